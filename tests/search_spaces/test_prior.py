"""Samples follow the prior, its density is normalised in the unit cube, and the support stays what it was."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, kstest, truncnorm

from search_spaces import (
    Choice,
    Distribution,
    Integer,
    LogUniform,
    Ordinal,
    Prior,
    Simplex,
    Space,
    Uniform,
    Weights,
    distribution_from_dict,
)

ONE_OF_EACH = [
    Uniform(low=-1, high=3, prior=Prior(centre=2.5, spread=0.7)),
    LogUniform(low=2**-10, high=2**-4, prior=Prior(centre=2**-6, spread=1)),
    Integer(low=0, high=9, prior=Prior(centre=2, spread=2)),
    Integer(low=1, high=1024, log=True, prior=Prior(centre=32, spread=1.5)),
    Ordinal(values=("a", "b", "c", "d"), prior=Prior(centre="b", spread=1)),
    Choice(values=("adamw", "lion", "muon"), prior=Prior(centre="lion", spread=0.4)),
    Simplex(
        parts=("web", "code", "books"),
        low=Weights(code=0.1),
        prior=Prior(centre=Weights(web=0.6, code=0.3, books=0.1), spread=0.3),
    ),
]


def draws(distribution: Distribution, n: int = 4_000) -> list[Any]:
    rng = np.random.default_rng(0)
    return [distribution.sample(rng) for _ in range(n)]


def truncated(low: float, high: float, centre: float, spread: float) -> Any:
    return truncnorm((low - centre) / spread, (high - centre) / spread, loc=centre, scale=spread)


def test_a_uniform_with_a_prior_is_a_truncated_normal_in_its_own_units() -> None:
    assert kstest(draws(ONE_OF_EACH[0]), truncated(-1, 3, 2.5, 0.7).cdf).pvalue > 0.001


def test_a_log_uniform_with_a_prior_is_a_truncated_normal_in_octaves() -> None:
    assert kstest(np.log2(draws(ONE_OF_EACH[1])), truncated(-10, -4, -6, 1).cdf).pvalue > 0.001


def test_ranks_and_whole_numbers_have_the_mass_of_their_cells() -> None:
    for distribution, edges, centre, spread in (
        (ONE_OF_EACH[2], np.arange(11) - 0.5, 2, 2),
        (ONE_OF_EACH[4], np.arange(5) - 0.5, 1, 1),
    ):
        expected = np.diff(truncated(edges[0], edges[-1], centre, spread).cdf(edges))
        counts = Counter(draws(distribution))
        observed = np.array([counts[value] for value in distribution.grid(99)]) / 4_000
        # Four standard errors of a share of 4,000.
        assert observed == pytest.approx(expected, abs=0.032)


def test_a_choice_with_a_prior_shares_the_spread_among_the_others() -> None:
    counts = Counter(draws(ONE_OF_EACH[5]))
    assert [counts[value] / 4_000 for value in ("adamw", "lion", "muon")] == pytest.approx([0.2, 0.6, 0.2], abs=0.032)


def test_a_simplex_with_a_prior_is_a_dirichlet_with_that_mean_and_spread() -> None:
    mixes = draws(ONE_OF_EACH[6])
    concentration = 1 / 0.3**2 - 1
    for part, low, centre in (("web", 0, 0.6), ("code", 0.1, 0.3), ("books", 0, 0.1)):
        mean = (centre - low) / 0.9
        free = [(mix[part] - low) / 0.9 for mix in mixes]
        assert kstest(free, beta(concentration * mean, concentration * (1 - mean)).cdf).pvalue > 0.001
        assert np.std(free) == pytest.approx(0.3 * math.sqrt(mean * (1 - mean)), rel=0.05)


@pytest.mark.parametrize("distribution", ONE_OF_EACH, ids=lambda d: d.kind)
def test_the_density_integrates_to_one_and_its_integral_is_undone_by_the_quantile(distribution: Distribution) -> None:
    assert distribution.prior is not None
    for density in distribution._densities(distribution.prior):
        breaks = list(np.linspace(0, 1, 13)[1:-1])
        for u in (0.03, 0.3, 0.8, 1.0):
            place = density.quantile(u)
            mass = quad(lambda p: math.exp(density.log(p)), 0, place, points=breaks, limit=200)[0]  # noqa: B023
            assert mass == pytest.approx(u, abs=2e-3)


@pytest.mark.parametrize("distribution", ONE_OF_EACH, ids=lambda d: d.kind)
def test_grids_and_the_map_from_the_cube_are_the_support_s(distribution: Distribution) -> None:
    table = distribution.to_dict()
    assert distribution_from_dict(table) == distribution
    del table["prior"]
    flat = distribution_from_dict(table)
    assert flat.grid(4) == distribution.grid(4)
    for u in (0.0, 0.3, 1.0):
        places = [u] * flat.dimensions
        assert flat.decode(places) == distribution.decode(places)
        assert flat.from_prior(places) == tuple(places)
    assert flat.log_prior(flat.grid(1)[0]) == 0.0


def test_a_space_s_prior_is_the_sum_over_what_is_active_and_moves_points() -> None:
    space = Space({**{d.kind + str(i): d for i, d in enumerate(ONE_OF_EACH)}, "flat": Uniform(low=0, high=1)})
    config = space.sample(1, seed=0)[0]
    assert space.log_prior(config) == pytest.approx(sum(space[name].log_prior(config[name]) for name in config))
    rng = np.random.default_rng(0)
    moved = np.array([space.from_prior(point) for point in rng.random((2_000, len(space.axes)))])
    assert kstest(moved[:, -1], "uniform").pvalue > 0.001
    assert kstest(moved[:, 0] * 4 - 1, truncated(-1, 3, 2.5, 0.7).cdf).pvalue > 0.001


def test_a_very_narrow_prior_stays_near_its_centre_and_a_wide_one_is_flat() -> None:
    near = LogUniform(low=1e-6, high=1, prior=Prior(centre=1e-6, spread=1e-4))
    assert max(draws(near)) < 1.001e-6
    flat = Uniform(low=0, high=1, prior=Prior(centre=0, spread=900))
    assert kstest(draws(flat), "uniform").pvalue > 0.001
    assert flat.log_prior(1.0) == pytest.approx(0, abs=1e-4)
