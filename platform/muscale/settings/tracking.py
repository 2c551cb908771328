"""[tracking] of the study file: where else the study is shown while it runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from muscale.settings.strict import StrictTable

Wandb = Literal["auto", "online", "offline", "off"]


class TrackingSettings(StrictTable):
    """[tracking]: no part of any key. Keys and addresses come from the environment alone: they are secrets."""

    wandb: Wandb = "auto"  # online where Weights & Biases has a key, else offline; WANDB_MODE is obeyed
    tensorboard: bool = False  # event files; needs muscale[tensorboard]
    mlflow: bool = False  # MLFLOW_TRACKING_URI, else an SQLite file; needs muscale[mlflow]
    project: str = Field(default="muscale", min_length=1)  # of Weights & Biases, and the experiment of MLflow
    entity: str | None = None  # of Weights & Biases; none: the key's own
    trials: bool = True  # a tracked run for each trial of the sweep
    points: PositiveInt = 1000  # of the full run's training curve: means over as many stretches of its tokens
