"""The study file: a tree of settings, read strictly.

Every message names the file, the key, the rule and the value. Nothing is written before a file is valid as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args, get_type_hints

import pydantic
from pydantic import BaseModel, Field, PositiveInt

from muscale.errors import StageError, StudyFileError
from muscale.formatting import format_read_error
from muscale.layout import STUDY_FILE
from muscale.settings.ablation import AblateSettings
from muscale.settings.corpus import CorpusSettings
from muscale.settings.cross_field_rules import cross_field_errors
from muscale.settings.plan import PlanSettings
from muscale.settings.promote import PromoteSettings
from muscale.settings.shape import Shape
from muscale.settings.strict import (
    FAULTY,
    PositiveOrInfinite,
    format_errors,
    lists_to_tuples,
    require_whole_or_fraction,
)
from muscale.settings.strict import StrictTable as _Table
from muscale.settings.sweep import SweepSettings
from muscale.settings.toml_file import inline, parse_toml, read_toml
from muscale.settings.tracking import TrackingSettings
from muscale.settings.transfer import TransferSettings
from proxy_models.architecture.config import ModelConfig, ModelFamily
from proxy_models.architecture.parametrization import DecayScaling, Scheme
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import COOLING
from proxy_models.training.compilation import Compile
from proxy_models.training.numerics import Numerics
from search_spaces import Choice, Fixed, Ordinal, Space, SpaceError, ready_made

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings that replace those of a study file."""


class CheckSettings(_Table):
    """[check]: the coordinate check."""

    widths: tuple[PositiveInt, ...] = (32, 64, 128, 256)
    depths: tuple[PositiveInt, ...] = ()  # such as [1, 2, 4, 8]; none: the check is of widths only
    seeds: tuple[int, ...] = (0, 1)


class Stem(Shape):
    """One of [[ladder.stems]]: a run of `n_tokens` at a shape; with branches, also annealed at n_tokens / √2, / 2, …."""

    n_tokens: PositiveInt
    branches: Annotated[int, Field(gt=0, le=100)] = 2


class LadderSettings(_Table):
    """[ladder]: the runs that the law is fitted from."""

    stems: tuple[Stem, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)  # of weights and data order; every stem is run with each


class FitSettings(_Table):
    """[fit]: the law."""

    # predicted relative difference from the policy's loss; rows beyond it stay out; inf: none does
    max_regret: PositiveOrInfinite = 0.0025
    n_bootstrap: PositiveInt = 1000
    seed: int = 0


