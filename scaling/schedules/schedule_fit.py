"""The law of loss along a schedule, with what it misses when a schedule is left out: forecasts of a run that is under way.

    fit_schedules(curves, warmup_steps=…)   one law for all sizes, and each schedule forecast by the others      -> ScheduleFit
    .forecast(run)                          loss at the end of a schedule, with an interval                      -> ScheduleForecast
    .effect(run, planned)                   the same over the loss at the end of another schedule                -> ScheduleEffect
    .anneal_now(run)                        the end if the rate is cooled to 0 over a further 10, 20, 30 %       -> list of them

alpha, C, beta and gamma are common to all curves, L0, A and B to those of one group: a size or, if the curves have lengths, a size and
a length. The length is the number of steps that the whole run was to have: then the law counts steps as thousandths of it and rates
as shares of the group's peak, so that one law holds for short and long runs.

The law comes from the curves; its level from the run: the mean log residual over the last fifth of the measured steps is added to
the log loss at all later ones. `schedule_forecast` has the interval, `size_transfer` the other sizes and lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import names, numbers, positive, require_columns
from scaling.errors import ScalingError
from scaling.presentation import lines
from scaling.schedules.schedule_curve import peak_and_depth
from scaling.schedules.schedule_forecast import GROWTH, ScheduleEffect, ScheduleForecast, Widening, default_scale
from scaling.schedules.schedule_law import MIN_DROP, ScheduleLaw, fit_common_law, in_numbers, largest_fall
from scaling.schedules.schedule_path import (
    TAIL,
    ForecastAhead,
    SchedulePath,
    above_zero,
    anchored,
    by_own_law,
    rows_at,
    unlike,
)
from scaling.schedules.size_transfer import constant_rate_loss, transferred
from scaling.serialization import FittedResult, TableLayout

MEASURED_SHARES = (0.4, 0.6, 0.8)
"""Shares of a held-out curve that are measured when it is forecast, next to 0."""
ALIKE_GAIN = 0.5
"""Least gain of a held-out forecast, over that of a forecast whose interval it widens."""
NO_LOSS_ERROR = 1.0
"""Log error of a held-out curve whose law gives a loss that is not above 0."""
ORIGINS = (0.5, 0.75)
"""Shares of a run's own measured steps from which its last measured loss is forecast."""
OWN_SHARE = 0.75
"""Share of the measured steps, up to the last, to which the constant-rate loss of a run of another group is fitted."""
MIN_OWN_ROWS = 8
"""Fewest measured losses of a run of another group."""
MIN_SCHEDULES = 3
"""Fewest schedules: with two, the law of the other would be one schedule's."""
MAX_WIDENING = 2.0
"""Largest k at which intervals count as supported (assumed). Beyond, if it comes from the fitted curves' own residuals, the law does
not even describe them, so the whole gain of the decay after the last measured step counts as a further error."""
MAX_RATIO = {"n_params": 4.2, "length": 4.2}
"""Largest ratio of the run's size and length to the nearest fitted ones (tested to 4)."""
MIN_GROUPS = 2
"""Fewest groups that show how the gain of a decay grows with size or length."""
LENGTH = 1000.0
"""Steps that a whole run counts as if the curves have lengths, so that the prior of C fits."""
SAME_SCHEDULE, SAME_RATES = 0.02, 0.01
"""Largest difference of lengths, and mean difference of rates as a share of the peak, between two runs of the same schedule (a sudden
drop may lie between other rows)."""
COOLDOWN_ROWS = 200
"""Rows of the cooldown of `anneal_now`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleFit(FittedResult):
    """The law of loss along a schedule, with each group's level and gains, and its errors on schedules left out.

    Attributes:
        laws: by group, the smallest first; a single one if the curves have neither sizes nor lengths. With lengths, their steps are
            thousandths of the length, and their rates shares of the group's peak.
        n_params, lengths: the groups' sizes and lengths; empty if the curves have none.
        held_out: one row per fitted curve and measured share: `group` (index of its law), `run`, `measured` (share of the steps
            measured), `error` (log of forecast over loss at the last step), `scale` (default scale of the error) and `gain` (share
            of the loss that the decay gains from the last measured step on; 0 if none is measured).
        curves: rows with a loss of the fitted curves: `group`, `run`, `step`, `lr`, `loss`, in the laws' units.
    """

    laws: tuple[ScheduleLaw, ...]
    n_params: tuple[float, ...]
    lengths: tuple[float, ...]
    held_out: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    curves: Annotated[pd.DataFrame, TableLayout("list")] = field(repr=False)
    warnings: tuple[str, ...]

    def forecast(
        self,
        run: pd.DataFrame,
        *,
        at: Sequence[float] | None = None,
        n_params: float | None = None,
        length: float | None = None,
        level: float = 0.9,
    ) -> ScheduleForecast:
        """Forecast the loss of a run at steps of its schedule.

        Args:
            run: the whole schedule, `step` and `lr`, dense enough to follow the rate; `loss` where it is measured, otherwise NaN;
                optionally `noise`, the standard error of the log loss.
            at: rows' steps to forecast, after the last measured one; the last row's if None.
            n_params, length: size of the run, and steps that it was to have before any change; needed if the curves have them. A
                group that was not fitted needs measured losses. With lengths, the highest measured rate counts as the run's peak.
            level: nominal coverage of the intervals.

        Raises:
            ValueError: a column is missing or breaks its rule, a step in `at` is no row's or was already measured, or `n_params` or
                `length` is missing, or given though the curves have none.
            ScalingError: the run is of another group and has too few measured losses, or the predicted loss is not above 0.
        """
        target = self._target(n_params, length)
        run = in_numbers(run).sort_values("step", kind="stable")
        path = SchedulePath.of(self._in_units(run, length), np.inf)
        steps = run["step"].to_numpy()
        rows = rows_at(path, steps, at)
        ahead = self._ahead(path, target)
        widening = self._widening(path, target, float(ahead.gain[rows].max()))
        k = widening.k
        doubt = ahead.gain if self._misfit(target).k > MAX_WIDENING else np.zeros(len(steps))
        parts = [k * default_scale(ahead.change, path.last is not None), ahead.error, doubt]
        scale = np.sqrt(np.square(parts).sum(axis=0))[rows]
        reach = np.exp(widening.factor(level) * scale)
        loss = np.exp(ahead.log_loss[rows])
        table = pd.DataFrame(
            {"step": steps[rows], "loss": loss, "low": loss / reach, "high": loss * reach, "log_scale": scale}
        )
        return ScheduleForecast(
            table=table,
            level=level,
            measured_to=None if path.last is None else float(steps[path.last]),
            widening=k,
            reasons=self._reasons(path.frame, target, k),
        )

    def effect(
        self,
        run: pd.DataFrame,
        planned: pd.DataFrame,
        *,
        n_params: float | None = None,
        length: float | None = None,
        level: float = 0.9,
    ) -> ScheduleEffect:
        """Forecast the loss at the end of a run's changed schedule over that at the end of the planned one.

        The level and the slope of the run at a constant rate enter both, so the ratio is far better known than either. The error of
        the gain carried from other groups counts by the share in which the schedules ahead differ.

        Args:
            run, planned: as `run` of `forecast`. Both have the same measured rows, at least one.
            n_params, length, level: as in `forecast`.

        Raises:
            ValueError, ScalingError: as `forecast`, or no loss is measured, or the measured rows differ.
        """
        target = self._target(n_params, length)
        tables = [in_numbers(each).sort_values("step", kind="stable") for each in (run, planned)]
        measured = [table.loc[table["loss"].notna(), ["step", "lr", "loss"]].to_numpy() for table in tables]
        paths = [SchedulePath.of(self._in_units(table, length), np.inf) for table in tables]
        if (last := paths[0].last) is None or paths[1].last is None:
            raise ValueError("loss must be measured in some rows of both schedules, got none")
        if len(measured[0]) != len(measured[1]) or not np.allclose(measured[0], measured[1], rtol=1e-6, atol=0.0):
            raise ValueError(
                "run and planned must have the same measured rows (step, lr and loss), since they are one run so far, got "
                f"{' and '.join(f'{len(rows)} to step {rows[-1, 0]:g}, loss {rows[-1, 2]:.6g}' for rows in measured)}"
            )
        ours, theirs = (self._ahead(path, target) for path in paths)
        gain = abs(float(ours.gain[-1] - theirs.gain[-1]))
        power = abs(float((ours.change - ours.gain)[-1] - (theirs.change - theirs.gain)[-1]))
        error = 0.0
        if self._law_index(target) is None:
            shares = [self._gain_shares(path, last)[:, -1:] for path in paths]
            of_difference, of_gain = (
                float(self._transferred(values, target)[1][0]) for values in (shares[0] - shares[1], shares[0])
            )
            error = math.hypot(of_difference, unlike(*paths) * of_gain)
        widening = self._widening(paths[0], target, float(max(ours.gain[-1], theirs.gain[-1])))
        doubt = gain if self._misfit(target).k > MAX_WIDENING else 0.0
        scale = math.hypot(widening.k * GROWTH * math.sqrt(gain + power), error, doubt)
        return ScheduleEffect(
            log_ratio=float(ours.log_loss[-1] - theirs.log_loss[-1]),
            half_width=widening.factor(level) * scale,
            widening=widening.k,
            reasons=self._reasons(paths[0].frame, target, widening.k),
        )

    def anneal_now(
        self,
        run: pd.DataFrame,
        *,
        shares: Sequence[float] = (0.1, 0.2, 0.3),
        n_params: float | None = None,
        length: float | None = None,
        level: float = 0.9,
    ) -> list[ScheduleForecast]:
        """Forecast the final loss if the rate is now cooled linearly to 0 over further steps: these shares of the steps so far.

        Args:
            run: `step`, `lr` and `loss` up to now, NaN where the loss is not measured; optionally `noise`.
            shares, n_params, length, level: as in `forecast`.

        Raises:
            ValueError, ScalingError: as `forecast`, or a share is not above 0.
        """
        require_columns(run, ("step", "lr", "loss"))
        so_far = in_numbers(run).sort_values("step")
        step, rate = float(so_far["step"].iloc[-1]), float(so_far["lr"].iloc[-1])
        found = []
        for share in positive("shares", list(shares)):
            part = np.arange(1, COOLDOWN_ROWS + 1) / COOLDOWN_ROWS
            cooldown = pd.DataFrame({"step": step * (1 + share * part), "lr": rate * (1 - part), "loss": np.nan})
            whole = pd.concat([so_far[["step", "lr", "loss", "noise"]], cooldown], ignore_index=True)
            found.append(self.forecast(whole, n_params=n_params, length=length, level=level))
        return found

    def __str__(self) -> str:
        sizes = [[f"{size:.4g} parameters"] for size in self.n_params] or [[] for _ in self.laws]
        for size, length in zip(sizes, self.lengths, strict=False):
            size.append(f"length {length:.4g}")
        errors = self.held_out["error"].abs()
        return lines(
            {
                "groups": "; ".join(
                    f"{', '.join(size) or 'one size'}: {', '.join(law.runs)}"
                    for size, law in zip(sizes, self.laws, strict=True)
                ),
                "held out": "no schedule could be left out"
                if errors.empty
                else f"mean error {errors.mean():.2%} of the final loss, largest {errors.max():.2%}",
                "status": self.status_line,
            }
        )

    @property
    def _fitted(self) -> dict[str, tuple[float, ...]]:
        """Sizes and lengths of the groups, without those that the curves do not have."""
        return {name: values for name, values in (("n_params", self.n_params), ("length", self.lengths)) if values}

    def _target(self, n_params: float | None, length: float | None) -> dict[str, float]:
        """Return the given size and length, if the curves have them."""
        given = {"n_params": n_params, "length": length}
        for name, value in given.items():
            if (value is None) == (name in self._fitted):
                raise ValueError(
                    f"{name} must be given if and only if the curves have the column {name}, got {value!r}"
                )
        return {name: float(positive(name, value)) for name, value in given.items() if value is not None}

    def _in_units(self, run: pd.DataFrame, length: float | None) -> pd.DataFrame:
        """Return the run with steps and rates in the laws' units."""
        if length is None:
            return run
        rates, known = run["lr"].to_numpy(), run["loss"].notna().to_numpy()
        peak, _ = peak_and_depth(rates[known] if known.any() else rates)
        return run.assign(step=run["step"] * (LENGTH / length), lr=rates / peak)

    def _law_index(self, target: Mapping[str, float]) -> int | None:
        """Index of the law of this group, None if the group was not fitted."""
        same = np.ones(len(self.laws), bool)
        for name, values in self._fitted.items():
            same &= np.isclose(values, target[name], rtol=1e-6, atol=0)
        return int(np.argmax(same)) if same.any() else None

    def _laws_for(self, target: Mapping[str, float]) -> tuple[ScheduleLaw, ...]:
        """Law of this group, or all laws if the group was not fitted."""
        index = self._law_index(target)
        return self.laws if index is None else (self.laws[index],)

    def _transferred(self, values: Array, target: Mapping[str, float]) -> tuple[Array, Array]:
        """Carry values of the groups, [groups, K], to the run: `transferred`."""
        fitted = self._fitted
        return transferred(
            values, np.log(np.array([*fitted.values()])).T, np.log(np.array([target[name] for name in fitted]))
        )

    def _ahead(self, path: SchedulePath, target: Mapping[str, float]) -> ForecastAhead:
        index = self._law_index(target)
        if index is not None:
            return by_own_law(self.laws[index], path, self.curves[self.curves["group"] == index])
        recent = path.recent(OWN_SHARE)
        if path.last is None or len(recent) < MIN_OWN_ROWS:
            raise ScalingError(
                f"a run of a size or length that was not fitted needs {MIN_OWN_ROWS} measured losses in the last {OWN_SHARE:.0%} of "
                f"its steps so far, got {len(recent)}"
            )
        last = path.last
        followed = [self._followed(number, path) for number in range(len(self.laws))] if not self.lengths else [None]
        if len(self.laws) >= MIN_GROUPS and all(curve is not None for curve in followed):
            logs = np.stack([np.interp(path.steps, c["step"], np.log(c["loss"])) for c in followed if c is not None])
            ratio, error = self._transferred(logs - logs[:, last, None], target)
            loss = np.exp(ratio)
            return anchored(path, last, loss, np.zeros(len(ratio)), ratio * loss, error * loss)
        power = self.laws[0].terms(path.frame)[0]
        share, error = self._transferred(self._gain_shares(path, last), target)
        now = math.exp(path.log_loss[path.recent(TAIL)].mean())
        level, factor = constant_rate_loss(power[recent], np.exp(path.log_loss[recent]) + now * share[recent])
        distance = (power - power[recent].mean()) / np.linalg.norm(power[recent] - power[recent].mean())
        error = now * np.hypot(error, distance * np.sqrt(np.square(path.noise[recent]).mean()))
        return anchored(path, last, level + factor * power - now * share, factor * power, now * share, error)

    def _gain_shares(self, path: SchedulePath, last: int) -> Array:
        """Gain of the decay since a row, by the law of each group, as a share of its loss there, [groups, rows]."""
        found = []
        for law in self.laws:
            power, gain = law.terms(path.frame)
            found.append((gain - gain[last]) / above_zero(law.L0 + power - gain, path)[last])
        return np.stack(found)

    def _followed(self, group: int, path: SchedulePath) -> pd.DataFrame | None:
        """Fitted curve of this group that has the path's schedule to its end; None if there is none."""
        curves = self.curves[self.curves["group"] == group]
        rates = path.frame["lr"].to_numpy(np.float64)
        for _, curve in curves.groupby("run", sort=True):
            ends = curve["step"].iloc[-1] >= (1 - SAME_SCHEDULE) * path.steps[-1]
            off = np.abs(np.interp(path.steps, curve["step"], curve["lr"]) - rates).mean()
            if ends and off <= SAME_RATES * rates.max():
                return curve
        return None

    def _misfit(self, target: Mapping[str, float]) -> Widening:
        """Widening by the residuals of the curves of this group, or of all groups if it was not fitted."""
        return Widening.of_fit(max(law.rms for law in self._laws_for(target)))

    def _widening(self, path: SchedulePath, target: Mapping[str, float], gain: float) -> Widening:
        """Largest widening by the fitted curves, those left out, and the run itself, for a forecast whose decay gains `gain`."""
        squares = self._squares(path.last is not None, gain)
        return max(Widening.of(squares), Widening.of(self._own_squares(path, target)), self._misfit(target))

    def _squares(self, measured: bool, gain: float) -> Array:
        """Mean squares of (error / default scale) of the held-out curves, forecast with or without a measured loss.

        Forecasts with at least half the gain count, or all if there are none.
        """
        rows = self.held_out[(self.held_out["measured"] > 0) == measured]
        if (alike := rows["gain"] >= ALIKE_GAIN * gain).any():
            rows = rows[alike]
        squares = (rows["error"] / rows["scale"]) ** 2
        return np.asarray(squares.groupby([rows["group"], rows["run"]]).mean(), np.float64)

    def _own_squares(self, path: SchedulePath, target: Mapping[str, float]) -> Array:
        """Mean square of (error / default scale) of the run's last measured loss, forecast from earlier steps, [1]; [0] if too few."""
        if path.last is None:
            return np.empty(0)
        last, found = path.last, list[float]()
        for origin in ORIGINS:
            earlier = path.upto(origin * path.steps[last])
            if len(earlier.recent(OWN_SHARE)) >= MIN_OWN_ROWS:
                ahead = self._ahead(earlier, target)
                found.append(((ahead.log_loss[last] - path.log_loss[last]) / ahead.scale(path, last)) ** 2)
        return np.array([np.mean(found)] if found else [])

    def _reasons(self, run: pd.DataFrame, target: Mapping[str, float], k: float) -> tuple[str, ...]:
        reasons = list[str]()
        if self._law_index(target) is None:
            if len(self.laws) < MIN_GROUPS:
                reasons.append("one fitted size and length: how the gain of a decay grows with them was not seen")
            for name, values in self._fitted.items():
                value = target[name]
                nearest = min(values, key=lambda fitted: abs(math.log(fitted / value)))
                if not 1 / MAX_RATIO[name] <= value / nearest <= MAX_RATIO[name]:
                    reasons.append(
                        f"{name} {value:.4g}: tested to {MAX_RATIO[name]:g}× the nearest fitted {nearest:.4g}"
                    )
        reasons += [reason for law in self._laws_for(target) for reason in law.unsupported_reasons(run)]
        reasons += [warning for warning in self.warnings if warning not in reasons]
        if k > MAX_WIDENING:
            reasons.append(
                f"errors on the fitted curves, on those left out or on the run itself are {k:.1f}× those of the tested curves"
            )
        return tuple(dict.fromkeys(reasons))


