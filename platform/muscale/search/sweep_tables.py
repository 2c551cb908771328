"""Tables of a sweep's record: its trials, their results at rungs, their annealed runs, and the noise of seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from muscale.search.prior_runs import differs_in
from muscale.search.record import Record
from muscale.search.record_view import RecordView
from muscale.search.trial import TrialPlan
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import ScalingError, pareto_front, seed_noise
from search_spaces import Config, Space

COST = "cost_flops"


def rungs_table(plan: TrialPlan, record: Record) -> pd.DataFrame:
    """A row for each result at a rung, in order of arrival.

    Columns: trial, rung, n_tokens (of the rung), loss (that trials are ranked by, nats per token; NaN: diverged), advanced,
    parent (the trial whose state it went on from: itself unless it copied another, −1 at the first rung), the configuration
    that it was trained with, spent_flops and spent_seconds (of all stems up to this result).
    """
    tokens, seconds, rows = 0, 0.0, []
    for (trial, rung), result in record.results.items():
        tokens, seconds = tokens + result.tokens, seconds + result.seconds
        rows.append(
            {
                "trial": trial,
                "rung": rung,
                "n_tokens": plan.rung_tokens[rung],
                "loss": math.nan if result.loss is None else result.loss,
                "advanced": (trial, rung) in record.advanced or record.last_rung(trial) > rung,
                "parent": record.donors.get((trial, rung - 1), trial) if rung else -1,
                **record.config_at(trial, rung),
                "spent_flops": _flops(plan, tokens),
                "spent_seconds": seconds,
            }
        )
    return pd.DataFrame(rows)


def annealed_table(plan: TrialPlan, record: Record, annealed: pd.DataFrame) -> pd.DataFrame:
    """A row for each annealed run of the search's own seed: trial, rung, n_tokens, loss (NaN: diverged), the configuration, cost.

    `cost_flops` is 6·N·D; `cost_seconds` that of its stem, with the cooldown at the same speed.

    Args:
        annealed: trial, rung, n_tokens, loss.
    """
    rows = []
    for run in annealed.to_dict("records"):
        trial, rung = run["trial"], run["rung"]
        stem = sum(record.results[trial, at].seconds for at in range(rung + 1))
        rows.append(
            {
                **run,
                **record.config_at(trial, rung),
                COST: _flops(plan, run["n_tokens"]),
                "cost_seconds": stem * run["n_tokens"] / plan.rung_tokens[rung],
            }
        )
    return pd.DataFrame(rows, columns=None if rows else [*annealed.columns, COST, "cost_seconds"])


def trials_table(plan: TrialPlan, record: Record, annealed: pd.DataFrame, repeated: pd.DataFrame) -> pd.DataFrame:
    """A row for each trial, best first; the columns are those of `SweepResult.trials`.

    Args:
        repeated: Runs of the finalists under other seeds: trial, seed, loss.
    """
    finished = annealed.dropna(subset="loss")
    longest = finished.sort_values("n_tokens").drop_duplicates("trial", keep="last").set_index("trial")
    on_front = set(pareto_front(finished, COST)["trial"])
    seeds = repeated["trial"].value_counts()
    expected = expected_losses(plan, record)
    rows = []
    for trial, values in record.configs.items():
        tokens, seconds = record.cost(trial)
        row: dict[str, Any] = {"trial": trial, "round": record.round_of(trial)}
        row |= {"status": record.status(trial, plan.top), **values}
        for rung, at in enumerate(plan.rung_tokens):
            loss = record.loss(trial, rung) if (trial, rung) in record.results else math.nan
            row[f"loss_at_{at}"] = loss if math.isfinite(loss) else math.nan
        known = trial in longest.index
        row["expected_loss"] = expected.get(trial, math.nan)
        row["annealed_loss"] = longest.loc[trial, "loss"] if known else math.nan
        row["n_tokens"] = int(longest.loc[trial, "n_tokens"]) if known else 0
        row |= {"seeds": int(known) + int(seeds.get(trial, 0)), "on_front": trial in on_front}
        row |= {"cost_tokens": tokens, COST: _flops(plan, tokens), "cost_seconds": seconds}
        rows.append(row)
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    order = ["n_tokens", "annealed_loss"]
    return table.sort_values(order, ascending=[False, True], na_position="last").reset_index(drop=True)


def copies_table(record: Record) -> pd.DataFrame:
    """Copies in a population, a row each: trial, rung, donor and the values that it continued with."""
    rows = [
        {"trial": trial, "rung": rung, "donor": donor, **record.config_at(trial, rung + 1)}
        for (trial, rung), donor in record.donors.items()
    ]
    return pd.DataFrame(rows, columns=None if rows else ["trial", "rung", "donor"])


def expected_losses(plan: TrialPlan, record: Record) -> dict[int, float]:
    """The loss of each trial at the last rung, of a stopped one corrected to it (`RecordView.observations`); NaN: diverged."""
    arrived = [trial for trial in record.configs if record.last_rung(trial) >= 0]
    losses = [math.nan if seen.loss is None else seen.loss for seen in RecordView(record, plan.top).observations]
    return dict(zip(arrived, losses, strict=True))


def known_noise(runs: pd.DataFrame, plan: TrialPlan, space: Space) -> tuple[float, float] | None:
    """Noise of seeds at the base shape, from runs of other stages; None where no seeds were repeated.

    A standard deviation of log loss and its degrees of freedom, as `scaling.compare_finalists` takes it.

    Args:
        plan: The trial's; runs with other fixed settings don't count.
    """
    model = json.loads(json.dumps(plan.numerics.to_dict()["model"]))
    rows = []
    for row in runs.to_dict("records"):
        others = row["purpose"] not in ("sweep", "full") and row["numerics"]["model"] == model
        if others and not differs_in(row, plan.defaults, space, plan.numerics):
            run = {"setting": json.dumps([row["hyperparameters"], row["segment"]["recipe"]], sort_keys=True)}
            data = json.dumps({**row["numerics"], "seed": None}, sort_keys=True)
            rows.append({**run, "data": data, **{name: row[name] for name in ("n_tokens", "seed", "loss")}})
    if not rows:
        return None
    table = pd.DataFrame(rows).drop_duplicates(["setting", "data", "n_tokens", "seed"])
    try:
        return seed_noise(table, ("setting",), blocks=("data", "n_tokens")).prior
    except ScalingError:
        return None  # no setting with two seeds


def config_of(row: Mapping[str, Any], space: Space) -> Config:
    """The searched values of a table's row; one that a condition left out is missing there."""
    values = {name: row[name] for name in space.searched if name in row}
    return {name: value for name, value in values.items() if not (isinstance(value, float) and math.isnan(value))}


def format_values(row: Mapping[str, Any], space: Space, given: Hyperparameters) -> str:
    """The searched values of a trial as a person reads them, with the stages that a population found."""
    values = {name: getattr(given, name) for name in config_of(row, space)}
    texts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()]
    return "; ".join([", ".join(texts), *map(str, given.stages)])


def format_narrowing(number: int, narrowing: Mapping[str, Any]) -> str:
    """Description of a narrowing: for each hyperparameter a line with its range and the reason."""
    table = narrowing["table"]
    smaller = any(row["before"] != row["after"] for row in table)
    where = "a narrower space" if smaller else "the same space, because nothing could be cut"
    width = max(len(row["hyperparameter"]) for row in table)
    lines = [f"round {number}, from trial {narrowing['first_trial']} on, in {where}"]
    for row in table:
        after = f" {row['after']}" if row["after"] else ""
        lines.append(f"  {row['hyperparameter']:<{width}}  {row['action']}:{after}; {row['reason']}")
    return "\n".join(lines)


def _flops(plan: TrialPlan, tokens: float) -> float:
    return 6.0 * plan.numerics.model.n_params * tokens
