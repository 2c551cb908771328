"""A study with a run that was promoted in one process, for tests of runs that branch off it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from muscale import Amended, Amendment, StudyConfig
from muscale.full_runs.amend.plan_amendment import plan_amendment, plan_continuation
from muscale.full_runs.amend.train import train_amendment
from muscale.full_runs.promote.promotion import full_run_of
from muscale.full_runs.train.attempt import train
from muscale.layout import CORPUS, FULL_RUNS, METRICS, STUDY_FILE
from muscale.plans.plan import Plan, register
from muscale.plans.planning import Planner
from muscale.settings.amendment_file import AmendmentFile
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import Source
from proxy_models.training.numerics import Numerics
from tests.muscale.conftest import MICRO, write_text
from tests.muscale.planted import planted_fit, planted_horizon

BATCH, STEPS = 256, 12


@dataclass
class Case:
    """A study with a run that was promoted, in this process."""

    directory: Path
    config: StudyConfig
    ledger: Ledger
    corpus: Corpus
    numerics: Numerics
    plan: Plan

    def planned(self, text: str, **config: Any) -> Amendment:
        path = self.directory / "continuation.toml"
        path.write_text(text)
        changed = self.config.model_copy(update=config)
        return plan_continuation(path, changed, self.ledger, self.corpus, self.numerics)

    def trained(self, text: str) -> Amended:
        return train_amendment(self.planned(text), self.config, self.ledger, launcher=train)

    def amended(self, **changes: Any) -> Amendment:
        """The amendment with these changes, `__` for the dots of keys."""
        stated = {"reason": "a test"} | {name.replace("__", "."): value for name, value in changes.items()}
        file = AmendmentFile.read(None, stated, vocab_size=256)
        return plan_amendment(file, None, self.config, self.ledger, self.corpus, self.numerics)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = promoted(tmp_path_factory.mktemp("study"))
    yield made
    made.ledger.close()


def promoted(directory: Path, steps: int = STEPS, mixture: Mixture | None = None) -> Case:
    """A study in this directory with a promoted run of so many steps, with checkpoints at half of them and at the end.

    The run reads the folder `text`, or a mixture of `text` and `code`.
    """
    write_text(directory / "text", words=200)
    write_text(directory / "code", documents=20, words=200)
    for file in (directory / "code").iterdir():
        file.write_text(file.read_text().upper())
    text = MICRO.replace("checkpoint_every_tokens = 20480", f"checkpoint_every_tokens = {steps // 2 * BATCH}")
    if mixture:
        text = text.replace('source = "text"\n', "").replace("[model]", f"{stages_of(mixture)}\n[model]")
    (directory / STUDY_FILE).write_text(text)
    config = StudyConfig.read(directory / STUDY_FILE, ["promote.keep_last=3"])
    sources = {name: Source(path=str(directory / name)) for name in ("text", "code")}
    corpus = (
        write_mixture(directory / CORPUS, sources, mixture)
        if mixture
        else write_corpus(directory / CORPUS, str(directory / "text"))
    )
    ledger = Ledger(directory / "ledger.sqlite")
    plan = Planner(config, config.hyperparameters, planted_horizon(), planted_fit(), corpus=corpus, winner=0).plan()
    plan = register(replace(plan, n_tokens=steps * BATCH), ledger)
    numerics = Numerics(
        model=config.model,
        base=config.model,
        corpus_key=corpus.key,
        seed=0,
        evaluation_tokens=2048,
        stages_by_fraction=corpus.stages_by_fraction,
    )
    train(full_run_of(plan, config, numerics, directory / FULL_RUNS / plan.key, corpus.folder))
    ledger.record_result(ResultKind.PROMOTION_STARTED, plan.key, {"at": "2026-01-01T00:00:00+00:00"})
    ledger.record_result(ResultKind.PROMOTION, plan.key, {"plan": plan.key})
    return Case(directory, config, ledger, corpus, numerics, plan)


def stages_of(mixture: Mixture) -> str:
    """The mixture as tables of a study file."""
    lines = ["[corpus.sources]", 'text = { path = "text" }', 'code = { path = "code" }']
    for stage in mixture.stages:
        weights = ", ".join(f"{name} = {weight}" for name, weight in stage.weights.items())
        lines += ["[[corpus.stages]]", f"weights = {{ {weights} }}"]
        lines += [] if stage.until_fraction is None else [f"until_fraction = {stage.until_fraction}"]
    return "\n".join(lines)


def last_evaluation(folder: Path) -> float:
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return float(rows[-1]["val_loss"])
