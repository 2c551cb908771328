"""Transfer check: the drift of the best learning rate with width or depth, and a verdict, from grids at several sizes.

Any other hyperparameter with positive values is checked in the same way: its optimum is found in log2, like the rate's.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from scaling.checks import losses, numbers, require_columns, seeds
from scaling.drawing import Figure
from scaling.errors import ScalingError
from scaling.optima.horizon import OPTIMUM_SCATTER
from scaling.optima.optimum import Optimum, fit_optimum
from scaling.optima.optimum_figures import draw_transfer, transfer_data
from scaling.optima.tokens_law import plural
from scaling.presentation import lines, number
from scaling.quantiles import two_sided
from scaling.serialization import JsonResult, OrInfinite, OrMinusInfinite, OrNan, TableLayout, converter

Judgement = Literal["pass", "fail", "not enough evidence"]

MAX_DRIFT = 0.5
"""Largest drift, in octaves, from the smallest size's optimum to the largest's. Measured over 8× in width, 205k tokens: with muP the
drift is −.38 and carrying the rate costs .004 nats; with the standard parametrization −2.67 and more than .16 nats. For depth and
other hyperparameters the same bound is assumed; `regret_transferred` is the cost of the drift."""
MAX_HALF_WIDTH = 1.0
"""Largest half width of the drift's 90 % interval, in octaves; a wider interval shows nothing."""
MIN_SIZES = 3
MIN_SPAN = 4.0
"""Least number of sizes, and least ratio of the largest to the smallest, for a pass."""
SIGNIFICANCE = 3.0
"""Standard errors by which a larger model must have more loss to count as worse."""
LARGER = {"width": "wider", "depth": "deeper", "experts": "more experts", "granularity": "finer", "sparsity": "sparser"}
OF_EXPERTS = ("experts", "granularity", "sparsity")
"""Scales of a mixture of experts. Only a model at another of their sizes than its proxies needs their verdict."""
UNORDERED = ("granularity", "sparsity")
"""Scales along which a larger size need not be better at the same tokens, and whose verdict does not ask it: a token's computation
stays, each expert sees fewer tokens, and the best granularity depends on the tokens (Krajewski et al., arXiv 2402.07871)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer(JsonResult):
    """Drift of the optimum with the size, and the cost of carrying the smallest size's value to the largest.

    Attributes:
        along: the scale that grows: `width`, `depth`, or another.
        over: the hyperparameter whose optimum is compared across sizes: `rate`, or another.
        rows: one column each for `along`, `over`, loss (NaN: diverged), seed.
        optima: the optimum of each size, by rising size; the `rate` of an optimum is the value of `over`.
        drift_octaves: log2 optimum at the largest size minus at the smallest.
        interval: 90 % interval of the drift, octaves; it includes the scatter of optima from seed to seed
            (`scaling.optima.horizon.OPTIMUM_SCATTER`, measured on rates and assumed for other hyperparameters).
        regret_transferred: relative loss given up at the largest size by the smallest size's optimum; NaN if the largest
            size's optimum was not found.
        larger_is_better: True if, at every value of a size's parabola, the next larger model tested at this value is no worse
            beyond the noise.
        verdict: `fail` if the interval lies wholly outside ±MAX_DRIFT, or a larger model is worse (except along UNORDERED);
            `pass` if the estimate lies within ±MAX_DRIFT, the interval is at most MAX_HALF_WIDTH either side, every optimum lies
            inside its tested values, and there are MIN_SIZES sizes over a factor MIN_SPAN; otherwise `not enough evidence`.
    """

    along: str
    over: str
    drift_octaves: float
    regret_transferred: OrNan
    larger_is_better: bool
    verdict: Judgement
    interval: tuple[OrMinusInfinite, OrInfinite]
    reasons: tuple[str, ...]
    optima: dict[float, Optimum]
    rows: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"

    @property
    def half_width(self) -> float:
        """Half of the interval's width, octaves; infinite if the interval is not known."""
        return (self.interval[1] - self.interval[0]) / 2 if math.isfinite(self.interval[0]) else math.inf

    def table(self) -> pd.DataFrame:
        """One row per size: the best value and its log2 (named after `over`), stderr, curvature, loss, status."""
        columns = ["rate", "log2_rate", "stderr", "curvature", "loss", "status"]
        records = [[getattr(optimum, column) for column in columns] for optimum in self.optima.values()]
        names = [self.over, f"log2_{self.over}", *columns[2:]]
        return pd.DataFrame(records, columns=names, index=pd.Index(list(self.optima), name=self.along))

    def plot(self) -> Figure:
        """Loss against the value, one curve per size, with the fitted optima (as in Tensor Programs V, fig. 1)."""
        data = transfer_data(self.rows, self.optima, self.along, self.over)
        return draw_transfer(data, along=self.along, over=self.over)

    @property
    def about(self) -> str:
        """The drift with its interval, the cost, the verdict: a line each."""
        drift, low, high = (number(octaves, "+.2f") for octaves in (self.drift_octaves, *self.interval))
        is_known = all(map(math.isfinite, self.interval))
        regret = number(self.regret_transferred, ".2%")
        return lines(
            {
                "drift": f"{drift} octaves, " + (f"90 % within {low} to {high}" if is_known else "of unknown error"),
                "regret": f"{regret} of the largest {self.along}'s loss given up by the smallest's optimum",
                larger(self.along): "is no worse beyond the noise" if self.larger_is_better else "is worse",
                "verdict": "; ".join((self.verdict, *self.reasons)),
            }
        )

    def __str__(self) -> str:
        return f"{self.table().to_string(na_rep='–', float_format=number)}\n{self.about}"


