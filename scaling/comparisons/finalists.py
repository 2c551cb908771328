"""Comparison of a search's finalists, each repeated over the same few fresh seeds.

    log loss_ij = level + trial_i + seed_j + error_ij,    error_ij ~ N(0, sigma²),    trial_i ~ N(0, (rho·sigma)²)

    Two kinds of luck flatter a winner (the winner's curse). First, a trial leads its search partly because of a lucky seed. So the
rows exclude the runs that chose the finalists, and repeats start from fresh seeds. Second, the least of several measured means is
too low, the more so the less the trials differ. So the trials' levels are shrunk towards each other as far as the noise
allows (e.g. Gelman et al., Bayesian Data Analysis, 3rd ed., sections 5.4 and 11.6). rho is averaged over rather than
estimated, as three trials hardly determine it. Every statement about the trials comes from this one posterior: a t
distribution for each rho, mixed by how well each rho explains the means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd

from scaling.arrays import Array
from scaling.checks import losses, require_columns, require_filled, seeds
from scaling.comparisons.noise import TwoWay, fit_two_way
from scaling.drawing import COLOURS, GREY, LOSS, Figure, add, blank
from scaling.errors import ScalingError
from scaling.presentation import lines, number
from scaling.quantiles import tails
from scaling.serialization import JsonResult, OrNan, TableLayout

N_DRAWS = 20_000
"""Draws of the posterior; they give a probability of being best to ± .004."""
RHO = 2 * np.tan(np.pi / 2 * (np.arange(128) + 0.5) / 128)
"""Ratios of the trials' spread to the noise of one run, with equal prior weights: a half-Cauchy prior of scale 2, which allows for
equal trials and for trials far apart. Chosen on planted sets of four trials over three seeds: the winner's loss is then wrong on
average by −.30 (equal trials), +.06 (a spread like the noise), +.15 (three times) and +.05 (ten times) standard deviations of one
run; its measured mean is wrong by −.59, −.29, −.09 and −.06."""
ROUNDING = 1e-9
"""Least standard deviation of log loss; otherwise equal losses would have no error at all."""
COLUMNS = (
    "loss",
    "low",
    "high",
    "difference",
    "difference_low",
    "difference_high",
    "p_best",
    "measured",
    "n_runs",
    "n_diverged",
)
UNKNOWN = {"low": -math.inf, "high": math.inf, "difference_low": -math.inf, "difference_high": math.inf}


@dataclass(frozen=True, kw_only=True, eq=False)
class Finalists(JsonResult):
    """The finalists with intervals, the winner, and the trials that cannot be distinguished from the winner.

    Attributes:
        trials: one row per trial, best first, index `trial`:
            `loss`, `low`, `high`: expected loss over seeds, nats per token, and its interval;
            `difference`, `difference_low`, `difference_high`: difference from the winner's loss;
            `p_best`: probability of being the best of these trials; NaN if not known;
            `measured`: plain mean loss of the finished runs; `n_runs`, `n_diverged`.
            Unknown bounds are infinite. A trial with a diverged run is not compared: its `loss` is the mean of the
            other runs, and `p_best` is 0.
        winner: the trial with the lowest expected loss.
        near_tie: trials that cannot be distinguished from the winner: the fewest that, with the winner, include the best
            trial with probability `level`. Empty if the winner alone does.
        noise: standard deviation of log loss of one run about trial + seed; NaN if not known.
        dof: degrees of freedom of `noise`.
        reasons: reasons why the comparison is incomplete or doubtful.
    """

    winner: Any
    level: float
    noise: OrNan
    dof: float
    n_seeds: int
    near_tie: tuple[Any, ...]
    reasons: tuple[str, ...]
    trials: Annotated[pd.DataFrame, TableLayout("records", index="trial", nulls=UNKNOWN)] = field(repr=False)

    @property
    def verdict(self) -> Literal["clear", "near-tie", "not known"]:
        """`clear` if the winner is the best with probability `level` of at least two trials."""
        if math.isnan(self.p_best) or len(self.trials) == 1:
            return "not known"
        return "near-tie" if self.near_tie else "clear"

    @property
    def p_best(self) -> float:
        """Probability that the winner is the best of these trials."""
        return float(self.trials.loc[self.winner, "p_best"])

    @property
    def loss(self) -> float:
        """The winner's expected loss."""
        return float(self.trials.loc[self.winner, "loss"])

    @property
    def interval(self) -> tuple[float, float]:
        """The winner's interval."""
        low, high = self.trials.loc[self.winner, ["low", "high"]]
        return float(low), float(high)

    @property
    def sentence(self) -> str:
        """E.g. `trial 7, 3.4120 ± 0.0060, best with probability 0.71: a near-tie with trial 12`."""
        reach = (self.interval[1] - self.interval[0]) / 2
        digits = min(max(1 - math.floor(math.log10(reach)), 2), 6) if math.isfinite(reach) and reach > 0 else 4
        error = f"{reach:.{digits}f}" if math.isfinite(reach) else "not known"
        found = f"trial {self.winner}, {self.loss:.{digits}f} ± {error}"
        if self.verdict == "not known":
            return f"{found}, the least of {len(self.near_tie) + 1}: it is not known whether it is the best"
        tie = f": a near-tie with trial {', '.join(map(str, self.near_tie))}" if self.near_tie else ""
        return f"{found}, best with probability {self.p_best:.2f}{tie}"

    def plot(self) -> Figure:
        """Each trial's loss with its interval and the probability that it is the best."""
        return draw_finalists(finalists_data(self.trials, self.winner, self.near_tie))

    @property
    def about(self) -> str:
        """Lines about the winner, the noise and the verdict."""
        noise = f"{self.noise:.3%} of the loss, {self.dof:g} degrees of freedom" if self.dof else "not known"
        return lines(
            {
                "winner": self.sentence,
                "intervals": f"{self.level:.0%}, losses shrunk towards their mean by the noise",
                "noise": f"{noise}; {self.n_seeds} seeds",
                "verdict": "; ".join((self.verdict, *self.reasons)),
            }
        )

    def __str__(self) -> str:
        return f"{self.trials.to_string(na_rep='–', float_format=lambda value: number(value, '.5g'))}\n{self.about}"


