"""MLflow: runs in an experiment, in the store that MLFLOW_TRACKING_URI names, else in an SQLite file of the study."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from muscale.tracking.tracked import Row, TrackedRun, Tracker, flat

KEY, GROUP = "muscale.run", "muscale.study"
_LONGEST = 500  # longest value of a parameter, in characters; MLflow refuses 6000 and more
_PARAMETERS = 100  # most parameters that MLflow takes at once
_METRICS = 1000  # most metrics at once


class MlflowTracker(Tracker[tuple[Any, str]]):
    """One MLflow run per tracked run, identified by a tag.

    Args:
        folder: Folder of the SQLite file and of kept files, if no server is named.
    """

    name = "mlflow"

    def __init__(self, experiment: str, folder: Path) -> None:
        super().__init__()
        self._experiment, self._folder = experiment, folder
        self._client: Any = None
        self._experiment_id = ""

    def _begin(self, run: TrackedRun) -> tuple[Any, str]:
        from mlflow.entities import Param

        client = self._connected()
        known = client.search_runs([self._experiment_id], f"tags.`{KEY}` = '{run.key}'", max_results=1)
        if known:
            found: str = known[0].info.run_id
            client.update_run(found, status="RUNNING")
        else:
            tags = {KEY: run.key, GROUP: run.group, "kind": run.kind}
            found = client.create_run(self._experiment_id, run_name=run.name, tags=tags).info.run_id
        sent = known[0].data.params if known else {}  # not all of them, if a request failed
        values = {name: str(value)[:_LONGEST] for name, value in flat(run.config).items()}
        params = [Param(name, value) for name, value in values.items() if name not in sent]
        for first in range(0, len(params), _PARAMETERS):
            client.log_batch(found, params=params[first : first + _PARAMETERS])
        return client, found

    def _connected(self) -> Any:
        if self._client is None:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            logging.getLogger("alembic").setLevel(logging.WARNING)  # alembic logs a line for each table of a new file
            from mlflow import MlflowClient

            uri = os.environ.get("MLFLOW_TRACKING_URI")
            if uri is None:
                self._folder.mkdir(parents=True, exist_ok=True)
            client = MlflowClient(tracking_uri=uri or f"sqlite:///{self._folder / 'mlflow.db'}")
            known = client.get_experiment_by_name(self._experiment)
            place = None if uri else (self._folder / "mlflow-files").as_uri()
            self._experiment_id = (
                known.experiment_id if known else client.create_experiment(self._experiment, artifact_location=place)
            )
            self._client = client
        return self._client

    def _log(self, opened: tuple[Any, str], rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        client, found = opened
        now = round(1000 * time.time())  # in milliseconds; rows have no time
        metrics = [Metric(name, value, now, row.at) for row in rows for name, value in row.metrics.items()]
        for first in range(0, len(metrics), _METRICS):
            client.log_batch(found, metrics=metrics[first : first + _METRICS])

    def _summarize(self, opened: tuple[Any, str], run: TrackedRun) -> None:
        client, found = opened
        for name, value in flat(run.summary).items():
            client.set_tag(found, f"summary.{name}", str(value)[:_LONGEST])

    def _attach(self, opened: tuple[Any, str], run: TrackedRun, name: str, path: Path) -> None:
        client, found = opened
        with TemporaryDirectory() as folder:  # an artifact has the name of its file
            client.log_artifact(found, shutil.copyfile(path, Path(folder) / name))

    def _end(self, opened: tuple[Any, str], how: Literal["finished", "failed"] | None) -> None:
        client, found = opened
        client.set_terminated(found, status="FAILED" if how == "failed" else "FINISHED")
