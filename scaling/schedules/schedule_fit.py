"""The law of loss along a schedule, with what it misses when a schedule is left out: forecasts of a run that is under way.

    fit_schedules(curves, warmup_steps=…)   laws per size, and each schedule forecast by the law of the others   -> ScheduleFit
    .forecast(run)                          loss at the end of a schedule, with an interval                      -> ScheduleForecast
    .anneal_now(run)                        the end if the rate is cooled to 0 over a further 10, 20, 30 %       -> list of them

The law comes from the curves; its level from the run: the mean log residual over the last fifth of the measured steps is added to
the log loss at all later ones. `schedule_forecast` has the interval, `size_transfer` the other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.checks import names, numbers, positive, require_columns
from scaling.errors import ScalingError
from scaling.presentation import lines, span
from scaling.schedules.schedule_forecast import ScheduleForecast, Widening, default_scale
from scaling.schedules.schedule_law import ScheduleLaw, fit_schedule_law
from scaling.schedules.size_transfer import constant_rate_loss, transferred
from scaling.serialization import FittedResult, TableLayout

TAIL = 0.2
"""Share of the measured steps, up to the last, whose residual sets the level. Of .05, .1, .2 and .4, this one had the least mean error
on the curves of 25M and 100M parameters: right after a drop of the rate, the law errs for some hundred steps."""
MEASURED_SHARES = (0.4, 0.6, 0.8)
"""Shares of a held-out curve that are measured when it is forecast, next to 0."""
ALIKE_GAIN = 0.5
"""Least gain of a held-out forecast, over that of a forecast whose interval it widens."""
NO_LOSS_ERROR = 1.0
"""Log error of a held-out curve whose law gives a loss that is not above 0."""
ORIGINS = (0.5, 0.75)
"""Shares of a run's own measured steps from which its last measured loss is forecast."""
OWN_SHARE = 0.75
"""Share of the measured steps, up to the last, to which the constant-rate loss of a run of another size is fitted."""
MIN_OWN_ROWS = 8
"""Fewest measured losses of a run of another size."""
MIN_SCHEDULES = 3
"""Fewest schedules per size: with two, the law of the other would be one schedule's."""
MAX_WIDENING = 2.0
"""Largest k at which intervals count as supported (assumed). Beyond, if it comes from the fitted curves' own residuals, the law does
not even describe them, so the whole gain of the decay after the last measured step counts as a further error."""
MAX_SIZE_RATIO = 4.2
"""Largest ratio of the run's size to the nearest fitted size (tested to 4)."""
MIN_SIZES = 2
"""Fewest sizes that show how the gain of a decay grows with size."""
SAME_SCHEDULE = 0.02
"""Largest difference of rates, as a share of the peak, and of lengths, between two runs of the same schedule."""
POINTS_KEPT = 40
"""Rows per fitted curve that tell how near to the fitted curves a schedule comes."""
COOLDOWN_ROWS = 200
"""Rows of the cooldown of `anneal_now`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleFit(FittedResult):
    """Laws of loss along a schedule, one per size, and their errors on schedules left out.

    Attributes:
        laws: by size, the smallest first; a single one if the curves have no column `n_params`.
        n_params: their sizes; empty without the column.
        held_out: one row per fitted curve and measured share: `size` (index of its law), `run`, `measured` (share of the steps
            measured), `error` (log of forecast over loss at the last step), `scale` (default scale of the error) and `gain` (share
            of the loss that the decay gains from the last measured step on; 0 if none is measured).
        curves: rows with a loss of the fitted curves: `size`, `run`, `step`, `lr`, `loss`.
    """

    laws: tuple[ScheduleLaw, ...]
    n_params: tuple[float, ...]
    held_out: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    curves: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    warnings: tuple[str, ...]

    def forecast(
        self,
        run: pd.DataFrame,
        *,
        at: Sequence[float] | None = None,
        n_params: float | None = None,
        level: float = 0.9,
    ) -> ScheduleForecast:
        """Forecast the loss of a run at steps of its schedule.

        Args:
            run: the whole schedule, `step` and `lr`, dense enough to follow the rate; `loss` where it is measured, otherwise NaN.
            at: rows' steps to forecast, after the last measured one; the last row's if None.
            n_params: size of the run; needed if the curves have sizes. A size that was not fitted needs measured losses.
            level: nominal coverage of the intervals.

        Raises:
            ValueError: a column is missing or breaks its rule, a step in `at` is no row's or was already measured, or `n_params` is
                missing, or given without sizes in the curves.
            ScalingError: the run has another size and too few measured losses, or the predicted loss is not above 0.
        """
        size = self._checked_size(n_params)
        path = _Path.of(run, np.inf)
        rows = self._rows_at(path, at)
        ahead = self._ahead(path, size)
        squares = self._squares(path.last is not None, float(ahead.gain[rows].max()))
        fitted = Widening.of_fit(max(law.rms for law in self._laws_for(size)))
        widening = max(Widening.of(squares), Widening.of(self._own_squares(run, path, size)), fitted)
        k = widening.k
        scale = np.hypot(k * default_scale(ahead.change, path.last is not None), ahead.gain_error)
        scale = np.hypot(scale, ahead.gain if fitted.k > MAX_WIDENING else 0.0)[rows]
        reach = np.exp(widening.factor(level) * scale)
        loss = np.exp(ahead.log_loss[rows])
        table = pd.DataFrame(
            {"step": path.steps[rows], "loss": loss, "low": loss / reach, "high": loss * reach, "log_scale": scale}
        )
        return ScheduleForecast(
            table=table,
            level=level,
            measured_to=None if path.last is None else float(path.steps[path.last]),
            widening=k,
            reasons=self._reasons(path.frame, size, k),
        )

    def anneal_now(
        self,
        run: pd.DataFrame,
        *,
        shares: Sequence[float] = (0.1, 0.2, 0.3),
        n_params: float | None = None,
        level: float = 0.9,
    ) -> list[ScheduleForecast]:
        """Forecast the final loss if the rate is now cooled linearly to 0 over further steps: these shares of the steps so far.

        Args:
            run: `step`, `lr` and `loss` up to now, the last row measured.
            shares, n_params, level: as in `forecast`.

        Raises:
            ValueError, ScalingError: as `forecast`, or a share is not above 0, or the last row has no loss.
        """
        require_columns(run, ("step", "lr", "loss"))
        so_far = run.sort_values("step")
        step, rate = float(so_far["step"].iloc[-1]), float(so_far["lr"].iloc[-1])
        if not math.isfinite(so_far["loss"].iloc[-1]):
            raise ValueError(f"loss must be measured in the run's last row, at step {step:g}, got none")
        found = []
        for share in positive("shares", list(shares)):
            part = np.arange(1, COOLDOWN_ROWS + 1) / COOLDOWN_ROWS
            cooldown = pd.DataFrame({"step": step * (1 + share * part), "lr": rate * (1 - part), "loss": np.nan})
            whole = pd.concat([so_far[["step", "lr", "loss"]], cooldown], ignore_index=True)
            found.append(self.forecast(whole, n_params=n_params, level=level))
        return found

    def __str__(self) -> str:
        sizes = [f"{size:.4g} parameters" for size in self.n_params] or ["one size"]
        errors = self.held_out["error"].abs()
        return lines(
            {
                "laws": "; ".join(f"{size}: {', '.join(law.runs)}" for size, law in zip(sizes, self.laws, strict=True)),
                "held out": "no schedule could be left out"
                if errors.empty
                else f"mean error {errors.mean():.2%} of the final loss, largest {errors.max():.2%}",
                "status": self.status_line,
            }
        )

    def _checked_size(self, n_params: float | None) -> float:
        """Return the size, NaN if the curves have no sizes."""
        if (n_params is None) == bool(self.n_params):
            raise ValueError(
                f"n_params must be given if and only if the curves have the column n_params, got {n_params!r}"
            )
        return math.nan if n_params is None else float(positive("n_params", n_params))

    def _law_index(self, n_params: float) -> int | None:
        """Index of the law of this size, None if the size was not fitted."""
        if not self.n_params:
            return 0
        same = np.isclose(self.n_params, n_params, rtol=1e-6, atol=0)
        return int(np.argmax(same)) if same.any() else None

    def _laws_for(self, n_params: float) -> tuple[ScheduleLaw, ...]:
        """Law of this size, or all laws if the size was not fitted."""
        index = self._law_index(n_params)
        return self.laws if index is None else (self.laws[index],)

    def _nearest(self, n_params: float) -> int:
        return int(np.argmin(np.abs(np.log(np.array(self.n_params) / n_params))))

    def _ahead(self, path: _Path, n_params: float) -> _Ahead:
        index = self._law_index(n_params)
        if index is not None:
            return _by_own_size(self.laws[index], path, self.curves[self.curves["size"] == index])
        if path.last is None or len(path.known) < MIN_OWN_ROWS:
            raise ScalingError(
                f"a run of a size that was not fitted needs {MIN_OWN_ROWS} measured losses, got {len(path.known)}"
            )
        sizes, last = np.array(self.n_params), path.last
        followed = [self._followed(number, path) for number in range(len(sizes))]
        if len(sizes) >= MIN_SIZES and all(curve is not None for curve in followed):
            logs = np.stack([np.interp(path.steps, c["step"], np.log(c["loss"])) for c in followed if c is not None])
            ratio, error = transferred(logs - logs[:, last, None], sizes, n_params)
            loss = np.exp(ratio)
            return _anchored(path, last, loss, np.zeros(len(ratio)), ratio * loss, error * loss)
        power, _ = self.laws[self._nearest(n_params)].terms(path.frame)
        gains = np.stack([law.terms(path.frame)[1] for law in self.laws])
        gain, error = transferred(gains - gains[:, last, None], sizes, n_params)
        recent = path.known[path.steps[path.known] >= (1 - OWN_SHARE) * path.steps[last]]
        level, factor = constant_rate_loss(power[recent], np.exp(path.log_loss[recent]) + gain[recent])
        return _anchored(path, last, level + factor * power - gain, factor * power, gain, error)

    def _followed(self, size: int, path: _Path) -> pd.DataFrame | None:
        """Fitted curve of this size that has the path's schedule to its end; None if there is none."""
        curves = self.curves[self.curves["size"] == size]
        rates = path.frame["lr"].to_numpy(np.float64)
        for _, curve in curves.groupby("run", sort=True):
            ends = curve["step"].iloc[-1] >= (1 - SAME_SCHEDULE) * path.steps[-1]
            off = np.abs(np.interp(path.steps, curve["step"], curve["lr"]) - rates).max()
            if ends and off <= SAME_SCHEDULE * rates.max():
                return curve
        return None

    def _squares(self, measured: bool, gain: float) -> Array:
        """Mean squares of (error / default scale) of the held-out curves, forecast with or without a measured loss.

        Forecasts with at least half the gain count, or all if there are none.
        """
        rows = self.held_out[(self.held_out["measured"] > 0) == measured]
        if (alike := rows["gain"] >= ALIKE_GAIN * gain).any():
            rows = rows[alike]
        squares = (rows["error"] / rows["scale"]) ** 2
        return np.asarray(squares.groupby([rows["size"], rows["run"]]).mean(), np.float64)

    def _own_squares(self, run: pd.DataFrame, path: _Path, n_params: float) -> Array:
        """Mean square of (error / default scale) of the run's last measured loss, forecast from earlier steps, [1]; [0] if too few."""
        if path.last is None:
            return np.empty(0)
        last, found = path.last, list[float]()
        for origin in ORIGINS:
            earlier = _Path.of(run, origin * path.steps[last])
            if len(earlier.known) >= MIN_OWN_ROWS:
                ahead = self._ahead(earlier, n_params)
                scale = math.hypot(default_scale(ahead.change[last], True), ahead.gain_error[last])
                found.append(((ahead.log_loss[last] - path.log_loss[last]) / scale) ** 2)
        return np.array([np.mean(found)] if found else [])

    def _rows_at(self, path: _Path, at: Sequence[float] | None) -> NDArray[np.intp]:
        if at is None:
            rows = np.array([len(path.steps) - 1])
        else:
            wanted = positive("at", list(at))
            rows = np.searchsorted(path.steps, wanted)
            rows = np.minimum(rows, len(path.steps) - 1)
            if (wrong := path.steps[rows] != wanted).any():
                raise ValueError(f"at must hold steps of the schedule's rows, got {wanted[wrong][0]:g}")
        if path.last is not None and (rows <= path.last).any():
            raise ValueError(
                f"the step to forecast must lie after the last measured one, {path.steps[path.last]:g}, "
                f"got {path.steps[rows].min():g}"
            )
        return rows

    def _reasons(self, run: pd.DataFrame, n_params: float, k: float) -> tuple[str, ...]:
        reasons, laws = list[str](), self._laws_for(n_params)
        if self._law_index(n_params) is None:
            nearest = self.n_params[self._nearest(n_params)]
            if len(self.laws) < MIN_SIZES:
                reasons.append("one fitted size: how the gain of a decay grows with size was not seen")
            if not 1 / MAX_SIZE_RATIO <= n_params / nearest <= MAX_SIZE_RATIO:
                reasons.append(
                    f"{n_params:.4g} parameters: tested to {MAX_SIZE_RATIO:g}× the nearest fitted size {nearest:.4g}"
                )
        reasons += [reason for law in laws for reason in law.unsupported_reasons(run)]
        reasons += [warning for warning in self.warnings if warning not in reasons]
        if k > MAX_WIDENING:
            reasons.append(
                f"errors on the fitted curves, on those left out or on the run itself are {k:.1f}× those of the tested curves"
            )
        return tuple(dict.fromkeys(reasons))


