"""Scores of tasks: they are those of a computation by hand and of lm-eval by itself, and no item is scored twice."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.llama import write_llama
from proxy_models.architecture.member import Member
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.data.cleaning.cleaning_step import MissingLibraryError
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import CorpusError, Source
from proxy_models.data.tokenizer import TokenizerKind, TokenizerSettings
from proxy_models.evaluation.contaminated_items import contaminated_items as find_contaminated
from proxy_models.evaluation.measure import Measured, Score, Subject
from proxy_models.evaluation.request_log import RequestLog
from proxy_models.evaluation.smooth_scores import choice_scores, share_error
from proxy_models.evaluation.task_model import Generation, TaskModel
from proxy_models.evaluation.tasks import SCORING, Tasks
from proxy_models.training.numerics import Numerics

LENGTH = 96
CHOICE = {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm", "acc_bytes")],
}
ITEMS: list[dict[str, Any]] = [
    {"question": "loss width", "choices": ["depth", "rate", "größe"], "answer": [0]},
    {"question": "a token and", "choices": ["batch", "step"], "answer": [1]},
    {"question": "norm", "choices": ["head", "loss", "scale", "to"], "answer": [1, 3]},
    {"question": "step ", "choices": ["norm", "a much longer choice than the others"], "answer": [0]},
]
"""Different numbers of choices, and several right ones."""
SPELLED = {
    "task": "spelled",
    "output_type": "generate_until",
    "doc_to_text": "{{number}} is",
    "doc_to_target": "{{word}}",
    "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 6},
}
NUMBERS = [{"number": n, "word": word} for n, word in enumerate(("zero", "one", "two"))]


def write_task(folder: Path, items: Iterable[dict[str, Any]], **config: Any) -> None:
    """A YAML file, of which JSON is a part, and its items next to it."""
    folder.mkdir(exist_ok=True)
    name = config["task"]
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(data | config))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_task(tmp_path / "tasks", ITEMS, **CHOICE)
    write_task(tmp_path / "tasks", NUMBERS, **SPELLED)
    return tmp_path / "tasks"


def random_decoder(vocab_size: int, length: int = LENGTH) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(d_model=32, n_layers=2, context_length=length, vocab_size=vocab_size))
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return decoder.eval()


def subject_of(corpus: Corpus, length: int = LENGTH, progress: Path | None = None) -> Subject:
    model = random_decoder(corpus.vocab_size, length)
    member: Member = model.config
    numerics = Numerics(model=member, base=member, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
    return Subject(model=model, numerics=numerics, text=corpus, tokens=0, progress=progress)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> dict[str, Corpus]:
    """The same text as bytes and by trained tokenizers."""
    text = corpus.folder.parent / "text"
    sizes: dict[TokenizerKind, int] = {"bpe": 280, "unigram": 260}
    trained: dict[str, Corpus] = {
        kind: write_corpus(
            tmp_path_factory.mktemp(kind) / "tokens",
            str(text),
            tokenizer=TokenizerSettings(kind=kind, vocab_size=vocab_size),
        )
        for kind, vocab_size in sizes.items()
    }
    return {"bytes": corpus, **trained}


def by_metric(measured: Measured, name: str) -> dict[str, Score]:
    return {score.metric: score for score in measured.scores if score.name == name}


def nats(subject: Subject, context: str, continuation: str) -> float:
    """Log-likelihood of a continuation, token by token."""
    tokenizer = subject.tokenizer
    before, whole = tokenizer.encode([context.encode(), (context + continuation).encode()])
    ids = torch.tensor([[tokenizer.end_of_document, *whole.tolist()]])
    with torch.no_grad():
        logs = torch.log_softmax(subject.model(ids)[0], dim=-1)
    return sum(float(logs[at, ids[0, at + 1]]) for at in range(len(before), ids.shape[1] - 1))


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
def test_scores_are_those_of_a_computation_by_hand(folder: Path, corpora: dict[str, Corpus], kind: str) -> None:
    subject = subject_of(corpora[kind])
    found = by_metric(Tasks(folder=folder, names=("choice",)).measure(subject), "choice")
    rows = []
    for item in ITEMS:
        question, choices = str(item["question"]), [str(choice) for choice in item["choices"]]
        likelihoods = np.array(
            [nats(subject, question.rstrip(), question[len(question.rstrip()) :] + f" {choice}") for choice in choices]
        )
        sizes = np.array([len(choice.encode()) for choice in choices])
        weights = np.exp(likelihoods) / np.exp(likelihoods).sum()
        best = max(item["answer"], key=lambda number: likelihoods[number])
        rows.append(
            {
                "bits_per_byte": -likelihoods[best] / math.log(2) / sizes[best],
                "probability": weights[item["answer"]].sum(),
                "accuracy": likelihoods.argmax() in item["answer"],
                "acc_norm": (likelihoods / [len(choice) for choice in choices]).argmax() in item["answer"],
                "acc_bytes": (likelihoods / sizes).argmax() in item["answer"],
            }
        )
    for metric in rows[0]:
        values = np.array([row[metric] for row in rows], dtype=float)
        assert found[metric].value == pytest.approx(values.mean(), rel=1e-4)
        is_share = metric.startswith("acc")
        error = share_error(values.mean(), len(ITEMS)) if is_share else values.std(ddof=1) / math.sqrt(len(ITEMS))
        assert found[metric].standard_error == pytest.approx(error, rel=1e-4)
        assert found[metric].n == len(ITEMS)
    assert not {"acc", "brier_score"} & set(found)


def exported(subject: Subject, folder: Path) -> Any:
    """lm-eval's own model of the exported weights, as docs/scores.md asks for it."""
    from lm_eval.models.huggingface import HFLM

    model = subject.model
    assert isinstance(model, Decoder)
    multipliers = ForwardMultipliers(
        embedding=float(model.embedding_multiplier),
        branch=float(model.branch_multiplier),
        readout=float(model.readout_multiplier),
        attention=float(model.attention_scale),
    )
    write_llama(model.config, multipliers, dict(model.named_parameters()), folder, subject.tokenizer)
    return HFLM(pretrained=str(folder), add_bos_token=True, device="cpu", batch_size=2)


