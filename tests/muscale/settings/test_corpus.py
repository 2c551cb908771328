"""[corpus]: one source or a mixture, looked at before anything is written, and what of it makes the study's identity."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import Study, StudyConfig, StudyFileError
from muscale.errors import StageError
from muscale.plans.costs import estimate
from muscale.proxies import transfer
from muscale.settings.corpus import CorpusSettings
from proxy_models.data.tokenizer import train_bpe

MakeStudy = Callable[..., Path]


MIXED = """
[corpus]
evaluation_tokens = 1024
tokenizer = "bpe"

[corpus.sources.words]
path = "text"

[corpus.sources.lines]
path = "lines.jsonl"
kind = "jsonl"
field = "content"

[[corpus.stages]]
until_tokens = 4096
weights = { words = 0.75, lines = 0.25 }

[[corpus.stages]]
weights = { words = 0.5, lines = 0.5 }

[model]
vocab_size = 300
"""


@pytest.fixture
def mixed(make_study: MakeStudy) -> Path:
    path = make_study()
    _, rest = path.read_text().split("[model]")
    path.write_text('name = "mixed"\n' + MIXED + rest)
    lines = [json.dumps({"content": f"{number} green bottles on the wall"}) + "\n" for number in range(900)]
    (path.parent / "lines.jsonl").write_text("".join(lines))
    return path


def test_a_mixture_is_written_from_the_study_file(mixed: Path) -> None:
    study = Study.open(mixed, quiet=True)
    corpus = study.corpus
    assert corpus.vocab_size == 300
    assert set(corpus.sources) == {"words", "lines"}
    assert corpus.mixture is not None
    assert corpus.mixture.stages[0].until_tokens == 4096
    assert study.config.shared_numerics(study.corpus).corpus_key == corpus.key
    assert Study.open(mixed, quiet=True).corpus == corpus
    json.dumps(study.config.to_dict())


BOTH = "weights={words=1, lines=1}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("corpus.sources.lines.weight=1.0", "corpus.sources.lines.weight: .*corpus.stages"),
        ("corpus.stages=[]", "corpus.sources.words.weight: missing"),
        ("corpus.sources.lines.pth=1", r"corpus.sources.lines.pth: .*value 1\).*path"),
        ("corpus.stages=[{weigths={words=1}}]", "corpus.stages.0.weigths: .*weights"),
        ("corpus.stages=[{weights={words=1}}]", "corpus.stages: .*lines, words, got words"),
        (f"corpus.stages=[{{{BOTH}, until_tokens=5}}]", "corpus.stages: .*last"),
        (
            f"corpus.stages=[{{{BOTH}, until_tokens=5}}, {{{BOTH}, until_fraction=0.5}}, {{{BOTH}}}]",
            "corpus.stages: until_tokens and until_fraction",
        ),
        ("model.vocab_size=256", "model.vocab_size: .*257"),
    ],
)
def test_a_faulty_mixture_is_refused_with_its_key(mixed: Path, override: str, message: str) -> None:
    with pytest.raises(StudyFileError, match=f"study.toml: {message}"):
        StudyConfig.read(mixed, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("corpus.sources.lines.path=nowhere", "corpus.sources.lines.path: .*nowhere"),
        ("corpus.tokenizer=lines.jsonl", "corpus.tokenizer: .*lines.jsonl"),
        ("corpus.tokenizer=small.json", "model.vocab_size: .*310.* got 300"),
    ],
)
def test_files_are_looked_at_before_anything_is_written(mixed: Path, override: str, message: str) -> None:
    text = (mixed.parent / "lines.jsonl").read_bytes() + b"".join(
        path.read_bytes() for path in sorted((mixed.parent / "text").iterdir())
    )
    (mixed.parent / "small.json").write_text(train_bpe([text], 310))
    with pytest.raises(StageError, match=f"study.toml: {message}"):
        Study.open(mixed, [override], quiet=True)
    assert not (mixed.parent / "corpus").exists()


def test_a_curriculum_by_fractions_costs_every_run_from_its_start(mixed: Path) -> None:
    shared = estimate(StudyConfig.read(mixed)).set_index("stage")["n_tokens"]
    mixed.write_text(mixed.read_text().replace("until_tokens = 4096", "until_fraction = 0.5"))
    study = Study.open(mixed, quiet=True)
    assert study.config.shared_numerics(study.corpus).stages_by_fraction
    whole = estimate(study.config).set_index("stage")["n_tokens"]
    jobs = transfer.jobs(
        transfer.members(study.config, study.config.shared_numerics(study.corpus), study.config.hyperparameters)
    )
    assert whole["transfer"] == sum(job.chain.last.end for job in jobs) > shared["transfer"]
    assert whole["ladder"] > shared["ladder"]
    assert whole["sweep"] == shared["sweep"]


def test_a_curriculum_is_checked_in_depth_too(mixed: Path) -> None:
    mixed.write_text(mixed.read_text().replace("until_tokens = 4096", "until_fraction = 0.5"))
    study = Study.open(mixed, ["check.depths=[1, 2, 4, 8]", "depth_exponent=0.5"], quiet=True)
    check = study.check()
    assert not [finding for finding in check.findings if finding.axis == "depth"]
    assert set(check.measurements["depth"]) == {1, 2, 4, 8}


def test_too_little_held_out_text_names_the_source(mixed: Path) -> None:
    study = Study.open(mixed, ["corpus.evaluation_tokens=40000"], quiet=True)
    with pytest.raises(StageError, match="corpus.evaluation_tokens: .*lines.* got 40000"):
        study.config.shared_numerics(study.corpus)


def test_documents_are_separated_by_the_id_that_closes_them(mixed: Path) -> None:
    study = Study.open(mixed, ["model.document_separator=3"], quiet=True)
    with pytest.raises(StageError, match="model.document_separator: documents of the corpus are closed by id 0, got 3"):
        _ = study.corpus


def test_the_identity_of_a_single_source_corpus_has_three_fields() -> None:
    assert CorpusSettings(source="text").identity() == {
        "corpus.source": "text",
        "corpus.validation_fraction": 0.1,
        "tokenizer": "bytes",
    }
    assert CorpusSettings(source="a", kind="jsonl").identity()["corpus.kind"] == "jsonl"
