"""What reads files that people give: each takes any bytes and ends in a value, or in an error of the kinds that it documents.

A target writes the bytes under a folder of its own. Whatever else it raises, how long it takes, an empty message, and a file
that it leaves behind are findings.
"""

from __future__ import annotations

import io
import json
import tomllib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd


class Target(ABC):
    """A reader of files."""

    suffix: ClassVar[str]

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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from importlib import resources

        from tests.muscale.conftest import MICRO

        self.seeds = [MICRO.encode(), (resources.files("muscale") / "quickstart.toml").read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StudyFileError

        return (StudyFileError,)

    def read(self, path: Path) -> object:
        from muscale import StudyConfig

        config = StudyConfig.read(path)
        return config.to_dict(), config.rung_tokens()


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


def _passes(call: object, refusals: tuple[type[Exception], ...]) -> bool:
    try:
        call()  # type: ignore[operator]
    except refusals:
        return False
    return True


TARGETS: dict[str, type[Target]] = {
    "study": StudyFile,
    "plan": PlanFile,
    "space": SpaceTable,
    "csv": CsvLadder,
    "jsonl": JsonLadder,
    "parquet": ParquetLadder,
    "tokens": TokenManifest,
    "record": CheckpointRecord,
    "checkpoint": CheckpointManifest,
    "bundle": BundleManifest,
    "wandb": WandbSweep,
    "observe": ObservedLosses,
}