def compare_finalists(
    rows: pd.DataFrame, level: float = 0.9, seed: int = 0, *, noise: tuple[float, float] | None = None
) -> Finalists:
    """Name the best of the finalists, and the trials that cannot be distinguished from it.

    Args:
        rows: one row per run: `trial`, `seed`, `loss` (nats per token; NaN if diverged). The seeds are the same for all
            trials; some runs may be missing. Leave out the runs that chose the finalists.
        level: probability of the intervals, and the probability above which the winner is clear.
        seed: seed of the draws; the same seed gives the same answer.
        noise: standard deviation of log loss between runs of shared seeds and its degrees of freedom, known from
            other runs (`seed_noise(…).prior`); it is pooled with the rows' noise, so it must hold for these trials too.

    Measured on planted sets of three or five trials over three seeds, with spreads from half the noise of a run to 25 times
    the noise: 90 % intervals hold 88 to 95 % of the true differences and 90 to 96 % of the true losses, and the winner is the best
    as often as stated (within 7 %, half of which is chance). With equal trials, 98 to 99 in 100 sets are called near-ties.

    Raises:
        ValueError: a column is missing or breaks its rule, a trial has two runs with one seed, or `level` or `noise` is
            out of its range.
        ScalingError: every run diverged, or two trials share no seed, not even through others.
    """
    ends = tails(level)
    if noise is not None and not (0 <= noise[0] < math.inf and 0 < noise[1] < math.inf):
        raise ValueError(
            f"noise must be a standard deviation, at least 0, and its degrees of freedom, above 0, got {noise!r}"
        )
    require_columns(rows, ("trial", "seed", "loss"))
    require_filled(rows, "trial")
    table = pd.DataFrame({"trial": rows["trial"].to_numpy(), "seed": seeds(rows, "trial"), "loss": losses(rows)})
    trials = table.groupby("trial", sort=False)["loss"].agg(
        measured="mean", n_runs="size", n_diverged=lambda loss: int(loss.isna().sum())
    )
    if not trials["measured"].notna().any():
        raise ScalingError(f"all {len(table)} runs of {len(trials)} trials diverged: nothing can be compared")
    sound = trials.index[trials["n_diverged"] == 0]
    compared = sound if len(sound) else trials.index[trials["measured"].notna()]
    used = table[table["trial"].isin(compared)].dropna(subset="loss")
    codes, names = pd.factorize(used["trial"])
    fitted = fit_two_way(codes, pd.factorize(used["seed"])[0], np.log(used["loss"].to_numpy()))
    if not fitted.connected:
        raise ScalingError(
            f"trials {', '.join(map(str, names))} cannot be compared: they share too few seeds; run them with equal seeds"
        )
    sum_of_squares, dof = fitted.sum_of_squares, float(fitted.dof)
    if noise is not None:
        sum_of_squares, dof = sum_of_squares + noise[1] * noise[0] ** 2, dof + noise[1]
    posterior = _describe(fitted, max(sum_of_squares, dof * ROUNDING**2), dof, ends, np.random.default_rng(seed))
    trials = posterior.set_index(pd.Index(names, name="trial")).join(trials, how="right")
    trials["loss"] = trials["loss"].fillna(trials["measured"])
    trials = trials.fillna(UNKNOWN | {"p_best": 0.0 if dof or len(names) == 1 else math.nan})
    trials["difference"] = trials["loss"] - trials.loc[names[int(np.argmin(posterior["loss"]))], "loss"]
    trials.loc[~trials.index.isin(names), "p_best"] = 0.0
    order = trials.assign(out=~trials.index.isin(names)).sort_values(["out", "loss"], kind="stable").index
    trials = trials.loc[order, list(COLUMNS)]
    return Finalists(
        trials=trials,
        winner=trials.index.tolist()[0],
        near_tie=_near_tie(trials.loc[trials.index.isin(names), "p_best"], level),
        level=level,
        noise=math.sqrt(sum_of_squares / dof) if dof else math.nan,
        dof=dof,
        n_seeds=int(used["seed"].nunique()),
        reasons=tuple(_warnings(table, trials, len(sound), used["seed"].nunique(), noise)),
    )


