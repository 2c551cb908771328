"""Counts of windows are those of a count by hand, also if only some windows are kept."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from proxy_models.evaluation import repeated_windows as module
from proxy_models.evaluation.repeated_windows import ReadTokens, Windows, repeated_windows, window_hashes

PREFIX, LENGTH, CONTEXT, END = 2, 6, 16, 0


def text(seed: int, n: int = 4000) -> NDArray[np.uint16]:
    """Random tokens with passages that occur several times, and ends of documents."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 50, n).astype(np.uint16)
    passages = np.random.default_rng(7).integers(1, 50, (4, 10)).astype(np.uint16)  # the same in each text
    for number, passage in enumerate(passages):
        for start in rng.choice(n // 10, 3**number, replace=False) * 10:
            tokens[start : start + 10] = passage
    tokens[rng.choice(n, 40, replace=False)] = END
    return tokens


def splits() -> list[ReadTokens]:
    rng = np.random.default_rng(3)
    starts = [rng.integers(0, 4000 - CONTEXT, 700) for _ in range(2)]
    return [ReadTokens(text(0), starts[0]), ReadTokens(text(1), starts[1]), ReadTokens(text(2, 1000), None)]


def by_hand(given: list[ReadTokens]) -> tuple[Counter[tuple[int, ...]], set[tuple[int, ...]]]:
    """Times that each window was read, and all windows of the training tokens."""
    times: Counter[tuple[int, ...]] = Counter()
    present = set()
    for tokens, starts in given:
        for position in range(len(tokens) - LENGTH + 1) if starts is not None else ():
            present.add(tuple(tokens[position : position + LENGTH].tolist()))
        for start in [] if starts is None else starts.tolist():
            for position in range(start, start + CONTEXT + 1 - LENGTH + 1):
                times[tuple(tokens[position : position + LENGTH].tolist())] += 1
    return times, present


def prefixes(given: list[ReadTokens]) -> dict[tuple[int, ...], set[tuple[int, ...]]]:
    """Prefixes of each continuation."""
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for tokens, _ in given:
        for position in range(len(tokens) - LENGTH + 1):
            window = tuple(tokens[position : position + LENGTH].tolist())
            found.setdefault(window[PREFIX:], set()).add(window[:PREFIX])
    return found


def found_in(given: list[ReadTokens], n_each: int = 10_000, seed: int = 0) -> list[Windows]:
    return repeated_windows(
        given,
        PREFIX,
        LENGTH - PREFIX,
        vocab_size=50,
        context_length=CONTEXT,
        end_of_document=END,
        n_each=n_each,
        seed=seed,
    )


def test_a_hash_is_the_sum_of_its_window_wherever_it_stands() -> None:
    tokens = text(0, 300)
    table = np.random.default_rng(0).integers(0, 2**64, 50, dtype=np.uint64)
    hashes = window_hashes(tokens, LENGTH, table)
    assert len(hashes) == 300 - LENGTH + 1
    for position in (0, 1, 17, 294):
        terms = [
            int(table[token]) * int(module._BASE) ** i for i, token in enumerate(tokens[position : position + LENGTH])
        ]
        assert int(hashes[position]) == sum(terms) % 2**64


@pytest.mark.parametrize("most", [1 << 23, 1000])
def test_counts_are_those_by_hand(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WINDOWS", most)
    monkeypatch.setattr(module, "_BLOCK", 256)
    given = splits()
    times, present = by_hand(given)
    before = prefixes(given)
    ranges = found_in(given)
    assert [windows.least for windows in ranges] == sorted({windows.least for windows in ranges})
    assert {windows.least for windows in ranges} >= {0, 1, 2, 4, 8}
    for windows in ranges:
        assert len(windows.tokens) == len(windows.times) > 0
        for tokens, n in zip(windows.tokens.tolist(), windows.times.tolist(), strict=True):
            assert END not in tokens
            assert before[tuple(tokens[PREFIX:])] == {tuple(tokens[:PREFIX])}
            if windows.least:
                assert windows.least <= n == times[tuple(tokens)] < 2 * windows.least
            else:
                assert n == 0
                assert tuple(tokens) not in present


def test_each_range_has_the_wanted_number_of_windows_from_different_places() -> None:
    given = splits()
    ranges = found_in(given, n_each=20)
    assert [len(windows.tokens) for windows in ranges[:3]] == [20, 20, 20]
    again, other = found_in(given, n_each=20), found_in(given, n_each=20, seed=1)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(ranges, again, strict=True))
    assert not np.array_equal(ranges[1].tokens, other[1].tokens)


def test_windows_of_one_hash_and_other_tokens_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "window_hashes", lambda tokens, n, _: np.zeros(len(tokens) - n + 1, np.uint64))
    assert sum(len(windows.tokens) for windows in found_in(splits())) == 0


def test_a_text_shorter_than_a_window_has_none() -> None:
    assert found_in([ReadTokens(np.arange(1, 4, dtype=np.uint16), np.zeros(1, np.int64))]) == []
