"""From a promoted run to its bundle: gathers what the study knows, trains nothing, and writes it whole or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from safetensors.torch import save_file
from torch import Tensor

from muscale import bundle as parts
from muscale.bundle import Bundle
from muscale.bundle_files import write_manifest
from muscale.checkpoints import CHECKPOINTS, Checkpoints
from muscale.environment import environment
from muscale.errors import BundleError, StageError
from muscale.fingerprint import package_fingerprint
from muscale.finished_run import average_checkpoints, held_out_loss, last_state
from muscale.layout import BUNDLES, FULL_RUNS, METRICS, RESULT
from muscale.lineage import Chain, segment_to_dict
from muscale.model_card import model_card
from muscale.plain import finite
from muscale.planning import Plan
from muscale.promotion import Promotion
from muscale.sweep import collect
from proxy_models.corpus import Corpus
from proxy_models.decoder import Decoder
from proxy_models.kept_tokenizer import TOKENIZER, TOKENIZER_MANIFEST
from proxy_models.numerics import Numerics
from proxy_models.state import capture
from proxy_models.step import GOOD, Stepper
from proxy_models.token_files import STATED
from proxy_models.whole_folder import whole_folder
from scaling import Forecast, ScalingFit

if TYPE_CHECKING:
    from muscale.study import Study

LOSS_TOLERANCE = 1e-3
"""Relative; what the weights may differ in their loss from what the run recorded, on other devices and other numbers of ranks:
sharding changes it by less than 1e-4 (a test of `full_run`), and all evaluate in fp32."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a bundle is made from.

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


def preserve(study: Study, *, average: int = 1) -> Bundle:
    """The bundle of the run promoted last, below the study's directory; written once, later only verified.

    Args:
        study: It is only read.
        average: Write the average of so many last checkpoints beside the last weights; 1 for none.

    Raises:
        StageError: If no run was promoted to its end, its last checkpoint is gone, or its weights do not give its loss.
        BundleError: If there is a bundle already, and it is damaged.
    """
    plan, promotion = _promoted(study)
    name = plan.key if average == 1 else f"{plan.key}-average-{average}"
    path = study.directory / BUNDLES / name
    if path.exists():
        return Bundle.open(path)
    run = FinishedRun(
        name=study.config.name,
        plan=plan,
        promotion=promotion,
        chain=_chain_of(study, plan),
        directory=study.directory / FULL_RUNS / plan.key,
        corpus=study.corpus,
        config=study.config.to_dict(),
        lineage=_lineage(study, plan, promotion),
        runs=study.runs(),
    )
    return write_bundle(run, path, average=average)


def _promoted(study: Study) -> tuple[Plan, Promotion]:
    found = study.ledger.latest_result("promotion")
    if found is None:
        raise StageError("bundle: no run was promoted to its end yet; run `muscale promote` first")
    promotion = Promotion.from_dict(found["payload"])
    forecast = study.ledger.forecast(promotion.plan)
    if forecast is None:
        raise StageError(f"bundle: the ledger has no plan {promotion.plan}, though its run was promoted")
    return Plan.from_dict({**forecast["payload"], "registered_at": forecast["registered_at"]}), promotion


def _chain_of(study: Study, plan: Plan) -> Chain:
    """The run's chain, with what determined its numbers then: settings of the study may have changed since."""
    runs = study.runs()
    own = runs[(runs["purpose"] == "full") & (runs["label"] == f"plan {plan.key}")]
    chain = plan.chain(study.numerics)
    return replace(chain, numerics=Numerics.from_dict(own["numerics"].iloc[-1])) if len(own) else chain


def _lineage(study: Study, plan: Plan, promotion: Promotion) -> dict[str, Any]:
    """Every stage as the ledger tells it now, and whether its fit is still the one that made the forecast."""
    check = study.ledger.latest_result("check")
    stages: dict[str, Any] = {"sweep": None, "check": check and check["payload"], "transfer": None, "fit": None}
    doubts: list[str] = []
    try:
        stages["sweep"] = collect(study.search).to_dict()
        if study.is_complete("transfer"):
            stages["transfer"] = study.transfer().to_dict()
        if study.is_complete("ladder"):
            stages["fit"] = _fit_of(study.fit(), plan.forecast, doubts)
    except StageError as error:
        doubts.append(f"the ledger does not tell every stage any more: {error}")
    missing = [name for name, found in stages.items() if found is None]
    if missing:
        doubts.append(f"not known any more: {', '.join(missing)}; runs were added or settings changed since")
    return {**stages, "plan": plan.to_dict(), "promotion": promotion.to_dict(), "doubts": doubts}


def _fit_of(fit: ScalingFit, told: Forecast, doubts: list[str]) -> dict[str, Any]:
    again = fit.forecast(told.n_params, told.n_tokens, level=told.level)
    if abs(again.loss / told.loss - 1) > 1e-9:
        doubts.append(
            f"the fit was made anew since the plan: it forecasts {again.loss:.6f} where {told.loss:.6f} was registered"
        )
    return fit.to_dict()