def _describe(
    fitted: TwoWay, sum_of_squares: float, dof: float, ends: tuple[float, float], generator: np.random.Generator
) -> pd.DataFrame:
    """Columns loss, low, high, difference_low, difference_high, p_best, a row per trial; `ends` are the bounds' probabilities."""
    n_trials, n_seeds = len(fitted.settings), len(fitted.seeds)
    if n_trials == 1:
        effects, draws = fitted.settings, np.zeros((N_DRAWS, 1))
    elif dof:
        effects, draws = _posterior(fitted, sum_of_squares, dof, generator)
    else:
        return pd.DataFrame({"loss": np.exp(fitted.level + fitted.settings), **UNKNOWN, "p_best": math.nan})
    summary = pd.DataFrame({"loss": np.exp(fitted.level + effects), **UNKNOWN})
    winner = int(np.argmin(effects))
    differences = np.quantile(draws - draws[:, [winner]], ends, axis=0)
    summary["difference_low"], summary["difference_high"] = summary["loss"].iloc[winner] * np.expm1(differences)
    summary["p_best"] = np.bincount(draws.argmin(axis=1), minlength=n_trials) / len(draws)
    if n_seeds > 1:
        # The mean of these few seeds differs from the mean of all seeds by the seeds' spread over the root of their number.
        error = math.sqrt(float(np.sum(fitted.seeds**2)) / (n_seeds - 1) / n_seeds)
        level_draws = fitted.level + error * generator.standard_t(n_seeds - 1, len(draws))
        summary["low"], summary["high"] = np.exp(np.quantile(level_draws[:, None] + draws, ends, axis=0))
    return summary


