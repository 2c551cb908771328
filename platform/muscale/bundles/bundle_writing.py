"""Writes the bundle of a finished run, whole or not at all, once its last weights have given its loss again."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from muscale.bundles import bundle as parts
from muscale.bundles.bundle import Bundle
from muscale.bundles.bundle_files import write_manifest
from muscale.bundles.model_card import model_card
from muscale.environment import environment
from muscale.errors import BundleError, StageError
from muscale.fingerprint import package_fingerprint
from muscale.formatting import finite
from muscale.full_runs.checkpoints.finished_run import averaged, held_out_loss, last_checkpoint, newest_checkpoints
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.full_runs.checkpoints.save import read_table
from muscale.full_runs.checkpoints.stored_weights import MEMORY, MODEL, MOMENTS, RecordReader
from muscale.full_runs.promote.promotion import Promotion
from muscale.layout import EVALUATIONS, METRICS, RESULT
from muscale.plans.planning import Plan
from muscale.store.lineage import Chain
from proxy_models.architecture.families import family_of, is_imported, parameter_shapes, with_weights
from proxy_models.architecture.member import ModuleConfig
from proxy_models.architecture.parametrization import ForwardMultipliers, Parametrization
from proxy_models.data.corpus import Corpus
from proxy_models.data.kept_tokenizer import TOKENIZER, TOKENIZER_MANIFEST
from proxy_models.data.token_files import STATED
from proxy_models.files import atomic_directory
from proxy_models.tensor_files import TensorFiles, write_tensors
from proxy_models.training.optimizer import multipliers_of, set_multipliers
from proxy_models.training.step import GOOD

LOSS_TOLERANCE = 1e-3
"""Relative; what the weights may differ in their loss from what the run recorded, on other devices and other numbers of ranks:
sharding changes it by less than 1e-4 (a test of `full_run`), and all evaluate in fp32."""


class Bundled(Protocol):
    """Source of a bundle: a promoted run, or a continuation of one; attributes as those of `FinishedRun`."""

    @property
    def chain(self) -> Chain: ...
    @property
    def directory(self) -> Path: ...
    @property
    def corpus(self) -> Corpus: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def lineage(self) -> dict[str, Any]: ...
    @property
    def runs(self) -> pd.DataFrame: ...

    @property
    def loss(self) -> float:
        """Validation loss at the end."""

    @property
    def n_tokens(self) -> int:
        """Tokens read of the corpus."""

    @property
    def outcome(self) -> tuple[str, dict[str, Any]]:
        """Name and content of the file of the outcome."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the manifest."""

    def card(self, averaging: dict[str, Any] | None) -> str:
        """The model card, with the loss of an average of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A promoted run, for its bundle.

    Attributes:
        name: The study's.
        plan: As it was registered.
        promotion: The run beside its forecast.
        chain: Its numerics and segments.
        directory: Where its checkpoints, metrics and result lie.
        corpus: What it was trained on.
        config: The resolved study file.
        lineage: How the plan came to be, by stage.
        runs: The ledger's.
    """

    name: str
    plan: Plan
    promotion: Promotion
    chain: Chain
    directory: Path
    corpus: Corpus
    config: dict[str, Any]
    lineage: dict[str, Any]
    runs: pd.DataFrame

    @property
    def loss(self) -> float:
        """Validation loss at the end."""
        return self.promotion.loss

    @property
    def n_tokens(self) -> int:
        """Tokens read of the corpus."""
        return self.plan.n_tokens

    @property
    def outcome(self) -> tuple[str, dict[str, Any]]:
        """The run beside its forecast."""
        reasons = list(self.plan.forecast.reasons)
        return parts.FORECAST, {**self.promotion.to_dict(), "outside_support": reasons}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the manifest."""
        return {"plan": self.plan.key, "finished_at": self.promotion.finished_at}

    def card(self, averaging: dict[str, Any] | None) -> str:
        """The model card."""
        return model_card(
            self.name,
            plan=self.plan,
            promotion=self.promotion,
            numerics=self.chain.numerics,
            corpus=self.corpus,
            lineage=self.lineage,
            averaging=averaging,
        )


def write_bundle(run: Bundled, path: Path, *, average: int = 1) -> Bundle:
    """Write a run's bundle, whole or not at all, and open it.

    Raises:
        StageError: If the last checkpoint is gone, or its weights do not give the loss that the run recorded; if the model's family
            was not imported.
        BundleError: If there is something at the path.
    """
    if not is_imported(model := run.chain.numerics.model):
        raise StageError(f"bundle: {model} is built to evaluate it, and its family was not imported here")
    if average < 1:
        raise BundleError(f"bundle: the average must be of at least 1 checkpoint, got {average}")
    numerics, segments = run.chain.numerics, run.chain.segments
    checkpoints = CheckpointFolder(run.directory / CHECKPOINTS)
    final = last_checkpoint(checkpoints, segments[-1].end)
    table = numerics.parametrization(segments[-1].recipe.optimizer)
    table.require(read_table(final))
    averaging: dict[str, Any] | None = None
    try:
        with atomic_directory(path) as folder:
            loss = _write_weights(run, final, folder / parts.WEIGHTS)
            _write_optimizer(final, folder / parts.OPTIMIZER)
            if average > 1:
                averaging = {"loss": loss, **_average(run, checkpoints, average, folder / parts.AVERAGED)}
                _write(folder / parts.AVERAGING, averaging)
            _write_facts(run, table, folder)
            _write_data(run, folder)
            _write_environment(run, folder)
            _write_source(run, folder)
            (folder / parts.CARD).write_text(run.card(averaging), encoding="utf-8")
            write_manifest(folder, run.facts)
    except FileExistsError as error:
        raise BundleError(f"bundle: {error}") from error
    return Bundle.open(path)


def _write_weights(run: Bundled, checkpoint: Path, path: Path) -> float:
    """Write the weights as they are read, and return their validation loss, held against the run's."""
    reader, shapes = RecordReader(checkpoint), parameter_shapes(run.chain.numerics.model)
    reader.require_weights(shapes)
    stored = reader.stream({f"{MODEL}.{name}": shape for name, shape in shapes.items()})
    write_tensors(path, shapes, ((name.removeprefix(f"{MODEL}."), tensor) for name, tensor in stored))
    loss, recorded = _loss_of(run, path), run.loss
    if not abs(loss / recorded - 1) <= LOSS_TOLERANCE:
        raise StageError(
            f"bundle: the weights in {run.directory} give a loss of {loss:.6f}, the run recorded {recorded:.6f}: they are "
            "not its last ones"
        )
    return loss


