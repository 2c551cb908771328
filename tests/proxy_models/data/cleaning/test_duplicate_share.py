"""Near-duplicates within the training text are counted by source; a sample of the text gives about the same share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy_models.data.cleaning import duplicate_share
from proxy_models.data.cleaning.duplicate_share import NearDuplicateShare, near_duplicate_shares
from proxy_models.data.documents import in_validation
from proxy_models.data.sources import Source
from proxy_models.serialization import converter
from tests.proxy_models.data.cleaning.test_clean import FRACTION, on_side, text_of, write_lines


def with_copies(n_texts: int, n_copies: int, start: int) -> list[str]:
    """Training texts, and near-duplicates of some of them."""
    texts = on_side(False, n_texts, start)
    copies = [
        next(copy for n in range(99) if not in_validation(copy := f"{text} {n}", FRACTION)) for text in texts[:n_copies]
    ]
    return [*texts, *copies]


def test_near_duplicates_are_counted_within_each_source_and_without_held_out_text(tmp_path: Path) -> None:
    one, held_out = with_copies(50, 10, 0), on_side(True, 5, 9000)
    sources = {
        "one": write_lines(tmp_path / "one", [*one, *held_out, *held_out]),
        "other": write_lines(tmp_path / "other", one[:30]),
        "tokens": Source(path="tokens.npy", kind="tokens", vocab_size=9),
    }
    progress: list[tuple[int, int]] = []
    found = near_duplicate_shares(
        sources, validation_fraction=FRACTION, on_progress=lambda done, total: progress.append((done, total))
    )
    assert list(found) == ["one", "other"]
    assert (found["one"].documents, found["one"].duplicates, found["one"].compared) == (60, 10, 1)
    assert found["one"].duplicate_bytes == sum(map(len, one[50:]))
    assert found["one"].n_bytes == sum(map(len, one))
    assert (found["other"].documents, found["other"].duplicates, found["other"].share) == (30, 0, 0)
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]


def test_a_sample_of_much_text_keeps_near_duplicates_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "t", with_copies(1000, 500, 0))
    monkeypatch.setattr(duplicate_share, "MOST_COMPARED", (tmp_path / "t" / "texts.jsonl").stat().st_size // 4)
    found = near_duplicate_shares({"corpus": source}, validation_fraction=FRACTION)["corpus"]
    assert found.compared == pytest.approx(0.25, rel=1e-3)
    assert found.documents == pytest.approx(1500 / 4, rel=0.2)
    assert found.duplicates / found.documents == pytest.approx(500 / 1500, abs=0.05)


def test_a_source_without_training_text_has_no_duplicates(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "t", [text_of(0)] * 3)
    (found,) = near_duplicate_shares({"a": source}, validation_fraction=1.0).values()
    assert (found.documents, found.share) == (0, 0)


def test_the_share_of_a_single_document_is_recorded_as_of_many(tmp_path: Path) -> None:
    """A ledger gives back what it was given, and takes whole numbers only."""
    found = near_duplicate_shares(
        {"one": write_lines(tmp_path / "one", on_side(False, 1, 0))}, validation_fraction=FRACTION
    )
    assert (found["one"].documents, found["one"].duplicates) == (1, 0)
    recorded = json.loads(json.dumps(converter.unstructure(found)))
    assert converter.structure(recorded, dict[str, NearDuplicateShare]) == found
