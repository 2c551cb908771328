"""The study file is read strictly: each fault is reported with file, key, rule and value."""

import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from muscale import Study, StudyConfig, StudyDirectoryError, StudyFileError
from muscale.settings.overrides import as_set
from muscale.settings.sweep import SweepSettings
from muscale.store.ledger_tables import ResultKind
from proxy_models.recipes.stages import HyperparameterStage
from search_spaces import mup_adamw, ready_made

MakeStudy = Callable[..., Path]
PBT = ["sweep.scheduler=pbt"]


def test_the_quickstart_is_valid_and_spans_what_it_claims() -> None:
    text = resources.files("muscale") / "quickstart.toml"
    config = StudyConfig.read(Path(str(text)))
    assert config.sweep.trials >= 16
    assert max(config.transfer.widths) == 4 * min(config.transfer.widths)
    sizes = {stem.width for stem in config.ladder.stems}
    compute = [
        config.family.at(width=s.width).n_params * s.n_tokens / 2**k for s in config.ladder.stems for k in (0, 1)
    ]
    assert len(sizes) >= 5
    assert len(compute) >= 16
    assert max(compute) / min(compute) >= 10
    assert 4 <= config.plan.budget.compute_flops / (6 * max(compute)) <= 10


def test_a_file_from_an_editor_of_windows_is_the_same(make_study: MakeStudy) -> None:
    path = make_study()
    plain = StudyConfig.read(path).to_dict()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert StudyConfig.read(path).to_dict() == plain


def test_the_resolved_config_is_json(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study())
    assert json.loads(json.dumps(config.to_dict()))["sweep"]["space"]["init_scale"]["high"] == 2.0


def test_the_parametrization_s_options_reach_training_and_are_the_study_s_identity(make_study: MakeStudy) -> None:
    path = make_study()
    study = Study.open(path, ["depth_exponent=0.5", "decay_scaling=sublayer_gain"], quiet=True)
    numerics = study.config.shared_numerics(study.corpus, study.directory)
    assert (numerics.depth_exponent, numerics.decay_scaling) == (0.5, "sublayer_gain")
    study.ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    with pytest.raises(StudyDirectoryError, match="decay_scaling.*depth_exponent"):
        Study.open(path, quiet=True)


@pytest.mark.parametrize(
    ("overrides", "proxies", "full_run"),
    [
        ([], "fp32", "fp32"),
        (["resources.gpus_per_worker=0.5"], "bf16", "bf16"),
        (["resources.gpus_per_worker=1", "numerics.precision=fp32"], "fp32", "fp32"),
        (["promote.precision=bf16"], "fp32", "bf16"),
        (["numerics.precision=bf16"], "bf16", "bf16"),
    ],
)
def test_the_precision_follows_the_devices_unless_it_is_set_and_is_in_the_keys(
    make_study: MakeStudy, overrides: list[str], proxies: str, full_run: str
) -> None:
    study = Study.open(make_study(), overrides, quiet=True)
    assert (study.config.precision, study.config.full_run_precision) == (proxies, full_run)
    assert study.config.shared_numerics(study.corpus, study.directory).precision == proxies


def test_whole_numbers_for_floats_are_the_same_study(make_study: MakeStudy) -> None:
    path = make_study()
    whole, fraction = (
        StudyConfig.read(path, [f"model.mlp_ratio={ratio}", f"hyperparameters.weight_decay_tau={tau}"])
        for ratio, tau in (("4", "1"), ("4.0", "1.0"))
    )
    assert json.dumps(whole.to_dict()) == json.dumps(fraction.to_dict())


STAGES = "hyperparameters.stages=[{after=0.4, learning_rate=0.5}, {after=0.8, learning_rate=1, beta2=0.98}]"


def test_stages_are_read_and_written(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), [STAGES])
    stages = (
        HyperparameterStage(after=0.4, learning_rate=0.5),
        HyperparameterStage(after=0.8, learning_rate=1.0, beta2=0.98),
    )
    assert config.hyperparameters.stages == stages
    plain = json.loads(json.dumps(config.to_dict()))["hyperparameters"]
    assert plain["stages"] == [stage.to_dict() for stage in stages]
    assert "stages" not in StudyConfig.read(make_study("b")).to_dict()["hyperparameters"]


