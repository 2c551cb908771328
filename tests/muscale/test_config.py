"""The study file is read strictly: each fault is told with file, key, rule and value."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from muscale import StudyConfig, StudyFileError

MakeStudy = Callable[..., Path]


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
    assert 5 <= config.plan.compute_flops / (6 * max(compute)) <= 10


def test_the_resolved_config_is_plain_json(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study())
    assert json.loads(json.dumps(config.to_dict()))["sweep"]["space"]["init_scale"]["high"] == 2.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.trails=3", r"study.toml: sweep.trails: unknown key \(value 3\); did you mean trials\?"),
        ('sweep.trials="many"', r"study.toml: sweep.trials: .*valid integer, got 'many'"),
        ("sweep.trials=0", r"study.toml: sweep.trials: .*greater than 0, got 0"),
        ("model.d_modle=64", r"study.toml: model.d_modle: unknown key \(value 64\); did you mean d_model\?"),
        ("model.d_model=65", "study.toml: model: d_model must be a multiple of head_dim=16, got 65"),
        ("hyperparameters.beta1=1.5", r"study.toml: hyperparameters: beta1 must lie in \[0, 1\), got 1.5"),
        ("hyperparameters.learning_rate=true", "hyperparameters.learning_rate: .*valid number, got True"),
        ("hyperparameters.batch_tokens=100", "batch_tokens: must be a multiple of model.context_length = 32, got 100"),
        ("sweep.space.init_scale.low=-1", "study.toml: sweep.space.init_scale: log_uniform needs low > 0"),
        ('sweep.space.colour.distribution="fixed"', "sweep.space.colour"),
        ("sweep.n_tokens=768", "sweep.n_tokens: the smallest of 2 rungs would have 256 tokens"),
        ("transfer.widths=[20]", "transfer.widths: d_model must be a multiple of head_dim=16, got 20"),
        ("promote.workers=3", "promote.workers: must divide the 8 sequences of a batch, got 3"),
        ("promote.precision=fp16", "promote.precision: fp16 is for one worker, use bf16 for 2"),
        ("hyperparameters.schedule=cosine", 'schedule: rungs, .* need "wsd" or "wsd_linear", .*, got .cosine.'),
        ("hyperparameters.cycles=3", 'cycles is a setting of cosine_cycles: schedule "wsd" would ignore 3'),
        ("plan.compute_flops=1e9", r"plan.compute_flops: must exceed the largest ladder run's .* got 1e\+09"),
        ("extra.key=1", "study.toml: extra: unknown key"),
        ("name=", "study.toml: name: String should have at least 1 character, got ''"),
    ],
)
def test_a_fault_is_told_with_file_key_rule_and_value(make_study: MakeStudy, override: str, message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(make_study(), [override])


def test_a_linear_cooldown_is_searched_like_any_other(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ["hyperparameters.schedule=wsd_linear"])
    assert config.hyperparameters.schedule == "wsd_linear"


def test_compilation_may_be_left_to_the_length_of_a_run(make_study: MakeStudy) -> None:
    assert StudyConfig.read(make_study(), ["resources.compile=auto"]).resources.compile == "auto"
    with pytest.raises(StudyFileError, match="resources.compile"):
        StudyConfig.read(make_study("b"), ["resources.compile=sometimes"])


def test_a_missing_key_and_a_missing_file_and_no_toml_are_told(make_study: MakeStudy, tmp_path: Path) -> None:
    path = make_study()
    path.write_text(path.read_text().replace("batch_tokens = 256\n", ""))
    with pytest.raises(StudyFileError, match="hyperparameters.batch_tokens: missing, a value is required"):
        StudyConfig.read(path)
    with pytest.raises(StudyFileError, match=r"nowhere.toml: no such file; `muscale init"):
        StudyConfig.read(tmp_path / "nowhere.toml")
    path.write_text("name = [")
    with pytest.raises(StudyFileError, match=r"study.toml: can't be read as TOML"):
        StudyConfig.read(path)


def test_every_fault_of_a_file_is_told_at_once(make_study: MakeStudy) -> None:
    with pytest.raises(StudyFileError) as error:
        StudyConfig.read(make_study(), ["sweep.trials=0", "model.head_dim=3", "fit.n_bootstrap=0"])
    assert len(str(error.value).splitlines()) == 3


def test_an_override_needs_a_key_and_a_value(make_study: MakeStudy) -> None:
    with pytest.raises(StudyFileError, match="--set sweep.trials: write table.key=value"):
        StudyConfig.read(make_study(), ["sweep.trials"])
    assert StudyConfig.read(make_study("b"), ["sweep.searcher=tpe"]).sweep.searcher == "tpe"