def fit_schedules(curves: pd.DataFrame, *, warmup_steps: float = 0.0) -> ScheduleFit:
    """Fit a law per size to loss curves under several schedules, and measure its errors on each schedule left out.

    Each curve is forecast at its last loss by the law of the size's other curves, with none, 40, 60 and 80 % of it measured. A size
    with fewer than three curves is fitted without this; so is a curve if no other curve's rate falls.

    Args:
        curves: one row per evaluation: `run`, `step`, `lr`, `loss`, as for `fit_schedule_law`; `n_params` if there are several sizes.
        warmup_steps: steps of a linear warmup to the rate of a run's first row, which must lie after the warmup.

    Raises:
        ValueError: a column or a number is missing or breaks its rule, or a run's first rate is 0.
        ScalingError: at some size no curve's rate falls, or there are fewer losses than numbers.
    """
    require_columns(curves, ("run", "step", "lr", "loss"))
    curves = curves.assign(run=names(curves, "run"))
    if "n_params" in curves:
        numbers(curves, "n_params")
        parts = [(float(size), part) for size, part in curves.groupby("n_params", sort=True)]
    else:
        parts = [(math.nan, curves)]
    laws, held_out, warnings = [], [], []
    for number, (size, part) in enumerate(parts):
        law = fit_schedule_law(part, warmup_steps=warmup_steps)
        laws.append(law)
        found = _held_out(part, warmup_steps)
        held_out += [{"size": number, **row} for row in found]
        of = f" at {size:.4g} parameters" if len(parts) > 1 else ""
        warnings += [warning + of for warning in law.warnings]
        if (n := len({row["run"] for row in found})) < MIN_SCHEDULES:
            warnings.append(
                f"{n} schedules{of} could be left out: intervals were tested with {MIN_SCHEDULES} or more, add a schedule"
            )
    return ScheduleFit(
        laws=tuple(laws),
        n_params=tuple(size for size, _ in parts) if "n_params" in curves else (),
        held_out=pd.DataFrame(held_out, columns=["size", "run", "measured", "error", "scale", "gain"]),
        curves=pd.concat([_kept(part, number) for number, (_, part) in enumerate(parts)], ignore_index=True),
        warnings=tuple(warnings),
    )