@pytest.mark.filterwarnings("ignore")  # of lm-eval's model about itself
@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
def test_lm_eval_by_itself_gives_the_same_numbers_for_the_exported_model(
    folder: Path, corpora: dict[str, Corpus], kind: str, transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    single = [item | {"answer": item["answer"][0]} for item in ITEMS]
    write_task(folder, single, **CHOICE | {"task": "shown", "num_fewshot": 2, "fewshot_split": "test"})
    subject = subject_of(corpora[kind])
    theirs = exported(subject, folder / "llama")
    monkeypatch.chdir(folder)  # lm-eval looks for data in the working directory
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    names = ["choice", "shown", "spelled"]
    found = lm_eval.simple_evaluate(theirs, tasks=names, task_manager=manager, bootstrap_iters=0)
    run = found["results"]
    monkeypatch.chdir("/")
    measured = Tasks(folder=folder).measure(subject)
    choice, shown, spelled = (by_metric(measured, name) for name in names)
    assert choice["accuracy"].value == run["choice"]["acc,none"]
    assert choice["acc_norm"].value == run["choice"]["acc_norm,none"]
    assert choice["acc_bytes"].value == run["choice"]["acc_bytes,none"]
    assert spelled["exact_match"].value == run["spelled"]["exact_match,none"]
    samples = [
        choice_scores(
            [response[0][0] for response in item["resps"]],
            [len(one.encode()) for one in item["doc"]["choices"]],
            [item["target"]],
        )
        for item in found["samples"]["shown"]
    ]
    for metric in samples[0]:
        assert shown[metric].value == pytest.approx(np.mean([sample[metric] for sample in samples]), abs=1e-4)

    ours = TaskModel(subject, RequestLog(None))
    texts = [("", "loss"), ("width ", "depth"), ("a\n", " b"), ("größe", " token"), ("x" * 120, " is cut")]
    asked = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in texts]
    for mine, other in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]
    settings = {"until": ["q", "\n"], "max_gen_toks": 20}
    asked = [
        Instance(request_type="generate_until", doc={}, arguments=(text, settings), idx=0)
        for text in ("loss width", "token", "norm and head")
    ]
    assert ours.generate_until(asked) == theirs.generate_until(asked)
    theirs.add_bos_token = False  # for rolling tasks lm-eval always puts the token before the text
    asked = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        for text in ("loss width", "token batch " * 30)
    ]
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), abs=1e-3)


