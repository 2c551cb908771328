"""Readers of files that others give or edit: each takes any bytes, and ends in a value or in an error that it documents."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import tomlkit
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from muscale import Plan, StageError, StudyConfig, StudyDirectoryError, StudyFileError
from muscale.bundles.bundle_files import MANIFEST as BUNDLE_MANIFEST
from muscale.bundles.bundle_files import verify, write_manifest
from muscale.errors import BundleError
from muscale.full_runs.amend.plan_amendment import plan_continuation
from muscale.full_runs.checkpoints.evaluate import _model
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, MANIFEST, PARAMETRIZATION, manifest_hash, require_intact
from muscale.full_runs.checkpoints.run_description import RunDescription
from muscale.full_runs.checkpoints.stored_weights import RecordReader, alone, read_weights
from muscale.full_runs.promote import prepared
from muscale.importers.import_space import import_space
from muscale.importers.results import outside_results
from muscale.importers.runs_fit import fit_runs
from muscale.layout import CORPUS, FULL_RUNS, RUN
from muscale.monitoring.calibration import calibrate
from muscale.monitoring.external_run import ExternalRun
from muscale.monitoring.losses import LossSource
from muscale.plans import plan_file
from muscale.plans.plan import register
from muscale.search.prior_runs import runs_of
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.given_weights import NO_MULTIPLIERS, GivenWeightsError
from proxy_models.architecture.given_weights import read_weights as read_given_weights
from proxy_models.architecture.llama import write_llama
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import CorpusError
from proxy_models.hashing import file_sha256
from proxy_models.training.numerics import Numerics
from scaling import fit_mixture
from search_spaces import Choice, LogUniform, Space
from tests.muscale.conftest import MICRO
from tests.muscale.planted_ladder import PROMOTION, numerics_of, registered_plan
from tests.muscale.planted_ledger import IDENTITY, add_run, add_sweep


@dataclass
class Target:
    """A reader of one file.

    Attributes:
        file: Where the bytes lie.
        read: Reads the file, and uses what was read as the command would.
        refusals: The errors that the reader documents.
        seeds: Valid contents.
        place: Writes the bytes.
        readings: In the tests that run every time.
    """

    file: Path
    read: Callable[[], object]
    refusals: tuple[type[Exception], ...]
    seeds: list[bytes]
    place: Callable[[Path, bytes], object] = Path.write_bytes
    readings: int = 40

    def __call__(self, data: bytes) -> bool:
        """Whether the bytes were read; an error that is not documented, says nothing or leaves files behind is raised."""
        self.place(self.file, data)
        before = set(self.file.parent.rglob("*"))
        try:
            self.read()
        except self.refusals as error:
            message = str(error)
        else:
            return True
        assert message.strip(), "a refusal without a message"
        assert set(self.file.parent.rglob("*")) == before, "files were left behind"
        return False


def planned_study(folder: Path) -> tuple[Path, StudyConfig, Ledger, Plan]:
    """A study with a registered plan: its directory, settings, ledger and plan."""
    study = folder.with_name(f"{folder.name}-study")
    study.mkdir()
    path = study / "study.toml"
    path.write_text(MICRO)
    ledger = Ledger(study / "ledger.sqlite")
    return study, StudyConfig.read(path), ledger, registered_plan(path, ledger)


def study_file(folder: Path) -> Target:
    file = folder / "study.toml"
    seeds = [MICRO.encode(), (resources.files("muscale") / "quickstart.toml").read_bytes()]
    return Target(file, lambda: StudyConfig.read(file).to_dict(), (StudyFileError,), seeds)


def continuation_file(folder: Path) -> Target:
    """A continuation file, planned against a study with a promoted run."""
    study, config, ledger, plan = planned_study(folder)
    for place in (study, folder):
        (place / "text").write_text("some text to be held " * 2000)
    corpus = write_corpus(study / CORPUS, str(study / "text"))
    ledger.record_result(ResultKind.PROMOTION, plan.key, {"plan": plan.key})
    numerics = numerics_of(config)
    (study / FULL_RUNS / plan.key / CHECKPOINTS / f"tokens={plan.n_tokens}").mkdir(parents=True)
    seed = (
        'name = "cosine"\nn_tokens = 8192\nlearning_rate = 0.001\nrewarm_tokens = 512\nschedule = "cosine"\n'
        f'final_fraction = 0.1\noptimizer = "lion"\nseed = 3\n[parent]\nrun = "{plan.key}"\ntokens = {plan.n_tokens}\n'
        '[corpus]\nsource = "text"\nvalidation_fraction = 0.2\nevaluation_tokens = 1024\n'
    )
    file = folder / "continuation.toml"

    def read() -> object:
        planned = plan_continuation(file, config, ledger, corpus, numerics)
        return str(planned), json.dumps(planned.to_dict())

    return Target(file, read, (StageError, StudyFileError), [seed.encode()])


def plan_table(folder: Path) -> Target:
    study, config, ledger, plan = planned_study(folder)
    plan_file.write(plan, config, ledger.directory)
    file = folder / "plan.toml"
    seed = plan_file.path_of(study, plan.key).read_bytes()
    return Target(file, lambda: plan_file.read(file, ledger, config), (StageError,), [seed])


def prepared_run(folder: Path) -> Target:
    """The file that `muscale promote --prepare` writes."""
    _, config, ledger, plan = planned_study(folder)
    ledger.close()
    file = Path(prepared.prepare(plan, config, numerics_of(config), folder).path)
    return Target(file, lambda: prepared.read(file).numerics.key, (StageError, StudyFileError), [file.read_bytes()])


def wandb_sweep(folder: Path) -> Target:
    seed = b"""method: bayes
