"""Upper bounds of each stage's cost, from the study file alone: a dry run before any compute is spent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import sqlalchemy as sa

from muscale.errors import StudyDirectoryError
from muscale.proxies import comparison, ladder, transfer
from muscale.search.sweep import budget, trial_plan
from muscale.settings.config import StudyConfig
from muscale.store.ledger_tables import runs, segments
from muscale.store.lineage import Chain
from muscale.store.read_only import open_read_only
from proxy_models.training.numerics import Numerics

_NEEDS = {
    "check": None,
    "sweep": None,
    "sweep --narrow": "sweep",
    "transfer": "sweep",
    "ladder": "transfer",
    "fit": "ladder",
    "plan": "fit",
    "promote": "plan",
    "run": "promote",
    "compare": "transfer",
}
"""The stage or command before each."""
_COLUMNS = ["stage", "runs", "n_tokens", "compute_flops"]
_ONE_SIZE = " --one-size"


def cost_of(command: str, config: StudyConfig) -> pd.DataFrame:
    """Return `estimate` of the stages that a command on a new study runs; for `compare`, a row for each part of each variant."""
    if command.endswith(_ONE_SIZE):
        command, config = command.removesuffix(_ONE_SIZE), config.at_one_size()
    table, needed, before = estimate(config), {command}, _NEEDS[command]
    while before:
        needed.add(before)
        before = _NEEDS[before]
    stages = table[table["stage"].isin(needed)].reset_index(drop=True)
    return pd.concat([stages[:-1], _variants(config)], ignore_index=True) if command == "compare" else stages


def with_device_hours(table: pd.DataFrame, config: StudyConfig, source: Path) -> pd.DataFrame:
    """Return the table with `device_hours`, at the speed of the study's trained runs; unchanged if there are none.

    Args:
        table: Costs with a column `compute_flops`.
    """
    try:
        with open_read_only(source) as (_, read):
            flops, seconds = read(_trained_so_far)
    except StudyDirectoryError:  # not begun, or its ledger can't be read here; the command itself reports it
        return table
    if not (flops and seconds):
        return table
    resources = config.resources
    devices = resources.ranks_per_trial * (resources.gpus_per_worker or resources.cpus_per_worker)
    return table.assign(device_hours=table["compute_flops"] / flops * seconds / 3600 * devices)


def with_total(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with a last row of sums if it has several rows; a sum is missing if one of its values is."""
    if len(table) < 2:
        return table
    sums = {name: table[name].sum(skipna=False) for name in table.columns.drop("stage")}
    return pd.concat([table, pd.DataFrame([{"stage": "total", **sums}])], ignore_index=True).astype(table.dtypes)


def _trained_so_far(connection: sa.Connection) -> tuple[float | None, float | None]:
    """Return FLOPs and worker seconds of the last segments of all proxy runs."""
    flops = 6.0 * runs.c.n_params * (segments.c.tokens - segments.c.trained_from)
    query = sa.select(sa.func.sum(flops), sa.func.sum(segments.c.seconds)).where(runs.c.purpose != "full")
    row = connection.execute(query.join(segments, runs.c.key == segments.c.key)).one()
    return row[0], row[1]


def estimate(config: StudyConfig) -> pd.DataFrame:
    """Return a row for each stage that trains: runs, tokens and compute in FLOPs (6·N·D), with shared stems counted once.

    The sweep's bound assumes no early stopping and includes every branch and repetition. Another round in a narrower space has
    its own trials and finalists within the same limits.
    """
    h, model, numerics = config.hyperparameters, config.model, dry_numerics(config)
    first = budget(config, trial_plan(config, numerics))
    both = replace(first, trials=2 * first.trials, n_finalists=2 * first.n_finalists)
    rows: list[tuple[str, int, Any, float]] = [
        (stage, first.trials, n_tokens, 6.0 * model.n_params * n_tokens)
        for stage, n_tokens in (("sweep", first.most_tokens), ("sweep --narrow", both.most_tokens - first.most_tokens))
    ]
    grid = [job.chain for job in transfer.jobs(transfer.members(config, numerics, h))]
    rows.append(("transfer", len(grid), *_trained(grid)))
    steps = [job.chain for job in ladder.ladder_jobs(config, numerics, h, horizon=None)]
    rows.append(("ladder", len(steps), *_trained(steps)))
    compared = [job.chain for _, _, job in comparison.most_jobs(config, numerics, h)] if config.variants else []
    rows.append(("compare", len(compared), *_trained(compared)))
    rows.append(("promote", 1, pd.NA, config.plan.budget.compute_flops))  # the plan decides how it is spent
    return pd.DataFrame(rows, columns=_COLUMNS).astype({"n_tokens": "Int64"})


def _variants(config: StudyConfig) -> pd.DataFrame:
    """Return each variant's rate grids at their widest, and each of its sizes with all seeds."""
    parts: dict[str, list[Chain]] = {}
    for variant, part, job in comparison.most_jobs(config, dry_numerics(config), config.hyperparameters):
        parts.setdefault(f"compare: {variant}, {part}", []).append(job.chain)
    rows = [(name, len(chains), *_trained(chains)) for name, chains in parts.items()]
    return pd.DataFrame(rows, columns=_COLUMNS).astype({"n_tokens": "Int64"})


def dry_numerics(config: StudyConfig) -> Numerics:
    """Return the study's numerics at its base shape, for a corpus that need not exist yet."""
    return Numerics(
        model=config.model,
        base=config.model,
        corpus_key="",
        seed=0,
        evaluation_tokens=config.corpus.evaluation_tokens,
        stages_by_fraction=config.corpus.stages_by_fraction,
    )


def _trained(chains: list[Chain]) -> tuple[int, float]:
    """Return the tokens and FLOPs trained; parts that runs share count once."""
    lines: dict[str, tuple[int, int]] = {}  # tokens of each line's longest segment, and N
    for chain in chains:
        part: Chain | None = chain
        while part:
            tokens = max(part.last.end - part.last.start, lines.get(part.line, (0, 0))[0])
            lines[part.line] = tokens, part.numerics.model.n_params
            part = part.parent
    return sum(tokens for tokens, _ in lines.values()), sum(6.0 * n * tokens for tokens, n in lines.values())
