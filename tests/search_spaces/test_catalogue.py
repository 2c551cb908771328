from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

import search_spaces
from proxy_models.hyperparameters import Hyperparameters
from search_spaces import (
    CATALOGUE,
    Choice,
    SpaceError,
    Transfer,
    classic,
    mup_adamw,
    mup_adamw_full,
    mup_lion,
    mup_muon,
    ready_made,
    transferability,
)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_name_of_every_ready_made_space_has_a_class(name: str) -> None:
    space = ready_made(name)
    assert [transferability(hyperparameter).name for hyperparameter in space] == list(space)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name.startswith("mup")])
def test_a_search_under_mup_holds_hyperparameters_that_may_be_carried_over(name: str) -> None:
    space = ready_made(name)
    assert {transferability(hyperparameter).transfer for hyperparameter in space} == {
        Transfer.UNDER_MUP,
        Transfer.BY_LAW,
    }
    middle: dict[str, Any] = space.decode([0.5] * len(space))
    Hyperparameters(batch_tokens=512, **middle)


def test_the_full_search_turns_every_factor_of_the_training_around_one() -> None:
    space = mup_adamw_full()
    factors = {field.name for field in fields(Hyperparameters) if field.name.endswith(("_multiplier", "_rate"))}
    factors -= {"learning_rate", "swap_learning_rate"}
    assert set(space) == {*mup_adamw(), *factors}
    assert all(space.decode([0.5] * len(space))[name] == pytest.approx(1) for name in factors)


def test_lion_s_rates_are_a_third_to_a_tenth_of_adamw_s_and_muon_s_are_the_same() -> None:
    adamw, lion = mup_adamw(), mup_lion()
    assert [adamw.decode([u] * 3)["learning_rate"] for u in (0, 1)] == [2**-10, 2**-4]
    assert [lion.decode([u] * 3)["learning_rate"] for u in (0, 1)] == pytest.approx([2**-10 / 10, 2**-4 / 3])
    assert mup_muon() == adamw


def test_the_search_under_mup_contains_the_optima_measured_here() -> None:
    middle = mup_adamw().decode([0.5, 0.5, 0.5])
    assert middle == pytest.approx({"learning_rate": 2**-7, "init_scale": 1.0, "weight_decay_tau": 0.5})
    # Four widths from 32 to 256 at 0.2 M tokens, then four horizons up to 1.2 M tokens.
    for log2_rate in (-6.38, -6.95, -6.73, -6.76, -7.07, -7.44, -7.78, -7.87):
        assert mup_adamw().contains({**middle, "learning_rate": 2**log2_rate})


def test_the_classic_table() -> None:
    space = classic()
    assert space.decode([0] * 7) == {
        "learning_rate": 1e-5,
        "batch_tokens_per_gpu": 512,
        "dropout": 0.0,
        "weight_decay": 0.0,
        "warmup_steps": 1_000,
        "optimizer": "adamw",
        "activation": "gelu",
    }
    assert space.decode([1] * 7) == {
        "learning_rate": 1e-3,
        "batch_tokens_per_gpu": 16_384,
        "dropout": 0.3,
        "weight_decay": 0.1,
        "warmup_steps": 20_000,
        "optimizer": "adafactor",
        "activation": "relu",
    }
    assert space["optimizer"] == Choice(values=("adamw", "lion", "adafactor"))
    assert space["activation"] == Choice(values=("gelu", "swiglu", "relu"))


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(
        SpaceError, match=r"unknown space 'mup_adam' \(did you mean 'mup_adamw'\?\); known: classic, mup"
    ):
        ready_made("mup_adam")


def test_the_public_names_are_one_sorted_list() -> None:
    assert search_spaces.__all__ == sorted(search_spaces.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(search_spaces, name) for name in search_spaces.__all__)


def test_importing_needs_numpy_scipy_and_pandas_and_nothing_else_from_outside() -> None:
    code = """
import sys, numpy, pandas, scipy.special
before = set(sys.modules)
import search_spaces
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - {"search_spaces", "numpy", "pandas", "scipy"} - set(sys.stdlib_module_names)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