def _posterior(
    fitted: TwoWay, sum_of_squares: float, dof: float, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Mean [I] and draws [N_DRAWS, I] of the trials' levels about their mean, nats of log loss.

    Along the axes of the unit covariance the means are independent: c_k | sigma, rho ~ N(0, sigma²·(spread_k + rho²)).
    With the prior 1/sigma² of the variance, p(rho | rows) ∝ ∏ (spread_k + rho²)^-½ · q^-(dof + I − 1)/2, with
    q = sum_of_squares + Σ c_k² / (spread_k + rho²), and sigma² | rho, rows = q / chi² of dof + I − 1.
    """
    spread, axes = np.linalg.eigh(fitted.unit_covariance)
    spread, axes = spread[1:], axes[:, 1:]  # without the first, the constant, along which nothing was fitted
    c = axes.T @ fitted.settings
    width = spread + RHO[:, None] ** 2
    q = sum_of_squares + np.sum(c**2 / width, axis=1)
    freedom = dof + len(c)
    log_weight = -np.log(width).sum(axis=1) / 2 - freedom / 2 * np.log(q)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    shrink = RHO[:, None] ** 2 / width
    rho = generator.choice(len(RHO), N_DRAWS, p=weight)
    variance = q[rho] / generator.chisquare(freedom, N_DRAWS)
    scale = np.sqrt(variance[:, None] * shrink[rho] * spread)
    draws = shrink[rho] * c + scale * generator.standard_normal((N_DRAWS, len(c)))
    return axes @ (weight @ shrink * c), draws @ axes.T


def _near_tie(p_best: "pd.Series[float]", level: float) -> tuple[Any, ...]:
    """The fewest trials after the first whose probabilities, with the first's, reach `level`; all if not known."""
    first, others = p_best.iloc[0], p_best.iloc[1:].sort_values(ascending=False, kind="stable")
    if math.isnan(first):
        return tuple(others.index.tolist())
    reached = first + np.concatenate([[0.0], np.cumsum(others.to_numpy())])
    enough = np.flatnonzero(reached >= level - 1e-12)
    return tuple(others.index.tolist()[: int(enough[0])])


def _warnings(
    table: pd.DataFrame, trials: pd.DataFrame, n_sound: int, n_seeds: int, noise: tuple[float, float] | None
) -> list[str]:
    warnings = []
    if len(trials) == 1:
        warnings.append("one trial: there is nothing to compare it with")
    if n_seeds == 1:
        known = "the noise is only what was passed in" if noise else "repeat the trials over 3 fresh seeds"
        warnings.append(f"one seed: {known}")
    if not n_sound:
        warnings.append("a run of every trial diverged: only the runs that survived are compared")
    for trial, row in trials.iterrows():
        if row["n_diverged"]:
            out = " and can't win" if n_sound else ""
            warnings.append(f"trial {trial} diverged in {row['n_diverged']:.0f} of {row['n_runs']:.0f} runs{out}")
        if missing := table["seed"].nunique() - int(row["n_runs"]):
            warnings.append(f"trial {trial} has no run of {missing} of {table['seed'].nunique()} seeds")
    return warnings


def finalists_data(trials: pd.DataFrame, winner: Any, near_tie: Sequence[Any]) -> pd.DataFrame:
    """One row per trial, best first: trial, loss, low, high (NaN if not known), p_best; series winner, near-tie, other."""
    table = trials.reset_index()[["trial", "loss", "low", "high", "p_best"]]
    series = np.select([table["trial"] == winner, table["trial"].isin(near_tie)], ["winner", "near-tie"], "other")
    return table.replace([-np.inf, np.inf], np.nan).assign(series=series)


def draw_finalists(data: pd.DataFrame) -> Figure:
    """Draw each trial's loss with its interval; the text is the probability that the trial is the best."""
    figure = blank()
    for name, colour in (("winner", COLOURS[0]), ("near-tie", COLOURS[3]), ("other", GREY)):
        part = data[data["series"] == name]
        if not len(part):
            continue
        text = ["" if np.isnan(p) else f"best: {p:.2f}" for p in part["p_best"]]
        looks = {"mode": "markers+text", "textposition": "middle right", "marker": {"color": colour, "size": 10}}
        add(figure, part.astype({"trial": str}), "trial", "loss", "y", name=name, text=text, **looks)
    order = data["trial"].astype(str).tolist()
    ends = [-0.4, len(order) - 0.25]  # room for the last text
    figure.update_xaxes(title="trial", type="category", categoryorder="array", categoryarray=order, range=ends)
    figure.update_yaxes(title=LOSS)
    return figure
