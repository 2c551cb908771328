"""Cost of a training pass of a mixture of experts next to what a user would pick instead.

    python tests/benchmarks/expert_speed.py

Forward and backward pass of one batch, in seconds of a processor on one thread, the median of several. Each mixture is compared with a
dense decoder whose MLP is as wide as the experts that a token passes, with the same mixture whose experts are computed one after the
other, and with transformers' Qwen3-MoE of the same shape under each implementation of experts that runs on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from proxy_models.architecture import experts
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.grouped import product_by_loop
from proxy_models.importable import mend_torchvision

DENSE = ModelConfig(d_model=256, n_layers=2, head_dim=32, context_length=256, mlp_ratio=2.0, vocab_size=512)
MIXTURES = {
    "8 experts, 2 passed": replace(DENSE, n_experts=8, experts_per_token=2, expert_ratio=1.0),
    "64 experts, 8 passed": replace(DENSE, n_experts=64, experts_per_token=8, expert_ratio=0.25),
}
SEQUENCES, TIMED = 8, 9


def seconds(loss: Callable[[], Tensor]) -> float:
    """The median time of a forward and a backward pass."""
    times = []
    for number in range(2 + TIMED):
        began = time.process_time()
        loss().backward()  # type: ignore[no-untyped-call]
        if number >= 2:
            times.append(time.process_time() - began)
    return statistics.median(times)


def of_decoder(config: ModelConfig, tokens: Tensor, *, compiled: bool) -> float:
    model = Decoder(config)
    loss = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss
    found = seconds(lambda: loss(model, tokens))
    torch._dynamo.reset()
    return found


def of_transformers(config: ModelConfig, tokens: Tensor, implementation: str) -> float:
    """The time of Qwen3-MoE, whose attention, norms and tables have the decoder's sizes."""
    mend_torchvision()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model: nn.Module = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            num_experts=config.n_experts,
            num_experts_per_tok=config.experts_per_token,
            moe_intermediate_size=config.expert_width,
            norm_topk_prob=True,
            experts_implementation=implementation,
        )
    )

    def loss() -> Tensor:
        logits = model(tokens[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return seconds(loss)


def main() -> None:
    torch.set_num_threads(1)
    tokens = torch.randint(DENSE.vocab_size, (SEQUENCES, DENSE.context_length + 1))
    dense = {compiled: of_decoder(DENSE, tokens, compiled=compiled) for compiled in (False, True)}
    print(f"dense: {dense[False]:.3f} s, compiled {dense[True]:.3f} s; below, times over the same dense pass's")
    for name, config in MIXTURES.items():
        found = {
            "eager": of_decoder(config, tokens, compiled=False) / dense[False],
            "compiled": of_decoder(config, tokens, compiled=True) / dense[True],
        }
        with patch.object(experts, "grouped_product", lambda r, m, e: product_by_loop(r, m.transpose(1, 2), e)):
            found["one expert after the other"] = of_decoder(config, tokens, compiled=False) / dense[False]
        for implementation in ("eager", "grouped_mm"):
            found[f"transformers, {implementation}"] = of_transformers(config, tokens, implementation) / dense[False]
        print(f"{name}: " + ", ".join(f"{how} {ratio:.2f}" for how, ratio in found.items()))


if __name__ == "__main__":
    main()
