"""The coordinate check: do a few steps of training move every activation by the same amount at every width and depth?

The check trains on one fixed batch for a few steps at several widths. It fits the size of each module's output, and of its change
since initialisation, as powers of the width, rms ∝ width^slope. Under muP hidden slopes are zero, so a rate tuned at one
width is right at all widths (Yang et al., arXiv 2203.03466, appendix D.1). Plain size alone is a weak test, since standard
parametrization nearly passes it at a small rate; the change after one step is the decisive test.

If depths are given, the check also fits powers of the depth, at the base's width. Blocks of models with different depths do not
correspond, so the check compares the stream, as the last block passes it to the final norm, and the readout.

| criterion              | quantity                                     | slope           | a failure means                |
| ---------------------- | -------------------------------------------- | --------------- | ------------------------------ |
| (a) initial size       | hidden size at t = 0                         | within ±0.15    | init                           |
| (b) first change       | hidden change at the first step that has one | within ±0.20    | learning-rate scaling          |
| (c) trained size       | hidden size at t ≥ 1                         | within ±0.25    | learning-rate scaling          |
| (d) readout size       | readout size at every t                      | in [-0.6, 0.15] | readout multiplier             |
| (e) stream in depth    | stream's size at t = 0                       | in [-0.6, 0.15] | residual scaling               |
| (f) change in depth    | stream's change at the first step with one   | in [-0.4, 0.20] | learning-rate scaling in depth |
| (g) readout in depth   | readout size at every t                      | within ±0.15    | readout multiplier             |
| (h) initial norm       | hidden matrix's norm at t = 0                | within ±0.15    | init                           |
| (i) first update       | norm of a matrix's change at its first step  | in [-0.4, 0.3]  | learning-rate scaling          |

Hidden modules are all except the readout, the model, and modules that compute from the readout's output: these are functions of the
logits and have the readout's bounds. (a) and (c) leave out the outputs of norms, since a norm fixes the size of its output. The logits
of a router of experts have the bound of (d). Their first change has none, as a readout's: besides the update's part, which keeps
its size (tested by (i)), it has the part of the changed stream under random initial values, which vanishes as 1/√width.

Each token keeps the experts of the first forward pass. Otherwise a few tokens change to another expert, each by the whole size of an
output, and the slopes of changes are those of their number: -.57 to +.44 under Lion and Muon, and -.1 to +.1 with held experts.

(h) and (i) test tensors, along the width: the largest singular value over √(fan_out / fan_in) (`tensors`). They find faults
that activations don't show: a recurrent matrix of a GRU whose rate is wrong by a factor of √m or 1/m keeps every bound up to (g), and
has slopes of +0.44 to +0.52, and of -1.06 to -0.98, in (i). The bounds were measured here, in seven variants of the decoder, five
optimizers, the GRU, and transformers' Qwen3 and GPT-2, over widths of 16 to 256: hidden matrices -0.04 to +0.06 in (h), -0.26 to
+0.06 in (i); embeddings and readouts -0.12 to +0.15 in (i); with all rates left as at the base, +0.84 to +1.04. Updates of queries
and keys have the lowest slopes, since at first their gradients are the least aligned. (h) leaves out embeddings and readouts, since
the vocabulary is not small relative to the width.

The bounds in depth were measured here: widths 32 to 128, depths 1 to 24 in sets that span a factor of 4 or 8, four pairs
of seeds, rates 2^-10 to 2^-7, every variant of the tests under AdamW, and every optimizer in the first variant. The last
two rows were measured in five variants, and under Lion and Muon.

| parametrization                          | (e)            | (f)            | (g)            |
| ---------------------------------------- | -------------- | -------------- | -------------- |
| CompleteP, depth exponent 1              | -0.32 to -0.09 | -0.22 to -0.10 | -0.02 to +0.02 |
| depth exponent 0.5                       | -0.01 to +0.03 | +0.01 to +0.13 | -0.02 to +0.02 |
| no residual scaling, also "standard"     | +0.33 to +0.50 | +0.77 to +1.36 | -0.04 to +0.04 |
| exponent 0.5 without its rate factor     | -0.01 to +0.03 | +0.31 to +0.57 | -0.02 to +0.03 |
| exponent 1, block rates times m_L^(1/2)  | as CompleteP's | +0.21 to +0.44 | -0.02 to +0.03 |
| exponent 1, block rates times m_L^(-1/2) | as CompleteP's | -0.66 to -0.60 | -0.04 to +0.02 |

Under exponent 1, (e) lies below zero because the initial outputs of m_L blocks are independent and each divided by m_L, so the sum
shrinks as the model gets deeper; the slope is at least -1/2, its value if the stream contains nothing else.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd

from proxy_models.architecture.parametrization import TIED_REACH

if TYPE_CHECKING:
    import plotly.graph_objects as go

Axis = Literal["width", "depth"]
MIN_SIZES = 4  # smallest number of widths, or of depths
MIN_SPAN = 8.0  # smallest ratio of the largest to the smallest size
MIN_SEEDS = 2
_SHOWN = 3  # largest number of findings in the printed result
_SLOPE_COLUMNS = ["axis", "module", "kind", "quantity", "step", "slope", "criterion", "low", "high", "fault"]


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One line of the table above: the interval for a slope."""

    name: str
    low: float
    high: float
    fault: str


