"""Given weights of a study: read once and stored, found by their key, refused where they contradict the study."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch

from muscale import StageError, Study, StudyDirectoryError, StudyFileError
from muscale.actors.worker import Worker
from muscale.full_runs.amend import parent
from muscale.full_runs.promote import promotion
from muscale.full_runs.promote.dry_run import dry_run
from muscale.full_runs.promote.replay import replay
from muscale.full_runs.train.attempt import train
from muscale.layout import FULL_RUNS, INITIAL_WEIGHTS
from muscale.plans.costs import estimate
from muscale.plans.plan import register
from muscale.plans.planning import Planner
from muscale.proxies import ladder, transfer
from muscale.settings.config import StudyConfig
from muscale.settings.continuation_file import ParentSettings
from muscale.store.lineage import Chain
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.hugging_face import same_tokenizer, write_tokenizer
from proxy_models.data.tokenizer import BytesTokenizer, FileTokenizer, train_bpe
from proxy_models.training.numerics import key_of_weights
from scaling import Verdict, fit_verdict
from tests.muscale.conftest import MICRO, write_text
from tests.muscale.planted import planted_fit, planted_horizon

MODEL = """
vocab_size = 256
norm = "layernorm"
norm_eps = 1e-5
activation = "gelu_tanh"
positions = "learned"
mlp_ratio = 4.0
biases = true
tied = true
"""
STUDY = 'initial_weights = "given"\n' + MICRO.replace("context_length = 32\n", f"context_length = 32\n{MODEL}").replace(
    "[check]\nwidths = [16, 32, 64, 128]\n", ""
).replace('init_scale = { distribution = "log_uniform", low = 0.5, high = 2.0 }\n', "").replace(
    "widths = [16, 32, 64]", "widths = [32]"
).replace("width = 16,", "width = 32,").replace(
    "{ width = 32, n_tokens = 16384 },\n    { width = 48", "{ width = 48"
).replace("width = 48, n_tokens = 16384", "width = 32, n_tokens = 8192").replace("width = 64,", "width = 32,").replace(
    "{ width = 80, n_tokens = 32768 }", "{ width = 32, n_tokens = 65536 }"
)


@pytest.fixture
def gpt2(transformers: ModuleType) -> Callable[[Path], torch.nn.Module]:
    """Writes random GPT-2 weights into a folder and returns their network."""

    def write(folder: Path, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        network: torch.nn.Module = transformers.GPT2LMHeadModel(config)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        network.save_pretrained(folder)  # type: ignore[operator]
        return network.eval()

    return write


@pytest.fixture
def study(tmp_path: Path, gpt2: Callable[..., torch.nn.Module]) -> Path:
    """A study from such weights in the folder "given"."""
    write_text(tmp_path / "text")
    gpt2(tmp_path / "given")
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    return path


def opened(path: Path, **overrides: object) -> Study:
    return Study.open(path, overrides, quiet=True, trains=True)


def shortest(study: Study) -> Chain:
    """The ladder's shortest run, at the study file's rate."""
    numerics = study.config.shared_numerics(study.corpus, study.directory)
    jobs = ladder.ladder_jobs(study.config, numerics, study.config.hyperparameters, horizon=None)
    return min((job.chain for job in jobs), key=lambda chain: chain.last.end)


def test_weights_are_stored_once_and_every_training_starts_from_them(
    study: Path, gpt2: Callable[..., torch.nn.Module], tmp_path: Path
) -> None:
    one = opened(study)
    numerics = one.config.shared_numerics(one.corpus, one.directory)
    key = key_of_weights(one.directory / INITIAL_WEIGHTS)
    assert numerics.initial_weights == key
    assert {
        job.chain.numerics.initial_weights
        for job in transfer.jobs(transfer.members(one.config, numerics, one.config.hyperparameters))
    } == {key}
    network, chain = gpt2(tmp_path / "same"), shortest(one)
    (held_out,) = evaluation_sets(one.corpus, 32, 2048).values()
    with torch.no_grad():
        sequences = held_out.sequences.long()
        logits = network(sequences[:, :-1]).logits.flatten(0, 1)
        untrained = torch.nn.functional.cross_entropy(logits, sequences[:, 1:].flatten()).item()
    worker = Worker(one.ledger, compiled=False)
    # A run of which nothing is learned keeps the loss that transformers computes.
    still = replace(chain.segments[0].recipe, learning_rate=1e-12)
    segments = tuple(replace(segment, recipe=still) for segment in chain.segments)
    kept = worker.reach(replace(chain, segments=segments))
    assert kept.loss == pytest.approx(untrained, rel=1e-5)
    learned = worker.reach(chain)
    assert learned.loss is not None
    assert learned.loss < untrained - 0.5
    one.ledger.close()
    # Once something was trained, the folder is not read again.
    shutil.rmtree(tmp_path / "given")
    again = opened(study)
    assert again.corpus.key == numerics.corpus_key
    assert shortest(again).key == chain.key
    again.ledger.close()


def test_until_something_is_trained_a_changed_folder_is_stored_again(
    study: Path, gpt2: Callable[..., torch.nn.Module], tmp_path: Path
) -> None:
    keys = []
    for seed in (None, None, 1):
        if seed:
            gpt2(tmp_path / "given", seed)
        one = opened(study)
        assert one.corpus.n_tokens > 0
        keys.append(key_of_weights(one.directory / INITIAL_WEIGHTS))
        one.ledger.close()
    assert keys[0] == keys[1] != keys[2]


def test_a_study_keeps_its_weights(study: Path, tmp_path: Path) -> None:
    one = opened(study)
    shutil.copytree(tmp_path / "given", tmp_path / "other")
    chain = shortest(one)
    Worker(one.ledger, compiled=False).reach(chain)
    one.ledger.close()
    with pytest.raises(StudyDirectoryError, match="initial_weights"):
        opened(study, initial_weights="other")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"transfer.widths": [16, 32]}, ["transfer.widths", "width 32", "width 16"]),
        ({"transfer.depths": [1, 2]}, ["transfer.depths", "initial_weights"]),
        ({"transfer.over": {"eps": {"points": 5}}}, ["transfer.over", "initial_weights"]),
        ({"check.seeds": [0, 1]}, ["check", "initial_weights"]),
        ({"ladder.stems": [{"width": 48, "n_tokens": 16384}]}, ["ladder.stems", "width 32", "width 48"]),
        ({"ladder.stems": [{"width": 32, "depth": 2, "n_tokens": 16384}]}, ["ladder.stems", "depth 1", "depth 2"]),
        ({"plan.shapes": [{"width": 64}]}, ["plan.shapes", "width 64"]),
        ({"compare.widths": [16]}, ["compare.widths", "width 16"]),
        ({"variants": {"wide": {"model": {"mlp_ratio": 2.0}}}}, ["variants.wide.model", "mlp_ratio"]),
        ({"variants": {"words": {"corpus": {"tokenizer": "bpe"}}}}, ["variants.words.corpus:", "tokenizer"]),
        ({"hyperparameters.init_scale": 0.5}, ["hyperparameters.init_scale", "0.5"]),
        ({"plan.explicit.init_scale": 0.5}, ["plan.explicit.init_scale", "0.5"]),
        ({"plan.explicit.context_length": 64}, ["plan.explicit.context_length", "64"]),
        (
            {"sweep.space.init_scale": {"distribution": "log_uniform", "low": 0.5, "high": 2.0}},
            ["sweep.space.init_scale", "initial_weights"],
        ),
    ],
)
def test_settings_that_need_other_shapes_or_values_are_refused(
    setting: dict[str, object], named: list[str], study: Path
) -> None:
    with pytest.raises(StudyFileError) as found:
        StudyConfig.read(study, setting)
    (line,) = [line for line in str(found.value).splitlines() if named[0] in line]
    assert all(part in line for part in [str(study), *named])


def test_the_default_space_draws_no_initial_values(study: Path) -> None:
    before, _, after = STUDY.partition("[sweep.space]")
    study.write_text(before + after[after.index("\n[") :])
    assert set(StudyConfig.read(study).sweep.space) == {"learning_rate", "weight_decay_tau"}


def test_the_example_of_the_documentation_is_a_whole_study_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (block,) = [
        block for block in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL) if "initial_weights =" in block
    ]
    path = tmp_path / "study.toml"
    path.write_text(block)
    config = StudyConfig.read(path)
    assert config.initial_weights == "gpt2"
    assert config.model.n_params == pytest.approx(124e6, rel=0.01)
    assert list(config.sweep.space) == ["learning_rate"]
    path.write_text(re.sub(r"\[sweep\.space\]\n.*\n", "", block))
    assert set(StudyConfig.read(path).sweep.space) == {"learning_rate", "weight_decay_tau"}


def test_a_folder_that_is_gone_before_the_first_training_is_named(study: Path, tmp_path: Path) -> None:
    one = opened(study)
    assert one.corpus.n_tokens > 0
    one.ledger.close()
    shutil.rmtree(tmp_path / "given")
    two = opened(study)
    with pytest.raises(StageError, match=r"initial_weights: .*given"):
        _ = two.corpus
    two.ledger.close()


def test_a_folder_that_does_not_fit_is_refused_before_anything_is_written(study: Path, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    for setting, named in (
        ({"initial_weights": "nothing"}, "nothing"),
        ({"model.norm_eps": 1e-6}, "layer_norm_epsilon"),
        ({"initial_weights": "text"}, "config.json"),
    ):
        with pytest.raises(StageError, match=f"initial_weights: .*{named}"):
            opened(study, **setting)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_check_over_widths_is_refused(study: Path) -> None:
    one = opened(study)
    with pytest.raises(StageError, match="initial_weights"):
        one.check()
    one.ledger.close()


def test_the_folder_s_tokenizer_must_be_the_corpus_s(study: Path, tmp_path: Path) -> None:
    bpe = tmp_path / "bpe.json"
    bpe.write_text(train_bpe([(tmp_path / "text" / "000.txt").read_bytes()], 256 + 4))
    trained = FileTokenizer(bpe)
    write_tokenizer(trained, tmp_path / "given", context_length=32)
    assert same_tokenizer(tmp_path / "given" / "tokenizer.json", trained)
    assert not same_tokenizer(tmp_path / "given" / "tokenizer.json", BytesTokenizer())
    one = opened(study)
    with pytest.raises(StageError, match=r"initial_weights: .*tokenizer\.json"):
        _ = one.corpus
    assert not (one.directory / INITIAL_WEIGHTS).exists()
    one.ledger.close()
    write_tokenizer(BytesTokenizer(), tmp_path / "given", context_length=32)
    two = opened(study)
    assert two.corpus.vocab_size == 256
    assert json.loads((two.directory / INITIAL_WEIGHTS / "manifest.json").read_text())["layout"] == "gpt2"
    two.ledger.close()


def test_grids_of_one_size_pass_and_give_the_law_in_the_tokens(study: Path) -> None:
    costs = estimate(StudyConfig.read(study)).set_index("stage")["runs"]
    assert costs["transfer"] == 10  # five rates, two horizons, one width
    rows = pd.DataFrame(
        [
            {"along": "width", "size": 32, "over": "rate", "value": 2.0**octave, "n_tokens": n, "loss": loss}
            for n, best in ((1e6, -7.0), (2e6, -7.3), (4e6, -7.6))
            for octave in np.arange(-9.0, -5.0, 0.5)
            for loss in [2.0 + 0.01 * (octave - best) ** 2]
        ]
    )
    verdict = fit_verdict(rows, one_size=True)
    assert verdict.passed
    assert verdict.is_of_one_size
    assert verdict.reasons == ()
    assert verdict.horizon is not None
    assert verdict.horizon.exponent == pytest.approx(0.3, abs=0.05)
    assert type(verdict).from_dict(verdict.to_dict()).passed
    with pytest.raises(ValueError, match="size"):
        fit_verdict(rows.assign(size=[16, 32] * (len(rows) // 2)), one_size=True)
    with pytest.raises(ValueError, match="2 values"):
        fit_verdict(rows)


def test_the_gate_says_that_nothing_is_carried_over_widths(study: Path) -> None:
    one = opened(study, **{"plan.shapes": [{"width": 32}]})
    config = one.config
    plan = Planner(config, config.hyperparameters, planted_horizon(), planted_fit(), corpus=one.corpus, winner=0).plan()
    assert plan.model == config.model
    assert not any("muP" in rule for rule in plan.rules.values())
    assert not any("muP width" in one.rules for one in plan.provenance)
    verdict = Verdict(transfers=(), n_tokens=16384.0, horizons=(), missing={})
    found = dry_run(plan, config, one.corpus, check=None, leaks=None, verdict=verdict, directory=one.directory)
    lines = {line.name: line for line in found.gate.lines}
    assert lines["transfer"].status == "passed"
    assert "'given'" in lines["transfer"].compared
    assert "coordinate check" not in lines
    one.ledger.close()


def test_a_parent_is_replayed_from_its_start_with_these_weights(study: Path) -> None:
    one = opened(study)
    config, numerics = one.config, one.config.shared_numerics(one.corpus, one.directory)
    planner = Planner(config, config.hyperparameters, planted_horizon(), planted_fit(), corpus=one.corpus, winner=0)
    plan = register(replace(planner.plan(), n_tokens=12 * 256), one.ledger)
    folder = one.directory / FULL_RUNS / plan.key
    train(promotion.full_run_of(plan, config, numerics, folder, one.corpus.folder))
    wanted = ParentSettings(run=plan.key, tokens=None)
    run = parent.full_run_of(parent.find_parent(wanted, one.ledger, one.corpus, numerics), config, one.ledger)
    found = replay(run, 12, train, one.ledger, end=run.n_tokens)
    assert found is not None
    assert (found.start, found.deviation) == (0, 0.0)
    one.ledger.close()
