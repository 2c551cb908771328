"""Readers of tables: ladders in three formats, losses of a run that goes on elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from tests.fuzz.planned_study import planned_study
from tests.fuzz.target import Target


class Ladder(Target):
    """A table of runs; `suffix` says in which form."""

    refusing: ClassVar[tuple[type[Exception], ...]]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.importers.runs_fit import fit_runs

        return str(fit_runs(path, n_params_convention="total", compute_flops=1e21))

    @staticmethod
    def table() -> pd.DataFrame:
        n_params = np.repeat([1e7, 3e7, 1e8, 3e8], 3)
        n_tokens = np.tile([2e8, 6e8, 2e9], 4)
        loss = 1.7 + 400 / n_params**0.34 + 410 / n_tokens**0.28
        plain = pd.DataFrame({"n_params": n_params.astype(int), "n_tokens": n_tokens.astype(int), "loss": loss})
        return plain.assign(stem=[f"r{k // 3}" for k in range(12)], annealed=True, left_out="", regret=0.0)


class CsvLadder(Ladder):
    suffix = ".csv"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [self.table().to_csv(index=False).encode()]


class JsonLadder(Ladder):
    suffix = ".jsonl"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [self.table().to_json(orient="records", lines=True).encode()]


class ParquetLadder(Ladder):
    suffix = ".parquet"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        written = io.BytesIO()
        self.table().to_parquet(written, index=False, compression=None)
        self.seeds = [written.getvalue()]


class ExternalLosses(Target):
    suffix = ".csv"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)

        self.study, _, self.ledger, self.plan = planned_study(folder)
        tokens = [self.plan.n_tokens * k // 20 for k in range(1, 12)]
        rows = [f"{at},{3 - k / 20},{3.1 - k / 20}" for k, at in enumerate(tokens)]
        self.seeds = ["\n".join(["tokens,val_loss,train_loss", *rows, ""]).encode()]
        self.seeds.append(b"step,train_loss\n" + b"".join(b"%d,%f\n" % (k, 3 - k / 20) for k in range(20)))

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.monitoring.external_run import ExternalRun
        from muscale.monitoring.losses import LossFile

        for growing in (True, False):
            source = LossFile(path=path, growing=growing)
            records = ExternalRun(self.ledger, source).records(source.read())
        return records
