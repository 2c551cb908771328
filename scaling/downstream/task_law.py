"""Law of a task's score over one ladder of runs, by the method that forecasts the ladder's largest runs better.

    direct law     score as a sigmoid of ln N and ln D (`scaling.downstream.score_law`)
    two steps      task's loss by a law in N and D, score as a sigmoid of that loss (`scaling.downstream.two_step`)

A score that is positive and falls without bound, such as bits per byte of the right answer, has the laws of
`scaling.downstream.falling_score` instead: the loss law and the likelihood law.

The largest two sizes and lengths in compute are left out, both laws are fitted to the rest and forecast them, and the law with the
smaller root mean square error is fitted to all runs. The first law is taken at equal errors, and where one of the laws can't be fitted
to the rest. Two points choose the wrong law now and then. So if the other law's error is at most `COMPARABLE` times the
smaller one, the interval spans the intervals of both, and a probability is the smaller of both.

A score whose signal is small next to its noise (`scaling.downstream.signal`) has a law to look at, but no forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd

from scaling.downstream.falling_score import (
    LIKELIHOOD_LAW,
    LOSS_LAW,
    NO_INFLATION,
    FallingLaw,
    LikelihoodLaw,
    LossLaw,
    fit_likelihood_law,
    fit_loss_law,
    inflation_of,
)
from scaling.downstream.score_law import DIRECT, Emergence, ScoreForecast, ScoreLaw, fit_score
from scaling.downstream.signal import MIN_RATIO, SignalToNoise, ends_and_checkpoints, signal_to_noise
from scaling.downstream.two_step import TwoStep, fit_two_step
from scaling.errors import ScalingError, TooFewRunsError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.runs import Table
from scaling.forms.law import NATS
from scaling.presentation import lines
from scaling.serialization import FittedResult

TWO_STEPS = "two steps"
HELD_OUT = 2
"""Sizes and lengths, the largest in compute, whose forecasts compare the laws."""
_Law = ScoreLaw | TwoStep | FallingLaw
COMPARABLE = 2.0
"""Ratio of errors up to which the other law counts in intervals (measured on planted tasks, `tests/benchmarks/scores.py`)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskLaw(FittedResult):
    """Law of one task's score.

    Attributes:
        method: the chosen law.
        errors: root mean square error of each law on the largest runs, which were left out for that; empty if not compared.
        signal: signal and noise of the score; None if the table does not show the noise.
        min_ratio: least signal to noise of a forecast.
        direct: direct law; None for a falling score.
        two_steps: two steps, if chosen or comparable.
        loss_law, likelihood_law: laws of a falling score; the second if it was compared.
    """

    metric: str
    method: str
    errors: dict[str, float] = field(default_factory=dict)
    signal: SignalToNoise | None
    min_ratio: float
    direct: ScoreLaw | None = None
    two_steps: TwoStep | None = None
    loss_law: LossLaw | None = None
    likelihood_law: LikelihoodLaw | None = None
    warnings: tuple[str, ...]

    @property
    def is_forecast(self) -> bool:
        """Whether the signal is large enough next to the noise, or the noise is not known."""
        return self.signal is None or self.signal.ratio >= self.min_ratio

    def forecast(self, n_params: float, n_tokens: float, level: float = 0.9, *, seed: int = 0) -> ScoreForecast:
        """Forecast the score of one run by the chosen law.

        Raises:
            ValueError: a size or the level is out of range.
            ScalingError: the signal is below `min_ratio` times the noise.
        """
        self._require_signal(n_params, n_tokens)
        found = {
            name: law.forecast(n_params, n_tokens, level=level, seed=seed) for name, law in self._comparable.items()
        }
        chosen = found[self.method]
        low, high = min(each.low for each in found.values()), max(each.high for each in found.values())
        bounding = (
            name for name, each in found.items() if each is not chosen and (each.low == low or each.high == high)
        )
        others = (f"{name}: {reason}" for name in bounding for reason in found[name].reasons)
        return ScoreForecast(
            metric=self.metric,
            n_params=float(n_params),
            n_tokens=float(n_tokens),
            family="",
            value=chosen.value,
            low=low,
            high=high,
            level=level,
            reasons=(*self.warnings, *chosen.reasons, *others, *self._at_chance(n_params, n_tokens)),
            method=self.method,
            errors=self.errors,
        )

    def probability(self, n_params: float, n_tokens: float, target: float, *, seed: int = 0) -> float:
        """Probability that one run's score reaches the target: at least the target, or for a falling score at most.

        Raises:
            ValueError, ScalingError: for the reasons of `forecast`.
        """
        self._require_signal(n_params, n_tokens)
        return min(law.probability(n_params, n_tokens, target, seed=seed) for law in self._comparable.values())

    def emergence(self, tokens_per_param: float = 20.0, level: float = 0.9) -> Emergence | None:
        """Size at which the score leaves chance, by the direct law; None for a falling score."""
        return self.direct.emergence(tokens_per_param, level=level) if self.direct else None

    @property
    def _comparable(self) -> dict[str, _Law]:
        """The laws whose errors are comparable, by name."""
        laws = {
            DIRECT: self.direct,
            TWO_STEPS: self.two_steps,
            LOSS_LAW: self.loss_law,
            LIKELIHOOD_LAW: self.likelihood_law,
        }
        most = COMPARABLE * min(self.errors.values(), default=math.inf)
        return {name: law for name, law in laws.items() if law and self.errors.get(name, most) <= most}

    def _require_signal(self, n_params: float, n_tokens: float) -> None:
        if self.signal is not None and not self.is_forecast:
            chance = "".join(f"; {sentence}" for sentence in self._at_chance(n_params, n_tokens))
            raise ScalingError(
                f"{self.metric}: signal to noise must be at least {self.min_ratio:g} for a forecast, got "
                f"{self.signal.ratio:.3g}{chance}"
            )

    def _at_chance(self, n_params: float, n_tokens: float) -> tuple[str, ...]:
        """The size at which the score is expected to leave chance at this D/N, if no run is above chance."""
        if self.direct is None or self.direct.rises:
            return ()
        return (str(self.direct.emergence(n_tokens / n_params)),)

    def __str__(self) -> str:
        compared = "; ".join(f"{name} {error:.3g}" for name, error in self.errors.items())
        ratio = "not known" if self.signal is None else f"{self.signal.ratio:.3g}"
        rows = {
            self.metric: self.method + (f"; errors on the largest runs, left out: {compared}" if compared else ""),
            "signal to noise": ratio + ("" if self.is_forecast else f", below {self.min_ratio:g}: not forecast"),
            "status": self.status_line,
        }
        return f"{lines(rows)}\n\n{self._comparable[self.method]}"


