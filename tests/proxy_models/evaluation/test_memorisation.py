"""A string that training repeats is continued verbatim, strings that it saw once are not."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import build
from proxy_models.architecture.generate import generate
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.evaluation import memorisation as module
from proxy_models.evaluation.measure import Score, Subject
from proxy_models.evaluation.memorisation import Memorisation
from proxy_models.evaluation.repeated_windows import HELD_OUT, Windows, repeated_windows, times_read
from proxy_models.evaluation.smooth_scores import share_error
from tests.proxy_models.evaluation.conftest import assert_unchanged, numerics_of, snapshot, trained

CONFIG = ModelConfig(d_model=64, n_layers=2, context_length=64, head_dim=16)
MEASURE = Memorisation(prefix_tokens=12, continuation_tokens=12, n_sequences=40)
LETTERS = np.frombuffer(b"abcdefghijklmnop", dtype=np.uint8)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Random letters, which can't be learnt, and one string of 40 letters at the start of every document."""
    root, rng = tmp_path_factory.mktemp("planted"), np.random.default_rng(0)
    string = bytes(rng.choice(LETTERS, 40))
    (root / "text").mkdir()
    for number in range(130):
        (root / "text" / f"{number:03}.txt").write_bytes(string + bytes(rng.choice(LETTERS, 100)))
    return write_corpus(root / "tokens", str(root / "text"), validation_fraction=0.2)


@pytest.fixture(scope="module")
def memorised(planted: Corpus) -> Subject:
    subject, _ = trained(numerics_of(CONFIG, planted, sequences=8), planted, 130, sequences=8)
    return subject


def by_name(scores: tuple[Score, ...]) -> dict[str, dict[str, Score]]:
    found: dict[str, dict[str, Score]] = {}
    for score in scores:
        found.setdefault(score.name, {})[score.metric] = score
    return found


def chosen(subject: Subject, measure: Memorisation, monkeypatch: pytest.MonkeyPatch) -> list[Windows]:
    """The windows that a measure looks at."""
    kept: list[Windows] = []

    def keep(*args: object, **options: object) -> list[Windows]:
        kept.extend(repeated_windows(*args, **options))  # type: ignore[arg-type]
        return kept

    monkeypatch.setattr(module, "repeated_windows", keep)
    measure.measure(subject)
    return kept


def test_a_repeated_string_is_memorised_and_strings_read_once_are_not(memorised: Subject) -> None:
    before = snapshot(memorised.model)
    found = by_name(MEASURE.measure(memorised).scores)
    assert_unchanged(memorised.model, before)
    names = list(found)
    assert names[0] == HELD_OUT
    most = found[names[-1]]
    assert most["repetitions"].value > 50
    assert most["memorised"].value == 1
    assert most["loss"].value < 0.2
    for name in {HELD_OUT, "1 time", "2–3 times"} & found.keys():
        assert found[name]["memorised"].value == 0
        assert found[name]["memorised"].standard_error == pytest.approx(share_error(0, found[name]["memorised"].n))
        assert found[name]["loss"].value > 2
    assert "repetitions" not in found[HELD_OUT]
    assert found[HELD_OUT]["memorised"].n == 40


def test_the_share_is_that_of_greedy_continuations(memorised: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = replace(MEASURE, n_sequences=5)
    found = by_name(measure.measure(memorised).scores)
    for windows in chosen(memorised, measure, monkeypatch):
        verbatim = [np.array_equal(generate(memorised.model, text[:12], 12), text[12:]) for text in windows.tokens]
        assert found[times_read(windows.least)]["memorised"].value == pytest.approx(np.mean(verbatim))


def test_times_count_whole_windows_in_the_sequences_of_each_source(
    mixed: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(d_model=16, n_layers=1, context_length=32, head_dim=8)
    numerics = numerics_of(config, mixed)
    subject = Subject(model=build(config), numerics=numerics, text=mixed, tokens=32 * 900)
    times: Counter[tuple[int, ...]] = Counter()
    for place in training_stream(mixed, 32, 0).places(0, 32 * 900):
        sequence = mixed.sources[place.source].train[place.start : place.start + 33].tolist()
        times.update(tuple(sequence[first : first + 24]) for first in range(10))
    windows = chosen(subject, MEASURE, monkeypatch)
    assert sum(len(part.tokens) for part in windows) > 40
    for part in windows:
        for tokens, n in zip(part.tokens.tolist(), part.times.tolist(), strict=True):
            assert times[tuple(tokens)] == n


def test_a_run_that_begins_behind_another_counts_what_both_read(memorised: Subject) -> None:
    half = memorised.tokens // 2
    whole, later = (
        MEASURE.measure(replace(memorised, tokens=tokens, position=position))
        for tokens, position in ((memorised.tokens, 0), (memorised.tokens - half, half))
    )
    assert later == whole
    assert MEASURE.measure(replace(memorised, tokens=half)) != whole


def test_a_window_longer_than_a_sequence_is_refused(memorised: Subject) -> None:
    with pytest.raises(ValueError, match="65"):
        Memorisation(prefix_tokens=33, continuation_tokens=33).measure(memorised)


@pytest.mark.parametrize("name", ["prefix_tokens", "continuation_tokens", "n_sequences"])
def test_a_setting_below_1_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Memorisation(**{name: 0})


def test_the_measure_is_picklable_and_its_key_holds_its_settings() -> None:
    assert pickle.loads(pickle.dumps(MEASURE)) == MEASURE
    keys = {replace(MEASURE, **change).key for change in ({}, {"seed": 1}, {"n_sequences": 41}, {"prefix_tokens": 13})}
    assert len(keys) == 4
