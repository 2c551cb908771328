"""The closed forms agree with brute force."""

import numpy as np
import pytest

from scaling import Chinchilla, Law, RepeatedData, compute_flops


def test_exponents_of_the_frontier(planted: Law) -> None:
    frontier = planted.frontier([1e18, 1e20])
    grown = frontier.iloc[1] / frontier.iloc[0]
    assert np.log(grown["n_params"]) / np.log(100) == pytest.approx(planted.params_exponent)
    assert np.log(grown["n_tokens"]) / np.log(100) == pytest.approx(planted.tokens_exponent)


def test_flops_do_not_wrap_in_integers() -> None:
    n_params, n_tokens = np.int64(70_000_000_000), np.int64(1_400_000_000_000)
    assert compute_flops(n_params, n_tokens) == pytest.approx(5.88e23)
    assert compute_flops(np.array([n_params]), n_tokens).dtype == np.float64


def test_loss_broadcasts(planted: Law) -> None:
    losses = planted.loss(np.array([1e8, 1e9])[:, None], np.array([1e9, 1e10, 1e11]))
    assert losses.shape == (2, 3)
    assert losses[1, 2] == pytest.approx(1.8 + 400 / 1e9**0.34 + 2000 / 1e11**0.37)


@pytest.mark.parametrize(("name", "value"), [("E", -0.1), ("A", 0.0), ("beta", -0.3), ("alpha", float("nan"))])
def test_bad_parameters_are_named(planted: Law, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must.*got {value}"):
        Chinchilla().law(**{**planted.parameters, name: value})


def test_bad_budget(planted: Law) -> None:
    with pytest.raises(ValueError, match="compute_flops .*got -1"):
        planted.allocate(-1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda law: law.loss(-1e9, 1e10), "n_params .*got -1000000000.0"),
        (lambda law: law.loss(1e9, [1e10, 0]), "n_tokens .*got 0.0"),
        (lambda law: law.loss(1e9, np.nan), "n_tokens .*got nan"),
        (lambda law: law.loss("7B", 1e10), "n_params .*got '7B'"),
        (lambda law: law.loss(1e9, 1e10, lr=3), "chinchilla depends on n_params, n_tokens, got lr too"),
        (lambda law: law.allocate(1e22, lr=3), "chinchilla depends on n_params, n_tokens, got lr too"),
    ],
)
def test_what_is_asked_of_a_law_is_named_where_it_breaks_a_rule(planted: Law, ask: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(planted)  # type: ignore[operator]


def test_a_law_of_more_than_n_and_d_names_what_is_missing(planted: Law) -> None:
    law = RepeatedData().law(**planted.parameters, rd_star=15.0, rn_star=5.0)
    with pytest.raises(ValueError, match="unique_tokens missing"):
        law.loss(1e9, 1e10)
