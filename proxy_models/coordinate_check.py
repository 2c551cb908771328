"""The coordinate check: does a few steps of training move every activation by the same amount at every width and depth?

One fixed batch is trained on for a few steps at several widths. The size of each module's output and of its change
since initialisation are fitted as powers of the width, rms ∝ width^slope. Under muP hidden slopes are zero, so a rate
tuned at one width is right at all (Yang et al., arXiv 2203.03466, appendix D.1). Plain size alone is a weak test, at a
small rate standard parametrization nearly passes it; the change after one step is the decisive one.

Where depths are given too, the same is fitted as powers of the depth, at the base's width. Blocks at different depths have
no counterpart in each other; compared are the stream, as the last block leaves it to the final norm, and the readout.

| criterion              | quantity                                     | slope           | a failure means                |
| ---------------------- | -------------------------------------------- | --------------- | ------------------------------ |
| (a) initial size       | hidden size at t = 0                         | within ±0.15    | init                           |
| (b) first change       | hidden change at the first step that has one | within ±0.20    | learning-rate scaling          |
| (c) trained size       | hidden size at t ≥ 1                         | within ±0.25    | learning-rate scaling          |
| (d) readout size       | readout size at every t                      | in [-0.6, 0.15] | readout multiplier             |
| (e) stream in depth    | stream's size at t = 0                       | in [-0.6, 0.15] | residual scaling               |
| (f) change in depth    | stream's change at the first step with one   | in [-0.4, 0.20] | learning-rate scaling in depth |
| (g) readout in depth   | readout size at every t                      | within ±0.15    | readout multiplier             |

Hidden is every module but the readout. Outputs of norms are left out of (a) and (c): a norm holds its own size.

The bounds in depth were measured here: widths 32 to 128, depths 1 to 24 in sets that span a factor of 4 or 8, four pairs
of seeds, rates 2^-10 to 2^-7, and every variant of the tests under AdamW, every optimizer in the first variant; the last
two rows in five variants, and under Lion and Muon.

| parametrization                          | (e)            | (f)            | (g)            |
| ---------------------------------------- | -------------- | -------------- | -------------- |
| CompleteP, depth exponent 1              | -0.32 to -0.09 | -0.22 to -0.10 | -0.02 to +0.02 |
| depth exponent 0.5                       | -0.01 to +0.03 | +0.01 to +0.13 | -0.02 to +0.02 |
| no residual scaling, also "standard"     | +0.33 to +0.50 | +0.77 to +1.36 | -0.04 to +0.04 |
| exponent 0.5 without its rate factor     | -0.01 to +0.03 | +0.31 to +0.57 | -0.02 to +0.03 |
| exponent 1, block rates times m_L^(1/2)  | as CompleteP's | +0.21 to +0.44 | -0.02 to +0.03 |
| exponent 1, block rates times m_L^(-1/2) | as CompleteP's | -0.66 to -0.60 | -0.04 to +0.02 |

(e) lies below zero under exponent 1 because independent initial outputs of m_L blocks, each divided by m_L, add up to less
the deeper the model; at most to a slope of -1/2, where nothing else is in the stream.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from torch import Tensor, nn

from proxy_models.architecture.config import ModelConfig, ModelFamily
from proxy_models.architecture.cross_entropy import whole_cross_entropy
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.parametrization import Parametrization, Scheme, TensorClass, parametrize
from proxy_models.check_sizes import Axis, require_seeds, require_sizes
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.optimizer import clip, initialize, make_optimizer, set_rates
from proxy_models.training.watching import rms, watching

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SHOWN = 3  # findings in the printed result
_SLOPE_COLUMNS = ["axis", "module", "kind", "quantity", "step", "slope", "criterion", "low", "high", "fault"]

Rule = Callable[[ModelConfig, ModelConfig], Parametrization]
Key = tuple[str, str, str, int]  # module, kind, quantity, step


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One line of the table above: the interval a slope must lie in."""

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
_BY_CHANGE: dict[Axis, Criterion] = {"width": FIRST_CHANGE, "depth": CHANGE_IN_DEPTH}
_BY_READOUT: dict[Axis, Criterion] = {"width": READOUT_SIZE, "depth": READOUT_IN_DEPTH}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One module that breaks a bound: the fault it points to, and its worst slope."""

    fault: str
    axis: Axis
    module: str
    quantity: str
    step: int
    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        """One line."""
        found = (
            f"slope {self.slope:+.2f}, bound [{self.low:+.2f}, {self.high:+.2f}]"
            if math.isfinite(self.slope)
            else "no finite slope, the activations are zero, infinite or not a number"
        )
        return f"{self.fault}: {self.quantity} of {self.module} over {self.axis} at step {self.step}: {found}"


@dataclass(frozen=True, kw_only=True, eq=False)
class CoordinateCheck:
    """What was measured, and what follows from it.

    Attributes:
        measurements: One row for each axis ("width" or "depth"), width, depth, module, quantity ("size" or "change" since
            step 0) and step: its root mean square over the batch, geometric mean over the seeds, and the module's kind
            ("hidden", "norm", "readout", or "stream").
        seeds: The seeds averaged over.
    """

    measurements: pd.DataFrame
    seeds: tuple[int, ...]

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """Exponent of width or depth for each axis, module, quantity and step, with the criterion and bound it is held to.

        Columns: axis, module, kind, quantity, step, slope, criterion, low, high, fault; the last four are empty for a
        slope that no criterion looks at. A slope is NaN where a size is zero or not finite.
        """
        rows: list[dict[str, Any]] = []
        for (axis, module, kind), group in self.measurements.groupby(["axis", "module", "kind"], sort=False):
            fits = {key: _slope(points[axis], points["rms"]) for key, points in group.groupby(["quantity", "step"])}
            for (quantity, step), criterion in _criteria(axis, str(kind), group).items():
                row = {"axis": axis, "module": module, "kind": kind, "quantity": quantity, "step": step}
                bound = {"criterion": criterion.name, "low": criterion.low, "high": criterion.high} if criterion else {}
                rows.append({**row, "slope": fits[quantity, step], **bound, "fault": criterion and criterion.fault})
        return pd.DataFrame(rows, columns=_SLOPE_COLUMNS)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """One for each module that breaks a bound at the first step at which any does along its axis, worst first.

        Later steps are left out: what breaks there may be a consequence. So a wrong init, or a readout that is wrong
        from the start, is told by its own name although it disturbs training too.
        """
        held = self.slopes.dropna(subset="fault")
        excess = np.maximum(held["slope"] - held["high"], held["low"] - held["slope"]).fillna(math.inf)
        broken = held.assign(excess=excess)[excess > 0]
        first = broken[broken["step"] == broken.groupby("axis")["step"].transform("min")]
        worst = first.sort_values("excess", ascending=False, kind="stable").drop_duplicates(["axis", "module"])
        return tuple(Finding(**row) for row in worst[list(Finding.__annotations__)].to_dict("records"))

    @property
    def passed(self) -> bool:
        """Whether every slope keeps its bound."""
        return not self.findings

    def __str__(self) -> str:
        """The verdict, the range of slopes under each criterion, and the worst findings."""
        sizes = [
            f"{axis}s {', '.join(map(str, sorted(rows[axis].unique())))}"
            for axis, rows in self.measurements.groupby("axis", sort=False)
        ]
        verdict, n_steps = "passed" if self.passed else "FAILED", self.measurements["step"].max()
        lines = [f"coordinate check {verdict}: {'; '.join(sizes)}; {len(self.seeds)} seeds; {n_steps} steps"]
        for name, group in self.slopes.dropna(subset="fault").groupby("criterion"):
            lines.append(
                f"  {name:<22}slopes {group['slope'].min():+.2f} to {group['slope'].max():+.2f}"
                f"   bound {group['low'].iloc[0]:+.2f} to {group['high'].iloc[0]:+.2f}"
            )
        lines += [f"  {finding}" for finding in self.findings[:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"  and {len(self.findings) - _SHOWN} more modules")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sizes that are not finite as null; the verdict is derived again on reading."""
        measurements = self.measurements.to_dict("list")
        measurements["rms"] = [rms if math.isfinite(rms) else None for rms in measurements["rms"]]
        return {
            "passed": self.passed,
            "findings": [str(finding) for finding in self.findings],
            "seeds": list(self.seeds),
            "measurements": measurements,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        return cls(
            measurements=pd.DataFrame(values["measurements"]).astype({"rms": float}), seeds=tuple(values["seeds"])
        )

    def plot(self) -> go.Figure:
        """Size and change of every module against width, and depth; one colour for each step, the readout dashed."""
        return draw_coordinates(coordinate_lines(self))


def coordinate_check(
    family: ModelFamily,
    hyperparameters: Hyperparameters,
    corpus: Corpus,
    *,
    widths: Sequence[int],
    depths: Sequence[int] | None = None,
    seeds: Sequence[int] = (0, 1),
    n_steps: int = 5,
    n_sequences: int = 4,
    scheme: Scheme = "mup",
    parametrization: Rule | None = None,
) -> CoordinateCheck:
    """Train on one fixed batch at every width for a few steps, fit activations against width; and the same for depth.

    The rate is the peak rate from the first step on, without warmup and without weight decay; it should not lie above
    the tuned optimum.

    Args:
        family: Its base is where the hyperparameters are tuned.
        hyperparameters: Their rate, scales, betas and clipping are used.
        corpus: Where the batch comes from.
        widths: At least 4, spanning at least a factor of 8; trained at the base's depth.
        depths: The same of depths, trained at the base's width; None leaves the check in depth out.
        seeds: At least 2 seeds of the initial values.
        n_steps: Optimizer steps.
        n_sequences: Sequences in the batch.
        scheme: "mup", or "standard" to see it fail.
        parametrization: Makes the table of (config, base) instead of `parametrize` under `scheme`.

    Raises:
        ValueError: If there are too few widths, depths or seeds, the sizes span too little, or there is no step.
    """
    sizes: dict[Axis, Sequence[int]] = {"width": widths}
    if depths is not None:
        sizes["depth"] = depths
    for axis, values in sizes.items():
        require_sizes(axis, values)
    require_seeds(seeds)
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}")
    table = parametrization or (
        lambda config, base: parametrize(config, base, scheme=scheme, optimizer=hyperparameters.optimizer)
    )
    # Any long horizon: warmup, batch ramp and decay, which depend on it, are switched off.
    n_tokens = 10_000 * hyperparameters.batch_tokens
    plain = replace(hyperparameters, warmup_fraction=0.0, warmup_floor_tokens=0, batch_doublings=0, batch_ramp_tokens=0)
    recipe = replace(plain.resolve(n_tokens), warmup_tokens=0, weight_decay=0.0)
    stream = training_stream(corpus, family.base.context_length, seed=0, run_tokens=n_tokens)
    sequences = stream.batch(0, n_sequences * family.base.context_length)
    rows: list[dict[str, Any]] = []
    for axis, values in sizes.items():
        for size in sorted(set(values)):
            config = family.at(**{axis: size})
            made = table(config, family.base)
            runs = [measure(config, made, recipe, sequences, seed=seed, n_steps=n_steps) for seed in seeds]
            if axis == "depth":
                runs = [_comparable_in_depth(run, size) for run in runs]
            for key in runs[0]:
                place = dict(zip(("module", "kind", "quantity", "step"), key, strict=True))
                mean = float(np.prod([run[key] for run in runs]) ** (1 / len(runs)))
                rows.append({"axis": axis, "width": config.d_model, "depth": config.n_layers, **place, "rms": mean})
    return CoordinateCheck(measurements=pd.DataFrame(rows), seeds=tuple(seeds))


