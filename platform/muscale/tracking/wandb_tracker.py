"""Weights & Biases, online or offline."""

from __future__ import annotations

import math
import netrc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from muscale.settings.tables import TrackingSettings
from muscale.tracking.tracked import Row, TrackedRun, Tracker

SECONDS = 20.0
"""Longest time that a run's start waits for the server, and its end for unsent records (assumed)."""
_LIGHT: dict[str, Any] = {
    # In an offline run these cost half a second (the packages alone .4 s; without them .02 s, measured), and all of them report
    # private details of the machine.
    "x_save_requirements": False,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "console": "off",
    "silent": True,
    "init_timeout": SECONDS,
    "finish_timeout": SECONDS,
}


def mode_of(settings: TrackingSettings) -> Literal["online", "offline", "off"]:
    """Mode of new runs: the study file's; with "auto" WANDB_MODE, else online if there is a key."""
    if settings.wandb != "auto":
        return settings.wandb
    match os.environ.get("WANDB_MODE", ""):
        case "online" | "offline" as mode:
            return mode
        case "disabled" | "dryrun":
            return "off"
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # there is no readable file
        return False


class WandbTracker(Tracker[Any]):
    """One run of Weights & Biases per tracked run, in the study's group.

    Args:
        folder: Folder of wandb's files.
    """

    name = "wandb"

    def __init__(self, settings: TrackingSettings, mode: Literal["online", "offline"], folder: Path) -> None:
        super().__init__()
        self._settings, self.mode, self._folder = settings, mode, folder
        self._begun: dict[str, float] = {}  # by key: time of the last start

    @property
    def place(self) -> str:
        """Name of the record of sent values; it includes the mode, since the server does not know runs that were kept offline."""
        return f"{self.name}-{self.mode}"

    def _begin(self, run: TrackedRun) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        for variable in ("WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):  # files wait here until they are sent
            os.environ.setdefault(variable, str(self._folder))
        import wandb

        # wandb names an offline folder by the second: a resumed run in the same folder would overwrite itself.
        time.sleep(max(0.0, self._begun.get(run.key, -math.inf) + 1.1 - time.monotonic()))
        self._begun[run.key] = time.monotonic()
        opened = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            group=run.group,
            job_type=run.kind,
            name=run.name,
            id=run.key,
            config=dict(run.config),
            dir=str(self._folder),
            mode=self.mode,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**_LIGHT),
        )
        opened.define_metric("*", step_metric="number" if run.kind == "study" else "tokens")
        return opened

    def _log(self, opened: Any, rows: Sequence[Row]) -> None:
        for row in rows:
            # wandb's own step must rise, but an evaluation may arrive after later training rows.
            opened.log(dict(row.values))

    def _summarize(self, opened: Any, run: TrackedRun) -> None:
        opened.summary.update(dict(run.summary))

    def _attach(self, opened: Any, run: TrackedRun, name: str, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(name=f"{run.kind}-{run.key}-{Path(name).stem}", type=run.kind)
        artifact.add_file(str(path), name=name)
        opened.log_artifact(artifact)

    def _end(self, opened: Any, how: Literal["finished", "failed"] | None) -> None:
        opened.finish(exit_code=1 if how == "failed" else 0)
