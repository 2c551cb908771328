"""Error spent over looks and over a family of variants."""

import numpy as np
import pytest

from scaling.variants.verdicts import error_of_look, verdicts


@pytest.mark.parametrize(("n_looks", "boundary"), [(1, 1.960), (2, 1.977), (3, 2.004), (4, 2.024), (5, 2.040)])
def test_the_last_look_s_boundary_is_the_published_one(n_looks: int, boundary: float) -> None:
    """O'Brien & Fleming's constants at a two-sided error of .05 (Jennison & Turnbull 1999, table 2.3)."""
    from scipy.special import ndtri

    assert -ndtri(error_of_look(n_looks, n_looks, 0.025)) == pytest.approx(boundary, abs=1e-3)


def test_a_walk_without_drift_crosses_as_often_as_was_allowed() -> None:
    from scipy.special import ndtr

    walks = np.random.default_rng(0).standard_normal((40_000, 4)).cumsum(axis=1) / np.sqrt(np.arange(1, 5))
    allowed = np.array([error_of_look(look, 4, 0.05) for look in range(1, 5)])
    assert (np.diff(allowed) > 0).all(), "early looks are the strictest"
    assert (ndtr(-walks) < allowed).any(axis=1).mean() == pytest.approx(0.05, abs=0.004)


def test_promotions_are_wrong_together_with_the_error_at_most() -> None:
    better = {"a": 0.999, "b": 0.97, "c": 0.96, "d": 0.5}
    found = verdicts(better, dict.fromkeys(better, 0.5), 0.05)
    assert found == {"a": "promote", "b": "promote", "c": "undecided", "d": "undecided"}
    assert verdicts({"c": 0.96}, {"c": 0.9}, 0.05) == {"c": "promote"}, "alone it may take all of it"


def test_a_rejection_is_of_what_brings_no_gain_worth_a_change() -> None:
    found = verdicts({"a": 0.01, "b": 0.3, "c": 0.97}, {"a": 0.0, "b": 0.06, "c": 0.01}, 0.05)
    assert found == {"a": "reject", "b": "undecided", "c": "promote"}
