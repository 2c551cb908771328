"""Writes the bundle of a finished run, completely or not at all, after checking that its last weights reproduce its loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from muscale.bundles import bundle as parts
from muscale.bundles.bundle import Bundle
from muscale.bundles.bundle_files import write_manifest
from muscale.environment import environment
from muscale.errors import BundleError, StageError, refusing
from muscale.fingerprint import package_fingerprint
from muscale.formatting import finite
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.checkpoints.save import read_table
from muscale.full_runs.checkpoints.stored_weights import MEMORY, MODEL, MOMENTS, READ_BYTES, RecordReader, read_weights
from muscale.layout import EVALUATIONS, METRICS, RESULT
from muscale.store.lineage import Chain
from proxy_models.architecture.families import family_of, is_imported, weight_shapes, with_weights
from proxy_models.architecture.parametrization import ForwardMultipliers, Parametrization
from proxy_models.data.corpus import Corpus
from proxy_models.data.kept_tokenizer import TOKENIZER, TOKENIZER_MANIFEST
from proxy_models.data.token_files import STATED
from proxy_models.files import atomic_directory
from proxy_models.tensor_files import TensorFiles, cut, write_tensors
from proxy_models.training.optimizer import multipliers_of, set_multipliers
from proxy_models.training.step import GOOD

LOSS_TOLERANCE = 1e-3
"""Largest relative difference between the loss of the weights and the recorded loss, across devices and numbers of ranks:
sharding changes the loss by less than 1e-4 (a test of `full_run`), and evaluations compute in the run's precision."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A promoted run, or a continuation of a run, for its bundle.

    Attributes:
        chain: Numerics and segments of the run.
        directory: Folder of its checkpoints, metrics and result.
        corpus: Training data.
        n_tokens: Tokens that the run read from the corpus.
        loss: Validation loss at the end.
        outcome: Name and content of the outcome's file.
        card: Function that writes the model card, given the losses of an average of checkpoints, or None without an average.
        config: The resolved study file.
        lineage: Origin of the run, by stage or by segment.
        runs: All runs of the ledger.
        position: Tokens of the corpus at which token 0 of the run is.
    """

    chain: Chain
    directory: Path
    corpus: Corpus
    n_tokens: int
    loss: float
    outcome: tuple[str, dict[str, Any]]
    facts: dict[str, Any]
    card: Callable[[dict[str, Any] | None], str]
    config: dict[str, Any]
    lineage: dict[str, Any]
    runs: pd.DataFrame
    position: int = 0


def write_bundle(run: FinishedRun, path: Path, *, average: int = 1) -> Bundle:
    """Write a run's bundle, completely or not at all, and open it.

    Raises:
        StageError: If the last checkpoint is gone, or its weights do not reproduce the recorded loss; if the model's family
            was not imported.
        BundleError: If the path exists already.
    """
    if not is_imported(model := run.chain.numerics.model):
        raise StageError(f"bundle: {model} must be built for its evaluation, but its family was not imported here")
    if average < 1:
        raise BundleError(f"bundle: the average must be of at least 1 checkpoint, got {average}")
    numerics, segments = run.chain.numerics, run.chain.segments
    checkpoints = CheckpointFolder(run.directory / CHECKPOINTS)
    final = _last_checkpoint(checkpoints, segments[-1].end)
    table = numerics.parametrization(segments[-1].recipe.optimizer)
    table.require(read_table(final))
    averaging: dict[str, Any] | None = None
    with refusing("bundle", FileExistsError, raising=BundleError), atomic_directory(path) as folder:
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
    return Bundle.open(path)


def _write_weights(run: FinishedRun, checkpoint: Path, path: Path) -> float:
    """Write the weights as they are read, and return their validation loss, checked against the run's."""
    reader, shapes = RecordReader(checkpoint), weight_shapes(run.chain.numerics.model)
    reader.require_weights(shapes)
    stored = reader.stream({f"{MODEL}.{name}": shape for name, shape in shapes.items()})
    write_tensors(path, shapes, ((name.removeprefix(f"{MODEL}."), tensor) for name, tensor in stored))
    loss, recorded = _loss_of(run, path), run.loss
    if not abs(loss / recorded - 1) <= LOSS_TOLERANCE:
        raise StageError(
            f"bundle: the weights in {run.directory} give a loss of {loss:.6f}, the run recorded {recorded:.6f}: they are "
            "not its last weights"
        )
    return loss


def _write_optimizer(checkpoint: Path, path: Path) -> None:
    """Write the moments and the memory of the steps, without the guard's snapshot, which only a continuing run needs."""
    reader = RecordReader(checkpoint)
    found = reader.shapes()
    names = {key: name for key in found if (name := _name_in_bundle(key))}
    shapes = {name: found[key] for key, name in names.items()}
    stored = reader.stream({key: found[key] for key in names})
    write_tensors(path, shapes, ((names[key], tensor) for key, tensor in stored))


