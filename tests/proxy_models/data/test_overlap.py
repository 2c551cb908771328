"""Held-out text that another corpus trains on is found, wherever it stands there."""

import random
from pathlib import Path

import pytest

from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.overlap import overlap


def text(seed: int, length: int = 20_000) -> str:
    return "".join(random.Random(seed).choices("abcdefghij ", k=length))


def corpus(folder: Path, content: str, validation_fraction: float = 0.1) -> Corpus:
    folder.mkdir()
    (folder / "text.txt").write_text(content)
    return write_corpus(folder / "corpus", str(folder / "text.txt"), validation_fraction=validation_fraction)


def test_a_corpus_holds_nothing_of_its_own_held_out_part_or_of_other_text(tmp_path: Path) -> None:
    first, other = corpus(tmp_path / "a", text(0)), corpus(tmp_path / "b", text(1))
    assert overlap(first, first) == 0
    assert overlap(first, other) == 0


@pytest.mark.parametrize("shift", [0, 7])
def test_held_out_text_is_found_at_any_position(tmp_path: Path, shift: int) -> None:
    whole = text(0)
    first = corpus(tmp_path / "a", whole)
    half = whole[19_000:]  # half of the tenth that is held out
    assert overlap(first, corpus(tmp_path / "b", "x" * shift + half + text(1))) == pytest.approx(0.5, abs=0.05)


def test_text_that_a_block_s_end_divides_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy_models.data.overlap._BLOCK", 100)
    whole = text(0)
    first = corpus(tmp_path / "a", whole)
    assert overlap(first, corpus(tmp_path / "b", "xyz" + whole[18_000:] + text(1))) > 0.95


def test_a_corpus_evaluated_on_another_has_its_held_out_tokens_and_a_key_of_its_own(tmp_path: Path) -> None:
    first, other = corpus(tmp_path / "a", text(0)), corpus(tmp_path / "b", text(1))
    both = other.evaluated_on(first)
    assert len({first.key, other.key, both.key}) == 3
    assert both.key == other.evaluated_on(first).key
    (found,), (wanted,) = (evaluation_sets(c, 16, 512).values() for c in (both, first))
    assert found.sequences.equal(wanted.sequences)
    assert both.n_tokens == other.n_tokens
