"""Error spent over looks and over a family of variants."""

import numpy as np
import pytest

from scaling.variants.verdicts import Outcome, error_by_look, verdicts


def test_however_many_the_looks_they_spend_the_error_in_all() -> None:
    for n_looks in (1, 2, 5):
        allowed = [error_by_look(look, n_looks, 0.04) for look in range(1, n_looks + 1)]
        assert allowed[-1] == pytest.approx(0.04)
        assert np.diff(allowed, prepend=0).min() > 0
        assert (np.diff(allowed, n=2) > 0).all(), "early looks are the strictest"


def test_stopping_at_any_look_keeps_promotions_wrong_within_the_error() -> None:
    """Effects from the prior N(0, 1), measured look after look: a posterior that is true promotes wrongly as seldom as it says."""
    rng, n_looks, wrong = np.random.default_rng(0), 6, []
    for effects in rng.standard_normal((2000, 3)):
        total, spent, left, any_wrong = np.zeros(3), 0.0, {"a": 0, "b": 1, "c": 2}, False
        for look in range(1, n_looks + 1):
            total += effects + rng.standard_normal(3)
            better = {name: above_zero(total[i] / np.sqrt(look + 1)) for name, i in left.items()}
            found = verdicts(better, better, promote=error_by_look(look, n_looks, 0.05) - spent, reject=0.0)
            for name in [name for name, outcome in found.items() if outcome == "promote"]:
                any_wrong |= bool(effects[left.pop(name)] <= 0)
                spent += 1 - better[name]
        assert spent <= 0.05 + 1e-9
        wrong.append(any_wrong)
    assert 0 < np.mean(wrong) <= 0.05


def above_zero(z: float) -> float:
    """Probability that a normal variable with this mean, in its standard deviations, is above 0."""
    from scipy.special import ndtr

    return float(ndtr(z))


def judged(better: dict[str, float], worth: dict[str, float]) -> dict[str, Outcome]:
    return verdicts(better, worth, promote=0.05, reject=0.05)


def test_promotions_are_wrong_together_with_the_error_at_most() -> None:
    better = {"a": 0.999, "b": 0.97, "c": 0.96, "d": 0.5}
    found = judged(better, dict.fromkeys(better, 0.5))
    assert found == {"a": "promote", "b": "promote", "c": "undecided", "d": "undecided"}
    assert judged({"c": 0.96}, {"c": 0.9}) == {"c": "promote"}, "alone it may take all of it"


def test_a_rejection_is_of_what_brings_no_gain_worth_a_change() -> None:
    found = judged({"a": 0.01, "b": 0.3, "c": 0.97}, {"a": 0.0, "b": 0.06, "c": 0.01})
    assert found == {"a": "reject", "b": "undecided", "c": "promote"}
