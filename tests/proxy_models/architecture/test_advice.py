from __future__ import annotations

import re
from typing import Any

import pytest

from proxy_models.architecture.advice import advise
from proxy_models.architecture.config import ModelConfig

GOOD: dict[str, Any] = {
    "d_model": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "mlp_ratio": 3.5,
    "vocab_size": 50304,
    "context_length": 4096,
}


def test_a_shape_that_fits_the_hardware_gets_no_advice() -> None:
    assert list(advise(ModelConfig(**GOOD))) == []


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"vocab_size": 50257}, "vocab_size", "50257 is not a multiple of 64.*50304 is"),
        ({"mlp_ratio": 2.6875, "d_model": 4096 + 128}, "d_ff", "11352 is not a multiple of 64.*11392 is"),
        ({"d_model": 4000, "head_dim": 80}, "d_model", "4000 is not a multiple of 64"),
        ({"d_model": 3840, "head_dim": 20}, "head_dim", "20 is not a multiple of 8"),
        ({"head_dim": 32}, "head_dim", "32 is below 64"),
        ({"context_length": 1000}, "context_length", "1000 is not a multiple of 64"),
        ({"positions": "alibi"}, "positions", "FlashAttention"),
    ],
)
def test_each_finding_names_the_field_the_value_and_a_source(change: dict[str, Any], name: str, message: str) -> None:
    found = [advice for advice in advise(ModelConfig(**{**GOOD, **change})) if advice.name == name]
    assert len(found) == 1
    assert found[0].source
    assert re.search(message, str(found[0]))
