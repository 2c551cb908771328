"""The public API is one sorted list, and what is light in it stays light."""

import subprocess
import sys

import proxy_models


def test_the_list_is_sorted_and_complete() -> None:
    assert proxy_models.__all__ == sorted(proxy_models.__all__)
    assert all(hasattr(proxy_models, name) for name in proxy_models.__all__)


def test_every_public_name_is_documented() -> None:
    assert [name for name in proxy_models.__all__ if not getattr(proxy_models, name).__doc__] == []


def test_shapes_tables_hyperparameters_and_data_need_no_torch() -> None:
    code = """
import sys
from proxy_models import Corpus, Hyperparameters, ModelConfig, ModelFamily, parametrize, write_corpus
family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2))
parametrize(family.at(width=128), family.base)
print("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
