"""Does the best learning rate stay the best when the model gets wider? A verdict from sweeps at several widths."""

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from scaling.errors import ScalingError
from scaling.optima import Optimum, fit_optimum
from scaling.presentation import Result, jsonable, lines
from scaling.table import losses, numbers, require_columns

if TYPE_CHECKING:
    import plotly.graph_objects as go

Verdict = Literal["pass", "fail", "not enough evidence"]

MAX_DRIFT = 0.5
"""Octaves from the smallest width's optimum to the largest's. Measured over 8× in width, 205k tokens: muP −.38 and a
loss of .004 nats by carrying the rate; standard parametrization −2.67 and more than .16 nats."""
MAX_HALF_WIDTH = 1.0
"""Octaves of the 90 % interval of the drift on either side, beyond which nothing was shown."""
MIN_WIDTHS = 3
MIN_SPAN = 4.0
"""Least number of widths, and least ratio of the largest to the smallest, from which a pass is given."""
SIGNIFICANCE = 3.0
"""Standard errors by which a wider model must be worse before it counts as worse."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer(Result):
    """Whether the optimum moves with width, and what it costs to carry the smallest width's rate to the largest.

    Attributes:
        rows: width, rate, loss (NaN: diverged), seed.
        optima: the optimum of each width, widths ascending.
        drift_octaves: log2 optimum at the largest width minus at the smallest.
        interval: 90 % interval of the drift, octaves.
        regret_carried: relative loss given up at the largest width by the smallest width's optimum; NaN if the largest
            width's optimum was not found.
        wider_is_better: at every rate of a width's parabola, the next wider model tested there is no worse beyond the
            noise.
        verdict: `fail` if the interval lies wholly outside ±MAX_DRIFT, or wider is worse; `pass` if the estimate lies
            within, the interval is at most MAX_HALF_WIDTH either side, every optimum lies inside its rates, and there
            are MIN_WIDTHS widths over a factor MIN_SPAN; otherwise `not enough evidence`.
        reasons: why it is not a pass.
    """

    rows: pd.DataFrame = field(repr=False)
    optima: dict[float, Optimum]
    drift_octaves: float
    interval: tuple[float, float]
    regret_carried: float
    wider_is_better: bool
    verdict: Verdict
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the verdict is `pass`."""
        return self.verdict == "pass"

    def table(self) -> pd.DataFrame:
        """One row per width: rate, log2_rate, stderr, curvature, loss, status."""
        columns = ["rate", "log2_rate", "stderr", "curvature", "loss", "status"]
        records = [[getattr(optimum, column) for column in columns] for optimum in self.optima.values()]
        return pd.DataFrame(records, columns=columns, index=pd.Index(list(self.optima), name="width"))

    def plot(self) -> "go.Figure":
        """Loss against rate, one curve per width, with the fitted optima (as in Tensor Programs V, fig. 1)."""
        from scaling.figures import draw_transfer, transfer_data

        return draw_transfer(transfer_data(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: everything but the rows."""
        known = {
            name: getattr(self, name) for name in ("drift_octaves", "regret_carried", "wider_is_better", "verdict")
        }
        return {
            **jsonable(known),
            "interval": [x if math.isfinite(x) else None for x in self.interval],
            "reasons": list(self.reasons),
            "optima": [{"width": width, **optimum.to_dict()} for width, optimum in self.optima.items()],
        }

    def __str__(self) -> str:
        """The optima, the drift with its interval, the cost, the verdict."""
        low, high = self.interval
        about = lines(
            {
                "drift": f"{self.drift_octaves:+.2f} octaves, 90 % within {low:+.2f} to {high:+.2f}",
                "carried": f"{self.regret_carried:.2%} of the largest width's loss given up by the smallest's optimum",
                "wider": "is better" if self.wider_is_better else "is not better",
                "verdict": "; ".join((self.verdict, *self.reasons)),
            }
        )
        return f"{self.table().to_string(float_format='{:.4g}'.format)}\n{about}"


def fit_transfer(rows: pd.DataFrame) -> Transfer:
    """Fit the optimum of each width and judge how far it moves.

    Args:
        rows: one row per run: `width`, `rate` (as set at the base shape), `loss` (nats per token; NaN if diverged) and,
            if several seeds were run, `seed`.

    Raises:
        ValueError: a column is missing or breaks its rule, or there is one width only.
        ScalingError: at some width fewer than three rates have a finite loss.
    """
    require_columns(rows, ("width", "rate", "loss"))
    table = pd.DataFrame({"width": numbers(rows, "width"), "rate": numbers(rows, "rate"), "loss": losses(rows)})
    table["seed"] = rows["seed"].to_numpy() if "seed" in rows else 0
    if table["width"].nunique() < 2:
        raise ValueError(f"width must take at least 2 values, got {table['width'].unique().tolist()}")

    optima: dict[float, Optimum] = {}
    for width, group in table.groupby("width"):
        try:
            optima[float(width)] = fit_optimum(group["rate"], group["loss"], seeds=group["seed"].tolist())
        except ScalingError as error:
            raise ScalingError(f"width {width:g}: {error}") from error
    narrow, wide = optima[min(optima)], optima[max(optima)]
    drift = wide.log2_rate - narrow.log2_rate
    reach = _half_width(narrow, wide)
    interval = (drift - reach, drift + reach)
    worse = _worse_when_wider(table, optima)
    verdict, reasons = _judge(optima, drift, interval, worse)
    return Transfer(
        rows=table,
        optima=optima,
        drift_octaves=drift,
        interval=interval,
        regret_carried=float(wide.regret(narrow.rate)),
        wider_is_better=worse is None,
        verdict=verdict,
        reasons=reasons,
    )


def _half_width(first: Optimum, second: Optimum) -> float:
    """Of the 90 % interval of a difference: Student's t with Welch's degrees of freedom."""
    from scipy.special import stdtrit

    variances = np.array([first.stderr**2, second.stderr**2])
    if not np.isfinite(variances).all():
        return math.inf
    if not variances.any():
        return 0.0
    dof = variances.sum() ** 2 / (variances**2 / np.array([first.dof, second.dof])).sum()
    return float(stdtrit(dof, 0.95) * math.sqrt(variances.sum()))


def _worse_when_wider(table: pd.DataFrame, optima: dict[float, Optimum]) -> str | None:
    """The first rate near a width's optimum at which the next wider model is worse beyond the noise, in words."""
    by_rate = table.groupby(["width", "rate"])["loss"].agg([("mean", lambda y: y.mean(skipna=False)), ("runs", "size")])
    for narrow, wide in itertools.pairwise(optima):
        both = {"left_index": True, "right_index": True, "suffixes": ("_narrow", "_wide")}
        shared = by_rate.loc[narrow].dropna().merge(by_rate.loc[wide], **both)
        octave = np.log2(shared.index)
        low, high = optima[narrow].used
        for rate, row in shared[(octave >= low) & (octave <= high)].iterrows():
            variance = np.nan_to_num(optima[narrow].noise) ** 2 / row["runs_narrow"]
            variance += np.nan_to_num(optima[wide].noise) ** 2 / row["runs_wide"]
            gain = math.log(row["mean_narrow"] / row["mean_wide"])  # NaN if the wide model diverged
            if not gain >= -SIGNIFICANCE * math.sqrt(variance):
                losses_there = (
                    f"width {wide:g} ends at {row['mean_wide']:.4f}, width {narrow:g} at {row['mean_narrow']:.4f}"
                )
                return f"{losses_there}, at rate {rate:.3g}"
    return None


def _judge(
    optima: dict[float, Optimum], drift: float, interval: tuple[float, float], worse: str | None
) -> tuple[Verdict, tuple[str, ...]]:
    failures = []
    if interval[0] > MAX_DRIFT or interval[1] < -MAX_DRIFT:
        failures.append(f"the whole interval of the drift lies outside ±{MAX_DRIFT:g} octaves")
    if worse:
        failures.append(f"wider is not better: {worse}")
    if failures:
        return "fail", tuple(failures)

    missing = [
        f"width {w:g}: no optimum inside the tested rates ({o.status})" for w, o in optima.items() if not o.inside
    ]
    if len(optima) < MIN_WIDTHS:
        missing.append(f"{len(optima)} widths: need {MIN_WIDTHS}")
    if (ratio := max(optima) / min(optima)) < MIN_SPAN:
        missing.append(f"widths span {ratio:.3g}×: need {MIN_SPAN:g}×")
    if abs(drift) > MAX_DRIFT:
        missing.append(f"the drift is {drift:+.2f} octaves, but its interval reaches within ±{MAX_DRIFT:g}")
    if (reach := (interval[1] - interval[0]) / 2) > MAX_HALF_WIDTH:
        missing.append(f"the drift is known to ±{reach:.2f} octaves only: need ±{MAX_HALF_WIDTH:g}; add seeds or rates")
    return ("not enough evidence", tuple(missing)) if missing else ("pass", ())