INITIAL_SIZE = Criterion(name="(a) initial size", low=-0.15, high=0.15, fault="init")
FIRST_CHANGE = Criterion(name="(b) first change", low=-0.20, high=0.20, fault="learning-rate scaling")
TRAINED_SIZE = Criterion(name="(c) trained size", low=-0.25, high=0.25, fault="learning-rate scaling")
READOUT_SIZE = Criterion(name="(d) readout size", low=-0.60, high=0.15, fault="readout multiplier")
STREAM_IN_DEPTH = Criterion(name="(e) stream in depth", low=-0.60, high=0.15, fault="residual scaling")
CHANGE_IN_DEPTH = Criterion(name="(f) change in depth", low=-0.40, high=0.20, fault="learning-rate scaling in depth")
READOUT_IN_DEPTH = Criterion(name="(g) readout in depth", low=-0.15, high=0.15, fault="readout multiplier")
INITIAL_NORM = Criterion(name="(h) initial norm", low=-0.15, high=0.15, fault="init")
FIRST_UPDATE = Criterion(name="(i) first update", low=-0.40, high=0.30, fault="learning-rate scaling")
_BY_CHANGE: dict[Axis, Criterion] = {"width": FIRST_CHANGE, "depth": CHANGE_IN_DEPTH}
_BY_READOUT: dict[Axis, Criterion] = {"width": READOUT_SIZE, "depth": READOUT_IN_DEPTH}


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A module that breaks a bound: the fault that it indicates, and its worst slope."""

    fault: str
    axis: Axis
    module: str
    quantity: str
    step: int
    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        found = (
            f"slope {self.slope:+.2f}, bound [{self.low:+.2f}, {self.high:+.2f}]"
            if math.isfinite(self.slope)
            else "no finite slope, the activations are zero, infinite or not a number"
        )
        return f"{self.fault}: {self.quantity} of {self.module or 'the model'} over {self.axis} at step {self.step}: {found}"


@dataclass(frozen=True, kw_only=True, eq=False)
class CoordinateCheck:
    """Result of the check: the measurements, their slopes, and the slopes that break a bound.

    Attributes:
        measurements: One row for each axis ("width" or "depth"), width, depth, module, quantity ("size" or "change" since
            step 0) and step: the root mean square over the batch, geometric mean over the seeds, and the module's kind
            ("hidden", "norm", "readout", "router", or "stream"). Each matrix has a row with "norm of weight", for example, and a row
            with "update of weight"; their rms is the largest singular value over its scale, and their kind "hidden matrix",
            "embedding matrix", "router matrix", "readout matrix", or "tied matrix" for a table with both uses.
        multipliers: Whether each forward multiplier for which the model has a buffer changes its logits, by name.
    """

    measurements: pd.DataFrame
    seeds: tuple[int, ...]
    multipliers: Mapping[str, bool] = field(default_factory=dict)

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """Exponent of width or depth for each axis, module, quantity and step, with its criterion and bound.

        Columns: axis, module, kind, quantity, step, slope, criterion, low, high, fault; the last four are empty for a
        slope without a criterion. A slope is NaN if a size is zero or not finite.
        """
        rows: list[dict[str, Any]] = []
        since = self._first_update
        for (axis, module, kind), group in self.measurements.groupby(["axis", "module", "kind"], sort=False):
            fits = {key: _slope(points[axis], points["rms"]) for key, points in group.groupby(["quantity", "step"])}
            for (quantity, step), criterion in _criteria(axis, str(kind), group, since).items():
                row = {"axis": axis, "module": module, "kind": kind, "quantity": quantity, "step": step}
                bound = {"criterion": criterion.name, "low": criterion.low, "high": criterion.high} if criterion else {}
                rows.append({**row, "slope": fits[quantity, step], **bound, "fault": criterion and criterion.fault})
        return pd.DataFrame(rows, columns=_SLOPE_COLUMNS)

    @cached_property
    def criteria(self) -> pd.DataFrame:
        """Least and largest finite slope under each criterion, with the criterion's bound.

        Columns: criterion, least, largest (NaN if no slope is finite), low, high.
        """
        held = self.slopes.dropna(subset="fault").assign(
            slope=lambda rows: rows["slope"].where(np.isfinite(rows["slope"]))
        )
        found = held.groupby("criterion").agg(
            least=("slope", "min"), largest=("slope", "max"), low=("low", "first"), high=("high", "first")
        )
        return found.reset_index()

    @cached_property
    def findings(self) -> tuple[Violation, ...]:
        """Findings, worst first: one for each module that breaks a bound at the first step at which any module on its axis does.

        Later steps are left out, since their faults may be consequences. A wrong init, or a readout that is wrong from the
        start, is therefore reported under its own name although it disturbs training too.
        """
        held = self.slopes.dropna(subset="fault")
        excess = np.maximum(held["slope"] - held["high"], held["low"] - held["slope"]).fillna(math.inf)
        broken = held.assign(excess=excess)[excess > 0]
        first = broken[broken["step"] == broken.groupby("axis")["step"].transform("min")]
        worst = first.sort_values("excess", ascending=False, kind="stable").drop_duplicates(["axis", "module"])
        return tuple(Violation(**row) for row in worst[list(Violation.__annotations__)].to_dict("records"))

    @property
    def unapplied(self) -> tuple[str, ...]:
        """Required multipliers for which the model has a buffer, but which its forward pass does not use."""
        return tuple(name for name in ("branch", "readout") if not self.multipliers.get(name, True))

    @property
    def is_tied(self) -> bool:
        """True if the readout is the embedding table."""
        return bool(self.measurements["kind"].eq("tied matrix").any())

    @property
    def caution(self) -> str:
        """Limit of the rules that the slopes don't show, or an empty string."""
        return (
            "the readout is the embedding table, and at small widths the best rate then rises with the width: trust it over "
            f"{TIED_REACH:g}× beyond the widest grid of the transfer check, or untie the two"
            if self.is_tied
            else ""
        )

    @property
    def passed(self) -> bool:
        """True if every slope keeps its bound, and every required multiplier with a buffer has an effect."""
        return not self.findings and not self.unapplied

    def __str__(self) -> str:
        lines = [
            f"  {row.criterion:<22}slopes "
            + ("none is finite" if math.isnan(row.least) else f"{row.least:+.2f} to {row.largest:+.2f}")
            + f"   bound {row.low:+.2f} to {row.high:+.2f}"
            for row in self.criteria.itertuples()
        ]
        first, *others = self.about.splitlines()
        return "\n".join([first, *lines, *(f"  {line}" for line in others)])

    @property
    def about(self) -> str:
        """Return the verdict and the worst findings, without the table of `criteria`."""
        sizes = [
            f"{axis}s {', '.join(map(str, sorted(rows[axis].unique())))}"
            for axis, rows in self.measurements.groupby("axis", sort=False)
        ]
        verdict, n_steps = "passed" if self.passed else "FAILED", self.measurements["step"].max()
        lines = [f"coordinate check {verdict}: {'; '.join(sizes)}; {len(self.seeds)} seeds; {n_steps} steps"]
        if self.multipliers:
            acting = [name for name, acts in self.multipliers.items() if acts]
            idle = [f"; {name} has no effect" for name, acts in self.multipliers.items() if not acts]
            lines.append(f"multipliers applied: {', '.join(acting) or 'none'}{''.join(idle)}")
        lines += [
            f"multiplier not applied: the model has the buffer of {name} but does not use it" for name in self.unapplied
        ]
        lines += [str(finding) for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"and {len(self.findings) - _SHOWN} more modules")
        if self.caution:
            lines.append(f"caution: {self.caution}")
        return "\n".join(lines)

    @property
    def _first_update(self) -> int:
        """First step that moves a hidden matrix: the second step under SOAP, which moves only the other tensors in its first."""
        found = self.measurements.query("kind == 'hidden matrix' and rms > 0")
        steps = found["step"][found["quantity"].str.startswith("update")]
        return int(steps.min()) if len(steps) else 1

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with sizes that are not finite as null; reading computes the verdict again."""
        measurements = self.measurements.to_dict("list")
        measurements["rms"] = [rms if math.isfinite(rms) else None for rms in measurements["rms"]]
        return {
            "passed": self.passed,
            "findings": [str(finding) for finding in self.findings],
            "caution": self.caution,
            "seeds": list(self.seeds),
            "multipliers": dict(self.multipliers),
            "measurements": measurements,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        return cls(
            measurements=pd.DataFrame(values["measurements"]).astype({"rms": float}),
            seeds=tuple(values["seeds"]),
            multipliers=values["multipliers"],
        )

    def plot(self) -> go.Figure:
        """Plot size and change of every module against width and depth, and matrices' norms; a colour per step, readouts dashed."""
        from proxy_models.coordinates.coordinate_figures import coordinates_data, draw_coordinates

        return draw_coordinates(coordinates_data(self.measurements))


