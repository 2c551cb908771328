"""Commands between a study and other tools: import-space, export-optuna, sync."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from muscale.cli.application import KEEP, LOOK, SEARCH, command
from muscale.cli.ending import Ending
from muscale.cli.options import AsJson, Options, Words
from muscale.cli.running import refuse_dry_run, result_alone, run_stage, show

if TYPE_CHECKING:
    from muscale.study import Study


@command(SEARCH, name="import-space", example="muscale import-space sweep.yaml --rename lr=learning_rate")
def import_space(source: str, *, rename: Words = (), json: AsJson = False) -> int:
    """Print another tool's search as tables of a study file.

    Args:
        source: A sweep of Weights & Biases (YAML), or a study in Optuna's SQLite storage, with "#name" if it holds several.
        rename: A hyperparameter under another name here, theirs=ours; may be repeated.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.importers.import_space import import_space

    with result_alone(json):
        imported = import_space(source, rename)
    show(imported, as_json=json)
    return 0


@command(KEEP, name="export-optuna", example="muscale export-optuna study.toml sweep.db")
def export_optuna(study: Path, file: Path, *, options: Options = Options()) -> int:
    """Write the sweep as a study of Optuna's, which optuna-dashboard opens.

    Args:
        study: The study file.
        file: Of SQLite; must not be there yet.
    """
    from muscale.search.optuna_export import export_optuna
    from muscale.search.sweep import Sweep

    refuse_dry_run("an export", options)
    ending = Ending(wrote={"storage": file})

    def exported(opened: Study) -> str:
        return export_optuna(Sweep.of(opened.config, opened.ledger, opened.corpus), file)

    return run_stage(study, options, exported, None, ending=lambda *_: ending)


@command(LOOK, example="muscale sync study.toml --set tracking.mlflow=true")
def sync(study: Path, *, options: Options = Options()) -> int:
    """Show Weights & Biases, TensorBoard or MLflow what is new to them of all that the study knows; trains nothing.

    Every stage does so as it goes; this makes up for what a tracker missed. [tracking] of the study file names them.

    Args:
        study: The study file.
    """
    from muscale.tracking.trackers import Tracking

    refuse_dry_run("tracking", options)
    return run_stage(study, options, lambda opened: Tracking(opened.config, opened.ledger).sync(), None)