def test_any_family_is_scored(folder: Path, corpus: Corpus) -> None:
    from tests.proxy_models.families import Recurrent

    family = Recurrent(vocab_size=256, context_length=LENGTH)
    member = family.member(16, 1)
    torch.manual_seed(0)
    numerics = Numerics(model=member, base=member, corpus_key=corpus.key, seed=0, evaluation_tokens=512)
    subject = Subject(model=family.build(16, 1), numerics=numerics, text=corpus, tokens=0)
    found = by_metric(Tasks(folder=folder).measure(subject), "choice")
    assert 0 < found["probability"].value < 1


def test_a_generated_text_ends_before_the_first_stop(corpus: Corpus) -> None:
    subject = subject_of(corpus)
    model = TaskModel(subject, RequestLog(None))
    whole = model._generated("loss", Generation(max_gen_toks=30), seed=0)
    stop = whole[10:12]
    assert model._generated("loss", Generation(until=(stop,), max_gen_toks=30), seed=0) == whole[: whole.index(stop)]
    assert whole.startswith(model._generated("loss", Generation(max_gen_toks=5), seed=0))


def test_sampled_texts_differ_between_repeats_and_not_between_runs(corpus: Corpus) -> None:
    class Request:
        args = ("loss", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12})

    def texts(seed: int) -> list[str]:
        return TaskModel(subject_of(corpus), RequestLog(None), seed=seed).generate_until([Request(), Request()])

    first = texts(0)
    assert first[0] != first[1]
    assert first == texts(0)
    assert first != texts(1)


def test_an_unknown_setting_of_generation_is_refused() -> None:
    with pytest.raises(ValueError, match="num_beams"):
        Generation.of({"num_beams": 4})
    assert Generation.of({"until": "x", "do_sample": False, "temperature": 0.7}) == Generation(until=("x",))


def test_a_continuation_longer_than_the_context_is_the_sum_of_its_windows(corpus: Corpus) -> None:
    subject = subject_of(corpus, length=16)
    text = "token batch rate scale step norm"
    (found,) = TaskModel(subject, RequestLog(None)).continuations([("", text)])
    ids = [0, *text.encode()]
    expected = 0.0
    for at in range(1, len(ids)):
        end = min(1 + 16 * math.ceil(at / 16), len(ids))  # of the window in which this token is predicted
        seen = torch.tensor([ids[max(0, end - 17) : at]])
        with torch.no_grad():
            expected += float(torch.log_softmax(subject.model(seen)[0, -1], dim=-1)[ids[at]])
    assert found.nats == pytest.approx(expected, rel=1e-4)
    assert found.n_tokens == len(text)


def test_likelihood_and_rolling_tasks(tmp_path: Path, corpus: Corpus) -> None:
    lines = [{"start": "loss", "end": "width"}, {"start": "a much longer start of", "end": "a text"}]
    write_task(
        tmp_path, lines, task="last", output_type="loglikelihood", doc_to_text="{{start}}", doc_to_target=" {{end}}"
    )
    write_task(
        tmp_path, lines, task="whole", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{start}}"
    )
    subject = subject_of(corpus)
    measured = Tasks(folder=tmp_path).measure(subject)
    last, whole = (by_metric(measured, name) for name in ("last", "whole"))
    bits = [-nats(subject, line["start"], " " + line["end"]) / math.log(2) / len(line["end"]) for line in lines]
    assert last["bits_per_byte"].value == pytest.approx(np.mean(bits), rel=1e-4)
    assert last["perplexity"].standard_error is None
    total = sum(nats(subject, "", line["start"]) for line in lines)
    n_bytes = sum(len(line["start"]) for line in lines)
    assert whole["bits_per_byte"].value == pytest.approx(-total / math.log(2) / n_bytes, rel=1e-4)
    assert whole["bits_per_byte"].standard_error is not None
    assert whole["byte_perplexity"].value == pytest.approx(math.exp(-total / n_bytes), rel=1e-4)