def fit_schedules(curves: pd.DataFrame, *, warmup_steps: float = 0.0, warmup_share: float = 0.0) -> ScheduleFit:
    """Fit a law to loss curves under several schedules, and measure its errors on each schedule left out.

    Each curve is forecast at its last loss by the law of all curves of other schedules, with none, 40, 60 and 80 % of it measured.
    This needs three schedules, and in the curve's group another curve whose rate falls.

    Args:
        curves: one row per evaluation: `run`, `step`, `lr`, `loss` and optionally `noise`, as for `fit_schedule_law`; `n_params` if
            there are several sizes; `length`, the steps that the whole run was to have, if there are several lengths; `schedule`, its
            name, if runs of one schedule have several names.
        warmup_steps: steps of a linear warmup to the rate of a run's first row, which must lie after the warmup.
        warmup_share: the same as a share of the length, for curves with lengths.

    Raises:
        ValueError: a column or a number is missing or breaks its rule, or a run's first rate is 0.
        ScalingError: in some group no curve's rate falls, or there are fewer losses than numbers.
    """
    require_columns(curves, ("run", "step", "lr", "loss"))
    by = [name for name in ("n_params", "length") if name in curves]
    curves = in_numbers(curves).assign(run=names(curves, "run"), **{name: numbers(curves, name) for name in by})
    curves["schedule"] = names(curves, "schedule" if "schedule" in curves else "run")
    if warmup_steps if (with_lengths := "length" in by) else warmup_share:
        wanted = "warmup_share" if with_lengths else "warmup_steps"
        raise ValueError(
            f"the warmup must be given as {wanted}, since the curves have {'a' if with_lengths else 'no'} column length, got "
            f"warmup_steps {warmup_steps!r} and warmup_share {warmup_share!r}"
        )
    if with_lengths:
        peaks, warmup_steps = curves.groupby(by)["lr"].transform("max"), warmup_share * LENGTH
        curves = curves.assign(step=curves["step"] * (LENGTH / curves["length"]), lr=curves["lr"] / peaks)
    groups = [part for _, part in curves.groupby(by, sort=True)] if by else [curves]
    laws = fit_common_law(groups, warmup_steps=warmup_steps)
    held_out = _held_out(groups, warmup_steps)
    warnings = list(dict.fromkeys(warning for law in laws for warning in law.warnings))
    if (n := held_out["schedule"].nunique()) < MIN_SCHEDULES:
        warnings.append(
            f"{n} schedules could be left out: intervals were tested with {MIN_SCHEDULES} or more, add a schedule"
        )
    firsts = {name: tuple(float(part[name].iloc[0]) for part in groups) for name in by}
    return ScheduleFit(
        laws=laws,
        n_params=firsts.get("n_params", ()),
        lengths=firsts.get("length", ()),
        held_out=held_out.drop(columns="schedule"),
        curves=pd.concat([_kept(part, number) for number, part in enumerate(groups)], ignore_index=True),
        warnings=tuple(warnings),
    )


