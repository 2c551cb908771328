"""What a run recorded so far, read on while it goes: its steps, and its evaluations, whoever made them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from muscale.full_runs.records.metrics_tail import MetricsTail
from muscale.layout import EVALUATIONS, METRICS


class RunRecords:
    """The records in a run's directory; each look reads only what is new."""

    def __init__(self, directory: Path) -> None:
        self.metrics = directory / METRICS
        self._own, self._beside = MetricsTail(self.metrics), MetricsTail(directory / EVALUATIONS)

    def steps(self) -> pd.DataFrame:
        """Columns tokens, train_loss, val_loss, seconds: a row for each step, and what the run itself evaluated."""
        return self._own.table()

    def evaluations(self) -> pd.DataFrame:
        """Columns tokens, val_loss, in the order of tokens: by the run itself and beside it; of both the run's own."""
        found = [table.dropna(subset=["val_loss"])[["tokens", "val_loss"]] for table in self._tables()]
        whole = pd.concat([table for table in found if len(table)] or found[:1])
        return whole.drop_duplicates("tokens").sort_values("tokens", kind="stable").reset_index(drop=True)

    def _tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        return self._own.table(), self._beside.table()
