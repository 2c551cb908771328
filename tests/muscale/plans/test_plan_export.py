"""An exported plan says of every tensor what the training itself does, and of every step its rate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from torch import nn

from muscale import StudyConfig
from muscale.plans.plan import Plan
from muscale.plans.plan_export import export, schedule_table, tensor_table
from muscale.store.ledger import Ledger
from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import load
from proxy_models.recipes.stages import HyperparameterStage
from proxy_models.training.optimizer import initialize, make_optimizer
from tests.muscale.planted_ladder import numerics_of, registered_plan
from tests.proxy_models.families import TRANSFORMERS, Network, Recurrent

MakeStudy = Callable[..., Path]


@pytest.fixture
def plan(make_study: MakeStudy, tmp_path: Path) -> Iterator[tuple[Plan, Any]]:
    path = make_study()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield registered_plan(path, ledger, "plan.compute_flops=2e12"), numerics_of(StudyConfig.read(path))
    ledger.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon", "output_multiplier": 2.0, "init_scale": 0.5},
        {"optimizer": "soap"},
        {"optimizer": "lamb"},
    ],
)
def test_every_tensor_is_listed_as_it_is_trained(plan: tuple[Plan, Any], changes: dict[str, Any]) -> None:
    made, numerics = plan
    made = replace(made, hyperparameters=replace(made.hyperparameters, **changes))
    assert made.model.d_model != numerics.base.d_model
    table = tensor_table(made, numerics).set_index("name")
    own, recipe = made.chain(numerics).numerics, made.segments[0].recipe
    parametrization = own.parametrization(recipe.optimizer)
    model = Decoder(as_decoder(made.model))
    initialize(model, parametrization, recipe, seed=0)
    optimizer = make_optimizer(model, parametrization, recipe)
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    assert set(table.index) == set(names.values())
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            row = table.loc[names[id(tensor)]]
            assert (row["learning_rate"], row["weight_decay"]) == (group["lr"], group["weight_decay"])
            assert row["shape"] == "x".join(map(str, tensor.shape))
            if row["optimizer"] == "muon":
                assert math.isnan(row["eps"]), "its iteration's is no part of the table"
            elif "eps" in group:
                assert row["eps"] == group["eps"]
            if row["init_std"]:
                assert float(tensor.detach().std()) == pytest.approx(row["init_std"], rel=0.1)
            else:
                assert bool((tensor == row["init_mean"]).all())
    assert table.loc["embedding.weight", "multiplier"] == model.embedding_multiplier.item()
    assert table.loc["readout.weight", "multiplier"] == pytest.approx(model.readout_multiplier.item())
    assert table.loc["blocks.0.mlp.down.weight", "multiplier"] == model.branch_multiplier.item()
    if changes:
        assert set(table["optimizer"]) == {changes["optimizer"], "adamw"}


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("name", "table"), [("Qwen3Config", "embed_tokens"), ("GPT2Config", "wte"), ("LlamaConfig", "embed_tokens")]
)
def test_the_multipliers_of_another_family_are_listed(plan: tuple[Plan, Any], name: str, table: str) -> None:
    made, numerics = plan
    family = load(f"transformers:{name}")(vocab_size=256, context_length=32, **TRANSFORMERS[name])
    own = replace(numerics, model=family.member(32, 2), base=family.member(32, 2))
    values = replace(made.hyperparameters, optimizer="muon", stages=())
    tensors = tensor_table(replace(made, model=family.member(64, 4), hyperparameters=values), own).set_index("name")
    in_blocks = tensors.index.str.contains(r"\.(?:layers|h)\.\d")
    assert set(tensors["block_multiplier"][in_blocks]) == {0.5}
    assert set(tensors["block_multiplier"][~in_blocks]) == {1.0}
    embedding = tensors.loc[tensors.index.str.contains(table)].iloc[0]
    assert embedding["multiplier"] == (1.0 if name == "Qwen3Config" else pytest.approx(32**0.5))
    if name == "Qwen3Config":
        assert tensors.loc["network.lm_head.weight", "multiplier"] == 0.5
    else:
        assert tensors["multiplier"].ne(1).sum() == 1  # learned positions are not multiplied
    assert tensors["beta1"].isna().equals(tensors["optimizer"] == "muon")


class PositionsFirst(Recurrent):
    """Networks whose learned positions are registered before the token table."""

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        symbols = network.symbols
        del network.symbols
        network.positions = nn.Embedding(32, width)
        network.symbols = symbols
        return network


def test_the_embedding_s_multiplier_is_the_token_table_s(plan: tuple[Plan, Any]) -> None:
    made, numerics = plan
    family = PositionsFirst(vocab_size=256, context_length=32)
    own = replace(numerics, model=family.member(32, 2), base=family.member(32, 2))
    values = replace(made.hyperparameters, embedding_multiplier=3.0, stages=())
    tensors = tensor_table(replace(made, model=family.member(64, 2), hyperparameters=values), own).set_index("name")
    assert dict(tensors["multiplier"][["symbols.weight", "positions.weight"]]) == {
        "symbols.weight": 3.0,
        "positions.weight": 1.0,
    }


def test_the_schedule_has_every_step_with_its_factor(plan: tuple[Plan, Any]) -> None:
    made, _ = plan
    table = schedule_table(made)
    assert table["tokens"].iloc[-1] + table["batch_tokens"].iloc[-1] == made.n_tokens
    assert list(table["step"]) == list(range(len(table)))
    for row in table.iloc[:: len(table) // 7].to_dict("records"):
        segment = next(s for s in made.segments if s.start <= row["tokens"] < s.end)
        assert row["rate_factor"] == segment.rate_factor(int(row["tokens"]))
    assert table["rate_factor"].max() == 1


def test_a_long_schedule_is_thinned_and_a_changed_recipe_is_listed_again(plan: tuple[Plan, Any]) -> None:
    made, numerics = plan
    staged = replace(made.hyperparameters, stages=(HyperparameterStage(after=0.5, learning_rate=0.5),))
    longer = replace(made, n_tokens=256 * 30_000, hyperparameters=staged)
    table = schedule_table(longer)
    assert 10_000 <= len(table) < 16_000
    assert table["tokens"].iloc[-1] == longer.n_tokens - 256
    tensors = tensor_table(longer, numerics)
    first, second = (group.set_index("name") for _, group in tensors.groupby("from_tokens"))
    assert (second["learning_rate"] / first["learning_rate"]).to_numpy() == pytest.approx(0.5)


def test_the_folder_is_read_without_us(plan: tuple[Plan, Any], tmp_path: Path) -> None:
    made, numerics = plan
    folder = export(made, numerics, tmp_path / "new" / "export")
    whole = json.loads((folder / "plan.json").read_text())
    assert whole["plan"]["key"] == made.key
    assert whole["clip_norm"] == made.hyperparameters.clip_norm
    tensors = pd.read_csv(folder / "tensors.csv")
    assert [row["learning_rate"] for row in whole["tensors"]] == pytest.approx(list(tensors["learning_rate"]), rel=1e-9)
    assert len(whole["schedule"]) == len(pd.read_csv(folder / "schedule.csv"))
    readme = (folder / "README.md").read_text()
    columns = [*tensors.columns, *pd.read_csv(folder / "schedule.csv").columns]
    assert all(name in readme for name in columns)
    assert f"{made.forecast.loss:.4f}" in readme