metric: {name: loss, goal: minimize}
run_cap: 40
early_terminate: {type: hyperband, eta: 3, s: 2}
parameters:
  learning_rate: {distribution: log_uniform_values, min: 0.001, max: 0.1}
  init_scale: {values: [0.5, 1, 2]}
  batch_tokens: {distribution: q_uniform, min: 256, max: 4096, q: 256}
  weight_decay_tau: {distribution: log_normal, mu: -1.0, sigma: 0.5}
  nested: {parameters: {beta1: {min: 0.8, max: 0.99}}}
"""
    file = folder / "sweep.yaml"

    def read() -> None:
        found = import_space(str(file))
        pasted = tomlkit.parse(str(found)).unwrap()
        assert Space.from_dict(pasted["sweep"]["space"]) == found.space

    return Target(file, read, (StageError,), [seed])


def ladder(folder: Path) -> Target:
    n_params, n_tokens = np.repeat([1e7, 3e7, 1e8, 3e8], 3), np.tile([2e8, 6e8, 2e9], 4)
    loss = 1.7 + 400 / n_params**0.34 + 410 / n_tokens**0.28
    table = pd.DataFrame({"n_params": n_params.astype(int), "n_tokens": n_tokens.astype(int), "loss": loss})
    file, text = folder / "ladder.csv", io.StringIO()
    table.assign(stem=[f"r{k // 3}" for k in range(12)], annealed=True).to_csv(text, index=False)
    seed = text.getvalue().encode()
    return Target(file, lambda: str(fit_runs(file, n_params_convention="total")), (StageError,), [seed])


def mixtures(folder: Path) -> Target:
    weights = np.arange(7) / 6
    table = pd.DataFrame({"weight_web": weights, "weight_code": 1 - weights, "loss_web": 3 - weights})
    file, text = folder / "mixtures.csv", io.StringIO()
    table.to_csv(text, index=False)
    return Target(file, lambda: str(fit_mixture(file)), (ValueError,), [text.getvalue().encode()], readings=20)


def external_losses(folder: Path) -> Target:
    _, _, ledger, plan = planned_study(folder)
    rows = [f"{plan.n_tokens * k // 20},{3 - k / 20},{3.1 - k / 20}" for k in range(1, 12)]
    file = folder / "losses.csv"

    def read() -> object:
        source = LossSource(losses=file, growing=False)
        return ExternalRun(ledger, source).records(source.read())

    return Target(file, read, (StageError,), ["\n".join(["tokens,val_loss,train_loss", *rows, ""]).encode()])


def token_manifest(folder: Path) -> Target:
    text = folder.with_name(f"{folder.name}-text")
    text.write_text("some text to be held " * 200)
    write_corpus(folder / "corpus", str(text))
    file = folder / "corpus" / "manifest.json"

    def read() -> object:
        found = Corpus.open(file.parent)
        return str(found), found.key, found.epochs(1000), found.bytes_per_token, found.sources

    return Target(file, read, (CorpusError,), [file.read_bytes()])


def checkpoint_record(folder: Path) -> Target:
    """The pickled record of a checkpoint's shards."""
    weights = {"a": torch.zeros(3, 2), "b": torch.zeros(5)}
    with alone():
        save({"model": weights, "rate": 0.5}, checkpoint_id=folder)
    file = folder / ".metadata"

    def read() -> None:
        RecordReader(folder).names()
        read_weights(folder, weights)

    return Target(file, read, (StageError,), [file.read_bytes()])


