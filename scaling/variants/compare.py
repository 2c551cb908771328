"""Effective compute multiplier of a variant at a target: does its win survive scale?

    log L_baseline(C) = log(E + A·C^−gamma)        log m(C) = a + g·log(C / C0) + drift(C)

A variant with compute C has the loss that the baseline has with compute m·C (the efficiency gain of Hernandez & Brown, 2005.04305).
Measured log m, one for each size, lie about a line in log C. Its slope g has a heavy-tailed prior about 0: most gains stay, some
fade, a few reverse. A random walk in proportion to the slope's scale lets the line bend beyond the runs; the runs decide between
steady gains, which stay straight, and changing ones. Noise is pooled over the variants, from repeated seeds and from the residuals.
Offset, slope, walk and noise are integrated over; the baseline's law is taken as fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from scaling.checks import losses, names, numbers, plain, renamed, require_columns, require_distinct
from scaling.errors import ScalingError
from scaling.fits.as_found import NO_COLUMNS, compute_unit
from scaling.fits.checkpoints import last_of_runs
from scaling.fits.recipes import is_recipe
from scaling.fits.runs import Table, naming, read_runs
from scaling.forms.law import compute_flops
from scaling.variants.look import ENDS, Look
from scaling.variants.posterior import NOISE
from scaling.variants.variant_comparison import VariantComparison
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
            all diverged is rejected.
        baseline: the variant that others are compared with. If it has one size only, the prior gives its slope.
        target_flops: compute of the full run, FLOPs; the largest run's if not given.
        worth: least gain in compute, as a share, that is worth the change.
        level: probability of the intervals.
        noise: prior standard deviation of log loss between seeds, and the degrees of freedom that it counts for.
        error: probability that any promotion is wrong, over all variants and looks; the same holds for rejections.
        n_looks: number of planned looks: the first sees the baseline's two smallest sizes, each later one a further size. A variant
            keeps the verdict of the look that first decided it. None: one look, at all runs.
        unit: unit of the losses, to be shown.
        columns: names of the table's columns, by ours; the last row of each `run` counts.

    Raises:
        ValueError: a column is missing, a value breaks its rule, or a finished run is listed twice.
        ScalingError: the baseline has no finished run, or there is no variant.
    """
    table = read_runs(runs, columns)
    with naming(runs):
        rows = _read(table, baseline)
        _require(level=level, worth=worth, error=error, noise=noise)
        _refuse_rising(rows[rows["variant"] == baseline], baseline, noise[0])
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
        unit=unit,
        noise=now.noise,
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


_LEAST_SPAN = 1.5
"""Least ratio of the baseline's largest to its smallest compute at which a rise of its loss is no effect of D/N (assumed)."""
_MOST_RISE = 4.0
"""Largest rise of the baseline's log loss over its runs, in standard deviations of the noise, that counts as noise (assumed)."""
_OTHER_LENGTH = 1.5
"""Least ratio of neighbouring computes under one label of `size` at which they belong to runs of other lengths (assumed)."""
_OTHER_NAMES = {"variant": ("arm", "recipe", "method", "optimizer")}
"""Names of our columns in other tables, without capitals and punctuation."""


