"""The tables of a study file; `muscale.settings.config` reads one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BaseModel, Field, PositiveInt, PrivateAttr

from muscale.errors import StageError
from muscale.settings.compare import CompareSettings, VariantSettings
from muscale.settings.corpus import CorpusSettings
from muscale.settings.own_model import OwnModel
from muscale.settings.plan import PlanSettings, Stem
from muscale.settings.promote import PromoteSettings
from muscale.settings.strict import PositiveOrInfinite, StrictTable, require_whole_or_fraction
from muscale.settings.sweep import SweepSettings
from muscale.settings.trainer import TrainerSettings
from muscale.settings.transfer import TransferSettings
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import DecayScaling, Scheme
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import COOLING
from proxy_models.training.compilation import Compile
from proxy_models.training.numerics import Numerics
from search_spaces import Choice, Fixed, Ordinal


class CheckSettings(StrictTable):
    """[check]: the coordinate check."""

    widths: tuple[PositiveInt, ...] = (32, 64, 128, 256)
    depths: tuple[PositiveInt, ...] = ()  # such as [1, 2, 4, 8]; none: the check is of widths only
    seeds: tuple[int, ...] = (0, 1)


class LadderSettings(StrictTable):
    """[ladder]: the runs that the law is fitted from."""

    stems: tuple[Stem, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)  # of weights and data order; every stem is run with each


class FitSettings(StrictTable):
    """[fit]: the law."""

    # predicted relative difference from the policy's loss; rows beyond it stay out; inf: none does
    max_regret: PositiveOrInfinite = 0.0025
    n_bootstrap: PositiveInt = 1000
    seed: int = 0


class ResourceSettings(StrictTable):
    """[resources]: what searches may use at once."""

    workers: PositiveInt = 2  # trainings at a time
    # that each training is sharded over by FSDP2; of the next two each rank has as many
    ranks_per_trial: PositiveInt = 1
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0  # of Ray's; 0.5 puts two trainings on one
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0  # 0.25 puts four trainings on one
    stall_minutes: PositiveOrInfinite = 30.0  # without a step, after which a training's process is ended; inf: never
    # torch.compile costs 7 to 21 s a shape and worker; "auto" where a segment is long enough to repay it
    compile: Compile = False

    @pydantic.model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_whole_or_fraction("resources", self, ("cpus_per_worker", "gpus_per_worker"))
        if self.ranks_per_trial > 1 and self.gpus_per_worker not in (0, 1):
            raise ValueError(
                f"resources.gpus_per_worker must be 0 or 1 with ranks_per_trial = {self.ranks_per_trial}, a device for each rank, "
                f"got {self.gpus_per_worker:g}"
            )
        return self

    @property
    def threads(self) -> int:
        """Threads of a worker that trains on the CPU, at least 1."""
        return max(1, int(self.cpus_per_worker))

    @property
    def device_share(self) -> float:
        """Share of a device's memory that is a worker's."""
        return min(1.0, self.gpus_per_worker or 1.0)

    @property
    def worker(self) -> dict[str, float]:
        """Ray's resources of one worker."""
        return {"CPU": self.cpus_per_worker} | ({"GPU": self.gpus_per_worker} if self.gpus_per_worker else {})

    @property
    def full_run_worker(self) -> dict[str, float]:
        """Ray's resources of one worker of the full run, which shares no GPU."""
        return self.worker | ({"GPU": 1.0} if self.gpus_per_worker else {})

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device of a worker: a GPU or its fraction of one if it has one, else the CPU."""
        return "cuda" if self.gpus_per_worker else "cpu"


class NumericsSettings(StrictTable):
    """[numerics]: what every training of the study computes in."""

    precision: Precision | Literal["auto"] = "auto"  # bf16 where resources.gpus_per_worker gives GPUs, fp32 on CPUs


class StorageSettings(StrictTable):
    """[storage]: where the ledger lies. PostgreSQL's URL is a secret and comes from MUSCALE_LEDGER_URL alone."""

    ledger: Literal["sqlite", "actor", "postgresql"] = "sqlite"
    path: str | None = None  # of "actor": an SQLite file on a local disk of the machine that begins the study

    @pydantic.model_validator(mode="after")
    def _path_fits(self) -> Self:
        if self.path is not None and self.ledger != "actor":
            raise ValueError(f'storage.path is for storage.ledger = "actor", got {self.path!r} with "{self.ledger}"')
        if self.path is not None and not Path(self.path).is_absolute():
            raise ValueError(f"storage.path must be absolute, as every node looks for it, got {self.path!r}")
        return self