def _write_optimizer(checkpoint: Path, path: Path) -> None:
    """Write the moments and the steps' memory, without the guard's snapshot, which is for a run that continues."""
    reader = RecordReader(checkpoint)
    found = reader.shapes()
    names = {key: name for key in found if (name := _name_in_bundle(key))}
    shapes = {name: found[key] for key, name in names.items()}
    stored = reader.stream({key: found[key] for key in names})
    write_tensors(path, shapes, ((names[key], tensor) for key, tensor in stored))


def _name_in_bundle(key: str) -> str | None:
    """The name of a tensor of a checkpoint in the optimizer's file; None for all others."""
    if key.startswith(MOMENTS):
        name, _, kind = key.removeprefix(MOMENTS).rpartition(".")
        return f"{kind}/{name}"
    if key.startswith(MEMORY) and not key.startswith(f"{MEMORY}{GOOD}"):
        return f"{parts.MEMORY}{key.removeprefix(MEMORY)}"
    return None


def _average(run: Bundled, checkpoints: CheckpointFolder, k: int, path: Path) -> dict[str, Any]:
    """Write the average of the last checkpoints, and evaluate it."""
    found = newest_checkpoints(checkpoints, k)
    shapes = parameter_shapes(run.chain.numerics.model)
    write_tensors(path, shapes, averaged([checkpoint for _, checkpoint in found], shapes))
    return {"averaged_loss": _loss_of(run, path), "checkpoints": [tokens for tokens, _ in found]}


