"""Layouts that a model's family has no products for."""

from __future__ import annotations

import pytest

from muscale.settings.parallelism import Parallelism
from tests.proxy_models.families import Recurrent


def test_a_family_without_a_plan_of_its_products_is_sharded_by_data_alone() -> None:
    model = Recurrent(vocab_size=256, context_length=32).member(32, 2)
    Parallelism().require(model)
    with pytest.raises(ValueError, match="tensor_parallel must be 1 .* got 2"):
        Parallelism(tensor_parallel=2).require(model)
