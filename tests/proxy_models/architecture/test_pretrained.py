"""Models of transformers' classes with muP's multipliers folded in: the same logits, tied or not, and refusals that write nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from proxy_models.architecture.causal_lm import CausalLM
from proxy_models.architecture.families import load
from proxy_models.architecture.pretrained import NotFoldableError, folded, write_pretrained
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.optimizer import initialize
from tests.proxy_models.families import TRANSFORMERS

VALUES = Hyperparameters(learning_rate=2**-8, batch_tokens=128, embedding_multiplier=3.0, output_multiplier=5.0)
TOKENS = torch.arange(32).unsqueeze(0)

pytestmark = pytest.mark.usefixtures("transformers")


def model(name: str, *, depth: int = 2) -> CausalLM:
    family = load(f"transformers:{name}")(vocab_size=256, context_length=32, **TRANSFORMERS[name])
    built = family.build(64, depth)
    table = family.parametrization(family.member(64, depth), family.member(32, 2))
    initialize(built, table, VALUES.resolve(1000 * 128), seed=0)
    return cast(CausalLM, built).eval()


@pytest.mark.parametrize("name", list(TRANSFORMERS))
def test_what_is_loaded_again_gives_the_logits_of_the_model_with_multipliers(
    name: str, tmp_path: Path, transformers: ModuleType
) -> None:
    trained = model(name)
    assert trained.embedding_multiplier.item() != trained.readout_multiplier.item()
    write_pretrained(trained, tmp_path / "written", None, context_length=32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert type(again) is type(trained.network)
    assert not cast(Any, again).config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, trained(TOKENS), rtol=1e-4, atol=1e-5)


def test_a_class_that_must_have_a_first_token_is_written_without_a_tokenizer(
    tmp_path: Path, transformers: ModuleType
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    family = load("transformers:CwmConfig")(vocab_size=256, context_length=32, **sizes)
    write_pretrained(cast(CausalLM, family.build(32, 1)), tmp_path / "written", None, context_length=32)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "written")
    assert 0 <= config.bos_token_id < 256


def test_a_tied_table_stays_tied_where_both_multipliers_are_one_number() -> None:
    trained = model("LlamaConfig")
    for name in ("embedding", "readout"):
        trained.get_buffer(f"{name}_multiplier").fill_(0.5)
    plain = folded(trained)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(plain(TOKENS).logits, trained(TOKENS), rtol=1e-4, atol=1e-5)


def test_multipliers_that_no_weight_can_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoldableError, match=r"multiplier 1.* got 0.5"):
        write_pretrained(model("Qwen3Config", depth=4), tmp_path / "deeper", None, context_length=32)
    softened = model("Qwen3Config")
    softened.get_submodule("network.lm_head").register_forward_hook(lambda _module, _inputs, output: output.tanh())
    with pytest.raises(NotFoldableError, match="must give the same logits"):
        folded(softened)
    assert not list(tmp_path.iterdir())
