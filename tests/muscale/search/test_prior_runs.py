"""Runs of the ledger as prior runs of a sweep: which are comparable, and where an inactive value is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from muscale.search.prior_runs import differs_in, usable_runs
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from search_spaces import Choice, Condition, Fixed, LogUniform, Ordinal, Space

DEFAULTS = Hyperparameters(learning_rate=0.01, batch_tokens=4096)
MODEL = ModelConfig(context_length=32, d_model=32, n_layers=1, head_dim=16)
NUMERICS = Numerics(model=MODEL, base=MODEL, corpus_key="c", seed=0, evaluation_tokens=1)
N_TOKENS = 40 * 4096
RATE = LogUniform(low=1e-3, high=6e-2)
ADAMW = Condition.from_dict({"optimizer": ["adamw"]})
OPTIMIZER = Choice(values=("adamw", "adafactor"))


def row(**changes: Any) -> dict[str, Any]:
    h = replace(DEFAULTS, **changes)
    return {
        "key": "-".join(map(str, changes.values())),
        "purpose": "sweep",
        "hyperparameters": h.to_dict(),
        "numerics": NUMERICS.to_dict(),
        "segment": {"recipe": chain(h, N_TOKENS)[-1].recipe.to_dict()},
        "n_params": 1000,
        "n_tokens": N_TOKENS,
        "loss": 3.0,
    }


def used(space: Space, *rows: dict[str, Any], defaults: Hyperparameters = DEFAULTS) -> pd.DataFrame:
    return usable_runs(pd.DataFrame(rows), defaults, space, NUMERICS)


def test_an_inactive_value_is_missing() -> None:
    """beta2 of adafactor is the default, which is none of the values that the sweep tries."""
    space = Space(
        {"learning_rate": RATE, "optimizer": OPTIMIZER, "beta2": Ordinal(values=(0.9, 0.98, 0.99), when=ADAMW)}
    )
    found = used(space, row(optimizer="adafactor"), row(optimizer="adamw", beta2=0.98))
    assert found["beta2"].isna().tolist() == [True, False]
    assert found["beta2"].iloc[1] == 0.98


def test_a_fixed_value_counts_only_where_it_is_active() -> None:
    space = Space({"learning_rate": RATE, "optimizer": OPTIMIZER, "beta1": Fixed(value=0.95, when=ADAMW)})
    adafactor = replace(DEFAULTS, optimizer="adafactor")
    for defaults in (DEFAULTS, adafactor):
        found = used(space, row(optimizer="adafactor"), row(beta1=0.95), row(beta1=0.9), defaults=defaults)
        assert found["optimizer"].tolist() == ["adafactor", "adamw"]


def test_runs_at_other_rates_inform_only_a_sweep_that_searches_the_rate() -> None:
    rows = [row(learning_rate=rate, init_scale=rate * 100) for rate in (0.01, 0.02, 0.04)]
    scale = LogUniform(low=0.25, high=4.0)
    assert len(used(Space({"learning_rate": RATE, "init_scale": scale}), *rows)) == 3
    assert used(Space({"init_scale": scale}), *rows)["init_scale"].tolist() == [1.0]
    fixed = Space({"init_scale": scale, "learning_rate": Fixed(value=0.02)})
    assert used(fixed, *rows)["init_scale"].tolist() == [2.0]


@pytest.mark.parametrize("name", ["weight_decay_tau", "batch_tokens"])
def test_the_difference_is_named(name: str) -> None:
    value = 2 * getattr(DEFAULTS, name)
    assert name in differs_in(row(**{name: value}), DEFAULTS, Space({"learning_rate": RATE}), NUMERICS)
    assert not differs_in(row(), DEFAULTS, Space({"learning_rate": RATE}), NUMERICS)
