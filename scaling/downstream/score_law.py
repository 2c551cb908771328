"""Score of a task as a function of N and D, for models of several families such as Llama, Pythia, or one's own recipe.

A score says little about another family's: at equal compute, public families differ by more than a decade of compute, because of their
data. The law therefore has an offset for each family and a spread between families (`scaling.downstream.family_posterior`), in the
manner of observational scaling laws (Ruan et al., arXiv 2405.10938); a family that was not seen gets an interval with that spread.

`scaling.downstream.two_step` goes by way of the task's loss, which needs that loss but fewer models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import names, numbers, positive, require_columns
from scaling.downstream.family_posterior import OFFSET_FREEDOM, SETTLED, Numbers, Rows, draw
from scaling.downstream.sigmoid import falls, require_unit
from scaling.errors import ScalingError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.runs import Table, naming, read_runs, without_stated
from scaling.presentation import lines, span
from scaling.quantiles import tails
from scaling.serialization import FittedResult, JsonResult

DIRECT = "direct law"
MIN_ROWS = 8
MIN_FAMILIES = 5
"""Families from which the spread of a new one is credible (assumed)."""
EMERGED = 0.1
"""Share of the way from floor to ceiling at which a score counts as above chance."""
FAR = math.log(30)
"""Distance beyond the largest compute of the rows, in e-folds, from which a forecast is doubtful; half of it for N or D alone."""
FAR_RATIO = 4.0
"""Factor of D/N beyond the rows from which a forecast is doubtful: the law knows no compute-optimal ratio (assumed)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreForecast(JsonResult):
    """Forecast of a future model's score.

    Attributes:
        family: the model's family; None for one that was not seen, "" if the rows have no families.
        value: the median.
        reasons: why the forecast is doubtful; empty if it is not.
        method: the law behind the forecast (`scaling.downstream.task_law`).
        errors: root mean square error of each law compared, on the largest runs, which were left out for that.
    """

    metric: str
    n_params: float
    n_tokens: float
    family: str | None
    value: float
    low: float
    high: float
    level: float
    reasons: tuple[str, ...]
    method: str = DIRECT
    errors: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        of = "" if self.family == "" else f", {self.family or 'a new family'}"
        missed = "; ".join(f"{name} {error:.2g}" for name, error in self.errors.items())
        return lines(
            {
                self.metric: f"{self.value:.4g}, {self.level:.0%} within {self.low:.4g} to {self.high:.4g}",
                "at": f"{self.n_params:.4g} parameters, {self.n_tokens:.4g} tokens{of}",
                "method": self.method + (f"; errors on the largest runs, left out: {missed}" if missed else ""),
                "status": "doubtful: " + "; ".join(self.reasons) if self.reasons else "ok",
            }
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Emergence(JsonResult):
    """The size at which a score leaves chance, at a stated number of tokens per parameter.

    Attributes:
        n_params: the median; half of the draws leave chance at smaller sizes.
        seen: whether a row of the fit is above chance already.
    """

    metric: str
    tokens_per_param: float
    n_params: float
    low: float
    high: float
    level: float
    seen: bool

    @property
    def n_tokens(self) -> float:
        """Tokens at the median."""
        return self.n_params * self.tokens_per_param

    def __str__(self) -> str:
        state = "above chance already; left it" if self.seen else "not yet above chance; expected to leave it"
        return (
            f"{self.metric}: {state} at about {self.n_params:.3g} parameters ({self.level:.0%} within {self.low:.3g} to "
            f"{self.high:.3g}) and {self.n_tokens:.3g} tokens"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreLaw(FittedResult):
    """A score in N and D, with offsets of families.

    Attributes:
        most: the largest possible score.
        families: names, in the order of `offsets`; a single empty name if the rows have no column `family`.
        centre: mean of ln N and of ln D, from which predictors are counted.
        largest: ln of N·D of the largest row.
        n_params_range, n_tokens_range, tokens_per_param_range: least and largest N, D and D/N of the rows.
        rises: whether some row is above chance, by `EMERGED`.
        draws: draws of floor, ceiling (both in the score's unit), intercept, slope of ln N, slope of ln D, spread of the families,
            scatter, noise (in the score's unit) and degrees of freedom, [n_draws, 9].
        offsets: draws of the families' offsets, in spreads, [n_draws, F].
    """

    metric: str
    most: float
    families: tuple[str, ...]
    n_rows: int
    centre: tuple[float, float]
    largest: float
    n_params_range: tuple[float, float]
    n_tokens_range: tuple[float, float]
    tokens_per_param_range: tuple[float, float]
    rises: bool
    draws: Array = field(repr=False)
    offsets: Array = field(repr=False)
    warnings: tuple[str, ...]

    def forecast(
        self, n_params: float, n_tokens: float, family: str | None = None, level: float = 0.9, *, seed: int = 0
    ) -> ScoreForecast:
        """Forecast the score of one model with its scatter.

        Args:
            family: name of a family of the rows; None, or another name, is a family that was not seen.

        Raises:
            ValueError: if a size or the level is out of range.
        """
        scores = self._scores(n_params, n_tokens, family, seed)
        low, middle, high = np.clip(np.quantile(scores, [tails(level)[0], 0.5, tails(level)[1]]), 0, self.most)
        known = self._known(family)
        return ScoreForecast(
            metric=self.metric,
            n_params=float(n_params),
            n_tokens=float(n_tokens),
            family=known,
            value=float(middle),
            low=float(low),
            high=float(high),
            level=level,
            reasons=tuple(self._reasons(float(n_params), float(n_tokens), known)),
        )

    def probability(
        self, n_params: float, n_tokens: float, target: float, family: str | None = None, *, seed: int = 0
    ) -> float:
        """Probability that one model's score is at least the target; raises ValueError if a size is out of range."""
        return float((self._scores(n_params, n_tokens, family, seed) >= target).mean())

    def _scores(self, n_params: float, n_tokens: float, family: str | None, seed: int) -> Array:
        """Draws of one model's score with its scatter, which may take it beyond the possible scores."""
        from scipy.special import expit

        x = np.log([positive("n_params", n_params), positive("n_tokens", n_tokens)]) - self.centre
        rng, n = np.random.default_rng(seed), self._numbers
        student = np.sqrt(n.freedom / rng.chisquare(n.freedom)) * rng.standard_normal((2, len(self.draws)))
        eta = n.intercept + n.slopes @ x + self._offset(family, rng) + n.scatter * student[0]
        return np.asarray(n.floor + (n.ceiling - n.floor) * expit(eta) + n.noise * student[1])

    def emergence(
        self, tokens_per_param: float = 20.0, family: str | None = None, level: float = 0.9, *, seed: int = 0
    ) -> Emergence:
        """Size at which the score has come `EMERGED` of the way from floor to ceiling, without a model's scatter."""
        rng, n = np.random.default_rng(seed), self._numbers
        offset = self._offset(family, rng)
        ratio = math.log(tokens_per_param)
        needed = (
            math.log(EMERGED / (1 - EMERGED))
            - n.intercept
            - offset
            + n.slopes @ np.array(self.centre)
            - n.slopes[:, 1] * ratio
        )
        low, middle, high = np.exp(np.quantile(needed / n.slopes.sum(axis=1), [tails(level)[0], 0.5, tails(level)[1]]))
        return Emergence(
            metric=self.metric,
            tokens_per_param=float(tokens_per_param),
            n_params=float(middle),
            low=float(low),
            high=float(high),
            level=level,
            seen=self.rises,
        )

    @property
    def _numbers(self) -> Numbers:
        floor, ceiling, intercept, for_n, for_d, *rest = self.draws.T
        return Numbers(floor, ceiling, intercept, np.stack([for_n, for_d], axis=1), *rest)

    def _known(self, family: str | None) -> str | None:
        """The family if the rows have it, "" if they have no families, else None."""
        return "" if self.families == ("",) else family if family in self.families else None

    def _offset(self, family: str | None, rng: np.random.Generator) -> Array:
        """Draws of a family's offset; those of a new one come from the distribution of offsets."""
        if (known := self._known(family)) is not None:
            return np.asarray(self._numbers.spread * self.offsets[:, self.families.index(known)])
        return np.asarray(self._numbers.spread * rng.standard_t(OFFSET_FREEDOM, len(self.draws)))

    def _reasons(self, n_params: float, n_tokens: float, family: str | None) -> list[str]:
        reasons, far = list(self.warnings), math.exp(FAR / 2)
        if (times := n_params * n_tokens / math.exp(self.largest)) > math.exp(FAR):
            reasons.append(f"the product of its sizes is {times:.3g} times the largest row's")
        for name, value, (low, high), factor in (
            ("n_params", n_params, self.n_params_range, far),
            ("n_tokens", n_tokens, self.n_tokens_range, far),
            ("n_tokens / n_params", n_tokens / n_params, self.tokens_per_param_range, FAR_RATIO),
        ):
            if not low / factor <= value <= high * factor:
                reasons.append(
                    f"{name} is {value:.3g}, further than {factor:.2g} times from the rows' {low:.3g} to {high:.3g}"
                )
        if self._known(family) is None and (n := len(self.families)) < MIN_FAMILIES:
            known = "one family does" if n == 1 else f"{n} families do"
            reasons.append(f"a new family, and only {known} tell how much families differ")
        return reasons

    def __str__(self) -> str:
        low, high = np.quantile(self.draws, [0.05, 0.95], axis=0)
        middle = np.median(self.draws, axis=0)
        shown = [
            f"{name} {middle[i]:.3g} ({span(low[i], high[i])})"
            for i, name in enumerate(("floor", "ceiling", "", "slope of ln N", "slope of ln D", "spread of families"))
            if name and (len(self.families) > 1 or i < 5)
        ]
        return lines(
            {
                self.metric: "floor + (ceiling − floor) / (1 + exp(−η)), η linear in ln N, ln D and the family's offset",
                "numbers": ", ".join(shown),
                "rows": f"{self.n_rows}" + (f", {len(self.families)} families" if len(self.families) > 1 else ""),
                "status": self.status_line,
            }
        )


def fit_score(
    runs: Table,
    *,
    metric: str = "accuracy",
    chance: float | None = None,
    ceiling: float | None = None,
    most: float = 1.0,
    n_draws: int = 1000,
    seed: int = 0,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> ScoreLaw:
    """Fit a score, which rises with N and D, over models of one or several families.

    Args:
        runs: one row per model, a table or file: `n_params`, `n_tokens` and the metric's column; optional `family`, and
            `standard_error` of the score. Rows without a score are left out, and those that the columns `left_out` and `annealed`
            leave out of `fit`.
        chance: the floor in the score's unit, e.g. .25 for four choices; by default fitted between 0 and the rows' mean.
        ceiling: the ceiling in the score's unit, by default `most`. A plateau of the rows is none: larger models rose above it in
            public tables, so a fitted one gives intervals that are too low.
        most: the largest possible score, 1 for a share, 100 for a percentage.
        columns: as for `fit`.

    Raises:
        ValueError: a column is missing or breaks its rule, or chance and ceiling don't lie between 0 and `most`, or are shares
            while the metric is a percentage.
        ScalingError: there are fewer than eight rows with a score.
    """
    size, score, error, family = _scored(runs, metric, columns)
    require_unit(metric, most, chance=chance, ceiling=ceiling)
    low, top = 0.0 if chance is None else chance, most if ceiling is None else ceiling
    if not 0 <= low < top <= most or score.max() > most:
        raise ValueError(
            f"{metric}, chance and ceiling must keep 0 <= chance < ceiling <= most = {most:g}, and no score be above it; got "
            f"chance {low!r}, ceiling {top!r}, largest score {score.max():g}"
        )
    which, families = pd.factorize(family)
    centre = size.mean(axis=0)
    middle = float(np.clip(score.mean(), low, top)) / most
    posterior = draw(
        Rows(
            x=size - centre,
            score=score / most,
            variance=(error / most) ** 2,
            family=which.astype(np.int64),
            floor=(low / most, low / most if chance is not None else middle),
            ceiling=(top / most, top / most),
        ),
        n_draws=n_draws,
        seed=seed,
    )
    n = posterior.numbers
    draws = np.column_stack(
        [most * n.floor, most * n.ceiling, n.intercept, n.slopes, n.spread, n.scatter, most * n.noise, n.freedom]
    )
    floor = float(np.median(draws[:, 0]))
    rises = bool((score - 2 * error > floor + EMERGED * (top - floor)).any())
    compute = size.sum(axis=1)
    warnings = []
    if falls(-compute, score):
        warnings.append("the score falls with compute, and the law can only rise")
    elif not rises:
        warnings.append("no row is above chance: where the score leaves it is known from the prior alone")
    if posterior.drift > SETTLED:
        warnings.append(
            f"the posterior is not settled: halves of its chains differ by {posterior.drift:.2g} deviations"
        )
    return ScoreLaw(
        metric=metric,
        most=float(most),
        families=tuple(str(name) for name in families),
        n_rows=len(score),
        centre=(float(centre[0]), float(centre[1])),
        largest=float(compute.max()),
        n_params_range=_ends(size[:, 0]),
        n_tokens_range=_ends(size[:, 1]),
        tokens_per_param_range=_ends(size[:, 1] - size[:, 0]),
        rises=rises,
        draws=draws,
        offsets=posterior.offsets,
        warnings=tuple(warnings),
    )


def _ends(logs: Array) -> tuple[float, float]:
    return math.exp(logs.min()), math.exp(logs.max())


def _scored(runs: Table, metric: str, columns: Mapping[str, str]) -> tuple[Array, Array, Array, NDArray[np.object_]]:
    """Return ln N and ln D, score, its standard error (0 if unknown) and family ("" if unknown) of the rows with a score."""
    table = read_runs(runs, columns)
    with naming(runs):
        require_columns(table, ("n_params", "n_tokens", metric))
        table = without_stated(table[table[metric].notna()])
        if len(table) < MIN_ROWS:
            raise ScalingError(f"need at least {MIN_ROWS} rows with {metric}, got {len(table)}")
        size = np.log(np.stack([numbers(table, "n_params"), numbers(table, "n_tokens")], axis=1))
        score = numbers(table, metric, inclusive=True)
        error = numbers(table, "standard_error", inclusive=True) if "standard_error" in table else np.zeros(len(table))
        family = names(table, "family") if "family" in table else np.full(len(table), "")
    return size, score, error, family