class ResourceSettings(_Table):
    """[resources]: what searches may use at once."""

    workers: PositiveInt = 2  # trainings at a time
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0  # of Ray's; 0.5 puts two trainings on one
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0  # 0.25 puts four trainings on one
    stall_minutes: PositiveOrInfinite = 30.0  # without a step, after which a training's process is ended; inf: never
    compile: Compile = (
        False  # torch.compile costs 7 to 21 s a shape and worker; "auto" where a segment is long enough to repay it
    )

    @pydantic.model_validator(mode="after")
    def _parts_fit(self) -> Self:
        require_whole_or_fraction("resources", self, ("cpus_per_worker", "gpus_per_worker"))
        return self

    @property
    def threads(self) -> int:
        """Of a worker that trains on the CPU: one at least."""
        return max(1, int(self.cpus_per_worker))

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What a worker trains on: the GPU that it was given, or its part of one; else the CPU."""
        return "cuda" if self.gpus_per_worker else "cpu"


class StorageSettings(_Table):
    """[storage]: where the ledger lies; the URL of PostgreSQL is a secret, and comes from MUSCALE_LEDGER_URL alone."""

    ledger: Literal["sqlite", "actor", "postgresql"] = "sqlite"
    path: str | None = None  # of "actor": an SQLite file on a local disk of the machine that begins the study

    @pydantic.model_validator(mode="after")
    def _path_fits(self) -> Self:
        if self.path is not None and self.ledger != "actor":
            raise ValueError(f'storage.path is for storage.ledger = "actor", got {self.path!r} with "{self.ledger}"')
        if self.path is not None and not Path(self.path).is_absolute():
            raise ValueError(f"storage.path must be absolute, as every node looks for it, got {self.path!r}")
        return self


class StudyConfig(_Table):
    """A whole study file."""

    name: str = Field(min_length=1)
    parametrization: Scheme = "mup"
    depth_exponent: Annotated[float, Field(ge=0.5, le=1)] = 1.0  # CompleteP's alpha: branches shrink as depth^-alpha
    decay_scaling: DecayScaling = (
        "timescale"  # or "sublayer_gain", AdamW's only: hidden decay grows as the root of width
    )
    corpus: CorpusSettings = CorpusSettings()
    model: ModelConfig
    hyperparameters: Hyperparameters
    check: CheckSettings = CheckSettings()
    sweep: SweepSettings
    transfer: TransferSettings
    ladder: LadderSettings
    fit: FitSettings = FitSettings()
    plan: PlanSettings
    promote: PromoteSettings = PromoteSettings()
    ablate: AblateSettings = AblateSettings()
    resources: ResourceSettings = ResourceSettings()
    storage: StorageSettings = StorageSettings()
    tracking: TrackingSettings = TrackingSettings()

    @property
    def family(self) -> ModelFamily:
        """The models of this study; its base is what the sweep searches."""
        return ModelFamily(base=self.model)

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
        return plain

    @classmethod
    def read(cls, path: Path, overrides: Overrides = ()) -> Self:
        """Read a study file.

        Args:
            path: The file.
            overrides: Each replaces one key: `table.key=value` with a TOML value, or a mapping of `table.key` to a value as
                TOML would hold it; `sweep.space` may be a `Space`.

        Raises:
            StudyFileError: Naming the file, the key, the rule and the value, for each thing that is wrong.
        """
        try:
            values = read_toml(path)
        except FileNotFoundError as error:
            raise StudyFileError(f"{path}: no such file; `muscale init {path.parent}` writes one to edit") from error
        except IsADirectoryError as error:
            raise StudyFileError(f"{path}: is a directory; give the study file in it, {path / STUDY_FILE}") from error
        except OSError as error:
            raise StudyFileError(f"{path}: {format_read_error(error)}") from error
        except ValueError as error:
            raise StudyFileError(f"{path}: {error}") from error
        if {"run", "forecast"} <= values.keys():
            raise StudyFileError(f"{path}: is a plan's file; give the file of the study that the plan was made in")
        for key, value in overrides.items() if isinstance(overrides, Mapping) else map(_parsed, overrides):
            _override(values, key, value)
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """The configuration of a table as TOML holds it.

        Raises:
            StudyFileError: Naming `where`, the key, the rule and the value, for each thing that is wrong.
        """
        tables = lists_to_tuples(values)
        problems: list[str] = []
        for key, build in (("model", ModelConfig), ("hyperparameters", Hyperparameters)):
            if isinstance(table := tables.get(key), dict):
                tables[key] = _build(build, table, f"{where}: {key}", problems)
        if isinstance(sweep := tables.get("sweep"), dict) and "space" in sweep:
            try:
                sweep["space"] = _space(values["sweep"]["space"], f"{where}: sweep.space")
            except SpaceError as error:
                problems.append(str(error))
                del sweep["space"]
        try:
            config = cls(**tables)
        except pydantic.ValidationError as error:
            raise StudyFileError("\n".join([*problems, *format_errors(error, where, cls)])) from error
        problems += [f"{where}: {problem}" for problem in cross_field_errors(config)]
        if problems:
            raise StudyFileError("\n".join(problems))
        return config

    def numerics(self, corpus: Corpus) -> Numerics:
        """What every training of the study shares, at the base shape.

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
            stages_by_fraction=corpus.stages_by_fraction,
        )


def _space(table: Any, where: str) -> Space:
    """The space of a table, or the ready-made one of a name, or one that is made already."""
    if isinstance(table, Space):
        return table
    if not isinstance(table, str):
        return Space.from_dict(table, where=where)
    try:
        return ready_made(table)
    except SpaceError as error:
        raise SpaceError(f"{where}: {error}") from error


def _build(build: type[Any], table: dict[str, Any], where: str, problems: list[str]) -> Any:
    """An instance of a library's dataclass from a table, with the same strictness as the rest of the file."""
    hints = get_type_hints(build)
    table, n_problems = dict(table), len(problems)
    for name, hint in hints.items():
        entry = next((kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)), None)
        if entry and isinstance(table.get(name), tuple):
            table[name] = tuple(
                _build(cast(type[Any], entry), value, f"{where}.{name}.{number}", problems)
                if isinstance(value, dict)
                else value
                for number, value in enumerate(table[name])
            )
    if len(problems) > n_problems:
        return FAULTY
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(build)
    }
    try:
        valid = pydantic.create_model(build.__name__, __base__=_Table, **fields)(**table)
        return build(
            **{name: getattr(valid, name) for name in fields}
        )  # 4 for a float is 4.0: equal settings, equal keys
    except pydantic.ValidationError as error:
        problems += format_errors(error, where, list(fields), separator=".")
    except ValueError as error:
        problems.append(f"{where}: {error}")
    return FAULTY


def as_set(overrides: Overrides) -> tuple[str, ...]:
    """The same settings, each as --set takes it."""
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    plain = {key: value.to_dict() if isinstance(value, Space) else value for key, value in overrides.items()}
    return tuple(f"{key}={_as_toml(value)}" for key, value in plain.items())


def _as_toml(value: Any) -> str:
    try:
        return inline(value).as_string()
    except (TypeError, ValueError):  # None, say, for which TOML has no word
        return str(value)


def _parsed(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator:
        raise StudyFileError(f"--set {override}: write table.key=value")
    try:
        return key.strip(), parse_toml(f"value = {text}")["value"]
    except ValueError:
        return key.strip(), text  # a bare word is a string, so that --set sweep.searcher=random needs no quotes


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    table = values
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise StudyFileError(f"--set {key}={value}: {part} is a value, not a table")
    table[name] = value


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, ModelConfig | Hyperparameters):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