def _loss_of(run: Bundled, path: Path) -> float:
    """The validation loss of weights in a bundle, mapped from their files; on the GPU, if there is one."""
    model = with_weights(run.chain.numerics.model, TensorFiles(path))
    set_multipliers(model, _multipliers(run))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return held_out_loss(model.eval().to(device), run.corpus, run.chain.numerics)


def _multipliers(run: Bundled) -> ForwardMultipliers:
    first = run.chain.segments[0].recipe
    return multipliers_of(run.chain.numerics.parametrization(first.optimizer), first)


def _write_facts(run: Bundled, table: Parametrization, folder: Path) -> None:
    model = {"numerics": run.chain.numerics.to_dict(), "multipliers": asdict(_multipliers(run))}
    _write(folder / parts.MODEL, model)
    _write(folder / parts.PARAMETRIZATION, table.to_dict())
    _write(folder / parts.SCHEDULE, [segment.to_dict() for segment in run.chain.segments])
    _write(folder / parts.STUDY, run.config)
    _write(folder / parts.SEEDS, _seeds(run))
    _write(folder / parts.LINEAGE, run.lineage)
    name, outcome = run.outcome
    _write(folder / name, outcome)
    run.runs.to_csv(folder / parts.RUNS, index=False)
    shutil.copyfile(run.directory / METRICS, folder / parts.METRICS)
    if (run.directory / EVALUATIONS).exists():
        shutil.copyfile(run.directory / EVALUATIONS, folder / parts.EVALUATIONS)


def _seeds(run: Bundled) -> dict[str, Any]:
    """Seeds of the full run and of the study file."""
    stated = {
        f"{table}.{key}": value
        for table, values in run.config.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if key in ("seed", "seeds")
    }
    return {"full_run": run.chain.numerics.seed, **stated}


def _write_data(run: Bundled, folder: Path) -> None:
    corpus = run.corpus
    sources = {name: files.manifest for name, files in corpus.sources.items()}
    known = any(manifest["tokenizer"] != STATED for manifest in sources.values())
    _write(
        folder / parts.DATA,
        {
            "key": corpus.key,
            "manifest": corpus.manifest,
            "sources": sources,
            "epochs": corpus.epochs(run.n_tokens),
            "tokenizer_known": known,
        },
    )
    if known and (corpus.folder / TOKENIZER_MANIFEST).exists():
        (folder / parts.TOKENIZER_FOLDER).mkdir()
        for name in (TOKENIZER, TOKENIZER_MANIFEST):
            shutil.copyfile(corpus.folder / name, folder / parts.TOKENIZER_FOLDER / name)


def _write_environment(run: Bundled, folder: Path) -> None:
    result = json.loads((run.directory / RESULT).read_text())
    here = {**environment(torch.device("cpu")), "package": package_fingerprint()}
    _write(folder / parts.ENVIRONMENT, {"run": result["environment"], "bundle": here})
    installed = {f"{found.name}=={found.version}" for found in metadata.distributions() if found.name}
    comment = "# Packages installed where this bundle was written; environment.json has those of the run.\n"
    (folder / parts.LOCK).write_text(comment + "\n".join(sorted(installed, key=str.lower)) + "\n")


def _write_source(run: Bundled, folder: Path) -> None:
    """Write the files that define the family of one's own, as data; readers of a bundle never import them."""
    if isinstance(model := run.chain.numerics.model, ModuleConfig):
        (folder / parts.FAMILY_FOLDER).mkdir()
        for name, content in type(family_of(model)).source().items():
            (folder / parts.FAMILY_FOLDER / name).write_bytes(content)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(finite(values), indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
