"""Effective compute multiplier of a variant at a target: does its win survive scale?

    log L_baseline(C) = log(E + A·C^−gamma)        log m(C) = a + g·log(C / C0) + drift(C)

A variant with compute C has the loss that the baseline has with compute m·C (the efficiency gain of Hernandez & Brown, 2005.04305).
Measured log m, one for each size, lie about a line in log C. Its slope g has a heavy-tailed prior about 0: most gains stay, some
fade, a few reverse. A random walk in proportion to the slope's scale lets the line bend beyond the runs; the runs decide between
steady gains, which stay straight, and changing ones. Noise is pooled over the variants, from repeated seeds and from the residuals.
Offset, slope, walk and noise are integrated over. The errors of the baseline's law, to first order, add to the measured log m: they
have no effect at log m = 0. With one size of the baseline the law is taken as fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from scaling.errors import ScalingError
from scaling.fits.as_found import NO_COLUMNS
from scaling.fits.runs import Table, naming, read_runs
from scaling.variants.look import ENDS, Look
from scaling.variants.posterior import NOISE
from scaling.variants.variant_comparison import VariantComparison
from scaling.variants.variant_runs import refuse_rising, variant_runs
from scaling.variants.verdicts import ERROR, WORTH, Outcome, error_by_look

_OF_LOOK = ("look", "variant", *ENDS, "p_better", "p_worth", "verdict")


def compare_variants(
    runs: Table,
    baseline: str,
    *,
    target_flops: float | None = None,
    worth: float = WORTH,
    level: float = 0.9,
    noise: tuple[float, float] = NOISE,
    error: float = ERROR,
    n_looks: int | None = None,
    unit: str = "",
    columns: Mapping[str, str] = NO_COLUMNS,
) -> VariantComparison:
    """Compare each variant with the baseline, at the compute of the full run.

    Args:
        runs: a DataFrame, a list of dicts, or a CSV, TSV, Parquet or JSON Lines file, a row per run:
            `variant`, `loss` (nats per token, or any unit that all rows share, on one held-out set; NaN: diverged), and
            `compute_flops` (FLOPs), or `n_params` and `n_tokens`, whose 6ND is used instead; with `seed`, runs of equal size and
            seed are paired. Runs are of one size if they have the same label in `size`, or the same `n_params` and `n_tokens`,
            or, without these columns, the same compute. A variant with a diverged run is not promoted; a variant whose runs
            all diverged is rejected. The columns `left_out`, `annealed` and `state` have their meaning in `scaling.fit`. Rows before
            the last of a run are left out if the table shows runs (`scaling.fits.checkpoints`). Losses per token are converted to bits
            per byte if a column `bytes_per_token` differs.
        baseline: the variant that others are compared with. If it has one size only, the prior gives its slope.
        target_flops: compute of the full run, FLOPs; the largest run's if not given.
        worth: least gain in compute, as a share, that is worth the change.
        level: probability of the intervals.
        noise: prior standard deviation of log loss between seeds, and the degrees of freedom that it counts for.
        error: probability that any promotion is wrong, over all variants and looks; the same holds for rejections.
        n_looks: number of planned looks: the first sees the baseline's two smallest sizes, each later one a further size. A variant
            keeps the verdict of the look that first decided it. None: one look, at all runs.
        unit: unit of the losses, e.g. "nats per token"; by default the unit that the name of the loss column states.
        columns: names of the table's columns, by ours; the last row of each `run` counts.

    Raises:
        ValueError: a column is missing, a value breaks its rule, a finished run is listed twice, or losses are per token of several
            tokenizers.
        ScalingError: the baseline has no finished run, or there is no variant.
    """
    table = read_runs(runs, columns)
    with naming(runs):
        found_runs = variant_runs(table, baseline, unit)
        rows = found_runs.rows
        _require(level=level, worth=worth, error=error, noise=noise)
        refuse_rising(rows[rows["variant"] == baseline], baseline, noise[0])
    target = float(rows["flops"].max() if target_flops is None else target_flops)
    if not 0 < target < math.inf:
        raise ValueError(f"target_flops must be a positive number, got {target_flops!r}")
    others = [name for name in rows["variant"].unique() if name != baseline]
    if not others:
        raise ScalingError(f"need a variant other than {baseline!r}, got none")
    seen, planned = _looks(rows, baseline, n_looks), n_looks or 1
    last: dict[str, tuple[Look, dict[str, Any]]] = {}
    looks: list[dict[str, Any]] = []
    spent: dict[Outcome, float] = {"promote": 0.0, "reject": 0.0}  # summed doubts about the verdicts so far
    undecided = others
    for number, visible in enumerate(seen, start=1):
        part = rows[visible & rows["variant"].isin([baseline, *undecided])]
        now = Look.at(part, baseline, undecided, target=target, level=level, noise=noise)
        so_far = error_by_look(number, planned, error)
        found = now.decide(undecided, worth, promote=so_far - spent["promote"], reject=so_far - spent["reject"])
        for name in undecided:
            row = now.row(name, worth) | {"look": number, "verdict": found[name]}
            last[name] = now, row
            looks.append({column: row[column] for column in _OF_LOOK})
            if found[name] != "undecided" and name in now.gains:
                spent[found[name]] += 1 - row["p_better"] if found[name] == "promote" else row["p_worth"]
        undecided = [name for name in undecided if found[name] == "undecided"]
        if not undecided:
            break
    judged = pd.DataFrame([row for _, row in last.values()])
    equal = [math.nan if math.isnan(m) else now.law.log_loss(math.log(target * m)) for m in judged["multiplier"]]
    judged["loss"] = np.exp(equal)
    return VariantComparison(
        baseline=baseline,
        target_flops=target,
        worth=worth,
        level=level,
        error=error,
        n_looks=planned,
        n_sizes=len(now.law.x),
        unit=found_runs.unit,
        notes=found_runs.notes,
        warnings=found_runs.warnings,
        noise=now.noise,
        seed_noise=now.seed_noise,
        noise_dof=now.noise_dof,
        baseline_diverged=int(rows.loc[rows["variant"] == baseline, "loss"].isna().sum()),
        baseline_loss=math.exp(now.law.log_loss(math.log(target))),
        table=judged,
        measured=_frame(
            [row for name in others for row in last[name][0].measured(name)], ("compute_flops", *ENDS, "change")
        ),
        band=_frame([row for name in others for row in last[name][0].band(name)], ("compute_flops", *ENDS)),
        looks=pd.DataFrame(looks),
        next_runs=_frame(
            [row for name in undecided for row in now.advise(name, worth, error)],
            ("compute_flops", "seeds", "cost", "p_decided"),
        ),
    )


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["variant", *columns])


def _require(*, level: float, worth: float, error: float, noise: tuple[float, float]) -> None:
    for name, share in (("level", level), ("error", error)):
        if not 0 < share < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {share!r}")
    if not 0 <= worth < math.inf:
        raise ValueError(f"worth must be finite and at least 0, a share of the compute, got {worth!r}")
    if not (0 < noise[0] < math.inf and noise[1] > 0):
        raise ValueError(f"noise must be a positive standard deviation and positive degrees of freedom, got {noise!r}")


def _looks(rows: pd.DataFrame, baseline: str, n_looks: int | None) -> list[pd.Series[bool]]:
    """Return the rows that each look sees, as masks."""
    own = rows[(rows["variant"] == baseline) & rows["loss"].notna()]
    if own.empty:
        there = ", ".join(map(repr, rows["variant"].unique()))
        raise ScalingError(
            f"the baseline {baseline!r} needs a finished run, got none; name one of {there} as the baseline"
        )
    if n_looks is None:
        return [rows["flops"].notna()]
    labelled = bool((rows["size"] != "").all())
    name = "size" if labelled else "flops"
    sizes = own.groupby(name)["flops"].mean().sort_values().index
    if max(1, len(sizes) - 1) > n_looks:
        raise ValueError(
            f"n_looks must be at least {len(sizes) - 1} for {len(sizes)} sizes of {baseline!r}, got {n_looks}"
        )
    ends = range(min(2, len(sizes)), len(sizes) + 1)
    return [rows["size"].isin(sizes[:n]) if labelled else rows["flops"] <= sizes[n - 1] for n in ends]
