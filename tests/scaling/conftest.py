"""Planted ladders, and the public tables if this machine has them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scaling import Chinchilla, Law

PLANTED = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)


@pytest.fixture
def planted() -> Law:
    return PLANTED


def planted_ladder(noise: float = 0.0, seed: int = 0, law: Law = PLANTED) -> pd.DataFrame:
    """Runs of a law: 5 sizes by 4 ratios over 3.2 decades of compute, with multiplicative noise."""
    sizes, ratios = np.meshgrid(np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0])
    n_params, n_tokens = sizes.ravel(), (sizes * ratios).ravel()
    error = noise * np.random.default_rng(seed).standard_normal(n_params.size)
    loss = law.loss(n_params, n_tokens) * np.exp(error)
    return pd.DataFrame({"n_params": n_params, "n_tokens": n_tokens, "loss": loss})


@pytest.fixture(scope="session")
def ladder() -> Callable[..., pd.DataFrame]:
    return planted_ladder


@pytest.fixture(scope="session")
def public_tables() -> Path:
    """Their folder: `$MUSCALE_REFERENCE_DATA`, by default ../shared/data beside the project; skips where there is none."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("MUSCALE_REFERENCE_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"the public tables are not on this machine, {folder} is no folder: set MUSCALE_REFERENCE_DATA")
    return folder


@pytest.fixture(scope="session")
def public_table(public_tables: Path) -> Callable[[str], pd.DataFrame]:
    """Reads one of the public tables, or skips."""

    def read(name: str) -> pd.DataFrame:
        path = public_tables / f"{name}.csv"
        if not path.exists():
            pytest.skip(f"public table {path} is not on this machine: set MUSCALE_REFERENCE_DATA")
        return pd.read_csv(path)

    return read


@pytest.fixture(scope="session")
def reference(public_table: Callable[[str], pd.DataFrame]) -> pd.DataFrame:
    """The 240 points of Besiroglu et al. (2404.10102): Hoffmann's runs without the five outliers."""
    table = public_table("besiroglu_chinchilla")
    return table[table["is_outlier"] == 0]
