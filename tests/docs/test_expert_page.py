"""The examples of docs/experts.md are a model, and shapes of mixtures."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from muscale.settings.plan import Shape, Stem
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.families import ModelFamily

PAGE = Path(__file__).parents[2] / "docs/experts.md"
OF_MODEL, OF_LADDER = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_model_of_the_page_can_be_built() -> None:
    model = ModelConfig(**tomllib.loads(OF_MODEL)["model"])
    assert model.n_sparse_layers == model.n_layers - model.first_dense_layers > 0
    assert model.n_params < model.n_params_total


def test_the_mixtures_of_the_page_exist() -> None:
    tables = tomllib.loads(OF_LADDER)
    family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2, n_experts=8, experts_per_token=2))
    shapes = [Stem(**stem) for stem in tables["ladder"]["stems"]] + [Shape(**s) for s in tables["plan"]["shapes"]]
    found = [shape.of(family) for shape in shapes]
    assert [model.n_experts for model in found] == [8, 16, 8, 16]
    assert {(model.n_experts or 0) / model.experts_per_token for model in found} <= {*tables["transfer"]["sparsities"]}
