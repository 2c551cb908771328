"""What reads files that people give: each takes any bytes and ends in a value, or in an error of the kinds that it documents.

A target writes the bytes under a folder of its own. Whatever else it raises, how long it takes, an empty message, and a file
that it leaves behind are findings.
"""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import tomllib
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from search_spaces import Space


class Target(ABC):
    """A reader of files."""

    suffix: ClassVar[str]
    few: ClassVar[int] = 40
    """Readings of the tests that run every time: fewer where one takes a tenth of a second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds: list[bytes] = []

    @property
    @abstractmethod
    def refusals(self) -> tuple[type[Exception], ...]:
        """What it documents."""

    @abstractmethod
    def read(self, path: Path) -> object:
        """Read a file, and use what was read as the command would."""

    def place(self, data: bytes) -> Path:
        """Where the bytes lie."""
        path = self.folder / f"given{self.suffix}"
        path.write_bytes(data)
        return path

    def __call__(self, data: bytes) -> str:
        """Read the bytes; returns the refusal, or nothing."""
        path = self.place(data)
        before = self._standing()
        try:
            self.read(path)
        except self.refusals as error:
            told = str(error)
            if not told.strip():
                raise AssertionError(f"a refusal that says nothing: {error!r}") from error
            if len(told) > 50_000:
                raise AssertionError(f"a refusal of {len(told):,} characters") from error
            if self._standing() != before:
                raise AssertionError(f"left behind: {self._standing() ^ before}") from error
            return told
        return ""

    def _standing(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*")}


class StudyFile(Target):
    suffix = ".toml"
    ramped = (
        "hyperparameters.schedule='step'",
        "hyperparameters.batch_doublings=1",
        "hyperparameters.batch_ramp_tokens=1024",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from importlib import resources

        from tests.muscale.conftest import MICRO

        self.seeds = [MICRO.encode(), (resources.files("muscale") / "quickstart.toml").read_bytes()]
        self.seeds += [self.whole(folder, *settings) for settings in ((), self.ramped)]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StudyFileError

        return (StudyFileError,)

    def read(self, path: Path) -> object:
        from muscale import StudyConfig

        config = StudyConfig.read(path)
        return config.to_dict(), config.rung_tokens()

    @staticmethod
    def whole(folder: Path, *settings: str) -> bytes:
        """Every key that there is, so that none stays as it is."""
        import tomlkit

        from muscale import StudyConfig
        from tests.muscale.conftest import MICRO

        path = folder.with_name(f"{folder.name}-whole.toml")
        path.write_text(MICRO)
        values = StudyConfig.read(path, settings).to_dict()
        del values["corpus"]["sources"], values["corpus"]["stages"]
        return tomlkit.dumps(_without_none(values)).encode()


class StageOfAStudy(Target):
    """A stage file, planned against a study with a run that was promoted."""

    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale import StudyConfig
        from muscale.full_runs.checkpoint_folder import CHECKPOINTS
        from muscale.layout import CORPUS, FULL_RUNS
        from muscale.store.ledger import Ledger
        from proxy_models.corpus import write_corpus
        from tests.muscale.conftest import MICRO
        from tests.muscale.planted_ladder import numerics_of, registered_plan

        study = folder.with_name(f"{folder.name}-study")
        study.mkdir()
        path = study / "study.toml"
        path.write_text(MICRO)
        (study / "text").write_text("some text to be held " * 2000)
        shutil.copy(study / "text", folder / "text")
        self.corpus = write_corpus(study / CORPUS, str(study / "text"))
        self.ledger, self.config = Ledger(study / "ledger.sqlite"), StudyConfig.read(path)
        plan = registered_plan(path, self.ledger)
        self.ledger.record_result("promotion", plan.key, {"plan": plan.key})
        self.numerics = numerics_of(self.config)
        (study / FULL_RUNS / plan.key / CHECKPOINTS / f"tokens={plan.n_tokens}").mkdir(parents=True)
        alone = (
            f'name = "more"\nn_tokens = 4096\nlearning_rate_factor = 0.5\nrewarm_tokens = 512\nschedule = "wsd"\n'
            f'cooldown_fraction = 0.2\n[parent]\nrun = "{plan.key}"\ntokens = {plan.n_tokens}\n'
        )
        swapped = (
            'name = "cosine"\nn_tokens = 8192\nlearning_rate = 0.001\nrewarm_tokens = 512\nschedule = "cosine"\n'
            'final_fraction = 0.1\noptimizer = "lion"\nseed = 3\n'
            '[corpus]\nsource = "text"\nvalidation_fraction = 0.2\nevaluation_tokens = 1024\n'
        )
        self.seeds = [alone.encode(), swapped.encode()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError, StudyFileError

        return (StageError, StudyFileError)

    def read(self, path: Path) -> object:
        from muscale.full_runs.continuation import plan_stage

        planned = plan_stage(
            path, self.config, self.ledger, self.corpus, lambda plan: plan.chain(self.numerics), lambda *_: None
        )
        return str(planned), planned.key, json.dumps(planned.to_dict())


class PreparedRun(Target):
    """What `muscale promote --prepare` wrote."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale import StudyConfig
        from muscale.full_runs.prepared import prepare
        from muscale.store.ledger import Ledger
        from tests.muscale.conftest import MICRO
        from tests.muscale.planted_ladder import numerics_of, registered_plan

        study = folder.with_name(f"{folder.name}-study")
        study.mkdir()
        path = study / "study.toml"
        path.write_text(MICRO)
        ledger, config = Ledger(study / "ledger.sqlite"), StudyConfig.read(path)
        plan = registered_plan(path, ledger)
        ledger.close()
        self.seeds = [Path(prepare(plan, config, numerics_of(config), folder).path).read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError, StudyFileError

        return (StageError, StudyFileError)

    def read(self, path: Path) -> object:
        from muscale.full_runs.full_run_spec import FullRun
        from muscale.full_runs.prepared import read

        run = FullRun(**read(path))
        return run.n_tokens, run.n_steps(run.n_tokens), run.numerics.key


class OptunaStorage(Target):
    """An SQLite file of Optuna's, its bytes made wrong."""

    suffix = ".db"
    few = 10

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder.with_name(f"{folder.name}-theirs.db")
        self.space = write_optuna_study(self.file)
        self.seeds = [small(self.file)]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.outside.import_space import import_space
        from muscale.outside.results import outside_results

        found = import_space(str(path))
        results = outside_results(path, self.space, n_params=1000, n_tokens=1000)
        return str(found).encode(), json.dumps(found.to_dict()), len(results)


class OptunaRows(OptunaStorage):
    """The same, its rows and tables made wrong, as SQLite keeps them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [script(self.file)]

    def place(self, data: bytes) -> Path:
        return rebuilt(self.folder / f"given{self.suffix}", data)


class MergedLedger(Target):
    """The ledger of somebody else, its bytes made wrong; ours stays as it is when it is refused."""

    suffix = ".sqlite"
    few = 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file, self.empty = (folder.with_name(f"{folder.name}-{name}.sqlite") for name in ("theirs", "empty"))
        write_ledgers(self.file, self.empty)
        self.ours = folder.with_name(f"{folder.name}-ours")
        self.ours.mkdir()
        self.seeds = [small(self.file)]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StudyDirectoryError

        return (StudyDirectoryError,)

    def __call__(self, data: bytes) -> str:
        for name in ("", "-wal", "-shm"):
            (self.ours / f"ledger.sqlite{name}").unlink(missing_ok=True)
        shutil.copy(self.empty, self.ours / "ledger.sqlite")
        return super().__call__(data)

    def read(self, path: Path) -> object:
        from muscale.search.lessons import runs_of
        from muscale.store.ledger import Ledger
        from muscale.store.merge import merge
        from muscale.watching.calibration import calibrate

        ledger = Ledger(self.ours / "ledger.sqlite")
        try:
            told = [str(runs_of(path)), str(calibrate(ledger, [path]))]
            found = merge(ledger, path)
            ledger.record_result("after", "a merge", {})
            told += [str(found), json.dumps(found.to_dict()), str(ledger.runs()), str(merge(ledger, path))]
            return "".join(told).encode()
        finally:
            ledger.close()

    def _standing(self) -> set[str]:
        with closing(sqlite3.connect(self.ours / "ledger.sqlite")) as connection:
            return super()._standing() | set(connection.iterdump())


class MergedRows(MergedLedger):
    """The same, its rows and tables made wrong, as SQLite keeps them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [script(self.file)]

    def place(self, data: bytes) -> Path:
        return rebuilt(self.folder / f"given{self.suffix}", data)


class PlanFile(Target):
    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale import StudyConfig
        from muscale.plans.plan_file import path_of, write
        from muscale.store.ledger import Ledger
        from tests.muscale.conftest import MICRO
        from tests.muscale.planted_ladder import registered_plan

        study = folder.with_name(f"{folder.name}-study")
        study.mkdir()
        path = study / "study.toml"
        path.write_text(MICRO)
        self.ledger, self.config = Ledger(study / "ledger.sqlite"), StudyConfig.read(path)
        plan = registered_plan(path, self.ledger)
        write(plan, self.config, self.ledger)
        self.seeds = [path_of(study, plan.key).read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.plans.plan_file import read

        return read(path, self.ledger, self.config)


class SpaceTable(Target):
    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            b'a = { distribution = "log_uniform", low = 0.004, high = 0.03, prior = { centre = 0.01, spread = 1.0 } }\n'
            b'b = { distribution = "integer", low = 1, high = 64, log = true }\n'
            b'c = { distribution = "choice", values = ["x", "y", 3], when = { b = { low = 2 } } }\n'
            b'd = { distribution = "ordinal", values = [1, 2, 4] }\n'
            b'e = { distribution = "simplex", parts = ["p", "q"] }\n'
            b'f = { distribution = "fixed", value = 0.5 }\n'
            b'constraints = { k = { less = ["a", "b"] }, m = { sum_at_most = { names = ["a", "b"], bound = 9.0 } } }\n'
        ]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from search_spaces import SpaceError

        return (SpaceError,)

    def read(self, path: Path) -> object:
        from search_spaces import Space

        try:
            table = tomllib.loads(path.read_text())
        except (ValueError, RecursionError):
            return None  # the study file's reader tells it
        space = Space.from_dict(table, where=str(path))
        again = Space.from_dict(json.loads(json.dumps(space.to_dict())))
        return str(space), again.encode(again.sample(1, seed=0)[0])


class Ladder(Target):
    """A table of runs; `suffix` says in which form."""

    refusing: ClassVar[tuple[type[Exception], ...]]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.outside.rows_fit import fit_rows

        return str(fit_rows(path, n_params_convention="total", compute_flops=1e21))

    @staticmethod
    def table() -> pd.DataFrame:
        n_params = np.repeat([1e7, 3e7, 1e8, 3e8], 3)
        n_tokens = np.tile([2e8, 6e8, 2e9], 4)
        loss = 1.7 + 400 / n_params**0.34 + 410 / n_tokens**0.28
        plain = pd.DataFrame({"n_params": n_params.astype(int), "n_tokens": n_tokens.astype(int), "loss": loss})
        return plain.assign(stem=[f"r{k // 3}" for k in range(12)], annealed=True, left_out="", regret=0.0)


class CsvLadder(Ladder):
    suffix = ".csv"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [self.table().to_csv(index=False).encode()]


class JsonLadder(Ladder):
    suffix = ".jsonl"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [self.table().to_json(orient="records", lines=True).encode()]


class ParquetLadder(Ladder):
    suffix = ".parquet"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        written = io.BytesIO()
        self.table().to_parquet(written, index=False, compression=None)
        self.seeds = [written.getvalue()]


class TokenManifest(Target):
    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from proxy_models.corpus import write_corpus

        text = folder.with_name(f"{folder.name}-text")
        text.write_text("some text to be held " * 200)
        self.corpus = folder / "corpus"
        write_corpus(self.corpus, str(text))
        self.seeds = [(self.corpus / "manifest.json").read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from proxy_models.corpus import CorpusError

        return (CorpusError,)

    def place(self, data: bytes) -> Path:
        (self.corpus / "manifest.json").write_bytes(data)
        return self.corpus

    def read(self, path: Path) -> object:
        from proxy_models.corpus import Corpus

        found = Corpus.open(path)
        told = str(found), found.key, found.n_tokens, found.epochs(1000), found.bytes_per_token
        return told, found.sources


class CheckpointRecord(Target):
    """The pickled record of a checkpoint's shards, whose hashes its author made hold."""

    suffix = ".metadata"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torch
        from torch.distributed.checkpoint.state_dict_saver import save

        from muscale.full_runs.stored_weights import alone

        self.checkpoint = folder / "tokens=4"
        self.weights = {"a": torch.zeros(3, 2), "b": torch.zeros(5)}
        with alone():
            save({"model": self.weights, "rate": 0.5}, checkpoint_id=self.checkpoint)
        self.seeds = [(self.checkpoint / ".metadata").read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def place(self, data: bytes) -> Path:
        (self.checkpoint / ".metadata").write_bytes(data)
        return self.checkpoint

    def read(self, path: Path) -> object:
        from muscale.full_runs.stored_weights import RecordReader, read_weights

        RecordReader(path).names()
        read_weights(path, self.weights)
        return None


class CheckpointManifest(Target):
    """What says whether a checkpoint is whole."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.full_runs.checkpoint_folder import MANIFEST, PARAMETRIZATION, sha256

        self.checkpoint = folder / "tokens=8"
        self.checkpoint.mkdir()
        hashes = {}
        for name in (".metadata", PARAMETRIZATION, "__0_0.distcp"):
            (self.checkpoint / name).write_text(name)
            hashes[name] = sha256(self.checkpoint / name)
        self.manifest = self.checkpoint / MANIFEST
        self.seeds = [json.dumps(hashes, indent=1).encode()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def place(self, data: bytes) -> Path:
        self.manifest.write_bytes(data)
        return self.checkpoint

    def read(self, path: Path) -> object:
        from muscale.full_runs.checkpoint_folder import require_whole, seal_of

        assert (seal_of(path) is None) != _passes(lambda: require_whole(path), self.refusals)
        require_whole(path)
        return None


class CheckpointTable(Target):
    """The parametrization beside a checkpoint's shards."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from proxy_models.config import ModelConfig
        from proxy_models.parametrization import parametrize

        model, base = (ModelConfig(d_model=width, n_layers=1) for width in (32, 16))
        self.table = parametrize(model, base)
        self.seeds = [json.dumps(self.table.to_dict(), indent=1).encode()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError, ValueError)

    def read(self, path: Path) -> object:
        from muscale.full_runs.checkpoints import _table

        self.table.require(_table(path))
        return None


class RunRecord(Target):
    """What a run's checkpoints are of, beside a checkpoint that is whole."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch.distributed.checkpoint.state_dict_saver import save

        from muscale.full_runs.run_description import RunDescription
        from muscale.full_runs.stored_weights import alone
        from muscale.layout import RUN
        from proxy_models.config import ModelConfig
        from proxy_models.decoder import Decoder
        from proxy_models.numerics import Numerics
        from proxy_models.parametrization import ForwardMultipliers

        model = ModelConfig(d_model=16, n_layers=1, vocab_size=16, context_length=8)
        numerics = Numerics(model=model, base=model, corpus_key="planted", seed=0, evaluation_tokens=8)
        multipliers = ForwardMultipliers(embedding=1.0, readout=1.0, attention=0.25, branch=1.0)
        described = RunDescription(numerics=numerics, multipliers=multipliers, corpus=folder / "corpus", n_tokens=8)
        described.write(folder)
        self.checkpoint, self.file = folder / "checkpoints" / "tokens=8", folder / RUN
        with alone():
            save({"model": Decoder(model).state_dict()}, checkpoint_id=self.checkpoint)
        self.seeds = [self.file.read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def place(self, data: bytes) -> Path:
        self.file.write_bytes(data)
        return self.folder

    def read(self, path: Path) -> object:
        from muscale.full_runs.checkpoint_evaluation import _decoder
        from muscale.full_runs.run_description import RunDescription

        return _decoder(RunDescription.read(path), self.checkpoint)


class LedgerPlace(Target):
    """Where the ledger of a study's directory lies."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            json.dumps(place, indent=1).encode()
            for place in (
                {"ledger": "actor", "host": "node-7", "path": str(folder.with_name("none.sqlite"))},
                {"ledger": "postgresql", "schema": "study_micro_0a1b2c3d"},
            )
        ]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StudyDirectoryError

        return (StudyDirectoryError,)

    def place(self, data: bytes) -> Path:
        from muscale.layout import LEDGER_PLACE

        (self.folder / LEDGER_PLACE).write_bytes(data)
        return self.folder

    def read(self, path: Path) -> object:
        from sqlalchemy import make_url

        from muscale.store.ledger_actor import ActorStorage
        from muscale.store.open_ledger import read_place
        from muscale.store.postgresql import PostgresStorage

        place = read_place(path) or {}
        if place["ledger"] == "postgresql":
            return PostgresStorage(make_url("postgresql://me@127.0.0.1:9/none"), place["schema"], read_only=True).name
        return ActorStorage(place["host"], Path(place["path"])).name, Path(place["path"]).is_file()


class BundleManifest(Target):
    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.bundles.bundle_files import MANIFEST, write_manifest

        self.bundle = folder / "bundle"
        (self.bundle / "tokenizer").mkdir(parents=True)
        for name in ("README.md", "weights.safetensors", "tokenizer/tokenizer.json"):
            (self.bundle / name).write_text(name)
        write_manifest(self.bundle, {"plan": "p", "version": "1"})
        self.manifest = self.bundle / MANIFEST
        self.seeds = [self.manifest.read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale.errors import BundleError

        return (BundleError,)

    def place(self, data: bytes) -> Path:
        self.manifest.write_bytes(data)
        return self.bundle

    def read(self, path: Path) -> object:
        from muscale.bundles.bundle_files import verify

        found = verify(path)
        return str(found).encode(errors="strict"), json.dumps(found.to_dict())


class WandbSweep(Target):
    suffix = ".yaml"
    text = b"""method: bayes
metric: {name: loss, goal: minimize}
run_cap: 40
early_terminate: {type: hyperband, eta: 3, s: 2}
parameters:
  learning_rate: {distribution: log_uniform_values, min: 0.001, max: 0.1}
  init_scale: {values: [0.5, 1, 2]}
  batch_tokens: {distribution: q_uniform, min: 256, max: 4096, q: 256}
  weight_decay_tau: {distribution: log_normal, mu: -1.0, sigma: 0.5}
  optimizer: {value: adamw}
  nested: {parameters: {beta1: {min: 0.8, max: 0.99}}}
"""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [self.text]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.outside.import_space import import_space
        from search_spaces import Space

        found = import_space(str(path))
        pasted = tomllib.loads(str(found))
        assert Space.from_dict(pasted["sweep"]["space"]) == found.space
        return json.dumps(found.to_dict())


class ObservedLosses(Target):
    suffix = ".csv"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.store.ledger import Ledger
        from tests.muscale.conftest import MICRO
        from tests.muscale.planted_ladder import registered_plan

        self.study = folder.with_name(f"{folder.name}-study")
        self.study.mkdir()
        path = self.study / "study.toml"
        path.write_text(MICRO)
        self.ledger = Ledger(self.study / "ledger.sqlite")
        self.plan = registered_plan(path, self.ledger)
        tokens = [self.plan.n_tokens * k // 20 for k in range(1, 12)]
        rows = [f"{at},{3 - k / 20},{3.1 - k / 20}" for k, at in enumerate(tokens)]
        self.seeds = ["\n".join(["tokens,val_loss,train_loss", *rows, ""]).encode()]
        self.seeds.append(b"step,train_loss\n" + b"".join(b"%d,%f\n" % (k, 3 - k / 20) for k in range(20)))

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.watching.observe import Observer, read_csv

        for growing in (True, False):
            rows = read_csv(path, growing=growing)
        observer = Observer(self.ledger, self.plan, str(path))
        return observer._estimated(observer._records(rows))


def write_optuna_study(path: Path) -> Space:
    """A study of Optuna's with three trials, one of which failed; returns what is searched."""
    import optuna

    from search_spaces import Choice, LogUniform, Space

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(storage=f"sqlite:///{path}", study_name="theirs", sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning_rate", 0.004, 0.03, log=True)
        trial.suggest_float("share", 0.0, 1.0, step=0.25)
        trial.suggest_int("batch", 256, 1024, step=256)
        trial.suggest_categorical("norm", ["pre", "post"])
        if trial.number == 2:
            raise ArithmeticError("diverged")
        return 2.0 + abs(rate - 0.01)

    study.optimize(objective, n_trials=3, catch=ArithmeticError)
    study._storage.remove_session()
    return Space({"learning_rate": LogUniform(low=0.004, high=0.03), "norm": Choice(values=("pre", "post"))})


def write_ledgers(theirs: Path, empty: Path) -> None:
    """Two ledgers of one study: of each kind of row one or two, and one that knows nothing yet."""
    from muscale.store.ledger import Ledger
    from muscale.store.tables import forecasts
    from tests.muscale.store.test_merge import IDENTITY, add_run, add_sweep
    from tests.muscale.watching.test_calibration import RUN

    for path in (theirs, empty):
        ledger = Ledger(path)
        ledger.claim(IDENTITY, {})
        if path == theirs:
            add_run(ledger, 0, 2.0)
            add_run(ledger, 1, None)
            add_sweep(ledger, "a sweep", 2.0)
            payload = {"forecast": {"log_scale": 0.02}}
            ledger.insert(forecasts, plan=RUN.plan, loss=2.0, low=1.9, high=2.1, level=0.9, payload=payload)
            ledger.record_result("promotion", RUN.plan, RUN.to_dict())
        ledger.close()


def small(path: Path) -> bytes:
    """A database in small pages, so that most of its bytes say something."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
            connection.execute(statement)
    return path.read_bytes()


def script(path: Path) -> bytes:
    """The statements that make a database, a line each."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        statements = [" ".join(statement.split("\n")) for statement in connection.iterdump()]
    return "\n".join([f"PRAGMA user_version = {version};", *statements]).encode()


def rebuilt(path: Path, data: bytes) -> Path:
    """A database of those statements that SQLite takes."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for statement in data.decode(errors="replace").splitlines():
            try:
                connection.execute(statement)
            except (sqlite3.Error, sqlite3.Warning, ValueError):  # what can't be run can't come from anybody
                continue
        if connection.in_transaction:
            connection.execute("COMMIT")
    return path


def _without_none(values: Any) -> Any:
    """As TOML has no such thing."""
    if isinstance(values, dict):
        return {name: _without_none(value) for name, value in values.items() if value is not None}
    return [_without_none(value) for value in values] if isinstance(values, list | tuple) else values


def _passes(call: object, refusals: tuple[type[Exception], ...]) -> bool:
    try:
        call()  # type: ignore[operator]
    except refusals:
        return False
    return True


TARGETS: dict[str, type[Target]] = {
    "study": StudyFile,
    "stage": StageOfAStudy,
    "prepared": PreparedRun,
    "plan": PlanFile,
    "space": SpaceTable,
    "csv": CsvLadder,
    "jsonl": JsonLadder,
    "parquet": ParquetLadder,
    "tokens": TokenManifest,
    "record": CheckpointRecord,
    "checkpoint": CheckpointManifest,
    "table": CheckpointTable,
    "run": RunRecord,
    "place": LedgerPlace,
    "bundle": BundleManifest,
    "wandb": WandbSweep,
    "observe": ObservedLosses,
    "optuna": OptunaStorage,
    "optuna_rows": OptunaRows,
    "ledger": MergedLedger,
    "ledger_rows": MergedRows,
}
