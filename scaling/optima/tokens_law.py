"""Power laws of a hyperparameter's best value in the training tokens D: the base of the horizon and batch laws.

For optima of groups g (widths, say) at token budgets D:   log2 value = offset_g + sign · exponent · log2(D / D_ref).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import positive
from scaling.errors import ScalingError
from scaling.optima.optimum import Optimum, fit_optimum
from scaling.presentation import lines, number, span
from scaling.quantiles import two_sided
from scaling.serialization import FittedResult, TableLayout

MAX_DECADES_BEYOND = 2.0
"""Most decades of tokens beyond the tuned budgets to which a law extrapolates; beyond, the value is constant (assumed)."""
MIN_BUDGETS = 3
MIN_SPAN = 4.0
"""Fewest token budgets, and least ratio of largest to smallest; with less, the exponent is mostly the prior's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokensLaw(FittedResult):
    """A power law of the tokens, fitted through optima.

    Attributes:
        exponent: exponent by data and prior together.
        prior: mean and standard deviation of the prior, or None.
        log2_ref: log2 of the best value at `n_tokens_ref`, mean over groups; optima that were given in addition to the grids
            determine only the exponent.
        n_tokens_ref: reference tokens, the weighted geometric mean of the tuned budgets.
        covariance: covariance of (log2_ref, exponent), 2×2.
        curvature: median second derivative of log loss, per octave².
        n_tokens_range: smallest and largest tuned budget.
        optima: one row per group and budget: group, n_tokens, log2 of the best value, stderr, curvature, status, used;
            the status is `Optimum`'s, or states that the grid has too few finite losses for an optimum.
        offsets: octaves of each group from `log2_ref`.
    """

    NAME: ClassVar[str]
    SIGN: ClassVar[int]
    SCATTER: ClassVar[float]

    exponent: float
    raw_exponent: float
    raw_stderr: float
    prior: tuple[float, float] | None
    log2_ref: float
    n_tokens_ref: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    curvature: float
    n_tokens_range: tuple[float, float]
    optima: Annotated[pd.DataFrame, TableLayout("records", nulls={"stderr": math.inf})] = field(repr=False)
    offsets: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def stderr(self) -> float:
        """Standard error of the exponent."""
        return math.sqrt(self.covariance[1][1])

    @property
    def supported_range(self) -> tuple[float, float]:
        """Range of token budgets in which the law is used; outside, the value at the nearer bound is used."""
        reach = 10**MAX_DECADES_BEYOND
        return self.n_tokens_range[0] / reach, self.n_tokens_range[1] * reach

    def supports(self, n_tokens: float) -> bool:
        """Return whether the budget lies in `supported_range`."""
        return self.supported_range[0] <= n_tokens <= self.supported_range[1]

    def best(self, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Best value at a budget of `n_tokens`, of the same shape; constant outside `supported_range`."""
        tokens = np.clip(positive("n_tokens", n_tokens), *self.supported_range)
        return np.asarray(2 ** (self.log2_ref + self.SIGN * self.exponent * np.log2(tokens / self.n_tokens_ref)))[()]

    def interval(self, n_tokens: float, level: float = 0.9) -> tuple[float, float]:
        """Interval of the best value of one run of `n_tokens`: normal, with the scatter of a single optimum."""
        octaves = math.log2(float(positive("n_tokens", n_tokens)) / self.n_tokens_ref)
        gradient = np.array([1.0, self.SIGN * octaves])
        spread = math.sqrt(gradient @ np.array(self.covariance) @ gradient + self.SCATTER**2)
        reach = two_sided(level) * spread
        value = float(self.best(n_tokens))
        return value * 2**-reach, value * 2**reach

    def regret(self, value: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Predicted relative loss given up at (value, n_tokens), broadcast, for the column `regret` of `fit`."""
        octaves = np.log2(positive(self.NAME, value) / self.best(n_tokens))
        return np.asarray(np.expm1(self.curvature / 2 * octaves**2))[()]

    def __str__(self) -> str:
        prior = f"prior {self.prior[0]:g} ± {self.prior[1]:g}" if self.prior else "no prior"
        alone = f"data alone {number(self.raw_exponent, '.3f')} ± {number(self.raw_stderr, '.3f')}"
        used = f"{self.optima['used'].sum()} of {len(self.optima)} optima used"
        return lines(
            {
                "exponent": f"{self.exponent:.3f} ± {self.stderr:.3f} ({prior}; {alone})",
                self.NAME: f"{float(self.best(self.n_tokens_ref)):.4g} at {self.n_tokens_ref:.4g} tokens",
                "tuned at": f"{span(*self.n_tokens_range)} tokens, {used}",
                "followed": f"{span(*self.supported_range)} tokens, constant outside",
                "status": self.status_line,
            }
        )

    @classmethod
    def fitted(
        cls,
        optima: pd.DataFrame,
        prior: tuple[float, float] | None,
        contradicted: str,
        *,
        aside: Collection[str] = (),
        **own: Any,
    ) -> Self:
        """Fit the law through the used optima of a table made by `optima_table`.

        Args:
            contradicted: Advice for data that contradict the prior.
            aside: groups that determine only the exponent, not the level.
            **own: Further fields of a subclass.

        Raises:
            ValueError: the prior's mean is not finite, or its standard deviation not finite and above 0.
            ScalingError: no group has optima inside the tested values at two budgets, no group that determines the level has one,
                or the noise is unknown.
        """
        if prior is not None:
            positive("the prior's standard deviation", prior[1])
            if not math.isfinite(prior[0]):
                raise ValueError(f"the prior's mean must be finite, got {prior[0]!r}")
        used = optima[optima["used"]]
        if not (used.groupby("group")["n_tokens"].nunique() >= 2).any():
            rows = optima[["group", "n_tokens", "status"]].itertuples(index=False)
            found = ", ".join(f"{group} at {n_tokens:,.0f} tokens {status}" for group, n_tokens, status in rows)
            raise ScalingError(
                f"need an optimum inside the tested {plural(cls.NAME)} at two token budgets of one group, got {found}"
            )
        if not np.isfinite(used["stderr"]).all():
            raise ScalingError(
                f"every grid has one run at each of three {plural(cls.NAME)}, so the noise is unknown: add a {cls.NAME} "
                "or a seed"
            )
        weights = 1 / (used["stderr"].to_numpy() ** 2 + cls.SCATTER**2)
        log2_value, log2_tokens = used[f"log2_{cls.NAME}"].to_numpy(), np.log2(used["n_tokens"].to_numpy())
        log2_ref = float(np.average(log2_tokens, weights=weights))
        codes, groups = pd.factorize(used["group"], sort=True)
        of_group = codes[:, None] == np.arange(len(groups))
        tells_level = ~np.isin(np.asarray(groups, dtype=str), list(aside))
        if not tells_level.any():
            raise ScalingError(
                f"no grid has an optimum inside the tested {plural(cls.NAME)}, so the level is not known"
            )
        design = np.column_stack([of_group, cls.SIGN * (log2_tokens - log2_ref)]).astype(np.float64)
        raw, raw_covariance = weighted_lines(design, log2_value, weights, None)
        estimate, covariance = weighted_lines(design, log2_value, weights, prior)
        mean = np.zeros((2, len(groups) + 1))
        mean[0, :-1], mean[1, -1] = tells_level / tells_level.sum(), 1
        (var_ref, cross), (_, var_exponent) = mean @ covariance @ mean.T
        at_ref, raw_stderr = float(mean[0] @ estimate), math.sqrt(raw_covariance[-1, -1])
        return cls(
            exponent=float(estimate[-1]),
            raw_exponent=float(raw[-1]),
            raw_stderr=raw_stderr,
            prior=prior,
            log2_ref=at_ref,
            n_tokens_ref=2.0**log2_ref,
            covariance=((float(var_ref), float(cross)), (float(cross), float(var_exponent))),
            curvature=float(used["curvature"].median()),
            n_tokens_range=(float(used["n_tokens"].min()), float(used["n_tokens"].max())),
            optima=optima,
            offsets={str(group): float(x) - at_ref for group, x in zip(groups, estimate[:-1], strict=True)},
            warnings=tuple(_warnings(optima, float(raw[-1]), raw_stderr, prior, contradicted)),
            **own,
        )


def optimum_or_none(values: ArrayLike, losses: ArrayLike, **options: Any) -> Optimum | None:
    """Call `fit_optimum`; return None if too few losses are finite."""
    try:
        return fit_optimum(values, losses, **options)
    except ScalingError:
        return None


def optima_table(fitted: dict[tuple[str, float], Optimum | None], name: str) -> pd.DataFrame:
    """Table of the optimum of each group and budget, with standard errors from the noise pooled over all grids.

    Curvature and noise of small grids are uncertain, so the noise is pooled before the optima are weighted. Optima at an edge or of a
    flat curve are listed but not used; nor is None, which stands for too few finite losses.
    """
    known = [o for o in fitted.values() if o and o.dof]
    dof = sum(o.dof for o in known)
    pooled = math.sqrt(sum(o.dof * o.noise**2 for o in known) / dof) if dof else math.nan
    columns = ["group", "n_tokens", f"log2_{name}", "stderr", "curvature", "status", "used"]
    records = [
        [*key, o.log2_rate, o.stderr_at(pooled), o.curvature, o.status, o.inside]
        if o
        else [*key, math.nan, math.inf, math.nan, f"fewer than three finite {plural(name)}", False]
        for key, o in fitted.items()
    ]
    return pd.DataFrame(records, columns=columns)


def plural(name: str) -> str:
    """Return the plural of a name: rates, batches, granularities, experts."""
    if name.endswith("s"):
        return name
    return f"{name[:-1]}ies" if name.endswith("ity") else f"{name}es" if name.endswith("ch") else f"{name}s"


def weighted_lines(
    design: Array, log2_value: Array, weights: Array, prior: tuple[float, float] | None
) -> tuple[Array, Array]:
    """Fit offsets and exponent, [G + 1], and their covariance; the prior counts as one more observation of the exponent."""
    precision = design.T @ (design * weights[:, None])
    target = design.T @ (weights * log2_value)
    if prior is not None:
        precision[-1, -1] += 1 / prior[1] ** 2
        target[-1] += prior[0] / prior[1] ** 2
    covariance = np.linalg.inv(precision)
    return np.asarray(covariance @ target), np.asarray(covariance)


def _warnings(
    optima: pd.DataFrame, raw: float, raw_stderr: float, prior: tuple[float, float] | None, contradicted: str
) -> list[str]:
    used = optima[optima["used"]]
    warnings = [
        f"group {row['group']}, {row['n_tokens']:.3g} tokens: not used: {row['status']}"
        for _, row in optima[~optima["used"]].iterrows()
    ]
    budgets = used["n_tokens"].nunique()
    if budgets < MIN_BUDGETS:
        warnings.append(
            f"{budgets} token budgets: at least {MIN_BUDGETS} are needed to see whether the law is straight"
        )
    if (ratio := used["n_tokens"].max() / used["n_tokens"].min()) < MIN_SPAN:
        warnings.append(f"the token budgets span {ratio:.3g}×: at least {MIN_SPAN:g}× is needed")
    if prior is not None and abs(raw - prior[0]) > 2 * math.hypot(raw_stderr, prior[1]):
        warnings.append(
            f"the data's exponent {raw:.2f} contradicts the prior {prior[0]:g} ± {prior[1]:g}: {contradicted}"
        )
    return warnings