def test_contexts_as_choices_examples_filters_and_functions(tmp_path: Path, corpus: Corpus) -> None:
    subject = subject_of(corpus)
    write_task(
        tmp_path,
        [{"left": "loss is", "right": "width is", "end": "small", "label": 1}],
        task="contexts",
        output_type="multiple_choice",
        doc_to_text="label",
        doc_to_choice="{{[left, right]}}",
        doc_to_target="end",
    )
    (tmp_path / "base.yaml").write_text(
        "dataset_path: json\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: !function parts.question\ndoc_to_target: '{{word}}'\nnum_fewshot: 1\n"
        "fewshot_config: {sampler: first_n, samples: [{number: 9, word: nine}]}\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 4}\n"
        "filter_list: [{name: short, filter: [{function: take_first}]}]\n"
    )
    (tmp_path / "parts.py").write_text("def question(doc):\n    return f\"{doc['number']} is\"\n")
    (tmp_path / "examples.yaml").write_text(
        "include: base.yaml\ntask: examples\ndataset_kwargs: {data_files: {test: numbers.jsonl}}\n"
    )
    (tmp_path / "numbers.jsonl").write_text(json.dumps(NUMBERS[1]) + "\n")
    measured = Tasks(folder=tmp_path).measure(subject)
    likelihoods = [nats(subject, context, " small") for context in ("loss is", "width is")]
    found = by_metric(measured, "contexts")
    assert found["probability"].value == pytest.approx(1 / (1 + math.exp(likelihoods[0] - likelihoods[1])), rel=1e-4)
    assert found["bits_per_byte"].value == pytest.approx(-likelihoods[1] / math.log(2) / 5, rel=1e-4)
    found = by_metric(measured, "examples")
    bits = -nats(subject, "9 is nine\n\n1 is", " one") / math.log(2) / 3
    assert found["bits_per_byte"].value == pytest.approx(bits, rel=1e-4)
    assert found["exact_match,short"].value in (0, 1)
    before = Tasks(folder=tmp_path).key
    (tmp_path / "parts.py").write_text("def question(doc):\n    return 'is'\n")
    assert Tasks(folder=tmp_path).key != before


def test_the_key_is_of_content_and_settings(folder: Path) -> None:
    measure = Tasks(folder=folder)
    others = [
        replace(measure, limit=2),
        replace(measure, seed=1),
        replace(measure, names=("choice",)),
        replace(measure, contaminated={"choice": (1,)}),
    ]
    moved = folder.rename(folder.with_name("moved"))
    assert replace(measure, folder=moved, contaminated={"choice": ()}).key == Tasks(folder=moved).key
    keys = {Tasks(folder=moved).key, *(replace(other, folder=moved).key for other in others)}
    with (moved / "choice.jsonl").open("a") as file:
        file.write("\n")
    keys.add(Tasks(folder=moved).key)
    assert len(keys) == 6


def test_nothing_is_written_outside_the_evaluations_folder(folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    code = (
        "import pickle, sys, pathlib; measure, subject = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "print(len(measure.measure(subject).scores))"
    )
    import pickle

    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "given").write_bytes(pickle.dumps((Tasks(folder=folder), subject_of(corpus))))
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "given"], env=environment, cwd=home, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) == 8
    assert [path for path in home.rglob("*") if path.is_file()] == []