def write_bundle(run: FinishedRun, path: Path, *, average: int = 1) -> Bundle:
    """Write a run's bundle, whole or not at all, and open it.

    Raises:
        StageError: If the last checkpoint is gone, or its weights do not give the loss that the run recorded.
        BundleError: If there is something at the path.
    """
    if average < 1:
        raise BundleError(f"bundle: the average must be of at least 1 checkpoint, got {average}")
    numerics, segments = run.chain.numerics, run.chain.segments
    checkpoints = Checkpoints(run.directory / CHECKPOINTS)
    stepper = last_state(checkpoints, numerics, segments)
    loss = _checked_loss(run, stepper.module)
    averaging: dict[str, Any] | None = None
    try:
        with whole_folder(path) as folder:
            _write_tensors(stepper, folder)
            if average > 1:
                averaging = {"loss": loss, **_average(run, checkpoints, stepper.module, average, folder)}
                _write(folder / parts.AVERAGING, averaging)
            _write_facts(run, stepper, folder)
            _write_data(run, folder)
            _write_environment(run, folder)
            card = model_card(
                run.name,
                plan=run.plan,
                promotion=run.promotion,
                numerics=numerics,
                corpus=run.corpus,
                lineage=run.lineage,
                averaging=averaging,
            )
            (folder / parts.CARD).write_text(card, encoding="utf-8")
            write_manifest(folder, {"plan": run.plan.key, "finished_at": run.promotion.finished_at})
    except FileExistsError as error:
        raise BundleError(f"bundle: {error}") from error
    return Bundle.open(path)


def _checked_loss(run: FinishedRun, decoder: Decoder) -> float:
    """The validation loss of the weights that were read, held against the run's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = held_out_loss(decoder.to(device), run.corpus, run.chain.numerics)
    decoder.to("cpu")
    recorded = run.promotion.loss
    if not abs(loss / recorded - 1) <= LOSS_TOLERANCE:
        raise StageError(
            f"bundle: the weights in {run.directory} give a loss of {loss:.6f}, the run recorded {recorded:.6f}: they are "
            "not its last ones"
        )
    return loss


def _write_tensors(stepper: Stepper, folder: Path) -> None:
    """Weights, and what the optimizer and the steps remember; the guard's snapshot is for a run that goes on."""
    weights: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for key, tensor in capture(stepper.module, stepper.optimizer).items():
        kind, _, name = key.partition("/")
        (weights if kind == "weight" else rest)[name if kind == "weight" else key] = tensor.cpu().contiguous()
    memory = {f"memory/{name}": value for name, value in stepper.memory().items() if not name.startswith(GOOD)}
    save_file(weights, folder / parts.WEIGHTS, metadata={"format": "pt"})
    save_file({**rest, **memory}, folder / parts.OPTIMIZER, metadata={"format": "pt"})


def _average(run: FinishedRun, checkpoints: Checkpoints, decoder: Decoder, k: int, folder: Path) -> dict[str, Any]:
    """Write the average of the last checkpoints, and evaluate it."""
    weights, tokens = average_checkpoints(checkpoints, decoder, k)
    save_file(weights, folder / parts.AVERAGED, metadata={"format": "pt"})
    last: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    _overwrite(decoder, weights)
    loss = held_out_loss(decoder, run.corpus, run.chain.numerics)
    _overwrite(decoder, last)
    return {"averaged_loss": loss, "checkpoints": list(tokens)}


@torch.no_grad()
def _overwrite(decoder: Decoder, weights: dict[str, Tensor]) -> None:
    for name, parameter in decoder.named_parameters():
        parameter.copy_(weights[name])


def _write_facts(run: FinishedRun, stepper: Stepper, folder: Path) -> None:
    numerics, segments = run.chain.numerics, run.chain.segments
    first = segments[0].recipe
    multipliers = numerics.parametrization(first.optimizer).multipliers.tuned(
        embedding=first.embedding_multiplier,
        readout=first.output_multiplier,
        attention=first.attention_multiplier,
    )
    _write(folder / parts.MODEL, {"numerics": numerics.to_dict(), "multipliers": asdict(multipliers)})
    _write(folder / parts.PARAMETRIZATION, stepper.parametrization.to_dict())
    _write(folder / parts.SCHEDULE, [segment_to_dict(segment) for segment in segments])
    _write(folder / parts.STUDY, run.config)
    _write(folder / parts.SEEDS, _seeds(run))
    _write(folder / parts.LINEAGE, run.lineage)
    reasons = list(run.plan.forecast.reasons)
    _write(folder / parts.FORECAST, {**run.promotion.to_dict(), "outside_support": reasons})
    run.runs.to_csv(folder / parts.RUNS, index=False)
    shutil.copyfile(run.directory / METRICS, folder / parts.METRICS)


def _seeds(run: FinishedRun) -> dict[str, Any]:
    """The full run's, and every one that the study file states."""
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
            "manifest": corpus.manifest,
            "sources": sources,
            "epochs": corpus.epochs(run.plan.n_tokens),
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
    told = "# What was installed where this bundle was written; what the run itself stated is in environment.json.\n"
    (folder / parts.LOCK).write_text(told + "\n".join(sorted(installed, key=str.lower)) + "\n")


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(finite(values), indent=1, default=str, allow_nan=False) + "\n", encoding="utf-8")
