"""The study file is read strictly: each fault is told with file, key, rule and value."""

import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from muscale import Study, StudyConfig, StudyDirectoryError, StudyFileError
from muscale.settings.config import as_set
from muscale.settings.sweep import SweepSettings
from proxy_models.recipes.stages import Stage
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
    assert 5 <= config.plan.budget.compute_flops / (6 * max(compute)) <= 10


def test_a_plan_s_file_is_told_from_a_study_s(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[run]\nn_tokens = 1\n[forecast]\nloss = 1.0\n[model]\nd_model = 3\n")
    with pytest.raises(StudyFileError, match=r"plan\.toml: is a plan's file; give the file of the study"):
        StudyConfig.read(path)


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
        ("promote.workers=9", "promote.workers: 9 ranks need a sequence of a batch for each share, got 8"),
        ("promote.tensor_parallel=3", "promote: tensor_parallel must divide the 2 ranks, got 3"),
        ("promote.shard_ranks=2", 'promote: shard_ranks is for sharding = "hybrid", got 2 with "full"'),
        (
            "promote.sharding=zero3",
            "promote.sharding: Input should be 'none', 'zero2', 'full' or 'hybrid', got 'zero3'",
        ),
        (
            "promote.evaluator_cpus=1.5",
            "promote: promote.evaluator_cpus must be a whole number or a part of one, got 1.5",
        ),
        ("promote.evaluation=after", "promote.evaluation: Input should be 'sync' or 'async', got 'after'"),
        (
            'promote.prompts=["a"]',
            r"promote.prompts is for promote.evaluation = \"async\", got \('a',\) with \"sync\"",
        ),
        ("promote.precision=fp16", "promote.precision: fp16 is for one worker, use bf16 for 2"),
        (
            "hyperparameters.schedule=constant",
            'sweep.schedule: a search compares trials on their way .*; got "constant"',
        ),
        ("hyperparameters.cycles=3", 'cycles is a setting of cosine_cycles: schedule "wsd" would ignore 3'),
        ("plan.compute_flops=1e9", r"plan.compute_flops: must exceed the largest ladder run's .* got 1e\+09"),
        ("corpus.kind=csv", "study.toml: corpus.kind: .*'text', 'jsonl', .* got 'csv'"),
        ("corpus.feild=text", r"corpus.feild: unknown key \(value 'text'\); did you mean field\?"),
        ("corpus.dtype=uint8", "study.toml: corpus: dtype and vocab_size are for kind \"tokens\", got them for 'text'"),
        (
            "corpus.kind=tokens",
            "study.toml: corpus: a source of tokens needs a dtype of uint8, uint16, uint32, got None",
        ),
        ("corpus.end_of_document=x", "corpus.tokenizer: end_of_document is for \"file\", got 'x' for 'bytes'"),
        ("model.vocab_size=100", "model.vocab_size: must be at least 256, for the tokenizer bytes, got 100"),
        ("corpus.tokenizer=bpe", "model.vocab_size: must be at least 257, for 256 bytes and the token .* got 256"),
        ('corpus.sources={a={path="text"}}', "corpus.source: must not stand beside corpus.sources, got 'text'"),
        ("corpus.stages=[{weights={a=1}}]", "corpus.stages: need corpus.sources, which they weigh"),
        ("check.widths=[32, 64]", r"check.widths: the coordinate check needs at least 4 widths, got \[32, 64\]"),
        ("check.depths=[1, 2, 4]", r"check.depths: the coordinate check needs at least 4 depths, got \[1, 2, 4\]"),
        ("check.depths=[1, 2, 3, 4]", "check.depths: depths must span at least a factor of 8, got 1 to 4"),
        ("check.seeds=[1]", r"check.seeds: .* at least 2 seeds, got \[1\]"),
        (
            'storage.path="/x"',
            'study.toml: storage: storage.path is for storage.ledger = "actor", got \'/x\' with "sqlite"',
        ),
        ('storage={ledger="actor", path="x"}', "storage: storage.path must be absolute, .* got 'x'"),
        ("depth_exponent=0.4", "study.toml: depth_exponent: .*greater than or equal to 0.5, got 0.4"),
        ("decay_scaling=gain", "study.toml: decay_scaling: .*'timescale' or 'sublayer_gain', got 'gain'"),
        ("sweep.n_tokens=10", "study.toml: sweep.n_tokens: a warmup of 256 tokens does not fit"),
        ("sweep.learn_from=../other", "sweep.learn_from: Input should be a list, got '../other'"),
        ("extra.key=1", "study.toml: extra: unknown key"),
        ("name=", "study.toml: name: String should have at least 1 character, got ''"),
    ],
)
def test_a_fault_is_told_with_file_key_rule_and_value(make_study: MakeStudy, override: str, message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(make_study(), [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.tied=true", "hyperparameters.zero_readout=true"),
            "study.toml: hyperparameters.zero_readout: the readout is the embedding table .* got true",
        ),
        (
            ("model.tied=true", 'sweep.space.zero_readout={distribution="choice", values=[true, false]}'),
            "study.toml: sweep.space.zero_readout: the readout is the embedding table .* got true",
        ),
        (
            ("decay_scaling=sublayer_gain", "hyperparameters.optimizer=lion"),
            'hyperparameters.optimizer: decay_scaling "sublayer_gain" is known for adamw only, got lion',
        ),
    ],
)
def test_keys_that_contradict_each_other_are_told(
    make_study: MakeStudy, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(make_study(), overrides)


def test_the_parametrization_s_options_reach_training_and_are_the_study_s_identity(make_study: MakeStudy) -> None:
    path = make_study()
    numerics = Study.open(path, ["depth_exponent=0.5", "decay_scaling=sublayer_gain"], quiet=True).numerics
    assert (numerics.depth_exponent, numerics.decay_scaling) == (0.5, "sublayer_gain")
    with pytest.raises(
        StudyDirectoryError, match=r"decay_scaling is 'timescale' .*; depth_exponent is 1.0 here but 0.5"
    ):
        Study.open(path, quiet=True)


def test_what_the_optimizer_would_ignore_is_not_searched(make_study: MakeStudy) -> None:
    adam = [
        "hyperparameters.optimizer=adam",
        "sweep.space.weight_decay_tau={distribution='log_uniform', low=0.1, high=1.0}",
    ]
    with pytest.raises(StudyFileError, match=r'sweep.space.weight_decay_tau: .* optimizer "adam" would ignore 0.1'):
        StudyConfig.read(make_study(), adam)
    with pytest.raises(StudyFileError, match=r"sweep.space.beta1: beta1 must lie in \[0, 1\), got 1.5"):
        StudyConfig.read(make_study("other"), ["sweep.space.beta1={distribution='uniform', low=0.5, high=1.5}"])


def test_whole_numbers_for_floats_are_the_same_study(make_study: MakeStudy) -> None:
    path = make_study()
    whole, fraction = (
        StudyConfig.read(path, [f"model.mlp_ratio={ratio}", f"hyperparameters.weight_decay_tau={tau}"])
        for ratio, tau in (("4", "1"), ("4.0", "1.0"))
    )
    assert json.dumps(whole.to_dict()) == json.dumps(fraction.to_dict())


def test_a_study_has_no_swap_of_the_optimizer(make_study: MakeStudy) -> None:
    settings = {"swap_optimizer": "muon", "swap_fraction": "0.5", "swap_learning_rate": "0.01"}
    swap = [f"hyperparameters.{name}={value}" for name, value in settings.items()]
    with pytest.raises(StudyFileError, match=r"hyperparameters.swap_optimizer: .* for a single run; .*, got 'muon'"):
        StudyConfig.read(make_study(), swap)
    searched = 'sweep.space.swap_fraction={distribution="log_uniform", low=0.1, high=0.9}'
    with pytest.raises(StudyFileError, match=r"sweep.space.swap_fraction: .* for a single run"):
        StudyConfig.read(make_study("b"), [searched])


STAGES = "hyperparameters.stages=[{after=0.4, learning_rate=0.5}, {after=0.8, learning_rate=1, beta2=0.98}]"


def test_stages_are_read_and_written(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), [STAGES])
    stages = (Stage(after=0.4, learning_rate=0.5), Stage(after=0.8, learning_rate=1.0, beta2=0.98))
    assert config.hyperparameters.stages == stages
    plain = json.loads(json.dumps(config.to_dict()))["hyperparameters"]
    assert plain["stages"] == [stage.to_dict() for stage in stages]
    assert "stages" not in StudyConfig.read(make_study("b")).to_dict()["hyperparameters"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hyperparameters.stages=[{after=0.4, learning_rat=1}]"],
            r"study.toml: hyperparameters.stages.0.learning_rat: unknown key \(value 1\); did you mean learning_rate\?",
        ),
        (
            ["hyperparameters.stages=[{learning_rate=1}]"],
            "hyperparameters.stages.0.after: missing, a value is required",
        ),
        (["hyperparameters.stages=[{after=true}]"], "hyperparameters.stages.0.after: .*valid number, got True"),
        (["hyperparameters.stages=[{after=0.5}]"], "hyperparameters.stages.0: the stage after 0.5 changes nothing"),
        (["hyperparameters.stages=[{after=2, beta1=0.8}]"], r"stages.0: a stage begins .* in \(0, 1\), got 2"),
        (["hyperparameters.stages=3"], "hyperparameters.stages: Input should be a list, got 3"),
        ([STAGES, "hyperparameters.schedule=linear"], 'stages is a setting of wsd and .*: schedule "linear" would'),
        ([STAGES, "sweep.schedule=linear"], "study.toml: sweep.schedule: stages is a setting of wsd"),
        (
            [STAGES, 'sweep.space.beta2={distribution="uniform", low=0.9, high=0.99}'],
            "sweep.space.beta2: hyperparameters.stages set it on the way",
        ),
        (
            ['sweep.space.stages={distribution="choice", values=["a", "b"]}'],
            "sweep.space.stages: rungs are compared at",
        ),
        (
            ["hyperparameters.stages=[{after=0.4, clip_norm=0.5}]", "transfer.over.clip_norm={points=5}"],
            "transfer.over.clip_norm: hyperparameters.stages set it on the way",
        ),
        (
            ["hyperparameters.stages=[{after=0.4, beta1=0.8}, {after=0.45, beta1=0.7}]", "sweep.n_tokens=1024"],
            "sweep.n_tokens: stages: 768 tokens before the cooldown are too few",
        ),
        (
            ["hyperparameters.stages=[{after=0.95, beta1=0.8}]"],
            'sweep.rank_by: the average at the rung of .* before the last stage does: use rank_by "stable", got "averaged"',
        ),
        ([STAGES, *PBT], 'hyperparameters.stages: "pbt" finds the stages itself, .* after 40%: learning_rate × 0.5;'),
        (
            [*PBT, "sweep.rungs=8"],
            'sweep.rank_by: .* before the last generation does: use rank_by "stable" or at most 6 rungs, got "averaged"',
        ),
        (
            [*PBT, "hyperparameters.schedule=linear", "sweep.schedule=wsd"],
            'sweep.scheduler: the course that "pbt" finds is the full run\'s up to its cooldown: .* got "linear"',
        ),
    ],
)
def test_stages_that_can_not_be_meant_are_told(make_study: MakeStudy, overrides: list[str], message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(make_study(), overrides)


def test_a_population_needs_no_other_setting_and_ranks_many_generations_by_the_last_weights(
    make_study: MakeStudy,
) -> None:
    path = make_study()
    for rungs in (2, 4, 6):
        assert StudyConfig.read(path, [*PBT, f"sweep.rungs={rungs}"]).sweep.rank_by == "averaged"
    assert len(StudyConfig.read(path, [*PBT, "sweep.rungs=8", "sweep.rank_by=stable"]).rung_tokens()) == 8


def test_a_linear_cooldown_is_searched_like_any_other(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ["hyperparameters.schedule=wsd_linear"])
    assert config.hyperparameters.schedule == "wsd_linear"


def test_compilation_may_be_left_to_the_length_of_a_run(make_study: MakeStudy) -> None:
    assert StudyConfig.read(make_study(), ["resources.compile=auto"]).resources.compile == "auto"
    with pytest.raises(StudyFileError, match="resources.compile"):
        StudyConfig.read(make_study("b"), ["resources.compile=sometimes"])


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
    with pytest.raises(StudyFileError, match="cpus_per_worker must be a whole number or a part of one, got 1.5"):
        StudyConfig.read(path, ["resources.cpus_per_worker=1.5"])


def test_a_missing_key_and_a_missing_file_and_no_toml_are_told(make_study: MakeStudy, tmp_path: Path) -> None:
    path = make_study()
    path.write_text(path.read_text().replace("batch_tokens = 256\n", ""))
    with pytest.raises(StudyFileError, match="hyperparameters.batch_tokens: missing, a value is required"):
        StudyConfig.read(path)
    with pytest.raises(StudyFileError, match=r"nowhere.toml: no such file; `muscale init"):
        StudyConfig.read(tmp_path / "nowhere.toml")
    with pytest.raises(StudyFileError, match=r"study: is a directory; give the study file in it, .*study/study.toml"):
        StudyConfig.read(path.parent)
    path.write_text("name = [")
    with pytest.raises(StudyFileError, match=r"study.toml: can't be read as TOML"):
        StudyConfig.read(path)


def test_a_ready_made_space_goes_by_its_name(make_study: MakeStudy) -> None:
    assert StudyConfig.read(make_study(), ["sweep.space=mup_lion"]).sweep.space == ready_made("mup_lion")
    with pytest.raises(StudyFileError, match=r"study.toml: sweep.space: unknown space 'mup_adam' \(did you mean"):
        StudyConfig.read(make_study("b"), ["sweep.space=mup_adam"])


def test_the_page_on_searching_names_every_key_and_its_space_is_valid(make_study: MakeStudy) -> None:
    page = (Path(__file__).parents[3] / "docs" / "searching.md").read_text()
    rows = re.findall(r"^\| ([a-z_, ]+) \|", page.split("## How")[1], re.M)
    assert {key for row in rows for key in row.split(", ")} - {"key"} == set(SweepSettings.model_fields) - {"space"}
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    path = make_study()
    whole = path.read_text()
    path.write_text(whole[: whole.index("[sweep.space]")] + shown + whole[whole.index("[transfer]") :])
    assert set(StudyConfig.read(path).sweep.space.constraints) == {"order", "product"}


def test_every_fault_of_a_file_is_told_at_once(make_study: MakeStudy) -> None:
    with pytest.raises(StudyFileError) as error:
        StudyConfig.read(make_study(), ["sweep.trials=0", "model.head_dim=3", "fit.n_bootstrap=0"])
    assert len(str(error.value).splitlines()) == 3


def test_an_override_needs_a_key_and_a_value(make_study: MakeStudy) -> None:
    with pytest.raises(StudyFileError, match="--set sweep.trials: write table.key=value"):
        StudyConfig.read(make_study(), ["sweep.trials"])
    assert StudyConfig.read(make_study("b"), ["sweep.searcher=tpe"]).sweep.searcher == "tpe"


def test_overrides_may_be_values_and_a_space(make_study: MakeStudy) -> None:
    space = mup_adamw()
    config = StudyConfig.read(make_study(), {"sweep.trials": 7, "sweep.space": space})
    assert config.sweep.trials == 7
    assert config.sweep.space == space
    with pytest.raises(StudyFileError, match=r"sweep.trials.*'7'"):
        StudyConfig.read(make_study("b"), {"sweep.trials": "7"})


def test_settings_from_python_are_told_as_set_takes_them() -> None:
    assert as_set(["a.b=1"]) == ("a.b=1",)
    given = {"a.text": 'it"s', "a.list": [1, 2.5], "a.table": {"b": True}, "a.none": None}
    assert as_set(given) == ('a.text="it\\"s"', "a.list=[1, 2.5]", "a.table={b = true}", "a.none=None")
