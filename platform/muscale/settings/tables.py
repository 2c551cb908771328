"""The tables of a study file; `muscale.settings.config` reads the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, PrivateAttr

from muscale.errors import StageError, refusing
from muscale.layout import INITIAL_WEIGHTS
from muscale.settings.compare import CompareSettings, VariantSettings
from muscale.settings.corpus import CorpusSettings
from muscale.settings.own_model import OwnModel
from muscale.settings.plan import PlanSettings, Stem
from muscale.settings.promote import PromoteSettings
from muscale.settings.scores import ScoresSettings
from muscale.settings.strict import AllDiffer, PositiveOrInfinite, StrictTable, require_whole_or_fraction
from muscale.settings.sweep import SweepSettings
from muscale.settings.trainer import TrainerSettings
from muscale.settings.transfer import TransferSettings
from muscale.settings.use_case import UseCaseSettings
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import DecayScaling, Scheme
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import COOLING
from proxy_models.training.compilation import Compile
from proxy_models.training.numerics import Numerics, key_of_weights
from search_spaces import Choice, Fixed, Ordinal


class CheckSettings(StrictTable):
    """[check]: the coordinate check."""

    widths: tuple[PositiveInt, ...] = (32, 64, 128, 256)  # to compare
    depths: tuple[PositiveInt, ...] = ()  # such as [1, 2, 4, 8]; none: only widths are checked
    seeds: tuple[int, ...] = (0, 1)  # of weights and data order


class LadderSettings(StrictTable):
    """[ladder]: runs of several sizes and lengths for the law."""

    stems: Annotated[tuple[Stem, ...], Field(min_length=1), AllDiffer]
    # of weights and data order; every stem runs with each
    seeds: Annotated[tuple[int, ...], Field(min_length=1), AllDiffer] = (0,)
    # branches of each run with smaller shares of their tokens in the corpus's last stage, for forecasts of a later start of that stage
    stage_branches: Annotated[int, Field(ge=0, le=20)] = 0


class FitSettings(StrictTable):
    """[fit]: the law."""

    # predicted relative difference from the policy's loss; rows beyond it are left out; inf: no row is
    max_regret: PositiveOrInfinite = 0.0025
    n_bootstrap: PositiveInt = 1000  # refits to resampled stems, for intervals
    seed: NonNegativeInt = 0  # of the bootstrap


class ResourceSettings(StrictTable):
    """[resources]: what one worker of a search or a full run gets, and the number of trainings at a time."""

    workers: PositiveInt = 2  # trainings at a time
    # ranks over which FSDP2 shards each training; each rank gets the CPUs and GPUs of the next two keys
    ranks_per_trial: PositiveInt = 1
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0  # CPUs in Ray's count; 0.5 puts two trainings on one
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0  # 0.25 puts four trainings on one
    stall_minutes: PositiveOrInfinite = 30.0  # longest time without a step; then the training is ended; inf: no limit
    # torch.compile costs 7 to 21 s a shape and worker; "auto" compiles where a segment is long enough to repay it
    compile: Compile = False

    @pydantic.model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_whole_or_fraction("resources", self, ("cpus_per_worker", "gpus_per_worker"))
        if self.ranks_per_trial > 1 and self.gpus_per_worker not in (0, 1):
            raise ValueError(
                f"resources.gpus_per_worker must be 0 or 1 with ranks_per_trial = {self.ranks_per_trial}, one device per rank; "
                f"got {self.gpus_per_worker:g}"
            )
        return self

    @property
    def threads(self) -> int:
        """Threads of a worker that trains on the CPU; at least 1."""
        return max(1, int(self.cpus_per_worker))

    @property
    def device_share(self) -> float:
        """Share of a device's memory for each worker."""
        return min(1.0, self.gpus_per_worker or 1.0)

    @property
    def worker(self) -> dict[str, float]:
        """Ray resources of one worker."""
        return {"CPU": self.cpus_per_worker} | ({"GPU": self.gpus_per_worker} if self.gpus_per_worker else {})

    @property
    def full_run_worker(self) -> dict[str, float]:
        """Ray resources of one worker of the full run, which shares no GPU."""
        return self.worker | ({"GPU": 1.0} if self.gpus_per_worker else {})

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device of a worker: a GPU if the worker gets one or a fraction of one, else the CPU."""
        return "cuda" if self.gpus_per_worker else "cpu"


class NumericsSettings(StrictTable):
    """[numerics]: the precision of every training of the study."""

    precision: Precision | Literal["auto"] = "auto"  # bf16 if resources.gpus_per_worker gives GPUs, fp32 on CPUs


class StorageSettings(StrictTable):
    """[storage]: location of the ledger. PostgreSQL's URL is a secret and comes only from MUSCALE_LEDGER_URL."""

    # "sqlite" for one machine, "actor" for a permanent head, "postgresql" for temporary heads and several clusters
    ledger: Literal["sqlite", "actor", "postgresql"] = "sqlite"
    # for "actor": absolute path of an SQLite file, on a local disk of the machine that begins the study
    path: str | None = None

    @pydantic.model_validator(mode="after")
    def _path_fits(self) -> Self:
        if self.path is not None and self.ledger != "actor":
            raise ValueError(f'storage.path is for storage.ledger = "actor", got {self.path!r} with "{self.ledger}"')
        if self.path is not None and not Path(self.path).is_absolute():
            raise ValueError(f"storage.path must be absolute, because every node uses it; got {self.path!r}")
        return self