def counted(subject: Subject) -> Callable[[], int]:
    """Counts the rows that the model is asked for."""
    rows = [0]

    def count(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        rows[0] += len(given[0])

    subject.model.register_forward_pre_hook(count)
    return lambda: rows[0]


KILLED = """
import os, pathlib, pickle, sys, time
measure, subject = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
from proxy_models.evaluation import scored_model
scored_model.EVALUATION_BATCH = 4
def slow(module, given):
    time.sleep(0.05)
subject.model.register_forward_pre_hook(slow)
measure.measure(subject)
"""


def test_a_killed_evaluation_scores_no_item_twice(tmp_path: Path, corpus: Corpus) -> None:
    import pickle

    generator = np.random.default_rng(0)
    words = ["loss", "width", "depth", "token", "batch", "rate", "scale", "step"]
    items = [
        {"question": f"{n} {' '.join(generator.choice(words, 3))}", "choices": ["one", "two"], "answer": [n % 2]}
        for n in range(100)
    ]
    write_task(tmp_path / "tasks", items, **CHOICE)
    measure = Tasks(folder=tmp_path / "tasks")
    (tmp_path / "progress").mkdir()
    subject = subject_of(corpus, progress=tmp_path / "progress")
    (tmp_path / "given").write_bytes(pickle.dumps((measure, subject)))
    file = tmp_path / "progress" / f"tasks-{SCORING}.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "given"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < 40):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with file.open("ab") as kept:
        kept.write(b'{"torn": [-1')
    done = file.read_bytes().count(b"\n")
    assert 40 <= done < 200
    calls = counted(subject)
    measured = measure.measure(subject)
    assert calls() == 200 - done
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({key for line in lines for key in line}) == len(lines) == 200
    assert measure.measure(subject) == measured
    assert calls() == 200 - done
    alone = Tasks(folder=tmp_path / "tasks").measure(replace(subject, progress=None))
    assert [score.value for score in measured.scores] == pytest.approx([score.value for score in alone.scores])
    fewer = Tasks(folder=tmp_path / "tasks", limit=50)
    assert fewer.key != measure.key
    before = calls()
    fewer.measure(subject)
    assert calls() == before, "answers of the same weights are read whatever the settings"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dataset_path": "ai2_arc"}, "ai2_arc"),
        ({"dataset_kwargs": {"data_files": {"test": "https://example.org/a.jsonl"}}}, "https://example.org/a.jsonl"),
        ({"dataset_kwargs": {"data_files": "missing.jsonl"}}, "missing.jsonl"),
        ({"dataset_kwargs": {}}, "data_files"),
        ({"metric_list": [{"metric": "rouge", "hf_evaluate": True}]}, "hf_evaluate"),
        ({"metric_list": [{"metric": "rouge"}]}, "rouge"),
        ({"unsafe_code": True}, "unsafe_code"),
        ({"use_prompt": "promptsource:x"}, "use_prompt"),
    ],
)
def test_what_would_be_downloaded_is_refused(
    tmp_path: Path, corpus: Corpus, changed: dict[str, Any], named: str
) -> None:
    write_task(tmp_path, ITEMS, **CHOICE | changed)
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        Tasks(folder=tmp_path).measure(subject_of(corpus))
    assert "choice.yaml" in str(error.value)


