"""The trackers that [tracking] names, and the parts of a study that they show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from muscale.errors import StudyFileError
from muscale.layout import CORPUS, FULL_RUNS, TRACKING
from muscale.progress import Update, silent
from muscale.search.sweep import Sweep
from muscale.settings.config import StudyConfig
from muscale.settings.tables import TrackingSettings
from muscale.store.ledger import Ledger
from muscale.tracking.mirror import Mirror, Source, Synced
from muscale.tracking.mlflow_tracker import MlflowTracker
from muscale.tracking.run_sources import FullRunSource, ladder_runs, trials, whole_study
from muscale.tracking.tensorboard_tracker import TensorBoardTracker
from muscale.tracking.tracked import TrackedRun, Tracker
from muscale.tracking.wandb_tracker import WandbTracker, mode_of
from proxy_models.data.corpus import Corpus
from proxy_models.data.token_files import MANIFEST


def make_mirror(settings: TrackingSettings, directory: Path) -> Mirror:
    """Make the mirror of a study's trackers, with files below its directory; raise StudyFileError if a package is missing."""
    folder = directory / TRACKING
    return Mirror(list(_trackers(settings, folder)), folder)


class Tracking:
    """Shows a study's work in its trackers; raises StudyFileError like `make_mirror`."""

    def __init__(self, config: StudyConfig, ledger: Ledger) -> None:
        self._config, self._ledger = config, ledger
        self._whole = partial(whole_study, config, ledger)
        self._mirror = make_mirror(config.tracking, ledger.directory)

    def during_sweep(self, sweep: Sweep) -> AbstractContextManager[None]:
        """Show the trials during the block, which searches, and the study at its end."""
        return self._mirror.following(self._trials(sweep), self._whole)

    def during_full_run(self, plan: str) -> AbstractContextManager[None]:
        """Show the full run of a plan, given by key, during the block, which trains it, and the study at its end."""
        return self._mirror.following(self._full_run(plan), self._whole)

    def finish(self) -> None:
        """Send the trackers everything that is new to them, as long as the end of a stage waits for it."""
        with self._mirror.following(lambda: (), self._everything):
            pass

    def sync(self, update: Update = silent) -> Synced:
        """Send the trackers everything that is new to them, and report what was sent; trains nothing."""
        return self._mirror.send(self._everything, update)

    def _everything(self) -> Iterator[TrackedRun]:
        corpus = self._ledger.directory / CORPUS
        if (corpus / MANIFEST).exists():  # otherwise nothing was searched yet
            yield from self._trials(Sweep.of(self._config, self._ledger, Corpus.open(corpus)))()
        yield from ladder_runs(self._config, self._ledger)
        for folder in sorted((self._ledger.directory / FULL_RUNS).glob("*")):
            yield from self._full_run(folder.name)()
        yield from self._whole()

    def _trials(self, sweep: Sweep) -> Source:
        return partial(trials, sweep) if self._config.tracking.trials else lambda: ()

    def _full_run(self, plan: str) -> FullRunSource:
        return FullRunSource(self._ledger, plan, self._config.to_dict(), self._config.tracking.points)


def _trackers(settings: TrackingSettings, folder: Path) -> Iterator[Tracker[Any]]:
    mode = mode_of(settings)
    if mode != "off":
        yield WandbTracker(settings, mode, folder)
    if settings.tensorboard:
        _require("tensorboardX", "tensorboard")
        yield TensorBoardTracker(folder / "tensorboard")
    if settings.mlflow:
        _require("mlflow", "mlflow")
        yield MlflowTracker(settings.project, folder)


def _require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise StudyFileError(f"tracking.{extra}: needs the package {package}: pip install 'muscale[{extra}]', got true")
