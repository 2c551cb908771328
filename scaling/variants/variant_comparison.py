"""The result of comparing variants with a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pandas as pd

from scaling.drawing import Figure
from scaling.presentation import lines
from scaling.serialization import JsonResult, OrNan, TableLayout
from scaling.variants.posterior import BEYOND
from scaling.variants.variant_figures import draw_changes, draw_looks, draw_variants
from scaling.variants.verdicts import Outcome


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantComparison(JsonResult):
    """Compute multiplier of each variant at the target, and its verdict.

    Attributes:
        baseline: name of the variant that all others are compared with.
        target_flops: compute of the run that the verdicts are about, FLOPs.
        worth: least gain in compute, as a share, that a change must bring.
        level: probability of the intervals.
        error: probability that any promotion is wrong, over all variants and looks; the same holds for rejections.
        n_sizes: sizes of the baseline; with one size the prior gives its slope.
        noise: standard deviation of one run's log loss, pooled over variants; the posterior's median at the last look.
        noise_dof: degrees of freedom of the measured noise; 0 if no runs were repeated, so that the noise is assumed; NaN in results
            of earlier versions.
        seed_noise: standard deviation of log loss from seed to seed that all variants of one size share; 0 if it is not known.
        baseline_loss: loss of the baseline at the target, by a power law with a floor.
        baseline_diverged: diverged runs of the baseline.
        table: by variant, at the look that decided the variant or else the last look: runs, diverged, beyond (runs that are not
            compared, as no finished run of the baseline is near), sizes, flops (of the largest compared run), change (log ratio of
            that run's loss to the baseline's at the same compute), change_low, change_high, multiplier (median at the target), low,
            high, p_better = P(m > 1), p_worth = P(m > 1 + worth), look, verdict, reason (why a variant with finished runs has no
            multiplier, else empty); and loss at the target by the baseline's law of the last look.
        measured: by variant and compute_flops: multiplier, low, high of that size alone, and change, log ratio of the losses.
        band: by variant and compute_flops, up to the target: multiplier, low, high.
        looks: by look and variant that was still undecided: multiplier, low, high, p_better, p_worth, verdict.
        unit: unit of the losses; empty if it was not stated.
        notes: how the table was read, and which rows were left out.
        warnings: reasons why the rows may not be finished, separate runs.
        next_runs: by undecided variant, within the target's compute: the cheapest runs that would decide with a probability of .5;
            if there are none, the runs most likely to decide, from a probability of .05: compute_flops and seeds of the
            variant, cost (FLOPs, the baseline's seeds included), p_decided.
    """

    baseline: str
    target_flops: float
    worth: float
    level: float
    error: float
    n_looks: int
    n_sizes: int
    noise: float
    baseline_loss: float
    table: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    measured: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    band: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    looks: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    next_runs: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    noise_dof: OrNan = math.nan
    baseline_diverged: int = 0
    unit: str = ""
    seed_noise: float = 0.0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def undecided(self) -> list[str]:
        """Names of the variants without a verdict."""
        return [str(name) for name in self.table.loc[self.table["verdict"] == "undecided", "variant"]]

    def verdict(self, variant: str) -> Outcome:
        """Verdict of one variant; raises KeyError if no variant has this name."""
        outcome: Outcome = self.table.set_index("variant").loc[variant, "verdict"]
        return outcome

    def plot(self) -> Figure:
        """Multiplier of each variant against compute, with its band up to the target."""
        return draw_variants(self.band, self.measured, self.level)

    def plot_losses(self) -> Figure:
        """Loss of each variant in % of the baseline's at the same compute, by size."""
        return draw_changes(self.measured, self.baseline, self.unit)

    def plot_looks(self) -> Figure:
        """Probability that each variant is better at the target, look by look."""
        return draw_looks(self.looks)

    @property
    def about(self) -> str:
        """Lines that explain the columns and verdicts, and list the runs that would decide."""
        table = self.table
        looked = f" over {self.n_looks} looks" if self.n_looks > 1 else ""
        about = {
            "at": f"{self.target_flops:.3g} FLOPs, where {self.baseline} has a loss of {self.baseline_loss:.4f} {self.unit}".rstrip(),
            "loss there": f"against {self.baseline} at the same compute, {self.level:.0%} interval",
            "multiplier": f"compute that {self.baseline} would need for the variant's loss at the target, over the variant's own"
            + ("; the slope is assumed because there is only one size" if self.n_sizes == 1 else ""),
            "promote": f"multiplier above 1; wrong for any variant{looked} with a probability of {self.error:g} at most",
            "reject": f"multiplier below {1 + self.worth:g}, no gain worth a change; same error probability",
            "noise": f"{self.noise:.2%} of the loss from run to run"
            + (f" on the same seed; {self.seed_noise:.2%} from seed to seed, common to all" if self.seed_noise else "")
            + (
                ""
                if self.noise_dof != 0
                else "; assumed, since no runs were repeated: promotions are as sure as this is"
            ),
        }
        about |= {name: "; ".join(each) for name, each in (("notes", self.notes), ("warnings", self.warnings)) if each}
        for row in table[table["diverged"] > 0].to_dict("records"):
            about[f"diverged: {row['variant']}"] = f"{row['diverged']} of {row['runs']} runs; not promoted"
        if self.baseline_diverged:
            about[f"diverged: {self.baseline}"] = f"{self.baseline_diverged} runs, which are left out"
        beyond = table[table["beyond"] > 0] if "beyond" in table else table[:0]  # not in results of earlier versions
        for row in beyond.to_dict("records"):
            about[f"left out: {row['variant']}"] = (
                f"{row['beyond']} runs more than {BEYOND:g} times in compute from all finished ones of {self.baseline}"
            )
        for row in table[table["reason"] != ""].to_dict("records"):
            about[f"no verdict on {row['variant']}"] = row["reason"]
        for row in self.next_runs.to_dict("records"):
            about[f"next for {row['variant']}"] = (
                f"{row['seeds']} {'seed' if row['seeds'] == 1 else 'seeds'} at {row['compute_flops']:.2g} FLOPs, next to "
                f"{self.baseline}'s: decides with probability {row['p_decided']:.2f} for {row['cost']:.2g} FLOPs"
            )
        return lines(about)

    def __str__(self) -> str:
        """The table and the lines of `about`."""
        table = self.table
        shown = pd.DataFrame(
            {
                "variant": table["variant"],
                "runs": table["runs"],
                "up to FLOPs": [f"{flops:.2g}" for flops in table["flops"]],
                "loss there": _of_rows(table, ("change", "change_low", "change_high"), _percent),
                "multiplier": _of_rows(table, ("multiplier", "low", "high"), "{:.3f}".format),
                "P(better)": [f"{p:.3f}" for p in table["p_better"]],
                f"loss at target{f' ({self.unit})' if self.unit else ''}": [f"{loss:.4f}" for loss in table["loss"]],
                "verdict": table["verdict"],
            }
        ).replace({"nan": "–", "nan [nan, nan]": "–"})
        return f"{shown.to_string(index=False)}\n{self.about}"


def _of_rows(table: pd.DataFrame, names: tuple[str, str, str], form: Callable[[float], str]) -> list[str]:
    return [f"{form(middle)} [{form(low)}, {form(high)}]" for middle, low, high in table[list(names)].to_numpy()]


def _percent(log_ratio: float) -> str:
    return f"{np.expm1(log_ratio):+.2%}" if math.isfinite(log_ratio) else "nan"
