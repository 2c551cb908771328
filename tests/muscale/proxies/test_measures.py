"""The measures of [scores]: tasks are checked before anything is trained, and searched for in the training text once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError, Study
from muscale.proxies.measures import measures_of
from muscale.store.ledger_tables import ResultKind

MakeStudy = Callable[[], Path]


@pytest.fixture
def study(make_study: MakeStudy) -> Path:
    path = make_study()
    folder, text = path.parent / "tasks", sorted((path.parent / "text").glob("*.txt"))[1].read_text()
    folder.mkdir()
    known, new = " ".join(text.split()[100:120]), " ".join(f"q{number}" for number in range(20))
    rows = [{"context": context, "choices": ["x", "y"], "right": 0} for context in (known, new)]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "words.yaml").write_text(
        "task: words\ndataset_path: json\ndataset_kwargs: {data_files: {test: words.jsonl}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_choice: choices\ndoc_to_target: right\n'
    )
    return path


@pytest.mark.parametrize(
    ("setting", "key"),
    [('scores.tasks=["none"]', "none"), ('scores.folder="elsewhere"', "scores.folder")],
)
def test_a_task_that_is_not_there_is_refused_when_the_study_opens(study: Path, setting: str, key: str) -> None:
    with pytest.raises(StageError, match=key):
        Study.open(study, ['scores.tasks=["words"]', setting], quiet=True)


def test_items_in_the_training_text_are_found_once(study: Path) -> None:
    opened = Study.open(study, ['scores.tasks=["words"]', "scores.quantised_bits=[8]"], quiet=True)
    calls: list[int] = []

    def measures() -> object:
        settings = opened.config.scores
        assert settings is not None
        return measures_of(
            opened.config,
            settings,
            opened.ledger,
            opened.corpus,
            opened.directory,
            lambda done, _: calls.append(done),
        )

    found = measures()
    assert [measure.name for measure in found.always] == ["loss", "tasks"]  # type: ignore[attr-defined]
    assert [measure.name for measure in found.at_end] == ["quantised_loss"]  # type: ignore[attr-defined]
    assert found.always[1].contaminated == {"words": (0,)}  # type: ignore[attr-defined]
    (row,) = opened.ledger.results(ResultKind.CONTAMINATION)
    assert row["payload"] == {"words": [0]}
    assert measures() == found
    assert len(opened.ledger.results(ResultKind.CONTAMINATION)) == 1
    opened.ledger.close()
