"""Incremental reading of a run's steps and evaluations, its own and the asynchronous ones."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from muscale.full_runs.records.metrics_tail import MetricsTail
from muscale.layout import EVALUATIONS, METRICS


class RunRecords:
    """The records in a run's directory; each call reads only new lines."""

    def __init__(self, directory: Path) -> None:
        self.metrics = directory / METRICS
        self._own, self._async = MetricsTail(self.metrics), MetricsTail(directory / EVALUATIONS)

    def steps(self) -> pd.DataFrame:
        """Columns tokens, train_loss, val_loss, seconds, mfu: a row for each step, with the run's own evaluations."""
        return self._own.table()

    def evaluations(self) -> pd.DataFrame:
        """Columns tokens, val_loss, by tokens; where both exist the run's own evaluation, not the asynchronous one."""
        found = [table.dropna(subset=["val_loss"])[["tokens", "val_loss"]] for table in self._tables()]
        whole = pd.concat([table for table in found if len(table)] or found[:1])
        return whole.drop_duplicates("tokens").sort_values("tokens", kind="stable").reset_index(drop=True)

    def _tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        return self._own.table(), self._async.table()
