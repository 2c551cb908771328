"""Continuations of a promoted run: their data, keys, losses and bundles."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muscale import StageError, Study, StudyFileError
from muscale.bundles.bundle import CARD, CONTINUED, LINEAGE
from muscale.cli import app
from muscale.full_runs.amend.train import Amended, train_amendment
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.checkpoints.held_out import evaluate_unsharded
from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.layout import FULL_RUNS, STUDY_FILE
from muscale.plans.plan import register
from muscale.settings.continuation_file import ContinuationFile
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.tokenizer import FileTokenizer, TokenizerSettings
from tests.muscale.full_runs.amend.conftest import BATCH, STEPS, Case, last_evaluation

CONTINUATION = f"""
name = "more"
n_tokens = {4 * BATCH}
"""
MIXTURE = '[corpus.sources.code]\npath = "code"\nweight = 3\n[corpus.sources.old]\npath = "text"\nweight = 1\n'
CODE = f"""
name = "code"
seed = 7
n_tokens = {6 * BATCH}
learning_rate_factor = 0.5
rewarm_tokens = {2 * BATCH}
{MIXTURE}"""


def test_reading_continues_after_the_promoted_run_and_the_result_is_returned_again(case: Case) -> None:
    continuation = case.planned(CONTINUATION)
    assert (continuation.parent.run, continuation.parent.tokens, continuation.position) == (
        case.plan.key,
        STEPS * BATCH,
        STEPS * BATCH,
    )
    assert continuation.numerics.model == case.plan.model
    done = case.trained(CONTINUATION)
    assert done.before.own == last_evaluation(case.directory / FULL_RUNS / case.plan.key)
    assert done.after.own == last_evaluation(continuation.folder) != done.before.own
    assert (done.before.earlier, done.tokens_before, done.n_tokens) == ({}, STEPS * BATCH, 4 * BATCH)
    assert [one.name for one in done.lineage] == ["plan", "more"]
    assert Amended.from_dict(json.loads(json.dumps(done.to_dict()))) == done
    never = train_amendment(
        case.planned(CONTINUATION), case.config, case.ledger, launcher=lambda run: pytest.fail("trained again")
    )
    assert never == done
    assert (done.forecast, done.inside) == (None, None)
    assert case.ledger.runs().empty, "a continuation is no run that a law may be fitted from"


def test_continuations_continue_continuations_and_report_forgetting(case: Case) -> None:
    first = case.planned(CODE)
    assert first.position == 0
    assert (first.corpus.mixture is not None, first.corpus.key != case.corpus.key) == (True, True)
    done = case.trained(CODE)
    label = f"plan {case.plan.key}"
    assert done.before.sources.keys() == {"code", "old"}
    assert done.before.earlier == {label: last_evaluation(case.directory / FULL_RUNS / case.plan.key)}
    assert done.after.sources["code"] < done.before.sources["code"]
    assert done.after.earlier[label] != done.before.earlier[label]
    assert f"old was already read by {label}; it is read again from its start" in str(first)
    for shown in (label, "  its own corpus", "  code", f"→ {done.after.own:.4f}"):
        assert shown in str(done)

    again = case.planned('name = "again"\nn_tokens = 1024\n[parent]\nrun = "code"\n')
    assert again.parent.run == first.key
    assert again.position == 6 * BATCH, "of the mixture"
    assert (set(again.earlier), again.numerics.seed) == ({label}, 7)
    back = f'name = "back"\nn_tokens = 1024\n[parent]\nrun = "{first.key}"\n[corpus]\nsource = "text"\n'
    continuation = case.planned(back)
    assert (continuation.corpus.key, continuation.position) == (case.corpus.key, STEPS * BATCH), (
        "behind what the promoted run read"
    )
    assert continuation.earlier.keys() == {f"code {first.key}"}
    assert continuation.numerics.seed == 0, "the order in which that corpus was read"
    result = case.trained(back)
    assert [one.name for one in result.lineage] == ["plan", "code", "back"]
    assert result.tokens_before == (STEPS + 6) * BATCH
    assert result.before.own == done.after.earlier[label]
    assert result.before.earlier[f"code {first.key}"] == done.after.own


def test_a_curriculum_by_fractions_is_the_continuation_s_own_and_is_read_on_in_its_last_stage(case: Case) -> None:
    sources = MIXTURE.replace("weight = 3\n", "").replace("weight = 1\n", "")
    first, last = (
        f"[[corpus.stages]]\nweights = {{ code = 1, old = {old} }}\n{end}"
        for old, end in ((1, "until_fraction = 0.5\n"), (0, ""))
    )
    done = case.trained(CONTINUATION.replace("more", "mixed") + sources + first + last)
    assert done.after.own == done.after.sources["code"] < done.before.own
    further = case.planned('name = "on"\nn_tokens = 1024\n[parent]\nrun = "mixed"\n')
    assert (further.corpus.key, further.position) == (done.lineage[-1].corpus, done.n_tokens)
    assert further.corpus.evaluation_weights == {"code": 1.0, "old": 0.0}


def test_the_key_is_of_the_parent_and_of_what_the_continuation_computes_and_not_of_its_name(case: Case) -> None:
    key = case.planned(CONTINUATION).key
    assert case.planned(CONTINUATION.replace("more", "other")).key == key
    assert case.planned(CONTINUATION + "learning_rate_factor = 1.0\nschedule = 'wsd'").key == key
    others = [
        "learning_rate_factor = 0.5",
        f"rewarm_tokens = {BATCH}",
        'schedule = "constant"',
        "cooldown_fraction = 0.5",
        f'optimizer = "lion"\nlearning_rate = 0.001\nrewarm_tokens = {BATCH}',
        f"[parent]\ntokens = {6 * BATCH}",
        '[corpus]\nsource = "code"\nevaluation_tokens = 1024',
        '[corpus]\nsource = "code"\nevaluation_tokens = 512',
    ]
    keys = {case.planned(f"{CONTINUATION}{other}\n").key for other in others}
    assert len(keys | {key}) == len(others) + 1
    mended = [
        case.config.promote.model_copy(update={"on_spike": "rollback", "rewarm_tokens": tokens})
        for tokens in (0, BATCH)
    ]
    keys |= {case.planned(CONTINUATION, promote=promote).key for promote in mended}
    assert len(keys | {key}) == len(others) + 3
    longer = register(replace(case.plan, key="another", n_tokens=2 * STEPS * BATCH), case.ledger)
    shutil.copytree(case.directory / FULL_RUNS / case.plan.key, case.directory / FULL_RUNS / longer.key)
    assert case.planned(f'{CONTINUATION}[parent]\nrun = "another"\ntokens = {STEPS * BATCH}\n').key not in {key, *keys}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[corpus]\nsource = 'code'\ntokenizer = 'bpe'", "bpe.* would train a new one; leave corpus.tokenizer out"),
        ("[corpus]\nsource = 'code'\ntokenizer = 'other.json'", "hash bytes, got [0-9a-f]{16}; leave corpus.tokenizer"),
        ("[corpus]\nsource = 'ids'\nkind = 'tokens'\ndtype = 'uint8'\nvocab_size = 256", "got stated; give text"),
        ("[corpus]\nsource = 'nowhere'", "corpus.source: "),
        ("[corpus]\nsource = 'code'\nevaluation_tokens = 10000000", "corpus.evaluation_tokens: an evaluation of"),
        ("seed = 5", "seed: must be 0, the data order in which plan .* read this corpus; .*; got 5"),
        (
            "optimizer = 'adamw'\nlearning_rate = 0.1\nrewarm_tokens = 256",
            "optimizer: must differ from the parent's",
        ),
        ("rewarm_tokens = 5000", "rewarm_tokens: 5120 tokens"),
        (
            "[parent]\nrun = 'nobody'",
            "parent.run: must be the key of a plan, or the key or name of a continuation, .* got 'nobody'",
        ),
        ("[parent]\ntokens = 512", r"parent.tokens: run \w+ has checkpoints after 1536, 3072 tokens .* got 512"),
        ("[parent]\ntokens = 9999999", "parent.tokens: must be at most the 3072 of run"),
    ],
)
def test_an_impossible_continuation_is_refused_with_file_key_rule_and_value(
    case: Case, text: str, message: str
) -> None:
    if "other.json" in text:
        bpe = write_corpus(
            case.directory / "bpe",
            str(case.directory / "text"),
            tokenizer=TokenizerSettings(kind="bpe", vocab_size=260),
        )
        shutil.copy(bpe.folder / "tokenizer.json", case.directory / "other.json")
        shutil.rmtree(bpe.folder)
    (case.directory / "ids").write_bytes(bytes(5000))
    with pytest.raises(StageError, match=rf"continuation\.toml: .*{message}"):
        case.planned(f"{CONTINUATION}{text}\n", model=replace(case.config.model, vocab_size=300))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cooldwon_fraction = 0.1", "cooldwon_fraction: unknown key (value 0.1); did you mean cooldown_fraction?"),
        ("[parent]\ntoken = 5", "parent.token: unknown key (value 5); did you mean tokens?"),
        ("[corpus.sources.a]\npth = 'a'", "corpus.sources.a.pth: unknown key"),
        ("learning_rate_factor = -1.0", "learning_rate_factor: must be greater than 0, got -1.0"),
        ("learning_rate_factor = 2.0\nlearning_rate = 0.1", "got 0.1 and 2.0"),
        (
            "schedule = 'cosine'\ncooldown_fraction = 0.1",
            "cooldown_fraction is for schedule wsd and wsd_linear, got 0.1",
        ),
        ("final_fraction = 0.2", 'final_fraction is for schedule cosine, got 0.2 with "wsd"'),
        ("optimizer = 'lion'", "needs learning_rate"),
        ("schedule = 'step'", "schedule: must be 'wsd'"),
        ("[corpus.sources.a]\npath = 'a'", "corpus.sources.a.weight: missing, a value is required"),
    ],
)
def test_a_continuation_file_is_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "continuation.toml"
    path.write_text(f"{CONTINUATION}{text}\n")
    with pytest.raises(StudyFileError) as refusal:
        ContinuationFile.read(path, vocab_size=256)
    assert f"{path}: " in str(refusal.value)
    assert message in str(refusal.value)
    with pytest.raises(StudyFileError, match="none.toml:"):
        ContinuationFile.read(tmp_path / "none.toml", vocab_size=256)


def test_text_of_a_continuation_is_encoded_by_the_tokenizer_that_the_study_trained(case: Case) -> None:
    tokenizer = TokenizerSettings(kind="bpe", vocab_size=280)
    first = write_corpus(case.directory / "first", str(case.directory / "text"), tokenizer=tokenizer)
    continuation = replace(case, corpus=first).planned(
        f'{CONTINUATION}[corpus]\nsource = "code"\nevaluation_tokens = 512\n',
        model=replace(case.config.model, vocab_size=280),
    )
    assert continuation.corpus.tokenizer().key == first.tokenizer().key
    assert continuation.corpus.manifest["tokenizer"] == first.manifest["tokenizer"]


def test_a_continuation_names_a_tokenizer_from_the_user_s_own_folder_as_a_study_does(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TokenizerSettings(kind="bpe", vocab_size=270)
    first = write_corpus(case.directory / "named", str(case.directory / "text"), tokenizer=tokenizer)
    shutil.copy(first.folder / "tokenizer.json", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = first.tokenizer()
    assert isinstance(kept, FileTokenizer)
    named = f'tokenizer = "~/tokenizer.json"\nend_of_document = "{kept.end_name}"'
    continuation = replace(case, corpus=first).planned(
        f'{CONTINUATION}[corpus]\nsource = "code"\nevaluation_tokens = 512\n{named}\n',
        model=replace(case.config.model, vocab_size=270),
    )
    assert continuation.corpus.tokenizer().key == kept.key


def test_a_continuation_is_bundled_with_a_lineage_that_names_its_parents(case: Case) -> None:
    done = case.trained(CODE)
    study = Study.open(case.directory / STUDY_FILE, quiet=True)
    bundle = study.bundle(continuation="code")
    assert bundle.path.name == done.key
    assert study.bundle(continuation=done.key).path == bundle.path
    found = evaluate_unsharded(
        bundle.decoder(), Corpus.open(case.directory / done.lineage[-1].folder), bundle.numerics
    )["val_loss"]
    assert found == pytest.approx(done.after.own, rel=1e-5)
    assert bundle.read(CONTINUED) == json.loads(json.dumps(done.to_dict()))
    lineage = bundle.read(LINEAGE)
    assert [one["run"] for one in lineage["segments"]] == [case.plan.key, done.key]
    assert lineage["plan"]["key"] == case.plan.key
    card = (bundle.path / CARD).read_text()
    for text in (f"1. plan {case.plan.key}", f"| old | {done.before.sources['old']:.4f} |"):
        assert text in card
    assert bundle.generate("", 5)
    with pytest.raises(StageError, match="'nobody' does not exist"):
        study.bundle(continuation="nobody")
    study.ledger.close()


def test_a_checkpoint_that_is_another_than_when_the_continuation_was_begun_is_refused(case: Case) -> None:
    text = CONTINUATION + "learning_rate_factor = 0.9\n"
    continuation = case.planned(text)

    def fails(run: FullRun) -> dict[str, Any]:
        raise StageError("no workers")

    with pytest.raises(StageError, match="no workers"):
        train_amendment(continuation, case.config, case.ledger, launcher=fails)
    kept = Checkpoints(continuation.parent.checkpoint.parent)
    away = case.directory / "away"
    continuation.parent.checkpoint.rename(away)
    shutil.copytree(kept.path(6 * BATCH), continuation.parent.checkpoint)
    assert continuation.parent.checkpoint.parent.name == CHECKPOINTS
    with pytest.raises(StageError, match="must be the checkpoint from which the run was started"):
        case.trained(text)
    shutil.rmtree(continuation.parent.checkpoint)
    away.rename(continuation.parent.checkpoint)
    done = case.trained(text)
    continuation.parent.checkpoint.rename(away)
    assert case.trained(f"{text}[parent]\ntokens = {STEPS * BATCH}\n") == done, (
        "what is finished needs its parent no more"
    )
    away.rename(continuation.parent.checkpoint)


@pytest.mark.soak  # the launch is promotion's own, of which other tests make sure
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_train_a_continuation_from_the_command_line(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    call: Callable[..., Any] = lambda *options: app(  # noqa: E731
        ["continue", str(case.directory / STUDY_FILE), str(path), *options], result_action="return_value"
    )
    path = case.directory / "cli.toml"
    path.write_text(CONTINUATION.replace("more", "cli") + "learning_rate_factor = 0.25\n")
    assert call("--dry-run") == 0
    shown = capfd.readouterr().out
    folder = case.directory / FULL_RUNS / shown.split()[3].removesuffix(":")
    assert not folder.exists()
    assert call("--json") == 0
    output = json.loads(capfd.readouterr().out)
    assert (output["world_size"], output["key"], output["n_tokens"]) == (2, folder.name, 4 * BATCH)
    alone = case.trained(CONTINUATION)
    assert output["before"]["own"] == pytest.approx(alone.before.own, rel=1e-4)
    assert call() == 0


@pytest.mark.parametrize("keys", ["evaluation_tokens = 1024", "validation_fraction = 0.2"])
def test_a_corpus_without_a_source_is_refused(case: Case, keys: str) -> None:
    """Its default, the standard library's source, was trained on without a word."""
    with pytest.raises(StudyFileError, match=r"corpus\.source"):
        case.planned(f"{CONTINUATION}[corpus]\n{keys}\n")
    with pytest.raises(StudyFileError, match=r"corpus\.source"):
        case.amended(corpus__evaluation_tokens=1024)


def test_held_out_text_that_a_new_corpus_trains_on_is_named(case: Case) -> None:
    (case.directory / "more" / "text").mkdir(parents=True)
    for file in (case.directory / "text").iterdir():
        shutil.copyfile(file, case.directory / "more" / "text" / file.name)
    found = case.planned(f'{CONTINUATION}[corpus]\nsource = "more"\n')
    assert [note for note in found.notes if "held-out words" in note]
    apart = case.planned(f'{CONTINUATION}[corpus]\nsource = "code"\n')
    assert not [note for note in apart.notes if "held-out words" in note]