def _name_in_bundle(key: str) -> str | None:
    """The name in the optimizer's file for a tensor of a checkpoint; None for tensors that are left out."""
    if key.startswith(MOMENTS):
        name, _, kind = key.removeprefix(MOMENTS).rpartition(".")
        return f"{kind}/{name}"
    if key.startswith(MEMORY) and not key.startswith(f"{MEMORY}{GOOD}"):
        return f"{parts.MEMORY}{key.removeprefix(MEMORY)}"
    return None


def _last_checkpoint(checkpoints: CheckpointFolder, end: int) -> Path:
    """The intact checkpoint at the end of the run."""
    found = next(checkpoints.intact(), None)
    if found is None or found[0] != end:
        at = f"the newest complete one is at {found[0]}" if found else "there is no complete one"
        raise StageError(f"{checkpoints.folder}: needs the checkpoint at the run's end, {end} tokens; {at}")
    return found[1]


def _average(run: FinishedRun, checkpoints: CheckpointFolder, k: int, path: Path) -> dict[str, Any]:
    """Write the average of the last `k` checkpoints, and evaluate it."""
    found = list(islice(checkpoints.intact(), k))
    if len(found) < k:
        raise StageError(
            f"{checkpoints.folder}: an average of {k} checkpoints needs {k} complete ones, got {len(found)}; a run "
            "keeps the newest promote.keep_last"
        )
    shapes = weight_shapes(run.chain.numerics.model)
    write_tensors(path, shapes, _averaged([checkpoint for _, checkpoint in found], shapes))
    return {"averaged_loss": _loss_of(run, path), "checkpoints": [tokens for tokens, _ in found]}


def _averaged(checkpoints: list[Path], shapes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The mean weights of checkpoints by name, summed in fp32; at most twice `READ_BYTES` are in memory."""
    for names in cut({name: shape.nbytes for name, shape in shapes.items()}, READ_BYTES):
        part = {name: shapes[name] for name in names}
        sums = {name: torch.zeros_like(shape, dtype=torch.float32, device="cpu") for name, shape in part.items()}
        for checkpoint in checkpoints:
            for name, tensor in read_weights(checkpoint, part).items():
                sums[name] += tensor
        for name, total in sums.items():
            yield name, total.div_(len(checkpoints))


def _loss_of(run: FinishedRun, path: Path) -> float:
    """The validation loss of weights in a bundle, mapped from their files; computed on the GPU, if there is one."""
    model = with_weights(run.chain.numerics.model, TensorFiles(path))
    set_multipliers(model, _multipliers(run))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return float(evaluate_unsharded(model.eval().to(device), run.corpus, run.chain.numerics)["val_loss"])


def _multipliers(run: FinishedRun) -> ForwardMultipliers:
    first = run.chain.segments[0].recipe
    return multipliers_of(run.chain.numerics.parametrization(first.optimizer), first)


def _write_facts(run: FinishedRun, table: Parametrization, folder: Path) -> None:
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


def _seeds(run: FinishedRun) -> dict[str, Any]:
    """Seeds of the full run and of the study file."""
    stated = {
        f"{table}.{key}": value
        for table, values in run.config.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if key in ("seed", "seeds")
    }
    return {"full_run": run.chain.numerics.seed, **stated}


def _write_data(run: FinishedRun, folder: Path) -> None:
    corpus = run.corpus
    sources = {name: files.manifest for name, files in corpus.sources.items()}
    known = any(manifest["tokenizer"] != STATED for manifest in sources.values())
    _write(
        folder / parts.DATA,
        {
            "key": corpus.key,
            "position": run.position,
            "manifest": corpus.manifest,
            "sources": sources,
            "epochs": corpus.epochs(
                run.n_tokens, run.chain.numerics.model.context_length, run_tokens=run.chain.numerics.run_tokens
            ),
            "tokenizer_known": known,
        },
    )
    if known and (corpus.folder / TOKENIZER_MANIFEST).exists():
        (folder / parts.TOKENIZER_FOLDER).mkdir()
        for name in (TOKENIZER, TOKENIZER_MANIFEST):
            shutil.copyfile(corpus.folder / name, folder / parts.TOKENIZER_FOLDER / name)


def _write_environment(run: FinishedRun, folder: Path) -> None:
    result = json.loads((run.directory / RESULT).read_text())
    here = {**environment(torch.device("cpu")), "package": package_fingerprint()}
    _write(folder / parts.ENVIRONMENT, {"run": result["environment"], "bundle": here})
    installed = {f"{found.name}=={found.version}" for found in metadata.distributions() if found.name}
    comment = "# Packages installed where this bundle was written; environment.json has those of the run.\n"
    (folder / parts.LOCK).write_text(comment + "\n".join(sorted(installed, key=str.lower)) + "\n")


def _write_source(run: FinishedRun, folder: Path) -> None:
    """Write the files that define a custom model's family, as data; readers of a bundle never import them."""
    if (model := run.chain.numerics.model).is_custom:
        for name, content in type(family_of(model)).source().items():
            path = folder / parts.FAMILY_FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(finite(values), indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
