"""A causal language model of transformers with muP's forward multipliers, usable as any other module of a family.

The code of transformers is unchanged. A block adds to the residual stream internally, so the branch multiplier scales the sum of what
the block adds: x + multiplier · (block(x) - x). In CompleteP's terms (arXiv 2505.01618) every block is one branch, whatever its
layers. At the base's depth the multiplier is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from proxy_models.architecture.cross_entropy import shifted, whole_cross_entropy
from proxy_models.architecture.experts import ROUTED, counts_of, load_of
from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.residual import change_stream


class CausalLM(nn.Module):
    """A model that `AutoModelForCausalLM` builds; maps token ids (batch, time) to logits (batch, time, vocab_size).

    Attributes:
        network: The unchanged model of transformers.
    """

    embedding_multiplier: Tensor
    branch_multiplier: Tensor
    readout_multiplier: Tensor

    def __init__(self, network: nn.Module, routers: Sequence[str] = (), *, has_auxiliary_loss: bool = False) -> None:
        """Wrap a model and register its multipliers; raise FamilyError if it has no embedding, no readout, or no list of blocks.

        `routers` are the names of the routers in the network, which count what they route. The auxiliary loss needs their logits.
        """
        super().__init__()
        self.network = network
        self._routers = [network.get_submodule(name) for name in routers]
        for router in self._routers:
            router.register_buffer(ROUTED, torch.zeros(cast(Any, network).config.num_experts + 1), persistent=False)
            router.register_forward_hook(_hold_counts)
            if has_auxiliary_loss:
                router.register_forward_hook(_hold_logits)
        for name in ("embedding_multiplier", "branch_multiplier", "readout_multiplier"):
            self.register_buffer(name, torch.ones(()), persistent=False)
        readout, embedding = (self.get_submodule(name) for name in (readout_name(self), embedding_name(self)))
        cast(Any, embedding).padding_idx = None  # here every id is a token; torch would not train a padding id's row
        embedding.register_forward_hook(lambda _module, _inputs, output: output * self.embedding_multiplier)
        readout.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * self.readout_multiplier,))
        for block in self.get_submodule(blocks_name(self)).children():
            block.register_forward_hook(self._scale_branch, with_kwargs=True)
            if any(router in self._routers for router in block.modules()):
                block.register_forward_hook(_add_counts)

    def forward(self, tokens: Tensor, *, of_routers: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits, computed without a cache of keys and values; with `of_routers` also their auxiliary loss, weighted."""
        logits = cast(Tensor, self.network(input_ids=tokens, use_cache=False).logits)
        if not of_routers:
            return logits
        config = cast(Any, self.network).config
        balance = cast(Any, sys.modules[type(self.network).__module__]).load_balancing_loss_func
        collected = tuple(cast(Tensor, router.logits) for router in self._routers)
        return logits, config.router_aux_loss_coef * balance(collected, config.num_experts, config.num_experts_per_tok)

    def _scale_branch(self, _block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        return change_stream(
            lambda before, after: before + self.branch_multiplier * (after - before), inputs, named, output
        )


def _hold_counts(router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Hold what a router of transformers counts in a pass."""
    logits, _, chosen = output
    cast(Any, router).counts = counts_of(load_of(chosen, logits.shape[1]), logits.detach().float().softmax(-1))


def _hold_logits(router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Hold the logits of a pass; transformers' own way to collect them does not compile."""
    cast(Any, router).logits = output[0]


def _add_counts(block: nn.Module, _inputs: Any, _output: Any) -> None:
    """Add the counts of a training pass to the router's buffer; a recomputation calls no hook of a block."""
    if block.training:
        router = cast(Any, block).mlp.gate
        router.routed.add_(router.counts)


def loss_with_routers(model: nn.Module, sequences: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return `sequence_loss` plus the auxiliary loss that balances experts, over these sequences (arXiv 2101.03961, eq. 4 to 6)."""
    tokens, targets, weights = shifted(sequences, scale)
    logits, of_routers = model(tokens, of_routers=True)
    return cast(Tensor, whole_cross_entropy(logits, targets, weights) + of_routers)


def embedding_name(model: CausalLM) -> str:
    """Return the name of the module that embeds the tokens."""
    return _name(model, cast(Any, model.network).get_input_embeddings(), "an input embedding")


def readout_name(model: CausalLM) -> str:
    """Return the name of the module that maps the width to logits."""
    return _name(model, cast(Any, model.network).get_output_embeddings(), "an output embedding")


def blocks_name(model: CausalLM) -> str:
    """Return the name of the outermost list with as many modules as the config has layers."""
    depth = cast(Any, model.network).config.num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    return _name(model, lists[0] if lists else None, f"a list of {depth} blocks")


def _name(model: nn.Module, wanted: nn.Module | None, described: str) -> str:
    names: Sequence[str] = [name for name, module in model.named_modules() if module is wanted]
    if not names:
        raise FamilyError(f"{type(cast(Any, model).network).__name__} must have {described}, but has none")
    return names[0]