def _held_out(curves: pd.DataFrame, warmup_steps: float) -> list[dict[str, float | str]]:
    found: list[dict[str, float | str]] = []
    if curves["run"].nunique() < MIN_SCHEDULES:
        return found
    for run, part in curves.groupby("run", sort=True):
        others = curves[curves["run"] != run]
        try:
            law = fit_schedule_law(others, warmup_steps=warmup_steps)
        except ScalingError:  # the only curve whose rate falls
            continue
        whole = _Path.of(part, np.inf)
        if whole.last is None:
            continue
        for share in (0.0, *MEASURED_SHARES):
            path = _Path.of(part, share * whole.steps[whole.last])
            if share and path.last is None:
                continue
            try:
                ahead = _by_own_size(law, path, others)
            except ScalingError:
                error, change, gain = NO_LOSS_ERROR, 0.0, 1.0
            else:
                error = float(ahead.log_loss[whole.last] - whole.log_loss[whole.last])
                change, gain = float(ahead.change[whole.last]), float(ahead.gain[whole.last])
            scale = float(default_scale(np.array(change), share > 0))
            found.append({"run": str(run), "measured": share, "error": error, "scale": scale, "gain": gain})
    return found


def _kept(curves: pd.DataFrame, size: int) -> pd.DataFrame:
    rows = curves.loc[curves["loss"].notna(), ["run", "step", "lr", "loss"]].sort_values(["run", "step"])
    return rows.astype({"step": np.float64, "lr": np.float64, "loss": np.float64}).assign(size=size)


