"""Effective compute multiplier of a variant at a target: does its win survive scale?

    log L_baseline(C) = log(E + A·C^−gamma)        log m(C) = a + g·log(C / C0) + drift(C)

A run of the variant with compute C and loss L is worth the baseline's run of compute m·C that has the same loss (the efficiency
gain of Hernandez & Brown, 2005.04305). Measured m, one for each size, lie about a line in log C. Its slope g has a heavy-tailed prior
about 0: most gains stay, some fade, a few turn round. A random walk leaves the line room to bend beyond the runs. Noise is pooled
over the variants, from repeated seeds and from the residuals. Offset, slope, walk and noise are integrated over; the baseline's
law is taken as fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd

from scaling.checks import losses, numbers, require_columns
from scaling.comparisons.noise import seed_noise
from scaling.errors import ScalingError
from scaling.fits.runs import Table, naming, read_runs
from scaling.forms.law import compute_flops
from scaling.presentation import lines
from scaling.serialization import JsonResult, TableLayout
from scaling.variants.posterior import NOISE, Baseline, Gains, Mixture, normal_quantile

if TYPE_CHECKING:
    import plotly.graph_objects as go

Outcome = Literal["promote", "reject", "undecided"]

SURE = 0.95
"""Probability from which a verdict is given."""
WORTH = 0.02
"""Least gain in compute, as a share, that is worth a change of the recipe: about what one more seed moves a single run."""
LIKELY = 0.5
"""Probability of deciding from which the cheapest next runs are advised."""
_N_NOISES = 25  # points of the grid that is summed over
_NOISE_SPAN = math.log(8.0)  # of the grid, either way


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantComparison(JsonResult):
    """What each variant is worth at the target.

    Attributes:
        baseline: name of the variant that all are held against.
        target_flops: compute of the run that is decided on, FLOPs.
        worth: least gain in compute, as a share, that a change must bring.
        level: of the intervals.
        noise: standard deviation of one run's log loss, pooled; the posterior's median.
        baseline_loss: of the baseline at the target, by a power law with a floor.
        table: by variant: runs, sizes, flops (of its largest run), multiplier (median at the target), low, high,
            p_better = P(m > 1), p_worth = P(m > 1 + worth), loss (at the target), verdict.
        measured: by variant and compute_flops: multiplier, low, high of that size alone.
        band: by variant and compute_flops, up to the target: multiplier, low, high.
        next_runs: by undecided variant, none dearer than the target: the cheapest runs that would decide with a probability of
            .5, or those with the highest: compute_flops and seeds of the variant, cost (FLOPs, the baseline's seeds included),
            p_decided.
    """

    baseline: str
    target_flops: float
    worth: float
    level: float
    noise: float
    baseline_loss: float
    table: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    measured: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    band: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    next_runs: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)

    def verdict(self, variant: str) -> Outcome:
        """Verdict of one variant.

        Raises:
            KeyError: there is none of that name.
        """
        outcome: Outcome = self.table.set_index("variant").loc[variant, "verdict"]
        return outcome

    def plot(self) -> go.Figure:
        """Multiplier of each variant against compute, with its band up to the target."""
        from scaling.variants.figures import draw_variants

        return draw_variants(self.band, self.measured, self.level)

    def __str__(self) -> str:
        """The table, what it rests on, and the runs that would decide."""
        shown = pd.DataFrame(
            {
                "variant": self.table["variant"],
                "runs": self.table["runs"],
                "up to FLOPs": [f"{flops:.2g}" for flops in self.table["flops"]],
                "multiplier": [f"{m:.3f}" for m in self.table["multiplier"]],
                f"{self.level:.0%} interval": [
                    f"{low:.3f} to {high:.3f}" for low, high in self.table[["low", "high"]].to_numpy()
                ],
                "P(better)": [f"{p:.3f}" for p in self.table["p_better"]],
                "loss": [f"{loss:.4f}" for loss in self.table["loss"]],
                "verdict": self.table["verdict"],
            }
        )
        about = {
            "at": f"{self.target_flops:.3g} FLOPs, where {self.baseline} has a loss of {self.baseline_loss:.4f}",
            "multiplier": f"compute that {self.baseline} would need for the variant's loss, over the variant's own",
            "promote": f"P(m > 1) is at least {SURE:g}",
            "reject": f"P(m > {1 + self.worth:g}) is at most {1 - SURE:.2g}: no gain worth a change",
            "noise": f"{self.noise:.2%} of the loss between two runs that differ by their seed",
        }
        for row in self.next_runs.to_dict("records"):
            about[f"next for {row['variant']}"] = (
                f"{row['seeds']} {'seed' if row['seeds'] == 1 else 'seeds'} at {row['compute_flops']:.2g} FLOPs, beside "
                f"{self.baseline}'s: decides with probability {row['p_decided']:.2f} for {row['cost']:.2g} FLOPs"
            )
        return f"{shown.to_string(index=False)}\n{lines(about)}"


def compare_variants(
    runs: Table,
    baseline: str,
    *,
    target_flops: float | None = None,
    worth: float = WORTH,
    level: float = 0.9,
    noise: tuple[float, float] = NOISE,
) -> VariantComparison:
    """Hold each variant against the baseline, at the compute of the run that is decided on.

    Args:
        runs: a DataFrame, a list of dicts, or a CSV, TSV, Parquet or JSON Lines file, a row per finished run:
            `variant`, `loss` (nats per token, or any unit that all rows share, on one held-out set), and
            `compute_flops` (FLOPs), or `n_params` and `n_tokens` whose 6ND takes its place; with `seed`, runs of equal compute and
            seed are paired. NaN losses (diverged) are left out.
        baseline: the variant that others are held against; needs two sizes at least.
        target_flops: compute of the full run, FLOPs; the largest run's if not given.
        worth: least gain in compute, as a share, that is worth the change.
        level: of the intervals.
        noise: standard deviation of log loss between seeds as known before, and the degrees of freedom that it counts for.

    Raises:
        ValueError: a column is missing, or a value breaks its rule.
        ScalingError: the baseline has runs of fewer than two sizes, no variant has a run, or one is below the baseline's floor.
    """
    rows = read_runs(runs)
    with naming(runs):
        cells, sd, dof = _cells(rows, noise)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    if not worth >= 0:
        raise ValueError(f"worth must be at least 0, a share of the compute, got {worth!r}")
    target = float(cells["flops"].max() if target_flops is None else target_flops)
    if not 0 < target < math.inf:
        raise ValueError(f"target_flops must be a positive number, got {target_flops!r}")
    own = cells[cells["variant"] == baseline]
    names = [name for name in cells["variant"].unique() if name != baseline]
    if len(own) < 2:
        raise ScalingError(
            f"the baseline {baseline!r} needs finished runs of two sizes or more, got {len(own)}; "
            f"the table has {', '.join(map(repr, cells['variant'].unique()))}"
        )
    if not names:
        raise ScalingError(f"need a variant beside {baseline!r}, got none")
    law = Baseline.fitted(own)
    lines_of = {name: Gains.measured(law, cells[cells["variant"] == name], name) for name in names}

    scales = sd * np.exp(np.linspace(-_NOISE_SPAN, _NOISE_SPAN, _N_NOISES))
    posterior = -dof * (np.log(scales) + sd**2 / (2 * scales**2))
    for gains in lines_of.values():
        posterior = posterior + np.logaddexp.reduce(gains.evidence(scales), axis=1)
    chances = np.exp(posterior - posterior.max())
    chances /= chances.sum()
    median = float(scales[np.searchsorted(chances.cumsum(), 0.5)])

    table, measured, band, following = [], [], [], []
    computes = np.geomspace(cells["flops"].min(), max(target, cells["flops"].max()), 33)
    for name, gains in lines_of.items():
        at_target, *along = gains.mixtures(np.log([target, *computes]), scales, chances)
        multiplier, low, high = np.exp([at_target.quantile(p) for p in (0.5, (1 - level) / 2, (1 + level) / 2)])
        better, worthwhile = at_target.above(0.0), at_target.above(math.log1p(worth))
        verdict: Outcome = "promote" if better >= SURE else "reject" if worthwhile <= 1 - SURE else "undecided"
        part = cells[cells["variant"] == name]
        table.append(
            {
                "variant": name,
                "runs": int(part["runs"].sum()),
                "sizes": len(part),
                "flops": float(part["flops"].max()),
                "multiplier": float(multiplier),
                "low": float(low),
                "high": float(high),
                "p_better": better,
                "p_worth": worthwhile,
                "loss": math.exp(law.log_loss(math.log(target * multiplier))),
                "verdict": verdict,
            }
        )
        reach = normal_quantile((1 + level) / 2) * median * np.sqrt(np.diag(gains.unit_noise))
        for flops, log_m, half in zip(part["flops"], gains.log_m, reach, strict=True):
            ends = np.exp([log_m, log_m - half, log_m + half])
            measured.append({"variant": name, "compute_flops": flops} | dict(zip(_ENDS, ends, strict=True)))
        for flops, there in zip(computes, along, strict=True):
            ends = np.exp([there.quantile(p) for p in (0.5, (1 - level) / 2, (1 + level) / 2)])
            band.append({"variant": name, "compute_flops": flops} | dict(zip(_ENDS, ends, strict=True)))
        if verdict == "undecided" and (best := _next(gains, law, at_target, median, target, worth)):
            following.append({"variant": name} | best)
    return VariantComparison(
        baseline=baseline,
        target_flops=target,
        worth=worth,
        level=level,
        noise=median,
        baseline_loss=math.exp(law.log_loss(math.log(target))),
        table=pd.DataFrame(table),
        measured=pd.DataFrame(measured),
        band=pd.DataFrame(band),
        next_runs=pd.DataFrame(following, columns=["variant", "compute_flops", "seeds", "cost", "p_decided"]),
    )


_ENDS = ("multiplier", "low", "high")


def _cells(rows: pd.DataFrame, noise: tuple[float, float]) -> tuple[pd.DataFrame, float, float]:
    """Mean log loss of each variant and compute (variant, flops, y, runs), the noise's scale and degrees of freedom."""
    require_columns(rows, ("variant", "loss"))
    if "compute_flops" in rows:
        flops = numbers(rows, "compute_flops")
    else:
        require_columns(rows, ("n_params", "n_tokens"))
        flops = compute_flops(numbers(rows, "n_params"), numbers(rows, "n_tokens"))
    sd, dof = noise
    if not (0 < sd < math.inf and dof > 0):
        raise ValueError(f"noise must be a positive standard deviation and positive degrees of freedom, got {noise!r}")
    runs = pd.DataFrame({"variant": rows["variant"].astype(str), "flops": flops, "loss": losses(rows)})
    if "seed" in rows:
        runs["seed"] = rows["seed"].to_numpy()
    runs = runs[runs["loss"].notna()]
    if "seed" in runs:
        try:
            known = seed_noise(runs, ("variant",), blocks=("flops",))
        except ScalingError:  # no variant has two seeds at one size: the noise stays what it was
            pass
        else:
            own, own_dof = known.prior
            sd, dof = math.sqrt((dof * sd**2 + own_dof * own**2) / (dof + own_dof)), dof + own_dof
    cells = (
        runs.assign(y=np.log(runs["loss"]))
        .groupby(["variant", "flops"], sort=False)["y"]
        .agg(["mean", "size"])
        .reset_index()
        .set_axis(["variant", "flops", "y", "runs"], axis=1)
    )
    return cells.sort_values("flops", ignore_index=True, kind="stable"), sd, dof


def _next(
    gains: Gains, law: Baseline, now: Mixture, noise: float, target: float, worth: float
) -> dict[str, Any] | None:
    """The cheapest measurement that is likely to decide, or the likeliest: its compute, seeds, cost and probability.

    None where all cost more than the target itself.

    Candidates are the baseline's sizes and 2, 4 … times its largest, below the target, with 1, 2 or 4 seeds of variant and
    baseline each. The posterior's mean after it is normal about today's, with the variance that it takes away (Raiffa &
    Schlaifer 1961).
    """
    from scipy.special import ndtr

    mean, variance = now.moments()
    typical, edge = np.array([noise]), normal_quantile(SURE)
    by_slope = gains.evidence(typical)[0]
    weights = np.exp(by_slope - by_slope.max())
    before = float(weights @ gains.predict(np.log([target]), typical)[1][0, :, 0])
    largest = float(law.x.max())
    further = [largest + math.log(2.0) * k for k in range(1, 12) if largest + math.log(2.0) * k <= math.log(target)]
    candidates: list[dict[str, Any]] = []
    for x in (*law.x, *further):
        for seeds in (1, 2, 4):
            # Both sides train: the variance of their difference in log loss, in units of log m.
            added = gains.with_runs(x, 2 / seeds / float(law.slope(np.array([x]))[0]) ** 2)
            after = float(weights @ added.predict(np.log([target]), typical)[1][0, :, 0]) / before * variance
            moves, left = math.sqrt(max(variance - after, 1e-18)), math.sqrt(after)
            promoted = ndtr((mean - edge * left) / moves)
            rejected = ndtr((math.log1p(worth) - edge * left - mean) / moves)
            found = {"compute_flops": math.exp(x), "seeds": seeds, "cost": 2 * seeds * math.exp(x)}
            found["p_decided"] = min(float(promoted + rejected), 1.0)
            if found["cost"] <= target:
                candidates.append(found)
    if not candidates:
        return None
    likely = [found for found in candidates if found["p_decided"] >= LIKELY]
    return min(likely, key=lambda found: found["cost"]) if likely else max(candidates, key=lambda f: f["p_decided"])