def fit_task(
    runs: Table,
    *,
    n_params_convention: str,
    metric: str = "accuracy",
    falls: bool = False,
    chance: float | None = None,
    ceiling: float | None = None,
    most: float = 1.0,
    loss_unit: str = NATS,
    min_ratio: float = MIN_RATIO,
    n_bootstrap: int = 100,
    seed: int = 0,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> TaskLaw:
    """Fit a task's score over the runs of one ladder, by the law that forecasts the ladder's largest runs better.

    Args:
        runs: one row per evaluation, as for `signal_to_noise`. Ends of runs are annealed. Optional `task_loss`, for two steps:
            the loss on the right answers' text, or the held-out loss; `standard_error` of the score; `stem`, as for `fit`.
            Checkpoints enter the step from the loss to the score, and the noise.
        falls: whether the score is positive and falls without bound, like bits per byte; then `chance`, `ceiling` and `most` do
            not apply.
        chance, ceiling, most: as for `fit_score`.
        loss_unit: unit of the task's loss, or of a falling score, as for `fit`.
        min_ratio: least signal to noise of a forecast.
        columns: as for `fit`; `columns` may also name `task_loss`.

    Raises:
        ValueError: a column is missing or breaks its rule, or an argument breaks its rule.
        ScalingError: there are too few runs.
    """
    if not min_ratio >= 0:
        raise ValueError(f"min_ratio must be at least 0, got {min_ratio!r}")
    ends, checkpoints = ends_and_checkpoints(runs, metric, columns)
    if ends.empty and len(checkpoints):
        nearest = checkpoints.loc[(checkpoints["tokens"] / checkpoints["n_tokens"]).idxmax()]
        raise ValueError(
            f"rows at the end of a run must have tokens = n_tokens, got none; the nearest has {nearest['tokens']:,.0f} of "
            f"{nearest['n_tokens']:,.0f} tokens"
        )
    try:
        signal = signal_to_noise(runs, metric, columns=columns)
    except ScalingError:
        signal = None
    laws = _Laws(
        metric=metric,
        chance=chance,
        ceiling=ceiling,
        most=most,
        n_params_convention=n_params_convention,
        loss_unit=loss_unit,
        n_bootstrap=n_bootstrap,
        seed=seed,
    )
    of_task = partial(
        TaskLaw,
        metric=metric,
        signal=signal,
        min_ratio=float(min_ratio),
        warnings=()
        if signal
        else ("the noise of the score is not known: no seeds were repeated, and checkpoints are too few",),
    )
    if falls:
        errors, inflations = laws.falling_errors(ends)
        better = bool(errors) and errors[LIKELIHOOD_LAW] < errors[LOSS_LAW]
        return of_task(
            method=LIKELIHOOD_LAW if better else LOSS_LAW,
            errors=errors,
            loss_law=replace(laws.as_loss(ends), inflation=inflations.get(LOSS_LAW, NO_INFLATION)),
            likelihood_law=replace(laws.as_likelihood(ends), inflation=inflations[LIKELIHOOD_LAW]) if errors else None,
        )
    errors = laws.errors(ends, checkpoints)
    near = bool(errors) and errors[TWO_STEPS] <= COMPARABLE * errors[DIRECT]
    return of_task(
        method=TWO_STEPS if errors and errors[TWO_STEPS] < errors[DIRECT] else DIRECT,
        errors=errors,
        direct=laws.direct(ends),
        two_steps=laws.two_steps(ends, checkpoints) if near else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Laws:
    """The laws with the arguments of `fit_task`."""

    metric: str
    chance: float | None
    ceiling: float | None
    most: float
    n_params_convention: str
    loss_unit: str
    n_bootstrap: int
    seed: int

    def as_loss(self, ends: pd.DataFrame) -> LossLaw:
        return fit_loss_law(
            _columns(ends, self.metric),
            self.metric,
            n_params_convention=self.n_params_convention,
            unit=self.loss_unit,
            n_bootstrap=self.n_bootstrap,
            seed=self.seed,
        )

    def as_likelihood(self, ends: pd.DataFrame) -> LikelihoodLaw:
        return fit_likelihood_law(_columns(ends, self.metric, "standard_error"), self.metric, seed=self.seed)

    def direct(self, ends: pd.DataFrame) -> ScoreLaw:
        return fit_score(
            _columns(ends, self.metric, "standard_error"),
            metric=self.metric,
            chance=self.chance,
            ceiling=self.ceiling,
            most=self.most,
            seed=self.seed,
        )

    def two_steps(self, ends: pd.DataFrame, checkpoints: pd.DataFrame) -> TwoStep:
        further = _columns(checkpoints[checkpoints["task_loss"].notna()], self.metric, "task_loss")
        return fit_two_step(
            _columns(ends, self.metric, "task_loss"),
            n_params_convention=self.n_params_convention,
            loss_unit=self.loss_unit,
            metric=self.metric,
            checkpoints=further if len(further) else None,
            chance=self.chance,
            ceiling=self.ceiling,
            most=self.most,
            n_bootstrap=self.n_bootstrap,
            seed=self.seed,
        )

    def errors(self, ends: pd.DataFrame, checkpoints: pd.DataFrame) -> dict[str, float]:
        """Root mean square error of both bounded laws on the largest runs; empty if they can't be compared."""
        if "task_loss" not in ends:
            return {}
        rest, largest, least = _without_largest(ends)
        earlier = checkpoints[checkpoints["n_params"] * checkpoints["n_tokens"] < least]
        return self._on_largest(
            rest, largest, lambda: {DIRECT: self.direct(rest), TWO_STEPS: self.two_steps(rest, earlier)}
        )[0]

    def falling_errors(self, ends: pd.DataFrame) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        """Errors of both laws of a falling score on the largest runs, and how far each missed them; empty likewise."""
        rest, largest, _ = _without_largest(ends)
        errors, laws = self._on_largest(
            rest, largest, lambda: {LOSS_LAW: self.as_loss(rest), LIKELIHOOD_LAW: self.as_likelihood(rest)}
        )
        n_params, n_tokens, score = (largest[name].to_numpy() for name in ("n_params", "n_tokens", self.metric))
        return errors, {
            name: inflation_of(law, n_params, n_tokens, score)
            for name, law in laws.items()
            if isinstance(law, FallingLaw)
        }

    def _on_largest(
        self, rest: pd.DataFrame, largest: pd.DataFrame, fit_laws: Callable[[], Mapping[str, _Law]]
    ) -> tuple[dict[str, float], Mapping[str, _Law]]:
        """Errors of laws that are fitted to the other runs, and the laws; empty if they can't be fitted."""
        if not np.ptp(rest[self.metric]):  # no law can tell how it moves
            return {}, {}
        sizes = [(float(of), float(to)) for of, to in largest[["n_params", "n_tokens"]].to_numpy()]
        try:
            laws = fit_laws()
            ahead = {name: np.array([law.forecast(*size).value for size in sizes]) for name, law in laws.items()}
        except (ScalingError, TooFewRunsError):
            return {}, {}
        squares = {name: ((value - largest[self.metric]) ** 2).mean() for name, value in ahead.items()}
        return {name: float(np.sqrt(square)) for name, square in squares.items()}, laws


def _without_largest(ends: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, float]:
    """Runs without the largest sizes and lengths, these, and the least compute of these."""
    compute = ends["n_params"] * ends["n_tokens"]
    least = float(np.unique(compute)[-HELD_OUT:][0])
    return ends[compute < least], ends[compute >= least], least


def _columns(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The columns that a law reads, with the run as the stem unless the table states stems."""
    kept = rows[["n_params", "n_tokens", *(name for name in names if name in rows)]]
    return kept.assign(stem=rows["stem"] if "stem" in rows else rows["run"])
