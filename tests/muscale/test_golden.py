"""Numbers stay what they were: keys, data order, rules and losses of golden.json, of fixed seeds on one thread.

Where one of these fails and the change is meant, raise `proxy_models.training.numerics.SEMANTICS`, so that no ledger mixes both,
and write the file anew: python -m tests.muscale.golden
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.muscale.golden import GOLDEN, OPTIMIZERS, golden
from tests.proxy_models.conftest import VARIANTS


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text()))


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return dict(json.loads(json.dumps(golden())))


def test_corpus_and_data_order_are_the_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in ("semantics", "corpus", "batches"):
        assert now[name] == before[name], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_s_size_key_and_first_losses_are_the_same(
    before: dict[str, Any], now: dict[str, Any], variant: str
) -> None:
    then, today = before["variants"][variant], now["variants"][variant]
    assert (today["n_params"], today["numerics"]) == (then["n_params"], then["numerics"])
    assert today["losses"] == pytest.approx(then["losses"], rel=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_s_rules_recipe_keys_and_losses_are_the_same(
    before: dict[str, Any], now: dict[str, Any], optimizer: str
) -> None:
    then, today = before["optimizers"][optimizer], now["optimizers"][optimizer]
    assert {name: today[name] for name in ("rules", "recipe", "line", "key")} == {
        name: then[name] for name in ("rules", "recipe", "line", "key")
    }
    assert today["losses"] == pytest.approx(then["losses"], rel=1e-3)


def test_a_law_its_forecast_and_the_law_of_the_rate_are_the_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, values in before["law"].items():
        assert now["law"][name] == pytest.approx(values, rel=1e-6), name
