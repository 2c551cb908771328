"""The trackers that [tracking] names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from muscale.errors import StudyFileError
from muscale.layout import TRACKING
from muscale.settings.tables import TrackingSettings
from muscale.tracking.mirror import Mirror
from muscale.tracking.mlflow_tracker import MlflowTracker
from muscale.tracking.tensorboard_tracker import TensorBoardTracker
from muscale.tracking.tracked import Tracker
from muscale.tracking.wandb_tracker import WandbTracker, mode_of


def make_mirror(settings: TrackingSettings, directory: Path) -> Mirror:
    """What brings a study's trackers up to date; everything they keep on this machine lies below the study's directory.

    Raises:
        StudyFileError: If a tracker is named whose package is not installed.
    """
    folder = directory / TRACKING
    return Mirror(list(_trackers(settings, folder)), folder)


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