def test_missing_folders_and_tasks_are_named_with_the_known_ones(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Tasks(folder=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="limit"):
        Tasks(folder=folder, limit=0)
    with pytest.raises(ValueError, match=r"choice, spelled.*arc"):
        _ = Tasks(folder=folder, names=("arc",)).key
    (folder / "broken.yaml").write_text("task: [")
    with pytest.raises(ValueError, match=r"broken\.yaml"):
        _ = Tasks(folder=folder).key
    (folder / "broken.yaml").write_text("task: choice")
    with pytest.raises(ValueError, match=r"choice\.yaml.*'choice'"):
        _ = Tasks(folder=folder).key


def test_an_answer_of_yes_or_no_is_a_number(tmp_path: Path, corpus: Corpus) -> None:
    metrics = {"metric_list": [{"metric": "acc"}]}
    found = []
    for name, answers in {"marked": (True, False), "numbered": (1, 0)}.items():
        items = [{"question": "loss", "choices": ["rate", "width"], "answer": answer} for answer in answers]
        write_task(tmp_path / name, items, **CHOICE | metrics)
        scores = by_metric(Tasks(folder=tmp_path / name).measure(subject_of(corpus)), "choice")
        found.append({metric: score.value for metric, score in scores.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("answer", [2, "depth", [], [True, False], [1, 1], ["rate", "rate"]])
def test_an_item_without_a_right_choice_is_refused(tmp_path: Path, corpus: Corpus, answer: Any) -> None:
    item = {"question": "loss", "choices": ["width", "rate"], "answer": answer}
    write_task(tmp_path, [item], **CHOICE | {"metric_list": [{"metric": "acc"}]})
    with pytest.raises(ValueError, match="choice"):
        Tasks(folder=tmp_path).measure(subject_of(corpus))


def test_items_that_lm_eval_cant_read_name_their_task(tmp_path: Path, corpus: Corpus) -> None:
    write_task(tmp_path, ITEMS, **CHOICE | {"num_fewshot": 1, "fewshot_split": "test"})  # examples with several answers
    with pytest.raises(ValueError, match="choice"):
        Tasks(folder=tmp_path).measure(subject_of(corpus))


def test_without_the_library_its_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingLibraryError, match=r"muscale\[scores\]"):
        _ = Tasks(folder=folder).key


def test_items_in_the_training_text_are_scored_apart(tmp_path: Path, corpus: Corpus) -> None:
    generator = np.random.default_rng(0)
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdklmnrst"]

    def sentence(n: int) -> str:
        return " ".join(generator.choice(words, n))

    items = [{"question": sentence(20), "choices": [sentence(2), sentence(2)], "answer": [n % 2]} for n in range(6)]
    write_task(tmp_path / "tasks", items, **CHOICE)
    (tmp_path / "text").mkdir()
    for n in range(20):
        extra = {
            3: f"{items[1]['question']} {items[1]['choices'][1]}",
            5: " ".join(str(items[4]["question"]).split()[2:17]),
        }
        (tmp_path / "text" / f"{n}.txt").write_text(f"{sentence(60)} {extra.get(n, '')} {sentence(60)}\n")
    measure = Tasks(folder=tmp_path / "tasks")
    source = {"text": Source(path=str(tmp_path / "text"))}
    found = find_contaminated(measure, source, validation_fraction=0.0)
    assert found == {"choice": (1, 4)}
    subject = subject_of(corpus)
    measured = replace(measure, contaminated=found).measure(subject)
    clean, apart = (by_metric(measured, name) for name in ("choice", "choice, contaminated items"))
    whole = by_metric(measure.measure(subject), "choice")
    assert (clean["probability"].n, apart["probability"].n, whole["probability"].n) == (4, 2, 6)
    for metric, score in whole.items():
        assert 4 * clean[metric].value + 2 * apart[metric].value == pytest.approx(6 * score.value)
    with pytest.raises(CorpusError):
        find_contaminated(measure, {"ids": Source(path="x", kind="tokens", vocab_size=9)}, validation_fraction=0.1)


def test_the_documentations_example_runs(tmp_path: Path, corpus: Corpus) -> None:
    text = (Path(__file__).parents[3] / "docs" / "scores.md").read_text()
    yamls, items = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("yaml", "json"))
    for name, config, data in zip(("sums", "spelled"), yamls, items, strict=True):
        (tmp_path / f"{name}.yaml").write_text(config)
        (tmp_path / f"{name}.jsonl").write_text(data)
    measured = Tasks(folder=tmp_path).measure(subject_of(corpus))
    assert {"bits_per_byte", "probability", "accuracy", "acc_norm"} <= set(by_metric(measured, "sums"))
    assert {"bits_per_byte", "exact_match"} == set(by_metric(measured, "spelled"))