def checkpoint_manifest(folder: Path) -> Target:
    """The hashes by which a checkpoint is known to be complete."""
    checkpoint, hashes = folder / "tokens=8", {}
    checkpoint.mkdir()
    for name in (".metadata", PARAMETRIZATION, "__0_0.distcp"):
        (checkpoint / name).write_text(name)
        hashes[name] = file_sha256(checkpoint / name)

    def read() -> None:
        intact = manifest_hash(checkpoint) is not None
        try:
            require_intact(checkpoint)
        except StageError:
            assert not intact
            raise
        assert intact

    return Target(checkpoint / MANIFEST, read, (StageError,), [json.dumps(hashes, indent=1).encode()])


def run_record(folder: Path) -> Target:
    """The description of a run, with a complete checkpoint."""
    model = ModelConfig(d_model=16, n_layers=1, vocab_size=16, context_length=8)
    numerics = Numerics(model=model, base=model, corpus_key="planted", seed=0, evaluation_tokens=8)
    multipliers = ForwardMultipliers(embedding=1.0, readout=1.0, attention=0.25, branch=1.0)
    RunDescription(numerics=numerics, multipliers=multipliers, corpus=folder / "corpus", n_tokens=8).write(folder)
    checkpoint, file = folder / "checkpoints" / "tokens=8", folder / RUN
    with alone():
        save({"model": Decoder(model).state_dict()}, checkpoint_id=checkpoint)
    return Target(
        file,
        lambda: _model(RunDescription.read(folder), checkpoint, torch.device("cpu")),
        (StageError,),
        [file.read_bytes()],
    )


def bundle_manifest(folder: Path) -> Target:
    (folder / "tokenizer").mkdir()
    for name in ("README.md", "weights.safetensors", "tokenizer/tokenizer.json"):
        (folder / name).write_text(name)
    write_manifest(folder, {"plan": "p", "version": "1"})
    file = folder / BUNDLE_MANIFEST
    return Target(file, lambda: json.dumps(verify(folder).to_dict()), (BundleError,), [file.read_bytes()])


def given_weights(name: str) -> Callable[[Path], Target]:
    """A file of a folder in Llama's layout, from which a study starts."""

    def target(folder: Path) -> Target:
        model = ModelConfig(d_model=16, n_layers=1, head_dim=8, context_length=8, vocab_size=12)
        with torch.device("cpu"):
            weights = dict(Decoder(model).named_parameters())
        write_llama(model, NO_MULTIPLIERS, weights, folder / "llama", None)
        file = folder / "llama" / name

        def read() -> float:
            return sum(float(tensor.sum()) for _, tensor in read_given_weights(folder / "llama", model))

        return Target(file, read, (GivenWeightsError,), [file.read_bytes()])

    return target


