"""The plan's file says all of it, is read back to the same plan, and takes no edit but of what it is trained on."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muscale import StageError, StudyConfig
from muscale.plans.plan import Plan, register
from muscale.plans.plan_file import DIGEST, contents, path_of, read, write
from muscale.plans.planning import Planner
from muscale.store.ledger import Ledger
from proxy_models.architecture.config import as_decoder
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, ScalingFit
from tests.muscale.conftest import write_text

MakeStudy = Callable[..., Path]
MakePlan = Callable[..., tuple[Plan, StudyConfig]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", words=100)
    return write_corpus(folder / "written", str(folder / "text"))


@pytest.fixture
def planned(make_study: MakeStudy, law: ScalingFit, horizon: HorizonLaw, corpus: Corpus, ledger: Ledger) -> MakePlan:
    path = make_study()

    def make(*overrides: str) -> tuple[Plan, StudyConfig]:
        # a plan's is resolved, its file's stated
        config = StudyConfig.read(path, ["promote.precision=fp32", *overrides])
        plan = Planner(config, config.hyperparameters, horizon, law, corpus=corpus, winner=3).plan()
        return register(plan, ledger), config

    return make


def edit(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert before.count(old) == 1, old
    path.write_text(before.replace(old, new))


def test_the_file_states_the_rule_and_the_source_of_each_value(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned('plan.accelerator="H100 SXM"', "plan.explicit.beta2=0.9", "hyperparameters.clip_norm=0.5")
    path = write(plan, config, ledger.directory)
    assert path == path_of(ledger.directory, plan.key)
    written = tomllib.loads(path.read_text())
    assert len(written.pop(DIGEST)) == 64
    assert written == json.loads(json.dumps(contents(plan, config)))
    assert written["run"]["n_tokens"] == plan.n_tokens
    assert written["model"] == plan.model.to_dict()
    values = written["hyperparameters"]
    assert values["learning_rate"]["value"] == plan.hyperparameters.learning_rate
    assert values["learning_rate"]["rules"] == ["muP width", "horizon law"]
    assert values["learning_rate"]["source"] == "trial 3 of the sweep and the grids of the transfer check"
    assert values["init_scale"] | {"rule": ""} == {
        "value": 1.0,
        "rules": ["muP width"],
        "source": "trial 3 of the sweep",
        "rule": "",
    }
    assert (values["beta2"]["rules"], values["beta2"]["value"]) == (["explicit"], 0.9)
    assert (values["clip_norm"]["rules"], values["clip_norm"]["source"]) == (["fixed"], "the study file")
    assert values["beta1"]["source"] == "default"
    assert written["data"] == plan.data == {"corpus": plan.data["corpus"], "tokenizer": "bytes"}
    assert written["cost"]["dollars"] == plan.decision["dollars"] > 0
    assert (written["forecast"]["low"], written["forecast"]["high"]) == (plan.forecast.low, plan.forecast.high)
    assert written["resources"]["workers"] == 2
    assert "# At the base shape" in path.read_text()


def test_a_comment_is_no_edit(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned()
    path = write(plan, config, ledger.directory)
    edit(path, "# Reasons for this size.", "# Why so large?")
    assert read(path, ledger, config) == (plan, config)
    write(plan, config, ledger.directory)
    assert "# Reasons for this size." in path.read_text(), "a file that says the same is written anew"


def test_the_evaluation_of_the_run_can_be_edited(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned("promote.evaluation=async")
    path = write(plan, config, ledger.directory)
    assert read(path, ledger, config) == (plan, config)
    edit(path, "evaluator_cpus = 1.0", "evaluator_cpus = 2.0")
    _, edited = read(path, ledger, config)
    assert (edited.promote.evaluation, edited.promote.evaluator_cpus) == ("async", 2.0)


def test_a_forecast_along_the_run_is_checked_too(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned()
    along = [{"tokens": 1000, "loss": 3.5, "low": 3.25, "high": 3.75}]
    path = write(plan, config, ledger.directory, along=along)
    assert tomllib.loads(path.read_text())["forecast"]["along"] == along
    assert read(path, ledger, config, along=lambda registered: along if registered == plan else ()) == (plan, config)
    with pytest.raises(StageError, match=r"forecast\.along was edited"):
        read(path, ledger, config)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_tokens = ", "n_tokens = 1", r"run\.n_tokens was edited: \d+ in the ledger, 1\d+ in the file; only \[resources\]"),
        ("d_model = 32", "d_model = 48", r"model\.d_model was edited: 32 in the ledger, 48 in the file"),
        ("clip_norm = {value = 1.0", "clip_norm = {value = 0.5", r"hyperparameters\.clip_norm\.value was edited: 1\.0 in the "
         r"ledger, 0\.5 in the file; state it with `muscale plan --set plan\.explicit\.clip_norm=…`"),
        ("level = 0.9", "level = 0.95", r"forecast\.level was edited"),
        ("seed = 0", "seed = 2026-01-01", r'run\.seed was edited: 0 in the ledger, "2026-01-01" in the file'),
        ("seed = 0", "", r"run\.seed was edited: 0 in the ledger, nothing in the file"),
        ("seed = 0", "seed = 0\nmore = 1", r"run\.more was edited: nothing in the ledger, 1 in the file"),
        ('tokenizer = "bytes"', 'tokenizer = "mine"', r"data\.tokenizer was edited"),
        ('on_spike = "stop"', 'on_spike = "skip"', r'run\.on_spike was edited: "stop" in the ledger, "skip" in the file'),
        ("plan = ", "registered = 1\nplan = ", r"registered was edited: nothing in the ledger, 1 in the file"),
        ("workers = 2", 'workers = 2\non_spike = "skip"', r'resources\.on_spike: changes what is computed, got "skip"'),
        ("workers = 2", "workers = 2\nworkers_min = 3", r"resources.*workers_min"),
        ("workers = 2", "workers = 0", r"resources\.workers: must be greater than 0, got 0"),
        ("workers = 2", "wrokers = 2", r"resources\.wrokers: unknown key \(value 2\)"),
        ("[run]", "[run", r"can't be read as TOML"),
        ("plan = ", "plan = 1 # ", r"plan: must be one that this study registered, got 1"),
    ],
)  # fmt: skip
def test_an_edit_is_refused_by_its_key(planned: MakePlan, ledger: Ledger, old: str, new: str, message: str) -> None:
    plan, config = planned()
    path = write(plan, config, ledger.directory)
    edit(path, f"\n{old}" if old != "plan = " else old, f"\n{new}" if old != "plan = " else new)
    with pytest.raises(StageError, match=message):
        read(path, ledger, config)


def test_what_it_is_trained_on_may_be_edited(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned()
    path = write(plan, config, ledger.directory)
    edit(path, "\nworkers = 2", "\nworkers = 4")
    edit(path, "max_failures = 2\n", "")
    found, own = read(path, ledger, config)
    assert found == plan
    assert own.promote == config.promote.model_copy(update={"workers": 4})
    assert own.resources == config.resources
    with pytest.raises(StageError, match=r"resources\.workers was edited: 2 .* 4 .*--plan"):
        write(plan, config, ledger.directory)
    edit(path, "\nd_model = 32", "\nd_model = 48")
    with pytest.raises(StageError, match=r"model\.d_model was edited.* --set"):
        write(plan, config, ledger.directory)
    path.unlink()
    write(plan, config, ledger.directory)
    assert read(path, ledger, config)[1] == config


def test_the_plan_s_own_handling_of_spikes_holds(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned('promote.on_spike="skip"')
    path = write(plan, config, ledger.directory)
    _, other = planned()
    assert read(path, ledger, other)[1] == config
    edit(path, 'on_spike = "skip"', 'on_spike = "stop"')
    with pytest.raises(StageError, match=r'run\.on_spike was edited: "skip" in the ledger, "stop" in the file'):
        read(path, ledger, config)


def test_the_study_file_s_own_changes_bring_the_file_up_to_date(planned: MakePlan, ledger: Ledger) -> None:
    plan, config = planned()
    write(plan, config, ledger.directory)
    priced, wider = planned('plan.accelerator="H200"', "promote.workers=4")
    assert priced.key == plan.key
    path = write(priced, wider, ledger.directory)
    assert tomllib.loads(path.read_text())["resources"]["workers"] == 4
    assert read(path, ledger, config)[1].promote == wider.promote


def test_a_plan_of_another_study_or_a_missing_file_is_refused(
    planned: MakePlan, ledger: Ledger, tmp_path: Path
) -> None:
    plan, config = planned()
    path = write(plan, config, ledger.directory)
    other = Ledger(tmp_path / "other.sqlite")
    try:
        with pytest.raises(StageError, match=rf"plan: must.*got '{plan.key}'"):
            read(path, other, config)
    finally:
        other.close()
    with pytest.raises(StageError, match=r"no such file; `muscale plan` writes one"):
        read(tmp_path / "none.toml", ledger, config)


def test_a_longer_context_is_declared_and_leaves_the_rest_of_the_plan(planned: MakePlan, ledger: Ledger) -> None:
    plan, _ = planned()
    longer, config = planned("plan.explicit.context_length=256", "plan.explicit.rope_theta=40000.0")
    assert longer.key != plan.key
    assert longer.model == replace(as_decoder(plan.model), context_length=256, rope_theta=40000.0)
    assert (longer.hyperparameters, longer.n_tokens) == (plan.hyperparameters, plan.n_tokens)
    assert longer.forecast == replace(plan.forecast, reasons=longer.forecast.reasons)
    assert any("context_length = 256 is stated" in reason for reason in longer.forecast.reasons)
    proxies = Numerics(model=config.model, base=config.model, corpus_key="", seed=0, evaluation_tokens=1024)
    of_run = longer.chain(proxies).numerics
    assert of_run.base == replace(as_decoder(config.model), context_length=256, rope_theta=40000.0)
    assert of_run.parametrization("adamw") == plan.chain(proxies).numerics.parametrization("adamw")
    stated = {one.name: one for one in longer.provenance if "explicit" in one.rules}
    assert stated.keys() == {"context_length", "rope_theta"}
    assert not any(one.is_silent for one in stated.values())
    read(write(longer, config, ledger.directory), ledger, config)


def test_a_stated_value_makes_another_plan_that_records_it(planned: MakePlan, ledger: Ledger) -> None:
    plan, _ = planned()
    stated, config = planned("plan.explicit.mlp_dropout=0.1", "plan.explicit.learning_rate=0.004")
    assert stated.key != plan.key
    assert (stated.model, stated.hyperparameters) == (
        replace(as_decoder(plan.model), mlp_dropout=0.1),
        replace(plan.hyperparameters, learning_rate=0.004),
    )
    assert any("mlp_dropout = 0.1 is stated" in reason for reason in stated.forecast.reasons)
    assert stated.rules["learning_rate"] == "explicit"
    by_name = {one.name: one for one in stated.provenance}
    assert by_name["mlp_dropout"].rules == by_name["learning_rate"].rules == ("explicit",)
    read(write(stated, config, ledger.directory), ledger, config)