def test_a_population_needs_no_other_setting_and_ranks_many_generations_by_the_last_weights(
    make_study: MakeStudy,
) -> None:
    path = make_study()
    for rungs in (2, 4, 6):
        assert StudyConfig.read(path, [*PBT, f"sweep.rungs={rungs}"]).sweep.rank_by == "averaged"
    assert len(StudyConfig.read(path, [*PBT, "sweep.rungs=8", "sweep.rank_by=stable"]).rung_tokens()) == 8


@pytest.mark.parametrize(("gpus", "device"), [("0", "cpu"), ("0.5", "cuda"), ("1", "cuda")])
def test_a_worker_that_is_given_a_gpu_or_a_part_of_one_trains_on_it(
    make_study: MakeStudy, gpus: str, device: str
) -> None:
    assert StudyConfig.read(make_study(), [f"resources.gpus_per_worker={gpus}"]).resources.device == device


@pytest.mark.parametrize(("cpus", "threads"), [("0.5", 1), ("1", 1), ("4", 4)])
def test_a_worker_may_have_a_part_of_a_cpu_and_has_a_thread_for_each_whole_one(
    make_study: MakeStudy, cpus: str, threads: int
) -> None:
    path = make_study()
    assert StudyConfig.read(path, [f"resources.cpus_per_worker={cpus}"]).resources.threads == threads


def test_a_ready_made_space_goes_by_its_name(make_study: MakeStudy) -> None:
    assert StudyConfig.read(make_study(), ["sweep.space=mup_lion"]).sweep.space == ready_made("mup_lion")


def test_the_page_on_searching_names_every_key_and_its_space_is_valid(make_study: MakeStudy) -> None:
    page = (Path(__file__).parents[3] / "docs" / "searching.md").read_text()
    rows = re.findall(r"^\| ([a-z_, ]+) \|", page.split("## How")[1].split("\n## ")[0], re.M)
    assert {key for row in rows for key in row.split(", ")} - {"key"} == set(SweepSettings.model_fields) - {"space"}
    shown, *_ = re.findall(r"```toml\n(.*?)```", page, re.S)  # others follow
    path = make_study()
    whole = path.read_text()
    path.write_text(whole[: whole.index("[sweep.space]")] + shown + whole[whole.index("[transfer]") :])
    assert set(StudyConfig.read(path).sweep.space.constraints) == {"order", "product"}


def test_overrides_may_be_values_and_a_space(make_study: MakeStudy) -> None:
    space = mup_adamw()
    config = StudyConfig.read(make_study(), {"sweep.trials": 7, "sweep.space": space})
    assert config.sweep.trials == 7
    assert config.sweep.space == space
    with pytest.raises(StudyFileError, match=r"sweep.trials.*'7'"):
        StudyConfig.read(make_study("b"), {"sweep.trials": "7"})


def test_overrides_may_be_one_text_or_have_the_types_of_a_notebook(make_study: MakeStudy, tmp_path: Path) -> None:
    path = make_study()
    assert StudyConfig.read(path, "sweep.trials=7").sweep.trials == 7
    given = {"sweep.trials": np.int64(7), "check.widths": np.array([16, 32, 64, 128]), "corpus.source": tmp_path}
    config = StudyConfig.read(path, given)
    assert (config.sweep.trials, config.check.widths, config.corpus.source) == (7, (16, 32, 64, 128), str(tmp_path))
    assert StudyConfig.read(path, as_set(given)) == config
    with pytest.raises(StudyFileError, match=r"sweep.trials: .*, got 7.5"):
        StudyConfig.read(path, {"sweep.trials": np.float64(7.5)})


def test_a_faulty_entry_of_a_list_is_one_fault(make_study: MakeStudy) -> None:
    path = make_study()
    with pytest.raises(StudyFileError) as caught:
        StudyConfig.read(path, {"ladder.stems": [{"width": 16, "n_tokens": "4B"}]})
    assert str(caught.value).count("\n") == 0
    assert "ladder.stems.0.n_tokens" in str(caught.value)
    with pytest.raises(StudyFileError, match=r"ladder.stems: .* 1 .*, got \[\]"):
        StudyConfig.read(path, {"ladder.stems": []})


def test_settings_from_python_are_formatted_as_set_takes_them() -> None:
    assert as_set(["a.b=1"]) == ("a.b=1",)
    given = {"a.text": 'it"s', "a.list": [1, 2.5], "a.table": {"b": True}, "a.none": None}
    assert as_set(given) == ('a.text="it\\"s"', "a.list=[1, 2.5]", "a.table={b = true}", "a.none=None")
