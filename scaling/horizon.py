"""How the best learning rate falls with the number of training tokens, at a fixed batch and schedule.

For optima of groups g (widths, say) at token budgets D:   log2 rate = offset_g − exponent · log2(D / D_ref).
The optimum falls with D and muP does not correct for it (arXiv 2409.19913), so a rate tuned on short runs is too high.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.errors import ScalingError
from scaling.form import Array
from scaling.optima import Optimum, fit_optimum
from scaling.presentation import Result, jsonable, lines, span
from scaling.table import losses, numbers, require_columns

if TYPE_CHECKING:
    import plotly.graph_objects as go

PRIOR = (0.3, 0.15)
"""Mean and standard deviation of the exponent before any data, at a fixed batch: about .3 in arXiv 2409.19913, .27 in
our own WSD runs over 8× in tokens. The spread is assumed: it keeps 0 and .6 within two deviations. Where the batch
grows with D the exponent is another, even of another sign (Step Law, 2503.04715): pass `prior=None` there."""
OPTIMUM_SCATTER = 0.15
"""Octaves by which a fitted optimum moves from seed to seed (measured: .1–.2), added to every optimum's own error: runs
that share a seed share this part, so the residuals of one grid do not show it."""
MAX_DECADES_BEYOND = 2.0
"""The law is followed so many decades of tokens beyond the tuned budgets and held constant from there (assumed)."""
TOO_FEW = "fewer than three finite rates"
MIN_BUDGETS = 3
MIN_SPAN = 4.0
"""Token budgets, and their ratio, below which the exponent is mostly the prior's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HorizonLaw(Result):
    """Best rate ∝ D^(−exponent).

    Attributes:
        exponent: the exponent used: data and prior together.
        raw_exponent: from the data alone.
        raw_stderr: standard error of the data's.
        prior: mean and standard deviation of the prior, or None.
        log2_rate_ref: log2 of the best rate at `n_tokens_ref`, mean over groups.
        n_tokens_ref: reference tokens, the weighted geometric mean of the tuned budgets.
        covariance: of (log2_rate_ref, exponent), 2×2.
        curvature: median second derivative of log loss, per octave².
        n_tokens_range: smallest and largest tuned budget.
        optima: one row per group and budget: group, n_tokens, log2_rate, stderr, curvature, status, used;
            the status is `Optimum`'s, or `fewer than three finite rates`.
        offsets: octaves of each group from the mean.
        warnings: why the law is doubtful; empty if it is not.
    """

    exponent: float
    raw_exponent: float
    raw_stderr: float
    prior: tuple[float, float] | None
    log2_rate_ref: float
    n_tokens_ref: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    curvature: float
    n_tokens_range: tuple[float, float]
    optima: pd.DataFrame = field(repr=False)
    offsets: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def status(self) -> str:
        """`ok`, or `doubtful` for the reasons in `warnings`."""
        return "doubtful" if self.warnings else "ok"

    @property
    def stderr(self) -> float:
        """Standard error of the exponent used."""
        return math.sqrt(self.covariance[1][1])

    @property
    def supported_range(self) -> tuple[float, float]:
        """Token budgets for which the law is followed; outside it the rate is that of the nearer end."""
        reach = 10**MAX_DECADES_BEYOND
        return self.n_tokens_range[0] / reach, self.n_tokens_range[1] * reach

    def supports(self, n_tokens: float) -> bool:
        """Whether the budget lies in `supported_range`."""
        return self.supported_range[0] <= n_tokens <= self.supported_range[1]

    def rate(self, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """The best rate at a budget of `n_tokens`, of its shape; constant outside `supported_range`."""
        tokens = np.clip(_positive("n_tokens", n_tokens), *self.supported_range)
        return np.asarray(2 ** (self.log2_rate_ref - self.exponent * np.log2(tokens / self.n_tokens_ref)))[()]

    def interval(self, n_tokens: float, level: float = 0.9) -> tuple[float, float]:
        """Where the best rate of one run of `n_tokens` lies: normal, with an optimum's own scatter."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level!r}")
        gradient = np.array([1.0, -math.log2(float(_positive("n_tokens", n_tokens)) / self.n_tokens_ref)])
        spread = math.sqrt(gradient @ np.array(self.covariance) @ gradient + OPTIMUM_SCATTER**2)
        reach = NormalDist().inv_cdf((1 + level) / 2) * spread
        rate = float(self.rate(n_tokens))
        return rate * 2**-reach, rate * 2**reach

    def regret(self, rate: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Predicted relative loss given up at (rate, n_tokens), broadcast: what `fit` wants in the column `regret`."""
        octaves = np.log2(_positive("rate", rate) / self.rate(n_tokens))
        return np.asarray(np.expm1(self.curvature / 2 * octaves**2))[()]

    def plot(self) -> "go.Figure":
        """Fitted optima against tokens, with the law and its 90 % interval."""
        from scaling.figures import draw_horizon, horizon_data

        return draw_horizon(horizon_data(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` restores it."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["optima"] = [jsonable({str(k): v for k, v in row.items()}) for row in self.optima.to_dict("records")]
        return data | {"covariance": [list(row) for row in self.covariance], "warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "HorizonLaw":
        """The inverse of `to_dict`."""
        optima = pd.DataFrame(data["optima"])
        restored = {
            "optima": optima.assign(
                stderr=optima["stderr"].astype(np.float64).fillna(math.inf),
                **optima[["log2_rate", "curvature"]].astype(np.float64),
            ),
            "prior": data["prior"] and tuple(data["prior"]),
            "covariance": tuple(map(tuple, data["covariance"])),
            "n_tokens_range": tuple(data["n_tokens_range"]),
            "warnings": tuple(data["warnings"]),
        }
        return cls(**(data | restored))

    def __str__(self) -> str:
        """Exponent used and raw, the rate at the reference, the data, the status."""
        prior = f"prior {self.prior[0]:g} ± {self.prior[1]:g}" if self.prior else "no prior"
        alone = f"data alone {self.raw_exponent:.3f} ± {self.raw_stderr:.3f}"
        used = f"{self.optima['used'].sum()} of {len(self.optima)} optima used"
        return lines(
            {
                "exponent": f"{self.exponent:.3f} ± {self.stderr:.3f} ({prior}; {alone})",
                "rate": f"{float(self.rate(self.n_tokens_ref)):.4g} at {self.n_tokens_ref:.4g} tokens",
                "tuned at": f"{span(*self.n_tokens_range)} tokens, {used}",
                "followed": f"{span(*self.supported_range)} tokens, constant outside",
                "status": "; ".join((self.status, *self.warnings)),
            }
        )


def fit_horizon_law(rows: pd.DataFrame, *, prior: tuple[float, float] | None = PRIOR) -> HorizonLaw:
    """Fit the optimum of each (group, budget), and through them one exponent with an offset per group.

    Small grids give a curvature and a noise that are themselves uncertain, so the noise of all grids is pooled before
    the optima are weighted. Optima at an edge, or of a flat curve, are listed and not used, as are grids
    with fewer than three finite rates.

    Args:
        rows: one row per finished run: `n_tokens`, `rate`, `loss` (nats per token; NaN if diverged); optional `group`
            or else `width` (its own offset), and `seed`.
        prior: mean and standard deviation of the exponent, or None.

    Raises:
        ValueError: a column is missing or breaks its rule.
        ScalingError: no group has optima inside the tested rates at two budgets, or the noise is unknown.
    """
    require_columns(rows, ("n_tokens", "rate", "loss"))
    table = pd.DataFrame({"n_tokens": numbers(rows, "n_tokens"), "rate": numbers(rows, "rate"), "loss": losses(rows)})
    by = next((column for column in ("group", "width") if column in rows), None)
    table["group"] = rows[by].astype(str).to_numpy() if by else "all"
    table["seed"] = rows["seed"].to_numpy() if "seed" in rows else 0
    optima = _optima(table)
    used = optima[optima["used"]]
    if not (used.groupby("group")["n_tokens"].nunique() >= 2).any():
        found = optima[["group", "n_tokens", "status"]].to_dict("records")
        raise ScalingError(f"need an optimum inside the tested rates at two token budgets of one group, got {found}")
    if not np.isfinite(used["stderr"]).all():
        raise ScalingError(
            "every grid has one run at each of three rates, so the noise is unknown: add a rate or a seed"
        )

    weights = 1 / (used["stderr"].to_numpy() ** 2 + OPTIMUM_SCATTER**2)
    log2_tokens = np.log2(used["n_tokens"].to_numpy())
    log2_ref = float(np.average(log2_tokens, weights=weights))
    codes, groups = pd.factorize(used["group"], sort=True)
    design = np.column_stack([codes[:, None] == np.arange(len(groups)), log2_ref - log2_tokens]).astype(np.float64)
    raw, raw_covariance = _weighted_lines(design, used["log2_rate"].to_numpy(), weights, None)
    estimate, covariance = _weighted_lines(design, used["log2_rate"].to_numpy(), weights, prior)
    mean = np.zeros((2, len(groups) + 1))
    mean[0, :-1], mean[1, -1] = 1 / len(groups), 1
    (var_ref, cross), (_, var_exponent) = mean @ covariance @ mean.T
    log2_rate_ref = float(estimate[:-1].mean())
    return HorizonLaw(
        exponent=float(estimate[-1]),
        raw_exponent=float(raw[-1]),
        raw_stderr=math.sqrt(raw_covariance[-1, -1]),
        prior=prior,
        log2_rate_ref=log2_rate_ref,
        n_tokens_ref=2.0**log2_ref,
        covariance=((float(var_ref), float(cross)), (float(cross), float(var_exponent))),
        curvature=float(used["curvature"].median()),
        n_tokens_range=(float(used["n_tokens"].min()), float(used["n_tokens"].max())),
        optima=optima,
        offsets={str(group): float(x) - log2_rate_ref for group, x in zip(groups, estimate[:-1], strict=True)},
        warnings=tuple(_doubts(optima, float(raw[-1]), math.sqrt(raw_covariance[-1, -1]), prior)),
    )


def _optima(table: pd.DataFrame) -> pd.DataFrame:
    """The optimum of each group and budget, standard errors restated with the noise pooled over all grids."""
    fitted: dict[tuple[str, float], Optimum | None] = {}
    for (group, n_tokens), part in table.groupby(["group", "n_tokens"]):
        try:
            fitted[group, float(n_tokens)] = fit_optimum(part["rate"], part["loss"], seeds=part["seed"].tolist())
        except ScalingError:
            fitted[group, float(n_tokens)] = None
    known = [o for o in fitted.values() if o and o.dof]
    dof = sum(o.dof for o in known)
    pooled = math.sqrt(sum(o.dof * o.noise**2 for o in known) / dof) if dof else math.nan
    columns = ["group", "n_tokens", "log2_rate", "stderr", "curvature", "status", "used"]
    records = [
        [*key, o.log2_rate, o.stderr_at(pooled), o.curvature, o.status, o.inside]
        if o
        else [*key, math.nan, math.inf, math.nan, TOO_FEW, False]
        for key, o in fitted.items()
    ]
    return pd.DataFrame(records, columns=columns)


def _weighted_lines(
    design: Array, log2_rate: Array, weights: Array, prior: tuple[float, float] | None
) -> tuple[Array, Array]:
    """Offsets and exponent [G + 1] and their covariance; the prior counts as one more observation of the exponent."""
    precision = design.T @ (design * weights[:, None])
    target = design.T @ (weights * log2_rate)
    if prior is not None:
        precision[-1, -1] += 1 / prior[1] ** 2
        target[-1] += prior[0] / prior[1] ** 2
    covariance = np.linalg.inv(precision)
    return np.asarray(covariance @ target), np.asarray(covariance)


def _doubts(optima: pd.DataFrame, raw: float, raw_stderr: float, prior: tuple[float, float] | None) -> list[str]:
    used = optima[optima["used"]]
    doubts = [
        f"group {row['group']}, {row['n_tokens']:.3g} tokens: not used: {row['status']}"
        for _, row in optima[~optima["used"]].iterrows()
    ]
    budgets = used["n_tokens"].nunique()
    if budgets < MIN_BUDGETS:
        doubts.append(f"{budgets} token budgets: at least {MIN_BUDGETS} show whether the law is straight")
    if (ratio := used["n_tokens"].max() / used["n_tokens"].min()) < MIN_SPAN:
        doubts.append(f"the token budgets span {ratio:.3g}×: at least {MIN_SPAN:g}× is wanted")
    if prior is not None and abs(raw - prior[0]) > 2 * math.hypot(raw_stderr, prior[1]):
        doubts.append(
            f"the data's exponent {raw:.2f} contradicts the prior {prior[0]:g} ± {prior[1]:g}: is the batch fixed?"
        )
    return doubts


def _positive(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must be finite and above 0, got {values!r}")
    return array