def _points(law: ScheduleLaw, curves: pd.DataFrame) -> Array:
    """Law's two terms, nats, in rows of the curves, [points, 2]."""
    parts = []
    for _, part in curves.groupby("run", sort=True):
        terms = np.stack(law.terms(part.sort_values("step")), axis=1)
        parts.append(terms[np.unique(np.linspace(0, len(terms) - 1, min(len(terms), POINTS_KEPT)).astype(int))])
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Path:
    """A run's schedule in the order of steps, and its measured rows up to some step.

    Attributes:
        frame: `step` and `lr`.
        log_loss: NaN where it is not measured, [rows].
        known: indices of measured rows.
    """

    frame: pd.DataFrame
    steps: Array
    log_loss: Array
    known: NDArray[np.intp]

    @property
    def last(self) -> int | None:
        """Index of the last measured row."""
        return int(self.known[-1]) if len(self.known) else None

    @classmethod
    def of(cls, run: pd.DataFrame, upto: float) -> _Path:
        require_columns(run, ("step", "lr"))
        ordered = run.sort_values("step", kind="stable").reset_index(drop=True)
        steps, loss = numbers(ordered, "step"), np.full(len(ordered), np.nan)
        if "loss" in ordered:
            measured = ordered["loss"].notna().to_numpy()
            loss[measured] = numbers(ordered[measured], "loss")
        loss[steps > upto] = np.nan
        kept = [name for name in ("run", "step", "lr") if name in ordered]
        return cls(ordered[kept], steps, np.log(loss), np.flatnonzero(~np.isnan(loss)))


