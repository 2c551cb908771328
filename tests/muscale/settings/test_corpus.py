"""[corpus]: one source or a mixture, looked at before anything is written, and what of it makes the study's identity."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import Study, StudyConfig, StudyFileError
from muscale.errors import StageError
from muscale.plans.costs import estimate
from muscale.proxies import transfer
from muscale.proxies.variant_corpora import variant_corpora
from muscale.settings.cleaning import CleanSettings, HeuristicsSettings, LineDuplicatesSettings
from muscale.settings.corpus import CorpusSettings
from proxy_models.data.cleaning.heuristics import Heuristics
from proxy_models.data.cleaning.line_duplicates import LineDuplicates
from proxy_models.data.tokenizer import train_bpe
from tests.muscale.command_lines import json_output, muscale

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
    assert study.config.shared_numerics(study.corpus, study.directory).corpus_key == corpus.key
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
    assert study.config.shared_numerics(study.corpus, study.directory).stages_by_fraction
    whole = estimate(study.config).set_index("stage")["n_tokens"]
    jobs = transfer.jobs(
        transfer.members(
            study.config, study.config.shared_numerics(study.corpus, study.directory), study.config.hyperparameters
        )
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
        study.config.shared_numerics(study.corpus, study.directory)


def test_documents_are_separated_by_the_id_that_closes_them(mixed: Path) -> None:
    study = Study.open(mixed, ["model.document_separator=3"], quiet=True)
    with pytest.raises(StageError, match="model.document_separator:.*0, got 3"):
        _ = study.corpus


def test_the_identity_of_a_single_source_corpus_has_three_fields() -> None:
    assert CorpusSettings(source="text").identity() == {
        "corpus.source": "text",
        "corpus.validation_fraction": 0.1,
        "tokenizer": "bytes",
    }
    assert CorpusSettings(source="a", kind="jsonl").identity()["corpus.kind"] == "jsonl"


def with_cleaning(path: Path, tables: str = "") -> Path:
    """A study of 60 texts, of which 20 occur twice and a line occurs in all, which [corpus.clean] removes."""
    texts = [f"The committee met on day {number} of the year to discuss bridge {number * 7}." for number in range(40)]
    notice = "All rights reserved by the publisher of this site.\n"
    lines = [json.dumps({"text": f"{text}\n{notice}{text[::-1]}\n"}) + "\n" for text in [*texts, *texts[:20]]]
    (path.parent / "lines.jsonl").write_text("".join(lines))
    text = path.read_text()
    head, _, rest = text.partition("[corpus]")
    _, bar, rest = rest.partition("\n[")
    corpus = '[corpus]\nsource = "lines.jsonl"\nkind = "jsonl"\nvalidation_fraction = 0.3\nevaluation_tokens = 1024\n'
    path.write_text(f"{head}{corpus}{tables}{bar}{rest}")
    return path


CLEAN = '[corpus.clean]\nexact_duplicates = "global"\nline_duplicates = { max_documents = 3 }\n'


def test_text_is_cleaned_before_it_is_tokenized(make_study: MakeStudy, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_cleaning(make_study(), CLEAN)
    rows = json_output(capsys, "data", "clean", path)
    assert [(row["step"], row["documents"], row["documents_left"]) for row in rows["steps"]] == [
        ("exact_duplicates", 60, 40),
        ("line_duplicates", 40, 40),
    ]
    assert {example["file"] for example in rows["examples"]} == {"lines.jsonl"}
    study = Study.open(path, quiet=True)
    removed = study.corpus.manifest["cleaned"]
    assert [step["documents_left"] for step in removed] == [40, 40]
    n_bytes = removed[-1]["bytes_left"]
    assert study.corpus.n_tokens + study.corpus.n_validation_tokens == n_bytes + 40
    assert len(list((path.parent / "cleaned").iterdir())) == 1
    shown = muscale(capsys, "data", "clean", path)
    assert shown.code == 0
    assert shown.out.split("\n")[1].split()[:4] == ["exact_duplicates", "corpus", "60", "40"]


def test_a_step_that_removes_too_much_is_answered_by_its_key(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_cleaning(make_study(), CLEAN + "most_removed = 0.2\n")
    stopped = muscale(capsys, "data", "clean", path)
    assert stopped.code == 2
    assert "most_removed" in stopped.err
    assert muscale(capsys, "data", "clean", path, "--set", "corpus.clean.most_removed=0.4").code == 0
    assert muscale(capsys, "data", "clean", path).code == 0  # finished, so that there is no question


def test_cleaning_identifies_a_corpus_and_its_absence_does_not() -> None:
    plain = CorpusSettings()
    assert CorpusSettings(clean=CleanSettings()).identity() == plain.identity()
    steps = CorpusSettings(clean=CleanSettings(exact_duplicates="global"))
    assert steps.identity() == plain.identity() | {"corpus.clean": {"exact_duplicates": "global"}}
    asked = CorpusSettings(clean=CleanSettings(exact_duplicates="global", most_removed=0.9))
    assert asked.identity() == steps.identity()


def test_default_numbers_of_steps_are_the_same_in_the_study_file() -> None:
    for settings, step in ((HeuristicsSettings(), Heuristics()), (LineDuplicatesSettings(), LineDuplicates())):
        assert settings.model_dump() == step.identity()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("corpus.clean.exact_duplicates=all", "corpus.clean.exact_duplicates: "),
        ("corpus.clean.heuristics={min_wrods=3}", "corpus.clean.heuristics.min_wrods: .*min_words"),
        ("corpus.clean.quality={scores='s.csv'}", "corpus.clean.quality: .*min_score"),
        ("corpus.clean.most_removed=2.0", "corpus.clean.most_removed: "),
    ],
)
def test_a_faulty_step_is_refused_with_its_key(make_study: MakeStudy, override: str, message: str) -> None:
    with pytest.raises(StudyFileError, match=f"study.toml: {message}"):
        StudyConfig.read(with_cleaning(make_study()), [override])


def test_a_variant_is_cleaned_by_its_own_steps_and_evaluated_on_the_study_s_text(make_study: MakeStudy) -> None:
    path = with_cleaning(make_study())
    path.write_text(path.read_text() + '\n[variants.unique.corpus.clean]\nexact_duplicates = "global"\n')
    study = Study.open(path, quiet=True)
    corpora = variant_corpora(study.config, study.corpus, path.parent, lambda done, total: None)
    unique = corpora["unique"]
    assert unique.held_out == study.corpus
    assert [step["documents_left"] for step in unique.manifest["cleaned"]] == [40]
    assert unique.n_tokens < study.corpus.n_tokens
    assert variant_corpora(study.config, study.corpus, path.parent, lambda done, total: None) == corpora
