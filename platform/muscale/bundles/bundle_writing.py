"""Writes the bundle of a finished run, whole or not at all, once its last weights have given its loss again."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import psutil
import torch
from torch import Tensor

from muscale.bundles import bundle as parts
from muscale.bundles.bundle import Bundle
from muscale.bundles.bundle_files import write_manifest
from muscale.bundles.model_card import model_card
from muscale.environment import environment
from muscale.errors import BundleError, StageError
from muscale.fingerprint import package_fingerprint
from muscale.formatting import finite
from muscale.full_runs.checkpoints.finished_run import average_checkpoints, held_out_loss, last_state
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.promote.promotion import Promotion
from muscale.layout import EVALUATIONS, METRICS, RESULT
from muscale.plans.planning import Plan
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.memory import training_memory
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.corpus import Corpus
from proxy_models.data.kept_tokenizer import TOKENIZER, TOKENIZER_MANIFEST
from proxy_models.data.token_files import STATED
from proxy_models.files import atomic_directory, save_tensors
from proxy_models.training.optimizer import multipliers_of
from proxy_models.training.state import capture
from proxy_models.training.step import GOOD, Stepper

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
        StageError: If the last checkpoint is gone, its weights do not give the loss that the run recorded, or they and the
            optimizer's state are more than this machine's free memory.
        BundleError: If there is something at the path.
    """
    if average < 1:
        raise BundleError(f"bundle: the average must be of at least 1 checkpoint, got {average}")
    numerics, segments = run.chain.numerics, run.chain.segments
    _require_memory(numerics.model, segments[-1].recipe.optimizer)
    checkpoints = Checkpoints(run.directory / CHECKPOINTS)
    stepper = last_state(checkpoints, numerics, segments)
    loss = _checked_loss(run, stepper.module)
    averaging: dict[str, Any] | None = None
    try:
        with atomic_directory(path) as folder:
            _write_tensors(stepper, folder)
            if average > 1:
                averaging = {"loss": loss, **_average(run, checkpoints, stepper.module, average, folder)}
                _write(folder / parts.AVERAGING, averaging)
            _write_facts(run, stepper, folder)
            _write_data(run, folder)
            _write_environment(run, folder)
            (folder / parts.CARD).write_text(run.card(averaging), encoding="utf-8")
            write_manifest(folder, run.facts)
    except FileExistsError as error:
        raise BundleError(f"bundle: {error}") from error
    return Bundle.open(path)


def _require_memory(model: ModelConfig, optimizer: OptimizerName) -> None:
    """Refuse a state that would not fit into memory, as it is read whole."""
    estimate = training_memory(model, micro_batch=1, optimizer=optimizer)
    needed, free = estimate.parameters + estimate.optimizer, psutil.virtual_memory().available
    if needed > free:
        raise StageError(
            f"bundle: weights and optimizer are {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on this machine; "
            "run `muscale bundle` on one with more memory"
        )


def _checked_loss(run: Bundled, decoder: Decoder) -> float:
    """The validation loss of the weights that were read, held against the run's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = held_out_loss(decoder.to(device), run.corpus, run.chain.numerics)
    decoder.to("cpu")
    recorded = run.loss
    if not abs(loss / recorded - 1) <= LOSS_TOLERANCE:
        raise StageError(
            f"bundle: the weights in {run.directory} give a loss of {loss:.6f}, the run recorded {recorded:.6f}: they are "
            "not its last ones"
        )
    return loss


def _write_tensors(stepper: Stepper, folder: Path) -> None:
    """Write the weights and the optimizer's state, without the guard's snapshot, which is for a run that continues."""
    weights: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for key, tensor in capture(stepper.module, stepper.optimizer).items():
        kind, _, name = key.partition("/")
        (weights if kind == "weight" else rest)[name if kind == "weight" else key] = tensor.cpu().contiguous()
    memory = {f"{parts.MEMORY}{name}": value for name, value in stepper.memory().items() if not name.startswith(GOOD)}
    save_tensors(weights, folder / parts.WEIGHTS)
    save_tensors({**rest, **memory}, folder / parts.OPTIMIZER)


def _average(run: Bundled, checkpoints: Checkpoints, decoder: Decoder, k: int, folder: Path) -> dict[str, Any]:
    """Write the average of the last checkpoints, and evaluate it."""
    weights, tokens = average_checkpoints(checkpoints, decoder, k)
    save_tensors(weights, folder / parts.AVERAGED)
    last: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    _overwrite(decoder, weights)
    loss = held_out_loss(decoder, run.corpus, run.chain.numerics)
    _overwrite(decoder, last)
    return {"averaged_loss": loss, "checkpoints": list(tokens)}


@torch.no_grad()
def _overwrite(decoder: Decoder, weights: dict[str, Tensor]) -> None:
    for name, parameter in decoder.named_parameters():
        parameter.copy_(weights[name])


def _write_facts(run: Bundled, stepper: Stepper, folder: Path) -> None:
    numerics, segments = run.chain.numerics, run.chain.segments
    first = segments[0].recipe
    multipliers = multipliers_of(numerics.parametrization(first.optimizer), first)
    _write(folder / parts.MODEL, {"numerics": numerics.to_dict(), "multipliers": asdict(multipliers)})
    _write(folder / parts.PARAMETRIZATION, stepper.parametrization.to_dict())
    _write(folder / parts.SCHEDULE, [segment.to_dict() for segment in segments])
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


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(finite(values), indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