def _read(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the columns variant, size ("" without labels), flops, loss, and seed if there are any."""
    for column, others in _OTHER_NAMES.items():
        named = [name for name in rows if plain(str(name)) in others]
        if column not in rows and len(named) == 1:
            rows = renamed(rows, named[0], column)
    units = {name: unit for name in rows if (unit := compute_unit(str(name))) is not None}
    if "compute_flops" not in rows and len(units) == 1:
        ((name, unit),) = units.items()
        rows = renamed(rows, name, "compute_flops")
        rows["compute_flops"] = unit * numbers(rows, "compute_flops")
    require_columns(rows, ("variant", "loss"))
    rows = last_of_runs(rows, "variant")
    require_distinct(rows[rows["loss"].notna()])
    if "compute_flops" in rows:
        flops = numbers(rows, "compute_flops")
    else:
        require_columns(rows, ("n_params", "n_tokens"))
        flops = compute_flops(numbers(rows, "n_params"), numbers(rows, "n_tokens"))
    found = pd.DataFrame({"variant": names(rows, "variant"), "size": "", "flops": flops, "loss": losses(rows)})
    found["size"] = _labels(rows, found) if "size" in rows else _shapes(rows, found, baseline)
    found = found.assign(seed=rows["seed"].to_numpy()) if "seed" in rows else found
    _refuse_split(rows, found)
    return found


def _refuse_split(rows: pd.DataFrame, found: pd.DataFrame) -> None:
    """Raise ValueError if a column, such as an evaluation set, differs between runs of one variant, size and seed."""
    finished = found["loss"].notna().to_numpy()
    rows, found = rows[finished].reset_index(drop=True), found[finished].reset_index(drop=True)
    same = ["variant", "size", "flops"]
    cell = found.groupby(same).ngroup()
    repeats = found.groupby([*same, "seed"], dropna=False).ngroup() if "seed" in found else cell
    for column in rows.columns.difference([*_MEASURED], sort=False):
        values = rows[column].astype(str)
        tuned = is_recipe(column)  # runs with different rates are no repeats
        within = values.groupby(cell if tuned else repeats).transform("nunique") > 1
        recurs = cell.groupby(values).nunique().median() > 1  # a run identifier or another metric does not
        if within.any() and (tuned or recurs):
            name = found.loc[within, "variant"].iloc[0]
            raise ValueError(
                f"column {column!r}: runs of one variant and size must be repeats; got {name!r} at one size with "
                f"several of {sorted(set(values[within]))[:5]}; keep one value, or name the column seed if they are repeats"
            )


_MEASURED = ("variant", "size", "compute_flops", "n_params", "n_tokens", "loss", "seed")


def _refuse_rising(own: pd.DataFrame, baseline: str, noise: float) -> None:
    """Raise ValueError if the baseline's metric rises with compute by more than the noise: such a metric is no loss."""
    own = own[own["loss"].notna()]
    x, y = np.log(own["flops"].to_numpy()), np.log(own["loss"].to_numpy())
    if len(own) < 2 or np.ptp(x) < math.log(_LEAST_SPAN):
        return
    rise = float(np.polyfit(x, y, 1)[0] * np.ptp(x))
    if rise > _MOST_RISE * noise:
        raise ValueError(
            f"loss must fall with compute; that of {baseline!r} rises by {math.expm1(rise):.1%} from {math.exp(x.min()):.2g} to "
            f"{math.exp(x.max()):.2g} FLOPs; if higher is better, pass the distance from the best value, such as 1 - accuracy"
        )


def _labels(rows: pd.DataFrame, found: pd.DataFrame) -> pd.Series[str]:
    """Return the label of each row; where a label has several lengths, with the number of the length."""
    label = pd.Series(rows["size"].astype(str).to_numpy(), index=found.index)
    ordered = np.log(found["flops"]).groupby(label).apply(pd.Series.sort_values).droplevel(0)
    steps = (ordered.groupby(label[ordered.index]).diff() > math.log(_OTHER_LENGTH)).groupby(label[ordered.index])
    lengths = steps.cumsum().reindex(found.index)
    several = lengths.groupby(label).transform("max") > 0
    return label.where(~several, label + " at length " + lengths.astype(str))


def _shapes(rows: pd.DataFrame, found: pd.DataFrame, baseline: str) -> pd.Series[str]:
    """Return N and D as a label of each row at a size of the baseline, "" for other rows.

    Runs of equal 6ND but unequal N and D have different losses, so they must not be averaged or paired. A row without one of the two
    has no label; a table without one of them has the other as labels if the baseline has a single compute at each.
    """
    named = [column for column in ("n_params", "n_tokens") if column in rows]
    computes, is_baseline = found["flops"].map("{:.3g}".format), found["variant"] == baseline
    if not named:
        return pd.Series("", found.index)
    counts = pd.DataFrame(
        {column: pd.to_numeric(rows[column], errors="coerce").to_numpy() for column in named}, found.index
    )
    shape = counts.map("{:g}".format).agg(" ".join, axis=1).where(np.isfinite(counts).all(axis=1), "")
    if len(named) == 1 and computes[is_baseline].groupby(shape[is_baseline]).nunique().max() > 1:
        return pd.Series("", found.index)
    own = shape[is_baseline & (shape != "")]
    shared = own.groupby(computes).nunique().max() > 1
    strays = found.loc[~shape.isin(own), "variant"]
    if shared and len(strays):
        raise ValueError(
            f"{baseline!r} has several n_params and n_tokens at one compute, so each variant must have runs at the "
            f"baseline's n_params and n_tokens; got others for {strays.iloc[0]!r}; add a column size that pairs the runs"
        )
    return shape.where(shape.isin(own), "")


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
