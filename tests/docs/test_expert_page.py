"""The example of docs/experts.md is a model."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from proxy_models.architecture.config import ModelConfig

PAGE = Path(__file__).parents[2] / "docs/experts.md"


def test_the_model_of_the_page_can_be_built() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    model = ModelConfig(**tomllib.loads(block)["model"])
    assert model.n_sparse_layers == model.n_layers - model.first_dense_layers > 0
    assert model.n_params < model.n_params_total
