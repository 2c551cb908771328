"""The bundle: written whole from a real run, usable without it, and any change to it is reported by file."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from muscale import weights_folder
from muscale.bundles import bundle as parts
from muscale.bundles.bundle import Bundle, load_bundle
from muscale.bundles.bundle_files import MANIFEST, verify
from muscale.bundles.bundle_writing import FinishedRun, write_bundle
from muscale.bundles.model_card import model_card
from muscale.cli import app
from muscale.errors import BundleError, StageError
from muscale.full_runs.checkpoints.evaluate import evaluate_checkpoint
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.checkpoints.stored_weights import alone
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.train.attempt import train
from muscale.layout import INITIAL_WEIGHTS, METRICS, RESULT
from muscale.settings.config import StudyConfig
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.decoder_family import DecoderFamily
from proxy_models.architecture.families import load
from proxy_models.architecture.family import Family
from proxy_models.data.cleaning.clean import clean
from proxy_models.data.cleaning.cleaning_step import CleaningStep
from proxy_models.data.cleaning.heuristics import Heuristics
from proxy_models.data.cleaning.leaks import Leaks
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import Source
from proxy_models.data.tokenizer import BYTES, BytesTokenizer, TokenizerSettings
from proxy_models.evaluation.samples import Samples
from proxy_models.hashing import file_sha256
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import Constant
from proxy_models.recipes.segments import Segment, chain
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.initial_weights import starting_values
from proxy_models.training.numerics import Numerics, key_of_weights
from proxy_models.training.optimizer import initialize, make_optimizer
from proxy_models.training.state import capture
from proxy_models.training.step import Stepper
from proxy_models.training.trainer import Trainer
from scaling import Forecast
from tests.muscale.conftest import write_text
from tests.muscale.planted_ladder import PLAN, PROMOTION
from tests.proxy_models.families import TRANSFORMERS, Recurrent

BATCH, STEPS = 256, 24
NUMBERS: dict[str, Any] = {"n_params": 1e4, "n_tokens": 6144.0, "loss": 3.0, "low": 2.0, "high": 9.0, "level": 0.9}
EXPERTS: dict[str, Any] = {"n_experts": 8, "expert_ratio": 0.5, "balance_rate": 0.05}
WRITTEN = {
    *(parts.CARD, parts.WEIGHTS, parts.OPTIMIZER, parts.MODEL, parts.PARAMETRIZATION, parts.SCHEDULE, parts.STUDY),
    *(parts.DATA, parts.ENVIRONMENT, parts.LOCK, parts.SEEDS, parts.METRICS, parts.FORECAST, parts.LINEAGE, parts.RUNS),
}


@dataclass(frozen=True)
class Case:
    run: FinishedRun
    bundle: Path


def finish(
    folder: Path,
    *,
    tokenizer: TokenizerSettings = BYTES,
    hyperparameters: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    guard: GuardSettings | None = None,
    family: Family | None = None,
    depth: int = 2,
    steps: Sequence[CleaningStep] = (),
) -> FinishedRun:
    """A real run in one process, with what a plan and a promotion would say of it."""
    write_text(folder / "text", documents=30, words=300)
    source = Source(path=str(folder / "text"))
    if steps:
        (folder / "text" / "notice.txt").write_text("All rights of this text are reserved by its author.\n")
        source = clean({"corpus": source}, folder / "cleaned", steps, validation_fraction=0.1).sources["corpus"]
    corpus = write_corpus(folder / "corpus", source, tokenizer=tokenizer)
    shape = {"context_length": 32, "vocab_size": 300, **(options or {})}
    family = family or DecoderFamily.of(ModelConfig(d_model=32, n_layers=2, **shape))
    model, base = (family.member(width, depth) for width, depth in ((32, depth), (16, 1)))
    numerics = Numerics(
        model=model, base=base, corpus_key=corpus.key, seed=3, evaluation_tokens=1024, guard=guard, depth_exponent=0.75
    )
    tuned = Hyperparameters(
        **{"learning_rate": 0.01, "batch_tokens": BATCH, "output_multiplier": 2.0, **(hyperparameters or {})}
    )
    segments = chain(tuned, BATCH * STEPS)
    directory = folder / "run"
    result = train(
        FullRun(
            numerics=numerics,
            segments=segments,
            directory=directory,
            corpus=corpus.folder,
            checkpoint_every_tokens=BATCH * 8,
            evaluate_every_tokens=BATCH * 100,
        )
    )
    forecast = Forecast(**NUMBERS, log_scale=0.1, extrapolation=2.0, reasons=(), law_loss=3.0)
    plan = replace(
        PLAN,
        model=model,
        n_tokens=BATCH * STEPS,
        seed=3,
        precision="fp32",
        hyperparameters=tuned,
        rules={"learning_rate": "muP across width | and a law"},
        forecast=forecast,
    )
    promotion = replace(
        PROMOTION,
        loss=result["loss"],
        forecast=forecast.loss,
        **{name: NUMBERS[name] for name in ("low", "high", "level")},
        world_size=1,
        seconds=result["seconds"],
    )
    known = {"sweep": {"winner": 4, "trials": [{}] * 6}, "check": None, "transfer": {}, "fit": None, "caveats": ["x"]}
    of_card: dict[str, Any] = {
        "name": "a <b>study</b>",
        "plan": plan,
        "promotion": promotion,
        "numerics": numerics,
        "corpus": corpus,
    }
    return FinishedRun(
        chain=Chain(numerics=numerics, segments=segments),
        directory=directory,
        corpus=corpus,
        n_tokens=plan.n_tokens,
        loss=promotion.loss,
        outcome=(parts.FORECAST, promotion.to_dict()),
        facts={"plan": plan.key},
        card=partial(model_card, lineage=known, **of_card),
        config={"name": "a study", "sweep": {"seed": 7}, "fit": {"max_regret": float("inf")}},
        lineage=known,
        runs=pd.DataFrame([{"key": "k", "loss": 1.5}]),
    )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("bundle")
    run = finish(folder, tokenizer=TokenizerSettings(kind="bpe", vocab_size=290))
    return Case(run, write_bundle(run, folder / "bundle", average=2).path)


@pytest.fixture
def copied(case: Case, tmp_path: Path) -> Path:
    """A bundle that a test may damage."""
    return Path(shutil.copytree(case.bundle, tmp_path / "bundle"))


def test_it_holds_everything_and_each_file_s_hash(case: Case) -> None:
    found = verify(case.bundle)
    assert found.passed
    files = json.loads((case.bundle / MANIFEST).read_text())["files"]
    averaged = {parts.AVERAGED, parts.AVERAGING}
    assert files.keys() == WRITTEN | averaged | {"tokenizer/tokenizer.json", "tokenizer/tokenizer.manifest.json"}
    assert all(entry["sha256"] == file_sha256(case.bundle / name) for name, entry in files.items())
    assert found.digest == file_sha256(case.bundle / MANIFEST)


def test_its_weights_are_the_run_s_and_give_its_loss_without_the_study(case: Case, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(case.bundle, tmp_path / "elsewhere"))
    decoder = load_bundle(alone)
    run = case.run
    assert evaluate_unsharded(decoder, run.corpus, run.chain.numerics)["val_loss"] == pytest.approx(run.loss, rel=1e-6)
    trained = resumed_at(run, BATCH * STEPS)
    expected = dict(trained.module.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in decoder.named_parameters())
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(decoder(tokens), trained.module.eval()(tokens))
    state = Bundle.open(alone).train_state().tensors
    expected_state = capture(trained.module, trained.optimizer)
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[key], expected_state[key]) for key in state)


@pytest.mark.parametrize(
    ("options", "hyperparameters", "guard"),
    [
        pytest.param({"tied": True}, {"optimizer": "muon"}, None, marks=pytest.mark.soak),
        pytest.param(
            {"norm": "layernorm", "biases": True},
            {"optimizer": "lion"},
            GuardSettings(action="rewind", window=8),
            marks=pytest.mark.soak,
        ),
        (EXPERTS, {"optimizer": "muon"}, GuardSettings(action="rewind", window=8)),
        ({"qk_norm": True}, {"swap_optimizer": "adafactor", "swap_fraction": 0.5, "swap_learning_rate": 0.01}, None),
    ],
    ids=["tied, Muon", "Lion, guard", "experts, Muon, guard", "swapped to Adafactor"],
)
def test_every_optimizer_and_variant_comes_back(
    options: dict[str, Any], hyperparameters: dict[str, Any], guard: GuardSettings | None, tmp_path: Path
) -> None:
    run = finish(tmp_path, options=options, hyperparameters=hyperparameters, guard=guard)
    bundle = write_bundle(run, tmp_path / "bundle")
    assert {path.name for path in bundle.path.iterdir()} == WRITTEN | {MANIFEST}
    again = evaluate_unsharded(bundle.decoder(), run.corpus, run.chain.numerics)["val_loss"]
    assert again == pytest.approx(run.loss, rel=1e-6)
    check_that_a_training_goes_on(run, bundle)
    assert bundle.numerics == run.chain.numerics
    assert bundle.tokenizer() == BytesTokenizer()
    assert 0 < len(bundle.generate("abc", 10)) <= 10


def check_that_a_training_goes_on(run: FinishedRun, bundle: Bundle) -> None:
    """From the bundle as from the state that the lean loop has at the same place."""
    numerics, last = run.chain.numerics, run.chain.last
    trainer, state = Trainer(run.corpus, compile=False), None
    for segment in run.chain.segments:
        state = trainer.train(numerics, segment, state).state
    further = Segment(recipe=last.recipe, phase=Constant(warmup_tokens=0), start=last.end, end=last.end + 4 * BATCH)
    undisturbed = trainer.train(numerics, further, state)
    resumed = trainer.train(numerics, further, bundle.train_state())
    np.testing.assert_allclose(resumed.curve.train_loss, undisturbed.curve.train_loss, rtol=1e-4)
    assert resumed.loss == pytest.approx(undisturbed.loss, rel=1e-4)


def test_the_facts_are_those_of_the_run(case: Case) -> None:
    bundle, run = Bundle.open(case.bundle), case.run
    forecast = bundle.read(parts.FORECAST)
    assert forecast["residual"] == run.loss - 3.0
    assert bundle.read(parts.SEEDS) == {"full_run": 3, "sweep.seed": 7}
    assert bundle.read(parts.STUDY)["fit"] == {"max_regret": None}, "JSON has no infinity"
    assert bundle.read(parts.DATA)["key"] == run.corpus.key
    assert bundle.read(parts.SCHEDULE)[-1]["end"] == BATCH * STEPS
    assert bundle.read(parts.PARAMETRIZATION) == run.chain.numerics.parametrization("adamw").to_dict()
    assert (case.bundle / parts.METRICS).read_text() == (run.directory / METRICS).read_text()
    assert f"torch=={metadata.version('torch')}" in (case.bundle / parts.LOCK).read_text().splitlines()
    assert bundle.read(parts.ENVIRONMENT)["run"] == json.loads((run.directory / RESULT).read_text())["environment"]


def test_a_cleaned_corpus_is_kept_with_what_each_step_removed(tmp_path: Path) -> None:
    run = finish(tmp_path, steps=[Heuristics(stop_words="none", repetition=False), Leaks()])
    bundle = write_bundle(run, tmp_path / "bundle").path
    (steps,) = (source["cleaned"] for source in json.loads((bundle / parts.DATA).read_text())["sources"].values())
    assert [(step["step"], step["documents"], step["documents_left"]) for step in steps] == [
        ("heuristics", 31, 30),
        ("leaks", 30, 30),
    ]
    assert [example["file"] for example in steps[0]["examples"]] == ["notice.txt"]
    assert verify(bundle).passed


def test_averages_are_fp32_means_stored_with_the_last_weights(case: Case) -> None:
    run = case.run
    checkpoints = Checkpoints(run.directory / CHECKPOINTS)
    newest = [tokens for tokens, _ in checkpoints.intact()][:2]
    bundle = Bundle.open(case.bundle)
    averaging = bundle.read(parts.AVERAGING)
    assert averaging["checkpoints"] == newest == [BATCH * 24, BATCH * 16]
    assert averaging["loss"] == pytest.approx(run.loss, rel=1e-6)
    averaged = bundle.decoder(averaged=True)
    assert evaluate_unsharded(averaged, run.corpus, run.chain.numerics)["val_loss"] == pytest.approx(
        averaging["averaged_loss"], rel=1e-6
    )
    assert f"average of 2 checkpoints {averaging['averaged_loss']:.4f}, last weights {averaging['loss']:.4f}" in str(
        bundle
    )
    weights = [_weights_at(run, tokens) for tokens in newest]
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(parameter.detach(), (weights[0][name] + weights[1][name]) / 2)
    with pytest.raises(StageError, match=r"\b3\b.*\b2\b"):
        write_bundle(run, case.bundle.with_name("more"), average=3)
    assert not case.bundle.with_name("more").exists()


def test_the_state_of_routers_is_kept_and_averaged_and_a_bundle_without_it_is_refused(tmp_path: Path) -> None:
    run = finish(tmp_path, options=EXPERTS)
    bundle = write_bundle(run, tmp_path / "bundle", average=2)
    name = "blocks.1.mlp.router.balance_bias"
    newest = [tokens for tokens, _ in Checkpoints(run.directory / CHECKPOINTS).intact()][:2]
    last, before = (resumed_at(run, tokens).module.get_buffer(name) for tokens in newest)
    assert last.abs().max() > 0
    torch.testing.assert_close(bundle.decoder().get_buffer(name), last)
    torch.testing.assert_close(bundle.decoder(averaged=True).get_buffer(name), (last + before) / 2)
    torch.testing.assert_close(bundle.train_state().tensors[f"buffer/{name}"], last)
    weights = load_file(bundle.path / parts.WEIGHTS)
    del weights[name]
    save_file(weights, bundle.path / parts.WEIGHTS)
    tamper(bundle.path, parts.WEIGHTS, (bundle.path / parts.WEIGHTS).read_bytes())
    with pytest.raises(BundleError, match=name):
        load_bundle(bundle.path)


def _weights_at(run: FinishedRun, tokens: int) -> dict[str, Tensor]:
    return dict(resumed_at(run, tokens).module.named_parameters())


def resumed_at(run: FinishedRun, tokens: int) -> Stepper:
    """The training, continued from one of its checkpoints."""
    numerics, recipe = run.chain.numerics, run.chain.last.recipe
    decoder, table = Decoder(as_decoder(numerics.model)), numerics.parametrization(recipe.optimizer)
    initialize(decoder, table, recipe, seed=numerics.seed)  # for the multipliers
    stepper = Stepper(decoder, make_optimizer(decoder, table, recipe), numerics, recipe)
    checkpoints = Checkpoints(run.directory / CHECKPOINTS)
    with alone():
        checkpoints.load(checkpoints.path(tokens), stepper)
    return stepper


def test_generation_and_export_need_only_the_bundle(copied: Path, transformers: ModuleType, tmp_path: Path) -> None:
    bundle = Bundle.open(copied)
    assert bundle.generate("ab", 20) == bundle.generate("ab", 20)
    assert bundle.generate("ab", 20, temperature=1.0, seed=1) != bundle.generate("ab", 20, temperature=1.0, seed=2)
    folder = bundle.export(tmp_path / "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = bundle.tokenizer()
    assert ours is not None
    text = "abcd efgh, and a text beyond"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == ours.encode([text.encode()])[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, bundle.decoder()(ids), atol=1e-4, rtol=0)
    assert (folder / parts.CARD).read_text() == (copied / parts.CARD).read_text()
    with pytest.raises(BundleError, match="must not exist"):
        bundle.export(folder)


def test_what_llama_can_t_hold_is_refused(copied: Path, tmp_path: Path) -> None:
    model = json.loads((copied / parts.MODEL).read_text())
    for shape in ("model", "base"):
        model["numerics"][shape]["parallel"] = True
    tamper(copied, parts.MODEL, json.dumps(model).encode())
    weights = load_file(copied / parts.WEIGHTS)
    save_file({name: t for name, t in weights.items() if "mlp_norm" not in name}, copied / parts.WEIGHTS)
    tamper(copied, parts.WEIGHTS, (copied / parts.WEIGHTS).read_bytes())
    with pytest.raises(BundleError, match=r"export: .*model.parallel must be False .* got True"):
        Bundle.open(copied).export(tmp_path / "llama")


def tamper(bundle: Path, name: str, content: bytes) -> None:
    """Change a file and its hash, as somebody would who means it."""
    (bundle / name).write_bytes(content)
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": file_sha256(bundle / name)}
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def test_weights_of_another_model_are_refused(copied: Path) -> None:
    weights = load_file(copied / parts.WEIGHTS)
    weights["embedding.weight"] = weights["embedding.weight"][:5].contiguous()
    save_file(weights, copied / parts.WEIGHTS)
    tamper(copied, parts.WEIGHTS, (copied / parts.WEIGHTS).read_bytes())
    with pytest.raises(BundleError, match=r"embedding.weight is \(5, 32\), the model's is \(300, 32\)"):
        load_bundle(copied)


def test_a_pickle_in_place_of_the_weights_is_not_opened(copied: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'opened'}",)

    torch.save({"embedding.weight": Evil()}, tmp_path / "evil.pt")
    tamper(copied, parts.WEIGHTS, (tmp_path / "evil.pt").read_bytes())
    with pytest.raises(BundleError, match="not safetensors"):
        load_bundle(copied)
    assert not (tmp_path / "opened").exists()


def test_a_family_of_one_s_own_is_kept_as_data_and_built_again_only_by_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish(tmp_path, family=Recurrent(vocab_size=300, context_length=32))
    written = write_bundle(run, tmp_path / "bundle", average=2)
    source = Path(sys.modules[Recurrent.__module__].__file__ or "")
    assert (written.path / parts.FAMILY_FOLDER / "tests/proxy_models/families.py").read_bytes() == source.read_bytes()
    card = (written.path / parts.CARD).read_text()
    assert f"{Recurrent.__module__}:Recurrent" in card
    assert "muscale generate" not in card, "it would be refused"
    monkeypatch.delitem(sys.modules, Recurrent.__module__)
    opened = Bundle.open(written.path)
    uses: list[Callable[[], Any]] = [
        opened.decoder,
        lambda: opened.generate("ab", 3),
        lambda: opened.export(tmp_path / "llama"),
    ]
    for use in uses:
        with pytest.raises(BundleError, match="got width 32, depth 2 of.*:Recurrent"):
            use()
    with pytest.raises(StageError, match="its family was not imported here"):
        write_bundle(run, tmp_path / "again")
    assert verify(written.path).passed
    assert Recurrent.__module__ not in sys.modules
    again = evaluate_unsharded(opened.module(), run.corpus, run.chain.numerics)["val_loss"]
    assert again == pytest.approx(run.loss, rel=1e-6)
    assert Recurrent.__module__ in sys.modules
    newest = evaluate_checkpoint(run.directory, [Samples(prompts=("ab",), n_tokens=3)], corpus=run.corpus.folder)
    assert newest.val_loss == pytest.approx(run.loss, rel=1e-6)
    assert len(newest.samples[0].text) == 3
    with pytest.raises(BundleError, match="width 32, depth 2 of.*:Recurrent"):
        opened.export(tmp_path / "exported", to="transformers")
    values = json.loads((written.path / parts.MODEL).read_text())
    values["numerics"]["model"]["source"] = "0" * 64
    tamper(written.path, parts.MODEL, json.dumps(values).encode())
    with pytest.raises(BundleError, match="the source of .*:Recurrent is .* here"):
        Bundle.open(written.path).module()


def test_a_config_of_transformers_is_exported_as_its_class_saves_it(tmp_path: Path, transformers: ModuleType) -> None:
    gpt2 = load("transformers:GPT2Config")(vocab_size=300, context_length=32, **TRANSFORMERS["GPT2Config"])
    opened = Bundle.open(write_bundle(finish(tmp_path, family=gpt2, depth=1), tmp_path / "bundle").path)
    folder = opened.export(tmp_path / "gpt2", to="transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("abcd efgh", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, opened.module()(ids), atol=1e-4, rtol=0)
    assert (folder / parts.CARD).read_text() == (opened.path / parts.CARD).read_text()
    with pytest.raises(BundleError, match="got width 32"):
        opened.export(tmp_path / "llama")


def test_what_has_no_class_in_transformers_is_not_exported_as_one(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="the built-in decoder has no class in transformers"):
        Bundle.open(copied).export(tmp_path / "exported", to="transformers")
    assert not (tmp_path / "exported").exists()


def test_a_bundle_is_never_written_over_another_nor_by_halves(case: Case, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="must not exist"):
        write_bundle(case.run, case.bundle)
    no_card: dict[str, str] = {}
    broken = replace(case.run, card=lambda _: str(no_card["missing"]))  # fails after the weights are written
    with pytest.raises(KeyError):
        write_bundle(broken, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_give_the_run_s_loss_are_refused(case: Case, tmp_path: Path) -> None:
    other = replace(case.run, loss=case.run.loss * 1.01)
    with pytest.raises(StageError, match="last weights"):
        write_bundle(other, tmp_path / "bundle")
    gone = replace(case.run, directory=tmp_path / "nowhere")
    with pytest.raises(StageError, match="6144"):
        write_bundle(gone, tmp_path / "bundle")


def test_the_commands_verify_generate_and_export(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def muscale(*arguments: str | Path) -> tuple[int, str]:
        code = app([str(argument) for argument in arguments], result_action="return_value")
        return code, capsys.readouterr().out

    bundle = Bundle.open(copied)
    assert muscale("verify", copied) == (0, f"{bundle.verification}\n")
    assert json.loads(muscale("verify", copied, "--json")[1])["passed"]
    draw = ("--tokens", "20", "--top-p", "0.9", "--seed", "5", "--averaged")
    text = bundle.generate("ab", 20, temperature=0.8, top_p=0.9, seed=5, averaged=True)
    assert muscale("generate", copied, "--prompt", "ab", *draw) == (0, f"ab{text}\n")
    chat, messages = [{"role": "user", "content": "ab?"}], tmp_path / "chat.json"
    messages.write_text(json.dumps(chat))
    answer = bundle.generate(chat, 20, temperature=0.8, top_p=0.9, seed=5, averaged=True)
    assert answer == bundle.generate(
        "<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n",
        20,
        temperature=0.8,
        top_p=0.9,
        seed=5,
        averaged=True,
    )
    assert muscale("generate", copied, "--messages", messages, *draw) == (0, f"{answer}\n")
    for wrong in ("{}", "[3]", "[", '[{"role": "user"}]'):
        messages.write_text(wrong)
        with pytest.raises(BundleError, match="messages"):
            muscale("generate", copied, "--messages", messages, *draw)
    with pytest.raises(BundleError, match="--prompt"):
        muscale("generate", copied, "--messages", messages, "--prompt", "ab")
    assert muscale("export", copied, tmp_path / "llama", "--to", "llama") == (0, f"wrote {tmp_path / 'llama'}\n")
    exported = load_file(tmp_path / "llama" / "model.safetensors")
    assert exported["lm_head.weight"].shape == (300, 32)
    (copied / parts.SEEDS).unlink()
    code, shown = muscale("verify", copied)
    assert code == 1
    assert shown.endswith(f"DAMAGED\n  missing: {parts.SEEDS}\n")
    with pytest.raises(BundleError, match=f"missing: {parts.SEEDS}"):
        muscale("generate", copied)


def test_a_corpus_of_tokens_has_no_tokenizer_to_generate_with(copied: Path) -> None:
    data = json.loads((copied / parts.DATA).read_text())
    tamper(copied, parts.DATA, json.dumps({**data, "tokenizer_known": False}).encode())
    bundle = Bundle.open(copied)
    assert bundle.tokenizer() is None
    with pytest.raises(BundleError, match="no tokenizer to write text with"):
        bundle.generate("ab", 5)


def test_a_study_starts_from_the_first_of_a_bundle_s_learned_positions(
    case: Case, copied: Path, make_study: Callable[[], Path], tmp_path: Path
) -> None:
    learned = replace(as_decoder(Bundle.open(copied).numerics.model), positions="learned")
    weights = {name: tensor.data for name, tensor in Decoder(learned).named_parameters()}
    values = json.loads((copied / parts.MODEL).read_text())
    values["numerics"] |= {"model": learned.to_dict(), "base": learned.to_dict()}
    tamper(copied, parts.MODEL, json.dumps(values).encode())
    tamper(copied, parts.WEIGHTS, save(weights))
    config = StudyConfig.read(make_study()).model_copy(update={"initial_weights": str(copied)})
    of_length = {n: config.model_copy(update={"model": replace(learned, context_length=n)}) for n in (16, 64)}
    weights_folder.store(of_length[16], tmp_path, case.run.corpus, is_begun=False)
    (stored,) = (tmp_path / INITIAL_WEIGHTS).glob("*.safetensors")
    assert load_file(stored)["position.weight"].equal(weights["position.weight"][:16])
    with pytest.raises(StageError, match="64"):
        weights_folder.check(of_length[64], tmp_path / "elsewhere")


def test_a_study_starts_from_a_bundle_s_function(
    case: Case, copied: Path, make_study: Callable[[], Path], tmp_path: Path
) -> None:
    bundle = Bundle.open(copied)
    model = as_decoder(bundle.numerics.model)
    shorter = replace(model, context_length=16, mlp_dropout=0.1)
    config = StudyConfig.read(make_study()).model_copy(update={"initial_weights": str(copied), "model": shorter})
    weights_folder.check(config, tmp_path)
    weights_folder.store(config, tmp_path, case.run.corpus, is_begun=False)
    key = key_of_weights(tmp_path / INITIAL_WEIGHTS)
    numerics = replace(bundle.numerics, model=shorter, base=shorter, initial_weights=key)
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=BATCH, attention_multiplier=3.0).resolve(BATCH * 100)
    started, values = Decoder(shorter), starting_values(numerics, recipe, tmp_path / INITIAL_WEIGHTS)
    initialize(started, numerics.parametrization("adamw"), recipe, seed=0, values=values)
    tokens = torch.randint(290, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = bundle.decoder()(tokens)
        torch.testing.assert_close(started.eval()(tokens), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    for changed in ({"norm_eps": 1e-5}, {"d_model": 48}, {"positions": "alibi"}):
        other = config.model_copy(update={"model": replace(shorter, **changed)})
        with pytest.raises(StageError, match=next(iter(changed))):
            weights_folder.check(other, tmp_path / "elsewhere")
    write_text(tmp_path / "bytes")
    of_bytes = write_corpus(tmp_path / "tokens", str(tmp_path / "bytes"))
    with pytest.raises(StageError, match="tokenizer"):
        weights_folder.store(config, tmp_path / "elsewhere", of_bytes, is_begun=False)