def _criteria(axis: Axis, kind: str, group: pd.DataFrame, since: int) -> dict[tuple[str, int], Criterion | None]:
    """Return the criterion of each (quantity, step) of one module along one axis, by the module's kind.

    A module that starts at zero (a zero-initialised tensor) is judged from the first step at which it has a size, or
    has changed, and the change of any module not before step `since`.
    """
    zero = group.groupby(["quantity", "step"])["rms"].max() == 0
    if kind.endswith("matrix"):
        initial = INITIAL_NORM if kind == "hidden matrix" else None
        return {key: initial if key[0].startswith("norm") and not zero[key] else None for key in zero.index} | {
            key: FIRST_UPDATE for key in zero.index if key[0].startswith("update")
        }
    changes = [step for (quantity, step), still in zero.items() if quantity == "change" and not still and step >= since]
    first_change = min(changes, default=since)
    criteria: dict[tuple[str, int], Criterion | None] = {}
    for quantity, step in zero.index:
        if quantity == "change":
            held = kind not in ("readout", "router") and step == first_change
            criteria[quantity, step] = _BY_CHANGE[axis] if held else None
        elif kind == "norm" or (step == 0 and zero[quantity, step]):
            criteria[quantity, step] = None
        elif kind in ("readout", "router"):
            criteria[quantity, step] = _BY_READOUT[axis]
        elif axis == "depth":
            criteria[quantity, step] = None if step else STREAM_IN_DEPTH
        else:
            criteria[quantity, step] = TRAINED_SIZE if step else INITIAL_SIZE
    return criteria