def _to_json(transfer: Transfer) -> dict[str, Any]:
    fields = _fields_to_json(transfer)
    return fields | {"optima": [{transfer.along: size, **optimum} for size, optimum in fields["optima"]]}


def _from_json(data: dict[str, Any], _: type) -> Transfer:
    optima = [(row[data["along"]], row) for row in data["optima"]]
    return _fields_from_json(data | {"optima": optima}, Transfer)


_fields_to_json = make_dict_unstructure_fn(Transfer, converter)
_fields_from_json = make_dict_structure_fn(Transfer, converter)
converter.register_unstructure_hook(Transfer, _to_json)
converter.register_structure_hook(Transfer, _from_json)


def larger(along: str) -> str:
    """The comparative of a scale: wider, deeper, or `larger` and its name."""
    return LARGER.get(along, f"larger {along}")


def values_of(over: str) -> str:
    """The tested values of a hyperparameter in words."""
    return "rates" if over == "rate" else f"values of {over}"


def fit_transfer(rows: pd.DataFrame, *, along: str = "width", over: str = "rate") -> Transfer:
    """Fit the optimum of each size, and judge the drift.

    Args:
        rows: one row per run: the columns `along` and `over` (value at the base shape), both positive, `loss` (nats per
            token; NaN if diverged) and, if several seeds were run, `seed`.
        along: the column of the sizes, such as `width` or `depth`.
        over: the column of the hyperparameter; its optimum is found in log2.

    Raises:
        ValueError: a column is missing or breaks its rule, a run of one seed is listed twice, or there is only one size.
        ScalingError: at some size fewer than three values have a finite loss.
    """
    if len({along, over, "loss", "seed"}) < 4:
        raise ValueError(f"along and over must be two columns other than loss and seed, got {along!r} and {over!r}")
    require_columns(rows, (along, over, "loss"))
    table = pd.DataFrame({along: numbers(rows, along), over: numbers(rows, over), "loss": losses(rows)})
    table["seed"] = seeds(rows, along, over)
    if table[along].nunique() < 2:
        raise ValueError(f"{along} must take at least 2 values, got {table[along].unique().tolist()}")

    optima: dict[float, Optimum] = {}
    for size, group in table.groupby(along):
        try:
            optima[float(size)] = fit_optimum(group[over], group["loss"], seeds=group["seed"].tolist())
        except ScalingError as error:
            raise ScalingError(f"{along} {size:g}: {error}".replace("rates", values_of(over))) from error
    small, large = optima[min(optima)], optima[max(optima)]
    drift = large.log2_rate - small.log2_rate
    errors, dofs = (small.stderr, large.stderr), (small.dof, large.dof)
    n_seeds = [int(table.loc[table[along] == size, "seed"].nunique()) for size in (min(optima), max(optima))]
    reach = half_width(errors, dofs, (n_seeds[0], n_seeds[1]))
    interval = (drift - reach, drift + reach)
    worse = _worse_when_larger(table, optima, along, over)
    verdict, reasons = _judge(optima, drift, interval, worse, along, over)
    return Transfer(
        along=along,
        over=over,
        rows=table,
        optima=optima,
        drift_octaves=drift,
        interval=interval,
        regret_transferred=float(large.regret(small.rate)),
        larger_is_better=worse is None,
        verdict=verdict,
        reasons=reasons,
    )