class TrackingSettings(StrictTable):
    """[tracking]: not part of any key. API keys and addresses are secrets and come from the environment alone."""

    # online where Weights & Biases has a key, else offline; WANDB_MODE is obeyed
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    tensorboard: bool = False  # event files; needs muscale[tensorboard]
    mlflow: bool = False  # MLFLOW_TRACKING_URI, else an SQLite file; needs muscale[mlflow]
    project: str = Field(default="muscale", min_length=1)  # of Weights & Biases, and the experiment of MLflow
    entity: str | None = None  # of Weights & Biases; none: the key's own
    trials: bool = True  # a tracked run for each trial of the sweep
    points: PositiveInt = 1000  # of the full run's training curve: means over as many stretches of its tokens


class StudyTables(StrictTable):
    """All tables of a study file."""

    name: str = Field(min_length=1)
    parametrization: Scheme = "mup"
    depth_exponent: Annotated[float, Field(ge=0.5, le=1)] = 1.0  # CompleteP's alpha: branches shrink as depth^-alpha
    # or "sublayer_gain", AdamW's only: hidden decay grows as the root of width
    decay_scaling: DecayScaling = "timescale"
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
    resources: ResourceSettings = ResourceSettings()
    numerics: NumericsSettings = NumericsSettings()
    storage: StorageSettings = StorageSettings()
    tracking: TrackingSettings = TrackingSettings()
    _own_model: OwnModel | None = PrivateAttr(default=None)  # [model] as written, where its family was imported
    _variant_models: dict[str, Member] = PrivateAttr(default_factory=dict)  # of families and programs of their own

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
    def family(self) -> ModelFamily[Member]:
        """The models of this study; its base is what the sweep searches."""
        return ModelFamily(base=self.model)

    def variant_model(self, name: str) -> Member:
        """A variant's model at the base shape.

        Raises:
            StageError: It is of a family or a program of its own, and the study was read by what trains nothing.
        """
        if known := self._variant_models.get(name):
            return known
        if self.variants[name].is_own(self.model):
            raise StageError(
                f"variants.{name}: only what trains imports its family or runs its program; open the study with trains=True"
            )
        return self.variants[name].model_of(self.model)

    def at_one_size(self) -> Self:
        """The same study with the base shape, over the transfer check's tokens, as the only size of [compare]."""
        n_tokens = round(self.transfer.n_tokens * max(self.transfer.shared_horizons))
        stem = Stem(width=self.model.d_model, n_tokens=n_tokens, branches=1)
        return self.model_copy(update={"compare": self.compare.model_copy(update={"stems": (stem,)})})

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the study: its corpus, or the name of what a trainer reads itself, its base and its parametrization."""
        values = self.to_dict()
        data = {"trainer.data": self.trainer.data} if self.trainer else self.corpus.identity()
        model = {f"model.{name}": value for name, value in values["model"].items()}
        rules = {name: values[name] for name in ("parametrization", "depth_exponent", "decay_scaling")}
        return {**data, **model, **rules}

    @property
    def can_generate(self) -> bool:
        """Whether `muscale generate` builds its models: the decoder; of another family it would run code that a bundle names."""
        return isinstance(self.model, ModelConfig)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches in tokens that the sweep may try: those of its space, else the study's."""
        match self.sweep.space.get("batch_tokens"):
            case Choice(values=values) | Ordinal(values=values):
                return tuple(value for value in values if isinstance(value, int))
            case Fixed(value=int(value)):
                return (value,)
        return (self.hyperparameters.batch_tokens,)

    @property
    def largest_batch(self) -> int:
        """The largest of `batches`, of which a sweep's rungs are multiples."""
        return max(self.batches)

    def rung_tokens(self) -> tuple[int, ...]:
        """Tokens at each rung: of the stem under a schedule with a cooldown, else of the run; the last one is its end.

        Under a population they are a generation apart, else a factor.
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
        """Every setting as plain JSON values, defaults filled in."""
        plain = {name: _plain(getattr(self, name)) for name in type(self).model_fields}
        plain["sweep"]["space"] = self.sweep.space.to_dict()
        if self.trainer is None:
            del plain["trainer"]  # as studies without one were recorded
        return plain

    def shared_numerics(self, corpus: Corpus) -> Numerics:
        """The numerics that all trainings of the study share, at the base shape.

        Raises:
            StageError: If the corpus holds out too little for the evaluations.
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
        )


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Member | Hyperparameters):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