def optuna_storage(folder: Path) -> Target:
    theirs = folder.with_name(f"{folder.name}-theirs.db")
    space = write_optuna_study(theirs)
    file = folder / "given.db"

    def read() -> object:
        found = import_space(str(file))
        return str(found).encode(), len(outside_results(file, space, n_params=1000, n_tokens=1000))

    return Target(file, read, (StageError,), [small(theirs)], readings=10)


def foreign_ledger(folder: Path) -> Target:
    """Somebody else's ledger; ours stays as it is."""
    theirs, ours = (folder.with_name(f"{folder.name}-{name}.sqlite") for name in ("theirs", "ours"))
    write_ledgers(theirs, ours)
    ledger = Ledger(ours)
    ledger.runs()
    file = folder / "given.sqlite"

    def read() -> None:
        before = list(sqlite3.connect(ours).iterdump())
        try:
            _ = str(runs_of(file)), str(calibrate(ledger, [file]))
        finally:
            assert list(sqlite3.connect(ours).iterdump()) == before

    return Target(file, read, (StudyDirectoryError,), [small(theirs)], readings=20)


def rows_of(make: Callable[[Path], Target]) -> Callable[[Path], Target]:
    """The same database with rows and tables changed, as SQLite stores them."""

    def target(folder: Path) -> Target:
        whole = make(folder)
        whole.file.write_bytes(whole.seeds[0])
        return replace(whole, seeds=[script(whole.file)], place=rebuild)

    return target


def write_optuna_study(path: Path) -> Space:
    """Write a study of Optuna's with three trials, of which one failed; returns its search space."""
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
    """Write two ledgers of one study: one with a row or two of each kind, one without any."""
    _, _, study, plan = planned_study(theirs.with_suffix(""))
    study.close()
    for path in (theirs, empty):
        ledger = Ledger(path)
        ledger.claim(IDENTITY, {})
        if path == theirs:
            add_run(ledger, 0, 2.0)
            add_run(ledger, 1, None)
            add_sweep(ledger, "a sweep", 2.0)
            register(plan, ledger)
            ledger.record_result(ResultKind.PROMOTION, plan.key, replace(PROMOTION, plan=plan.key).to_dict())
        ledger.close()


def small(path: Path) -> bytes:
    """A database in small pages, so that most of its bytes mean something."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
            connection.execute(statement)
    return path.read_bytes()


def script(path: Path) -> bytes:
    """The statements that make a database, one a line."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        statements = [" ".join(statement.split("\n")) for statement in connection.iterdump()]
    return "\n".join([f"PRAGMA user_version = {version};", *statements]).encode()


def rebuild(path: Path, data: bytes) -> None:
    """Write a database of those statements that SQLite accepts."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for statement in data.decode(errors="replace").splitlines():
            try:
                connection.execute(statement)
            except (sqlite3.Error, sqlite3.Warning, ValueError):
                continue
        if connection.in_transaction:
            connection.execute("COMMIT")


TARGETS: dict[str, Callable[[Path], Target]] = {
    "study": study_file,
    "continuation": continuation_file,
    "plan": plan_table,
    "prepared": prepared_run,
    "wandb": wandb_sweep,
    "ladder": ladder,
    "mixtures": mixtures,
    "losses": external_losses,
    "tokens": token_manifest,
    "record": checkpoint_record,
    "checkpoint": checkpoint_manifest,
    "run": run_record,
    "bundle": bundle_manifest,
    "given config": given_weights("config.json"),
    "given weights": given_weights("model.safetensors"),
    "optuna": optuna_storage,
    "optuna_rows": rows_of(optuna_storage),
    "ledger": foreign_ledger,
    "ledger_rows": rows_of(foreign_ledger),
}
