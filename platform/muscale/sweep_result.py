"""What a sweep found: its trials as a table, the winner and how sure that is, and what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from muscale.config import StudyConfig
from muscale.errors import StageError
from muscale.search.record import Record
from muscale.trial import TrialPlan
from proxy_models.hyperparameters import Hyperparameters
from scaling import Leaders, compare_leaders


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        trials: A row each, best first: trial, status, configuration, the loss that it was ranked by at each rung reached, the
            loss and tokens of its longest annealed run (NaN and 0 without one), and what its stem cost: tokens, FLOPs
            (6·N·D), seconds. Losses in nats per token.
        best: Hyperparameters of the winner.
        winner: Its trial.
        leaders: How the leading trials compare over seeds that the search did not see; None without repetitions.
        copies: In a population, a row for each copy: trial, rung, donor and the values that it went on with.
        warnings: What a reader should know.
    """

    trials: pd.DataFrame
    best: Hyperparameters
    winner: int
    leaders: Leaders | None
    copies: pd.DataFrame
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        best, status = self.trials.set_index("trial").loc[self.winner], self.trials["status"]
        told = [
            f"sweep: {len(self.trials)} trials, {int((status == 'stopped').sum())} stopped early, "
            f"{int((status == 'diverged').sum())} diverged; best annealed loss {best['annealed_loss']:.4f} by trial "
            f"{self.winner}",
            *([str(self.leaders)] if self.leaders else []),
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(told)

    def _repr_html_(self) -> str:
        return str(self.trials.to_html(index=False))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "best": self.best.to_dict(),
            "winner": self.winner,
            "leaders": self.leaders.to_dict() if self.leaders else None,
            "warnings": list(self.warnings),
            "copies": self.copies.to_dict("records"),
            "trials": self.trials.to_dict("records"),
        }


def make_result(
    config: StudyConfig, plan: TrialPlan, record: Record, annealed: pd.DataFrame, repeated: pd.DataFrame
) -> SweepResult:
    """The result of what was recorded.

    Args:
        config: The study's.
        plan: The trial's.
        record: Suggestions, results, decisions.
        annealed: Runs under the search's own seed: trial, rung, n_tokens, loss.
        repeated: Runs of the leading trials under other seeds: trial, seed, loss.

    Raises:
        StageError: If no trial came to an annealed end.
    """
    table = _trials(config, plan, record, annealed.dropna())
    if table.empty or table["annealed_loss"].isna().all():
        raise StageError(
            f"sweep: none of the {len(table)} trials came to an annealed end; "
            "lower the upper bound of sweep.space.learning_rate or raise sweep.trials"
        )
    leaders = compare_leaders(repeated) if repeated["loss"].notna().any() else None
    winner = int(leaders.winner) if leaders else int(table.iloc[0]["trial"])
    rung = int(annealed.dropna().query("trial == @winner")["rung"].max())
    return SweepResult(
        trials=table,
        best=replace(plan.given(record.path_towards(winner, rung), rung), schedule=config.hyperparameters.schedule),
        winner=winner,
        leaders=leaders,
        copies=_copies(record),
        warnings=tuple(_warnings(config, plan)),
    )


def _trials(config: StudyConfig, plan: TrialPlan, record: Record, annealed: pd.DataFrame) -> pd.DataFrame:
    longest = annealed.sort_values("n_tokens").drop_duplicates("trial", keep="last").set_index("trial")
    rows = []
    for trial, values in record.configs.items():
        tokens, seconds = record.cost(trial)
        row: dict[str, Any] = {"trial": trial, "status": record.status(trial, plan.top), **values}
        for rung, at in enumerate(plan.rung_tokens):
            arrived = (trial, rung) in record.arrivals
            row[f"loss_at_{at}"] = _finite(record.loss(trial, rung)) if arrived else math.nan
        known = trial in longest.index
        row["annealed_loss"] = longest.loc[trial, "loss"] if known else math.nan
        row["n_tokens"] = longest.loc[trial, "n_tokens"] if known else 0
        row |= {"cost_tokens": tokens, "cost_flops": 6.0 * config.model.n_params * tokens, "cost_seconds": seconds}
        rows.append(row)
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    order = ["n_tokens", "annealed_loss"]
    return table.sort_values(order, ascending=[False, True], na_position="last").reset_index(drop=True)


def _copies(record: Record) -> pd.DataFrame:
    rows = [
        {"trial": trial, "rung": rung, "donor": donor, **record.config_at(trial, rung + 1)}
        for (trial, rung), donor in record.donors.items()
    ]
    return pd.DataFrame(rows, columns=None if rows else ["trial", "rung", "donor"])


def _warnings(config: StudyConfig, plan: TrialPlan) -> list[str]:
    searched, wanted = plan.defaults.schedule, config.hyperparameters.schedule
    if searched == wanted:
        return []
    return [
        f"searched under schedule {searched}, but the full run follows {wanted}: rankings under one don't carry over to the "
        "other"
    ]


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.nan
