"""TensorBoard: a folder of event files for each run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from muscale.tracking.tracked import Row, TrackedRun, Tracker, flat


class TensorBoardTracker(Tracker[tuple[Any, Path]]):
    """Writes scalars by tokens, configuration and summary as text, and a trial's values for the hyperparameters tab.

    Args:
        folder: Folder for `tensorboard --logdir`.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _begin(self, run: TrackedRun) -> tuple[Any, Path]:
        from tensorboardX import SummaryWriter

        folder = self._folder / run.kind / run.key
        fresh = not folder.exists()
        writer = SummaryWriter(logdir=str(folder))
        if fresh:
            shown = {"name": run.name, "group": run.group, **flat(run.config)}
            writer.add_text("config", "\n".join(f"    {name} = {value}" for name, value in shown.items()), 0)
        return writer, folder

    def _log(self, opened: tuple[Any, Path], rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.metrics.items():
                opened[0].add_scalar(name, value, row.at)
        opened[0].flush()

    def _summarize(self, opened: tuple[Any, Path], run: TrackedRun) -> None:
        from tensorboardX.summary import hparams

        writer, _ = opened
        summary = flat(run.summary)
        writer.add_text("summary", "\n".join(f"    {name} = {value}" for name, value in summary.items()), 0)
        if run.kind == "trial" and "val_loss" in summary:
            for part in hparams(flat(run.config), {"val_loss": summary["val_loss"]}):
                writer.file_writer.add_summary(part)
        writer.flush()

    def _attach(self, opened: tuple[Any, Path], run: TrackedRun, name: str, path: Path) -> None:
        shutil.copyfile(path, opened[1] / name)

    def _end(self, opened: tuple[Any, Path], how: Literal["finished", "failed"] | None) -> None:
        opened[0].close()
