"""Evaluations in the ledger: what each measure found about the weights at one point of a training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import Chain
from muscale.store.statements import result_keys
from proxy_models.evaluation.measure import Measure, Measured
from proxy_models.hashing import content_key

POINT = ("weights", "run", "n_params", "tokens", "anneals", "seed")
"""Columns of `score_table` about the weights: key of their chain, its stem, N, tokens so far, whether they end a run, and seed."""
SCORE = ("measure", "name", "metric", "value", "standard_error", "n")
"""Columns of `score_table` about the score, as in `proxy_models.evaluation.measure.Score`."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A point of a training at which measures are taken."""

    chain: Chain
    measures: tuple[Measure, ...]


def missing(ledger: Ledger, points: Iterable[Evaluated]) -> list[Evaluated]:
    """The points with the measures that the ledger lacks, without those that it has."""
    known = ledger.read(result_keys, ResultKind.EVALUATION.value)
    left = [
        Evaluated(
            chain=point.chain,
            measures=tuple(m for m in point.measures if evaluation_key(point.chain.key, m) not in known),
        )
        for point in points
    ]
    return [point for point in left if point.measures]


def record(ledger: Ledger, chain: Chain, measure: Measure, found: Measured, *, seconds: float) -> None:
    """Record what a measure found about the weights at the end of a chain."""
    numerics = chain.numerics
    payload = {
        "weights": chain.key,
        "run": chain.stem,
        "n_params": numerics.model.n_params,
        "tokens": chain.last.end,
        "anneals": chain.anneals,
        "seed": numerics.seed,
        "measure": measure.name,
        "measure_key": measure.key,
        "seconds": seconds,
        **asdict(found),
    }
    ledger.record_result(ResultKind.EVALUATION, evaluation_key(chain.key, measure), payload)


def evaluation_key(weights: str, measure: Measure) -> str:
    """Key of a measure's result for the weights at the end of the chain with this key."""
    return content_key([weights, measure.name, measure.key])


def score_table(ledger: Ledger, keys: Collection[str] | None = None) -> pd.DataFrame:
    """The scores of the ledger, one row each, the oldest first: `POINT`, `SCORE`, and measure_key, which tells settings apart.

    Args:
        keys: Only results with these keys (`evaluation_key`); None: all.
    """
    rows = []
    for row in ledger.results(ResultKind.EVALUATION):
        if keys is not None and row["key"] not in keys:
            continue
        payload: Mapping[str, Any] = row["payload"]
        about = {name: payload[name] for name in POINT}
        rows += [about | {"measure_key": payload["measure_key"]} | score for score in payload["scores"]]
    return pd.DataFrame(rows, columns=[*POINT, *SCORE, "measure_key"])
