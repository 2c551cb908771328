from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

import search_spaces
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import (
    CATALOGUE,
    Choice,
    SpaceError,
    TransferClass,
    architecture,
    batch,
    classic,
    mixture,
    mup_adamw,
    mup_adamw_full,
    mup_lamb,
    mup_lion,
    mup_muon,
    mup_optimizer,
    mup_soap,
    ready_made,
    schedule,
    transferability,
)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_name_of_every_ready_made_space_has_a_class(name: str) -> None:
    space = ready_made(name)
    assert [transferability(hyperparameter).name for hyperparameter in space] == list(space)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name.startswith("mup")])
def test_a_search_under_mup_contains_transferable_hyperparameters(name: str) -> None:
    space = ready_made(name)
    assert {transferability(hyperparameter).transfer for hyperparameter in space} == {
        TransferClass.UNDER_MUP,
        TransferClass.BY_LAW,
    }
    middle: dict[str, Any] = space.decode([0.5] * len(space))
    Hyperparameters(batch_tokens=512, **middle)


def test_the_full_search_turns_every_factor_of_the_training_around_one() -> None:
    space = mup_adamw_full()
    factors = {field.name for field in fields(Hyperparameters) if field.name.endswith(("_multiplier", "_rate"))}
    factors -= {"learning_rate", "swap_learning_rate"}
    assert set(space) == {*mup_adamw(), *factors}
    assert all(space.decode([0.5] * len(space))[name] == pytest.approx(1) for name in factors)


def test_lion_s_rates_are_a_third_to_a_tenth_of_adamw_s_lamb_s_are_relative_and_those_of_muon_and_soap_the_same() -> (
    None
):
    adamw, lion = mup_adamw(), mup_lion()
    assert [adamw.decode([u] * 3)["learning_rate"] for u in (0, 1)] == [2**-10, 2**-4]
    assert [lion.decode([u] * 3)["learning_rate"] for u in (0, 1)] == pytest.approx([2**-10 / 10, 2**-4 / 3])
    assert [mup_lamb().decode([u] * 3)["learning_rate"] for u in (0, 1)] == [2**-9, 2**-3]
    assert mup_muon() == mup_soap() == adamw


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


@pytest.mark.parametrize("name", ["mup_optimizer", "schedule", "batch"])
def test_training_takes_every_sample_of_a_space_for_it(name: str) -> None:
    for config in ready_made(name).sample(200, seed=0):
        values: dict[str, Any] = {"learning_rate": 0.01, "batch_tokens": 2**15, **config}
        Hyperparameters(**values)


def test_the_complete_optimizer_space_adds_betas_in_order_and_the_warmup() -> None:
    space = mup_optimizer()
    assert set(space) - set(mup_adamw_full()) == {"beta1", "beta2", "warmup_fraction"}
    pairs = {(config["beta1"], config["beta2"]) for config in space.sample(300, seed=0)}
    assert pairs == {(b1, b2) for b1 in (0.8, 0.9, 0.95) for b2 in (0.9, 0.95, 0.98, 0.99, 0.995, 0.999) if b1 < b2}


def test_a_schedule_has_only_the_settings_that_it_reads() -> None:
    for config in schedule().sample(200, seed=1):
        assert ("cooldown_fraction" in config) == (config["schedule"] in ("wsd", "wsd_linear", "inverse_sqrt"))
        assert ("final_fraction" in config) == (config["schedule"] == "cosine")


def test_the_batches_are_powers_of_two_between_the_bounds() -> None:
    assert batch()["batch_tokens"].grid(1) == [2**k for k in range(15, 23)]
    assert batch(smallest=500, largest=2_048)["batch_tokens"].grid(1) == [512, 1024, 2048]
    with pytest.raises(SpaceError, match="got 500 and 1000"):
        batch(smallest=500, largest=1_000)


def test_every_sample_of_the_architecture_space_is_a_model() -> None:
    space = architecture()
    names = {field.name for field in fields(ModelConfig)}
    assert set(space) - names == {"width_depth_ratio"}
    for config in space.sample(200, seed=0):
        values: dict[str, Any] = {name: value for name, value in config.items() if name in names}
        ModelConfig(d_model=64, n_layers=2, **values)
        assert ("rotary_fraction" in config) == (config["positions"] == "rotary")


def test_a_mixture_is_made_for_its_sources() -> None:
    space = mixture(["web", "code", "books"], low={"code": 0.1}, natural={"web": 0.7, "code": 0.2, "books": 0.1})
    assert transferability("data_mixture").transfer is TransferClass.MUST_MATCH
    weights = [dict(config["data_mixture"]) for config in space.sample(2_000, seed=0)]  # type: ignore[arg-type]
    assert all(mix["code"] >= 0.1 and sum(mix.values()) == pytest.approx(1) for mix in weights)
    # The largest standard deviation of a part is .25 · .5 or so; the mean of 2,000 is known to .006.
    means = [sum(mix[name] for mix in weights) / len(weights) for name in ("web", "code", "books")]
    assert means == pytest.approx([0.7, 0.2, 0.1], abs=0.03)
    assert mixture(["web", "code"])["data_mixture"].prior is None


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(SpaceError, match="'mup_adam' .*'mup_adamw'"):
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
