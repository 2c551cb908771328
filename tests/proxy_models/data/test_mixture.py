"""Proportions hold over every window, each source is read without gaps, and position alone decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy_models.data.mixture import SLOTS, Mixture, MixtureStage

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=4).map(lambda w: {f"s{n}": x for n, x in enumerate(w)})


def two_stages(end: int) -> Mixture:
    return Mixture(
        stages=(
            MixtureStage(weights={"a": 0.75, "b": 0.25, "c": 0.0}, until_tokens=end),
            MixtureStage(weights={"a": 0.25, "b": 0.25, "c": 0.5}),
        )
    )


@settings(max_examples=40)
@given(weights=WEIGHTS, seed=st.integers(0, 5), first=st.integers(0, 3 * SLOTS), length=st.integers(1, 2000))
def test_every_stretch_has_the_proportions(weights: dict[str, float], seed: int, first: int, length: int) -> None:
    mixture = Mixture.constant(weights)
    sources, _ = mixture.interleave(8, seed).locate(np.arange(first, first + length))
    counts = np.bincount(sources, minlength=len(weights))
    wanted = np.array([weights[name] for name in mixture.names]) / sum(weights.values()) * length
    assert np.abs(counts - wanted).max() <= 2 * (len(weights) + 1) + length / SLOTS


@settings(max_examples=40)
@given(end=st.integers(1, 8 * 25_000), seed=st.integers(0, 5), n=st.integers(1, 30_000))
def test_each_source_is_read_in_order_without_gaps(end: int, seed: int, n: int) -> None:
    sources, within = two_stages(end).interleave(8, seed).locate(np.arange(n))
    for source in range(3):
        assert np.array_equal(within[sources == source], np.arange(np.count_nonzero(sources == source)))


@given(at=st.integers(0, 10**12), seed=st.integers(0, 3))
def test_any_position_is_found_directly(at: int, seed: int) -> None:
    interleaving = two_stages(8 * 12_345).interleave(8, seed)
    sources, within = interleaving.locate(np.arange(at, at + 50))
    for offset in (0, 17, 49):
        one = interleaving.locate(np.array([at + offset]))
        assert (one[0][0], one[1][0]) == (sources[offset], within[offset])


def test_a_stage_ends_where_it_is_set() -> None:
    sources, _ = two_stages(8 * 1000).interleave(8, 0).locate(np.arange(2000))
    assert np.bincount(sources[:1000], minlength=3).tolist() == pytest.approx([750, 250, 0], abs=4)
    assert np.bincount(sources[1000:], minlength=3).tolist() == pytest.approx([250, 250, 500], abs=4)
    assert 2 not in sources[:1000]


@given(weights=WEIGHTS)
def test_slots_are_whole_and_within_one_of_the_weights(weights: dict[str, float]) -> None:
    slots = MixtureStage(weights=weights).slots
    assert sum(slots.values()) == SLOTS
    total = sum(weights.values())
    assert all(abs(slots[name] - weight / total * SLOTS) < 1 for name, weight in weights.items())


def test_decimal_weights_are_exact() -> None:
    assert MixtureStage(weights={"a": 0.7, "b": 0.25, "c": 0.05}).slots == {"a": 7000, "b": 2500, "c": 500}


def test_fractions_are_resolved_for_a_run() -> None:
    mixture = Mixture(
        stages=(MixtureStage(weights={"a": 1, "b": 0}, until_fraction=0.25), MixtureStage(weights={"a": 0, "b": 1}))
    )
    with pytest.raises(ValueError, match=r"until_fraction needs the run's length: call resolve\(n_tokens\) first"):
        mixture.interleave(8, 0)
    assert mixture.resolve(1000).stages[0].until_tokens == 250
    assert mixture.tokens(1000) == {"a": 250, "b": 750}


@given(end=st.integers(1, 2000), n_tokens=st.integers(1, 3000))
def test_the_tokens_of_all_sources_are_the_run(end: int, n_tokens: int) -> None:
    assert sum(two_stages(end).tokens(n_tokens).values()) == pytest.approx(n_tokens)


def test_plain_values_go_there_and_back() -> None:
    assert Mixture.from_dict(two_stages(100).to_dict()) == two_stages(100)


A, B = MixtureStage(weights={"a": 1.0}), MixtureStage(weights={"a": 1.0}, until_tokens=5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MixtureStage(weights={}), "must name at least one source, got none"),
        (lambda: MixtureStage(weights={"a": -1}), "the weight of a must be a number of at least 0, got -1"),
        (lambda: MixtureStage(weights={"a": float("nan")}), "the weight of a must be a number of at least 0, got nan"),
        (lambda: MixtureStage(weights={"a": 0}), "must not all be 0"),
        (
            lambda: MixtureStage(weights={"a": 1, "b": 1e-6}),
            "the weight of b must be at least 0.0001 of the sum, got 1e-06",
        ),
        (lambda: MixtureStage(weights={"a": 1}, until_tokens=0), "until_tokens must be at least 1, got 0"),
        (
            lambda: MixtureStage(weights={"a": 1}, until_fraction=1.0),
            "until_fraction must lie between 0 and 1, got 1.0",
        ),
        (lambda: MixtureStage(weights={"a": 1}, until_tokens=1, until_fraction=0.5), "exclude each other"),
        (lambda: Mixture(stages=()), "at least one stage, got none"),
        (lambda: Mixture(stages=(A, A)), "a stage before the last must have an end.* got stage 0 of 2"),
        (lambda: Mixture(stages=(B,)), "the last stage must have no end.* got stage 0 of 1"),
        (lambda: Mixture(stages=(B, B, A)), r"stages must end one after another, got \[5, 5\]"),
        (lambda: Mixture(stages=(B, MixtureStage(weights={"b": 1}))), "same sources: stage 0 has a, stage 1 has b"),
    ],
)
def test_a_contradictory_mixture_is_refused(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        build()