@dataclass(frozen=True)
class _Ahead:
    """Forecast at each row of a path, [rows].

    Attributes:
        change: x of the default scale.
        gain: gain of the decay since the last measured row, as a share of the loss; 0 if none is measured.
        gain_error: standard error of a gain carried from other sizes, as a share of the loss.
    """

    log_loss: Array
    change: Array
    gain: Array
    gain_error: Array


def _by_own_size(law: ScheduleLaw, path: _Path, curves: pd.DataFrame) -> _Ahead:
    """Forecast by a law of the run's size, which was fitted to these curves."""
    power, gain = law.terms(path.frame)
    if path.last is not None:
        loss = law.L0 + power - gain
        return _anchored(path, path.last, loss, power, gain - gain[path.last], np.zeros(len(power)))
    loss = _above_zero(law.L0 + power - gain, path)
    points = _points(law, curves)
    near = np.abs(power[:, None] - points[:, 0]) + np.abs(gain[:, None] - points[:, 1])
    return _Ahead(np.log(loss), near.min(axis=1) / loss, np.zeros(len(loss)), np.zeros(len(loss)))


def _anchored(path: _Path, last: int, loss: Array, power: Array, gain: Array, error: Array) -> _Ahead:
    """Forecast by the law's loss, times the factor that fits the last part of the measured steps.

    Args:
        last: index of the last measured row.
        power: term of the loss at a constant rate, nats, [rows].
        gain: gain of the decay since the last measured row, nats, [rows].
        error: standard error of a transferred gain, nats, [rows].
    """
    loss = _above_zero(loss, path)
    recent = path.known[path.steps[path.known] > (1 - TAIL) * path.steps[last]]
    shift = float((path.log_loss[recent] - np.log(loss[recent])).mean())
    change = (np.abs(power - power[last]) + np.abs(gain)) / loss
    return _Ahead(np.log(loss) + shift, change, np.abs(gain) / loss, error / loss)


def _above_zero(loss: Array, path: _Path) -> Array:
    least = int(np.argmin(loss))
    if loss[least] <= 0:
        rates = path.frame["lr"]
        raise ScalingError(
            f"the law gives a loss of {loss[least]:.3g} at step {path.steps[least]:g}; the schedule's rates, "
            f"{span(float(rates.min()), float(rates.max()))}, lie too far from the fitted ones"
        )
    return loss