def _slope(sizes: pd.Series[int], rms: pd.Series[float]) -> float:
    """Return the least-squares exponent of `rms` in `sizes`; NaN if a value has no logarithm."""
    if not (np.isfinite(rms) & (rms > 0)).all():
        return math.nan
    return float(np.polyfit(np.log2(sizes.to_numpy(dtype=float)), np.log2(rms.to_numpy(dtype=float)), 1)[0])


def require_sizes(axis: Axis, sizes: Sequence[int]) -> None:
    """Require widths or depths from which a slope can be fitted; raise ValueError if they are too few, or their span too small."""
    if len(set(sizes)) < MIN_SIZES:
        raise ValueError(f"the coordinate check needs at least {MIN_SIZES} {axis}s, got {sorted(set(sizes))}")
    if max(sizes) < MIN_SPAN * min(sizes):
        raise ValueError(
            f"{axis}s must span at least a factor of {MIN_SPAN:g}, got {min(sizes)} to {max(sizes)}, "
            f"a factor of {max(sizes) / min(sizes):.3g}"
        )


def require_seeds(seeds: Sequence[int]) -> None:
    """Require enough seeds to average over; raise ValueError if there are too few."""
    if len(set(seeds)) < MIN_SEEDS:
        raise ValueError(f"the coordinate check averages over at least {MIN_SEEDS} seeds, got {list(seeds)}")