def _held_out(groups: Sequence[pd.DataFrame], warmup_steps: float) -> pd.DataFrame:
    """`ScheduleFit.held_out`, with the column `schedule`."""
    found: list[dict[str, float | str]] = []
    schedules = sorted({name for curves in groups for name in curves["schedule"]})
    for schedule in schedules if len(schedules) >= MIN_SCHEDULES else ():
        others = {number: curves[curves["schedule"] != schedule] for number, curves in enumerate(groups)}
        others = {n: curves for n, curves in others.items() if len(curves) and largest_fall(curves) >= MIN_DROP}
        if not others:
            continue
        laws = fit_common_law([*others.values()], warmup_steps=warmup_steps)
        for (number, rest), law in zip(others.items(), laws, strict=True):
            curves = groups[number]
            for run, part in curves[curves["schedule"] == schedule].groupby("run", sort=True):
                errors = _errors(law, rest, part)
                found += [{"group": number, "schedule": schedule, "run": str(run), **row} for row in errors]
    columns = ["group", "schedule", "run", "measured", "error", "scale", "gain"]
    return pd.DataFrame(found, columns=columns)


def _errors(law: ScheduleLaw, fitted: pd.DataFrame, curve: pd.DataFrame) -> list[dict[str, float]]:
    """Errors of the law at the last loss of a curve to which it was not fitted, by the share of the curve that is measured."""
    found: list[dict[str, float]] = []
    whole = SchedulePath.of(curve, np.inf)
    if (last := whole.last) is None:
        return found
    for share in (0.0, *MEASURED_SHARES):
        path = whole.upto(share * whole.steps[last])
        if share and path.last is None:
            continue
        try:
            ahead = by_own_law(law, path, fitted)
        except ScalingError:
            error, scale, gain = NO_LOSS_ERROR, float(default_scale(np.zeros(1), share > 0)[0]), 1.0
        else:
            error, gain = float(ahead.log_loss[last] - whole.log_loss[last]), float(ahead.gain[last])
            scale = ahead.scale(whole, last, share > 0)
        found.append({"measured": share, "error": error, "scale": scale, "gain": gain})
    return found


def _kept(curves: pd.DataFrame, group: int) -> pd.DataFrame:
    rows = curves.loc[curves["loss"].notna(), ["run", "step", "lr", "loss"]].sort_values(["run", "step"])
    return rows.assign(group=group)
