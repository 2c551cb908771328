"""Commands between a study and other tools: import-space, export-optuna, sync."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from muscale.cli.application import ARTIFACTS, INSPECT, SEARCH, command
from muscale.cli.ending import Ending
from muscale.cli.options import AsJson, Options, StudyFile, Words
from muscale.cli.running import result_alone, run_stage, show

if TYPE_CHECKING:
    from muscale.study import Study
    from muscale.tracking.mirror import Synced


@command(SEARCH, name="import-space", example="muscale import-space sweep.yaml --rename lr=learning_rate")
def import_space(source: str, *, rename: Words = (), json: AsJson = False) -> int:
    """Convert another tool's search space to tables of a study file.

    Args:
        source: A W&B sweep (YAML) or an Optuna study in SQLite storage; append "#name" to choose one of several studies.
        rename: Rename a hyperparameter, theirs=ours; may be repeated.
    """
    from muscale.importers.import_space import import_space

    with result_alone(json):
        imported = import_space(source, rename)
    show(imported, as_json=json)
    return 0


@command(ARTIFACTS, name="export-optuna", example="muscale export-optuna study.toml sweep.db")
def export_optuna(study: StudyFile, file: Path, *, options: Options = Options()) -> int:
    """Export the sweep as an Optuna study, for optuna-dashboard.

    Args:
        file: The SQLite file to create.
    """
    from muscale.search.optuna_export import export_optuna
    from muscale.search.sweep import Sweep

    ending = Ending(wrote={"storage": file})

    def exported(opened: Study) -> str:
        return export_optuna(Sweep.of(opened.config, opened.ledger, opened.corpus), file)

    return run_stage(study, options, exported, None, ending=lambda *_: ending)


@command(INSPECT, example="muscale sync study.toml --set tracking.mlflow=true")
def sync(study: StudyFile, *, options: Options = Options()) -> int:
    """Send new results to Weights & Biases, TensorBoard or MLflow; trains nothing.

    Every stage does this while it runs; use `sync` for results that a tracker missed. The study file's [tracking] names the
    trackers. The exit code is 1 if one of them failed; the next `sync` sends it the rest.
    """
    from muscale.progress import Display
    from muscale.tracking.trackers import Tracking

    def synced(opened: Study) -> Synced:
        with Display(quiet=options.json).stage("sync") as update:
            return Tracking(opened.config, opened.ledger).sync(update)

    return run_stage(study, options, synced, None, failed=lambda result: bool(result.failed))