def measure(
    config: ModelConfig, parametrization: Parametrization, recipe: Recipe, sequences: Tensor, *, seed: int, n_steps: int
) -> dict[Key, float]:
    """Root mean square of each module's output, and of its change since step 0, after 0, 1, …, n_steps steps."""
    model = Decoder(config).eval()  # nothing is dropped
    initialize(model, parametrization, recipe, seed=seed)
    optimizer = make_optimizer(model, parametrization, recipe)
    set_rates(optimizer, 1.0)
    kinds = {name: _kind(name, module, parametrization) for name, module in model.named_modules()}
    measured: dict[Key, float] = {}
    first: dict[str, Tensor] = {}
    for step in range(n_steps + 1):
        with recorded_outputs(model) as outputs:
            loss = whole_cross_entropy(model(sequences[:, :-1]), sequences[:, 1:])  # the readout is to be seen
        first = first or outputs
        for name, output in outputs.items():
            measured[name, kinds[name], "size", step] = rms(output)
            if step:
                measured[name, kinds[name], "change", step] = rms(output - first[name])
        if step < n_steps:
            loss.backward()  # type: ignore[no-untyped-call]
            clip(model.parameters(), recipe.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return measured


@contextmanager
def recorded_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Detached output of each module in the forward passes inside, by name.

    A module that hands on a submodule's output unchanged (a readout's model, a projection's attention) is not listed
    a second time.
    """
    outputs: dict[str, Tensor] = {}
    seen: list[Tensor] = []

    def record(name: str, output: Tensor) -> None:
        if not any(output is other for other in seen):
            seen.append(output)
            outputs[name] = output.detach()

    with watching(model, record):
        yield outputs


def coordinate_lines(check: CoordinateCheck) -> pd.DataFrame:
    """What the figure shows: `measurements`, so that each (axis, quantity, step, module) is a run of rows by size."""
    order = ["axis", "quantity", "step", "module", "width", "depth"]
    return check.measurements.sort_values(order, ascending=[False] + [True] * 5, ignore_index=True)


def draw_coordinates(lines: pd.DataFrame) -> go.Figure:
    """Figure of `coordinate_lines`: rms against width and, below, depth, all logarithmic; size left and change right."""
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale
    from plotly.subplots import make_subplots

    titles = {"size": "size of the output", "change": "change since step 0"}
    labels = {"width": "width (d_model)", "depth": "depth (n_layers)"}
    axes, steps = list(lines["axis"].unique()), sorted(lines["step"].unique())
    figure = make_subplots(rows=len(axes), cols=len(titles), column_titles=list(titles.values()))
    colors = dict(zip(steps, sample_colorscale("Viridis", np.linspace(0, 1, len(steps)).tolist()), strict=True))
    named: set[int] = set()
    for (axis, quantity, step, module), line in lines.groupby(["axis", "quantity", "step", "module"], sort=False):
        figure.add_trace(
            go.Scatter(
                x=line[axis],
                y=line["rms"],
                mode="lines+markers",
                line={"color": colors[step], "dash": "dash" if line["kind"].iloc[0] == "readout" else "solid"},
                name=f"step {step}",
                legendgroup=f"step {step}",
                legendrank=step,
                showlegend=step not in named,
                hovertemplate=f"{module}, step {step}<br>{axis} %{{x}}: %{{y:.3g}}<extra></extra>",
            ),
            row=axes.index(axis) + 1,
            col=list(titles).index(quantity) + 1,
        )
        named.add(step)
    for row, axis in enumerate(axes, start=1):
        sizes = sorted(lines.loc[lines["axis"] == axis, axis].unique())
        figure.update_xaxes(type="log", title=labels[axis], tickvals=sizes, row=row)
    figure.update_yaxes(type="log", title="root mean square over batch and coordinates")
    return figure


def _comparable_in_depth(measured: dict[Key, float], depth: int) -> dict[Key, float]:
    """What has a counterpart at every depth: the stream as the last block leaves it, and the readout."""
    stream = f"blocks.{depth - 1}"
    return {
        ("last block", "stream", quantity, step) if module == stream else (module, kind, quantity, step): rms
        for (module, kind, quantity, step), rms in measured.items()
        if module == stream or kind == "readout"
    }


def _criteria(axis: Axis, kind: str, group: pd.DataFrame) -> dict[tuple[str, int], Criterion | None]:
    """The criterion of each (quantity, step) of one module along one axis, by its kind.

    A module that starts at zero (a zero-initialised tensor) is judged from the first step at which it has a size, or
    has changed.
    """
    zero = group.groupby(["quantity", "step"])["rms"].max() == 0
    first_change = next((step for (quantity, step), still in zero.items() if quantity == "change" and not still), 1)
    criteria: dict[tuple[str, int], Criterion | None] = {}
    for quantity, step in zero.index:
        if quantity == "change":
            held = kind != "readout" and step == first_change
            criteria[quantity, step] = _BY_CHANGE[axis] if held else None
        elif kind == "norm" or (step == 0 and zero[quantity, step]):
            criteria[quantity, step] = None
        elif kind == "readout":
            criteria[quantity, step] = _BY_READOUT[axis]
        elif axis == "depth":
            criteria[quantity, step] = None if step else STREAM_IN_DEPTH
        else:
            criteria[quantity, step] = TRAINED_SIZE if step else INITIAL_SIZE
    return criteria


def _slope(sizes: pd.Series[int], rms: pd.Series[float]) -> float:
    """Least-squares exponent of `rms` in `sizes`; NaN where one has no logarithm."""
    if not (np.isfinite(rms) & (rms > 0)).all():
        return math.nan
    return float(np.polyfit(np.log2(sizes.to_numpy(dtype=float)), np.log2(rms.to_numpy(dtype=float)), 1)[0])


def _kind(name: str, module: nn.Module, parametrization: Parametrization) -> str:
    rule = parametrization.rules.get(f"{name}.weight")
    if name == "readout" or (rule and rule.tensor_class is TensorClass.READOUT):
        return "readout"
    return "norm" if isinstance(module, nn.RMSNorm | nn.LayerNorm) else "hidden"