def half_width(stderrs: tuple[float, float], dofs: tuple[float, float], n_seeds: tuple[int, int]) -> float:
    """Half width of a difference's 90 % interval: Student's t with Welch's degrees of freedom; infinite if an error is unknown.

    The scatter of optima from seed to seed, which the residuals of a grid do not show, is added in quadrature.
    """
    variances = np.array(stderrs) ** 2
    if not np.isfinite(variances).all():
        return math.inf
    shown = 0.0
    if variances.any():
        dof = variances.sum() ** 2 / (variances**2 / np.array(dofs)).sum()
        shown = two_sided(0.9, dof) * math.sqrt(variances.sum())
    return math.hypot(shown, two_sided(0.9) * OPTIMUM_SCATTER * math.sqrt(sum(1 / n for n in n_seeds)))


def _worse_when_larger(table: pd.DataFrame, optima: dict[float, Optimum], along: str, over: str) -> str | None:
    """Describe the first value near a size's optimum at which the next larger model is worse beyond the noise.

    The noise of a run is that about the size's parabola, or the scatter of the seeds at this value if that is larger: seeds
    scatter more at rates where runs become unstable, and the parabola has a level for each seed. A parabola without a degree of
    freedom shows no noise; it gets the noise pooled over the other sizes. If none shows noise, only a divergence counts as worse.
    """
    known = [optimum for optimum in optima.values() if optimum.dof]
    pooled = sum(o.dof * o.noise**2 for o in known) / sum(o.dof for o in known) if known else math.inf
    noise = {size: optimum.noise**2 if optimum.dof else pooled for size, optimum in optima.items()}
    runs = table.assign(log_loss=np.log(table["loss"])).groupby([along, over])["log_loss"]
    by_value = runs.agg([("mean", lambda y: y.mean(skipna=False)), ("variance", "var"), ("runs", "size")])
    for small, large in itertools.pairwise(optima):
        both = {"left_index": True, "right_index": True, "suffixes": ("_small", "_large")}
        shared = by_value.loc[small].dropna(subset="mean").merge(by_value.loc[large], **both)
        octave = np.log2(shared.index)
        low, high = optima[small].used
        for value, row in shared[(octave >= low) & (octave <= high)].iterrows():
            variance = sum(
                np.fmax(noise[size], row[f"variance_{which}"]) / row[f"runs_{which}"]
                for size, which in ((small, "small"), (large, "large"))
            )
            gain = row["mean_small"] - row["mean_large"]  # NaN if the large model diverged
            if not gain >= -SIGNIFICANCE * math.sqrt(variance):
                ends = [f"{along} {large:g} ends at {math.exp(row['mean_large']):.4f}"]
                ends.append(f"{along} {small:g} at {math.exp(row['mean_small']):.4f}")
                return f"{', '.join(ends)}, at {over} {value:.3g}"
    return None


def _judge(
    optima: dict[float, Optimum], drift: float, interval: tuple[float, float], worse: str | None, along: str, over: str
) -> tuple[Judgement, tuple[str, ...]]:
    failures = []
    if interval[0] > MAX_DRIFT or interval[1] < -MAX_DRIFT:
        failures.append(f"the interval of the drift lies outside ±{MAX_DRIFT:g} octaves")
    if worse and along not in UNORDERED:
        failures.append(f"{larger(along)} is not better: {worse}")
    if failures:
        return "fail", tuple(failures)

    missing = [
        f"{along} {size:g}: no optimum inside the tested {values_of(over)} ({o.status})"
        for size, o in optima.items()
        if not o.inside
    ]
    if len(optima) < MIN_SIZES:
        missing.append(f"{len(optima)} {plural(along)}: need {MIN_SIZES}")
    if (ratio := max(optima) / min(optima)) < MIN_SPAN:
        missing.append(f"{plural(along)} span {ratio:.3g}×: need {MIN_SPAN:g}×")
    if abs(drift) > MAX_DRIFT:
        missing.append(f"the drift is {drift:+.2f} octaves, but its interval reaches within ±{MAX_DRIFT:g}")
    if (reach := (interval[1] - interval[0]) / 2) > MAX_HALF_WIDTH:
        known = (
            f"known to ±{reach:.2f} octaves only"
            if math.isfinite(reach)
            else "of unknown error (one seed, or an optimum at an edge)"
        )
        missing.append(f"the drift is {known}: need ±{MAX_HALF_WIDTH:g}; add seeds or {values_of(over)}")
    return ("not enough evidence", tuple(missing)) if missing else ("pass", ())