class TrackingSettings(StrictTable):
    """[tracking]: not part of any key. API keys and addresses are secrets and come only from the environment."""

    # "auto": WANDB_MODE, else online if Weights & Biases has a key, else offline
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    tensorboard: bool = False  # event files; needs muscale[tensorboard]
    mlflow: bool = False  # MLFLOW_TRACKING_URI, else an SQLite file; needs muscale[mlflow]
    project: str = Field(default="muscale", min_length=1)  # project of Weights & Biases, and experiment of MLflow
    entity: str | None = None  # entity of Weights & Biases; none: the API key's default
    trials: bool = True  # a tracked run for each trial of the sweep
    points: PositiveInt = 1000  # points of the full run's training curve: means over as many intervals of its tokens


class StudyTables(StrictTable):
    """All tables of a study file."""

    name: str = Field(min_length=1)  # in reports and trackers
    parametrization: Scheme = "mup"  # "standard": values found at the base do not transfer; to compare
    depth_exponent: Annotated[float, Field(ge=0.5, le=1)] = 1.0  # CompleteP's alpha: branches shrink as depth^-alpha
    # "timescale": the weights average over the same share of a run at every width; "sublayer_gain", AdamW's only: the decay of hidden
    # matrices grows as the root of width
    decay_scaling: DecayScaling = "timescale"
    # a folder, relative to the study file, whose weights every training starts from: a bundle, or safetensors with config.json in
    # the layout of Llama, its relatives, or GPT-2; all runs then have the shape of [model]
    initial_weights: Annotated[str, Field(min_length=1)] | None = None
    corpus: CorpusSettings = CorpusSettings()
    model: Member
    hyperparameters: Hyperparameters
    check: CheckSettings = CheckSettings()
    sweep: SweepSettings
    transfer: TransferSettings
    ladder: LadderSettings
    fit: FitSettings = FitSettings()
    plan: PlanSettings
    promote: PromoteSettings = PromoteSettings()
    variants: dict[str, VariantSettings] = Field(default_factory=dict)
    compare: CompareSettings = CompareSettings()
    trainer: TrainerSettings | None = None
    scores: ScoresSettings | None = None
    use_case: UseCaseSettings | None = None
    resources: ResourceSettings = ResourceSettings()
    numerics: NumericsSettings = NumericsSettings()
    storage: StorageSettings = StorageSettings()
    tracking: TrackingSettings = TrackingSettings()
    _own_model: OwnModel | None = PrivateAttr(default=None)  # [model] as written, if its family was imported
    _variant_models: dict[str, Member] = PrivateAttr(default_factory=dict)  # custom or a program's, by variant

    @property
    def precision(self) -> Precision:
        """The resolved precision of the proxies, part of their keys."""
        if self.numerics.precision == "auto":
            return "bf16" if self.resources.device == "cuda" else "fp32"
        return self.numerics.precision

    @property
    def full_run_precision(self) -> Precision:
        """The resolved precision of the full run, part of its plan."""
        return self.promote.precision or self.precision

    @property
    def has_check(self) -> bool:
        """Whether the study has a coordinate check: not with a [trainer] program or given weights."""
        return not (self.trainer or self.initial_weights)

    @property
    def family(self) -> ModelFamily[Member]:
        """The models of this study; the sweep searches at the base."""
        return ModelFamily(base=self.model)

    def variant_model(self, name: str) -> Member:
        """A variant's model at the base shape.

        Raises:
            StageError: If the variant has a custom model or a program, and the study was not opened for training.
        """
        if known := self._variant_models.get(name):
            return known
        if self.variants[name].is_own(self.model):
            raise StageError(
                f"variants.{name}: its family is imported, or its program run, only for training; open the study with trains=True"
            )
        return self.variants[name].model_of(self.model)

    def at_one_size(self) -> Self:
        """The same study with a single size in [compare]: the base shape, over the transfer check's tokens."""
        n_tokens = round(self.transfer.n_tokens * max(self.transfer.shared_horizons))
        stem = Stem(width=self.model.d_model, n_tokens=n_tokens, branches=1)
        return self.model_copy(update={"compare": self.compare.model_copy(update={"stems": (stem,)})})

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the study: its corpus, or the name of the data that a trainer reads itself, its base and its parametrization."""
        values = self.to_dict()
        data = {"trainer.data": self.trainer.data} if self.trainer else self.corpus.identity()
        model = {f"model.{name}": value for name, value in values["model"].items()}
        rules = {name: values[name] for name in ("parametrization", "depth_exponent", "decay_scaling")}
        weights = {"initial_weights": self.initial_weights} if self.initial_weights else {}
        return {**data, **model, **rules, **weights}

    @property
    def can_generate(self) -> bool:
        """Whether `muscale generate` can build the study's models; a custom family would run code that a bundle names."""
        return not self.model.is_custom

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches, in tokens, that the sweep may try: those of its space, else the study's."""
        match self.sweep.space.get("batch_tokens"):
            case Choice(values=values) | Ordinal(values=values):
                return tuple(value for value in values if isinstance(value, int))
            case Fixed(value=int(value)):
                return (value,)
        return (self.hyperparameters.batch_tokens,)

    @property
    def largest_batch(self) -> int:
        """The largest of `batches`; the sweep's rungs are multiples of it."""
        return max(self.batches)

    def rung_tokens(self) -> tuple[int, ...]:
        """Tokens at each rung: of the run before cooldown if the schedule has one, else of the whole run; the last rung is its end.

        Rungs of a population are a generation apart, other rungs a constant factor.
        """
        sweep = self.sweep
        h = dataclasses.replace(self.hyperparameters, batch_tokens=self.largest_batch)
        last = h.whole_batches(sweep.n_tokens)
        if (sweep.schedule or h.schedule) in COOLING:
            last = h.stable_tokens(last)
        if sweep.is_population:
            return tuple(h.whole_batches(last * (k + 1) / sweep.rungs) for k in range(sweep.rungs))
        return tuple(h.whole_batches(last / sweep.reduction_factor**k) for k in reversed(range(sweep.rungs)))

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values, with defaults filled in."""
        plain = {name: _plain(getattr(self, name)) for name in type(self).model_fields}
        plain["sweep"]["space"] = self.sweep.space.to_dict()
        if not self.sweep.tune:
            del plain["sweep"]["tune"]  # so that sweeps without it keep their recorded form
        for optional in ("trainer", "scores", "use_case", "initial_weights"):
            if plain[optional] is None:
                del plain[optional]  # so that studies without it keep their recorded form
        return plain

    def shared_numerics(self, corpus: Corpus, directory: Path) -> Numerics:
        """The numerics that all trainings share, at the base shape.

        Args:
            directory: The study's directory, with the stored weights if trainings start from given weights.

        Raises:
            StageError: If the corpus holds out too little, or weights are not stored yet.
        """
        wanted = self.corpus.evaluation_tokens
        for name, files in corpus.sources.items():
            if wanted // len(corpus.sources) > files.n_validation_tokens - self.model.context_length:
                of = f" of {name}" if corpus.mixture else ""
                shared = f", shared by {len(corpus.sources)} sources" if corpus.mixture else ""
                raise StageError(
                    f"corpus.evaluation_tokens: the held-out split{of} has only {files.n_validation_tokens} tokens, "
                    f"got {wanted}{shared}"
                )
        if not corpus.all_count:
            from proxy_models.data.batches import evaluation_sets  # slow to import: torch

            with refusing("corpus.evaluation_tokens"):
                evaluation_sets(corpus, self.model.context_length, wanted)
        weights = key_of_weights(directory / INITIAL_WEIGHTS) if self.initial_weights else None
        if self.initial_weights and weights is None:
            raise StageError(
                "initial_weights: not stored in the study's directory yet; a command that trains stores them"
            )
        return Numerics(
            model=self.model,
            base=self.model,
            corpus_key=corpus.key,
            seed=self.sweep.seed,
            evaluation_tokens=wanted,
            scheme=self.parametrization,
            depth_exponent=self.depth_exponent,
            decay_scaling=self.decay_scaling,
            precision=self.precision,
            stages_by_fraction=corpus.stages_by_fraction,
            initial_weights=weights,
        )


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Member | Hyperparameters):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
