"""Readers of what lies beside data: manifests, records of checkpoints and runs, the place of a ledger, bundles."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fuzz.target import Target, passes


class TokenManifest(Target):
    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from proxy_models.data.corpus import write_corpus

        text = folder.with_name(f"{folder.name}-text")
        text.write_text("some text to be held " * 200)
        self.corpus = folder / "corpus"
        write_corpus(self.corpus, str(text))
        self.seeds = [(self.corpus / "manifest.json").read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from proxy_models.data.corpus import CorpusError

        return (CorpusError,)

    def place(self, data: bytes) -> Path:
        (self.corpus / "manifest.json").write_bytes(data)
        return self.corpus

    def read(self, path: Path) -> object:
        from proxy_models.data.corpus import Corpus

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

        from muscale.full_runs.checkpoints.stored_weights import alone

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
        from muscale.full_runs.checkpoints.stored_weights import RecordReader, read_weights

        RecordReader(path).names()
        read_weights(path, self.weights)
        return None


class CheckpointManifest(Target):
    """What says whether a checkpoint is whole."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.full_runs.checkpoints.folder import MANIFEST, PARAMETRIZATION
        from proxy_models.hashing import file_sha256

        self.checkpoint = folder / "tokens=8"
        self.checkpoint.mkdir()
        hashes = {}
        for name in (".metadata", PARAMETRIZATION, "__0_0.distcp"):
            (self.checkpoint / name).write_text(name)
            hashes[name] = file_sha256(self.checkpoint / name)
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
        from muscale.full_runs.checkpoints.folder import require_whole, seal_of

        assert (seal_of(path) is None) != passes(lambda: require_whole(path), self.refusals)
        require_whole(path)
        return None


class CheckpointTable(Target):
    """The parametrization beside a checkpoint's shards."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from proxy_models.architecture.config import ModelConfig
        from proxy_models.architecture.parametrization import parametrize

        model, base = (ModelConfig(d_model=width, n_layers=1) for width in (32, 16))
        self.table = parametrize(model, base)
        self.seeds = [json.dumps(self.table.to_dict(), indent=1).encode()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError, ValueError)

    def read(self, path: Path) -> object:
        from muscale.full_runs.checkpoints.save import _table

        self.table.require(_table(path))
        return None


class RunRecord(Target):
    """What a run's checkpoints are of, beside a checkpoint that is whole."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch.distributed.checkpoint.state_dict_saver import save

        from muscale.full_runs.checkpoints.run_description import RunDescription
        from muscale.full_runs.checkpoints.stored_weights import alone
        from muscale.layout import RUN
        from proxy_models.architecture.config import ModelConfig
        from proxy_models.architecture.decoder import Decoder
        from proxy_models.architecture.parametrization import ForwardMultipliers
        from proxy_models.training.numerics import Numerics

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
        from muscale.full_runs.checkpoints.evaluate import _decoder
        from muscale.full_runs.checkpoints.run_description import RunDescription

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
