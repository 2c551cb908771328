"""Mixture of experts: a router sends each token to a few of many MLPs. No token is dropped.

Shapes do not depend on the routing, so nothing waits for the device and one compiled graph serves every batch. The load is balanced
without a loss (Wang et al., arXiv 2408.15664): a bias on each expert's score, in the selection only, moves once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.grouped import grouped_product
from proxy_models.architecture.mlp import MLP, activated
from proxy_models.architecture.sharded import own

BALANCE_BIAS, ROUTED = "balance_bias", "routed"
Exchange = Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor]
"""Function of experts, sorted rows and the load of all experts, as `proxy_models.architecture.shared_experts.ExpertShare`."""


class Routing(NamedTuple):
    """Experts of the tokens of a pass.

    Attributes:
        logits: Logits of all experts, fp32, (tokens, n_experts).
        chosen: Experts of each token, (tokens, experts_per_token).
        gates: Their weights, which sum to 1 (under "sqrt_gate", their squares do), fp32, as `chosen`.
        load: Tokens of each expert, (n_experts,), int64.
        counts: Entries to add to the router's `routed`.
        penalty: Terms that the router adds to the training loss.
    """

    logits: Tensor
    chosen: Tensor
    gates: Tensor
    load: Tensor
    counts: Tensor
    penalty: Tensor


class Router(nn.Module):
    """Scores of experts for each token, computed in fp32 from a weight in the precision of the tokens.

    The state `balance_bias` is a buffer (n_experts,). `routed` has the load since the last step and, as its last entry, the entropy.
    """

    balance_bias: Tensor
    routed: Tensor
    held: Tensor | None = None
    """Experts of each token, (tokens, experts_per_token), instead of a choice by scores: for measurements."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, n_experts = config, cast(int, config.n_experts)
        self.weight = nn.Parameter(torch.empty(n_experts, config.d_model))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # torch's own for a linear layer
        self.register_buffer(BALANCE_BIAS, torch.zeros(n_experts))
        self.register_buffer(ROUTED, torch.zeros(n_experts + 1), persistent=False)

    def forward(self, tokens: Tensor) -> Routing:
        """Map (tokens, width) to their routing."""
        config = self.config
        logits = F.linear(tokens.float(), self.weight.to(tokens.dtype).float())
        scores = logits.sigmoid() if config.router_scores == "sigmoid" else logits.softmax(-1)
        chosen = self.held
        if chosen is None:
            chosen = (scores.detach() + self.balance_bias).topk(config.experts_per_token, dim=-1).indices
        gates = scores.gather(1, chosen)
        gates = gates / (gates.sum(-1, keepdim=True) + torch.finfo(gates.dtype).tiny)
        if config.expert_scheme == "sqrt_gate":
            gates = gates.sqrt()
        load = load_of(chosen, len(self.weight))
        shares = scores / scores.sum(-1, keepdim=True)
        return Routing(logits, chosen, gates, load, counts_of(load, shares), self._penalty(logits, shares, load))

    def _penalty(self, logits: Tensor, shares: Tensor, load: Tensor) -> Tensor:
        """Return the z-loss (Zoph et al., arXiv 2202.08906, eq. 5) and the balance loss (Fedus et al., arXiv 2101.03961, eq. 4).

        The latter is n_experts · Σ (share of the load) · (mean share of the scores), 1 at perfect balance.
        """
        config, penalty = self.config, logits.new_zeros(())
        if config.router_z_loss:
            penalty = penalty + config.router_z_loss * logits.logsumexp(-1).square().mean()
        if config.balance_loss:
            balance = len(load) * (load / load.sum() * shares.mean(0)).sum()
            penalty = penalty + config.balance_loss * balance
        return penalty


class Experts(nn.Module):
    """The matrices of all experts, stacked: (experts, outputs, inputs)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        n_experts, width, hidden = cast(int, config.n_experts), config.d_model, config.expert_width
        if config.activation == "swiglu":
            self.gate = _stack(n_experts, hidden, width)
        self.up = _stack(n_experts, hidden, width)
        self.down = _stack(n_experts, width, hidden)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map rows, sorted by their expert, of which each expert's end at `ends`, (rows, width) to the same shape."""
        hidden = activated(
            self.activation,
            grouped_product(rows, own(self.up).to(rows.dtype), ends),
            lambda: grouped_product(rows, own(self.gate).to(rows.dtype), ends),
        )
        return grouped_product(hidden, own(self.down).to(rows.dtype), ends)


def _stack(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape))
    return nn.init.normal_(parameter, std=shape[-1] ** -0.5)  # type: ignore[return-value]


class RoutedMLP(nn.Module):
    """Router, routed experts and, if any, an MLP that every token passes, as wide as all shared experts together.

    Attributes:
        share: Exchange between ranks that have different experts; None: all experts are here.
    """

    share: Exchange | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router, self.experts = Router(config), Experts(config)
        if config.n_shared_experts:
            self.shared = MLP(config, config.n_shared_experts * config.expert_width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (batch, time, width) to the same shape, and return the entries to add to `Router.routed`, and the penalty."""
        config, tokens = self.config, x.flatten(0, -2)
        routing = self.router(tokens)
        load = routing.load

        def compute(rows: Tensor) -> Tensor:
            if self.share:
                return self.share(self.experts, rows, load)
            return cast(Tensor, self.experts(rows, load.cumsum(0).int()))

        mixed = through_experts(tokens, routing.chosen, routing.gates.to(tokens.dtype), compute).view_as(x)
        mixed = F.dropout(mixed, config.mlp_dropout, self.training)
        if config.n_shared_experts:
            mixed = mixed + self.shared(x)
            if config.expert_scheme == "sqrt_gate":  # routed and shared experts have equal parts of the variance
                mixed = mixed * 0.5**0.5
        return mixed, routing.counts, routing.penalty


def load_of(chosen: Tensor, n_experts: int) -> Tensor:
    """Return the tokens of each expert, (n_experts,), int64, without a wait for the device; `chosen` has the experts of each token."""
    ones = torch.ones_like(chosen).flatten()
    return ones.new_zeros(n_experts).index_add(0, chosen.flatten(), ones)


def counts_of(load: Tensor, shares: Tensor) -> Tensor:
    """Return the load of each expert, and the sum over tokens of the entropy of their shares (tokens, n_experts), (n_experts + 1,)."""
    entropy = torch.special.entr(shares.detach()).sum()
    return torch.cat([load.float(), entropy[None]])


def through_experts(tokens: Tensor, chosen: Tensor, gates: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum over each token's experts of gate times output, (tokens, width).

    Args:
        tokens: (tokens, width).
        chosen, gates: Experts of each token and their weights, (tokens, experts per token).
        compute: Function of the rows sorted by expert, (tokens · experts per token, width), to the outputs in the same order.
    """
    order = chosen.flatten().argsort(stable=True)
    places = inverse(order)
    rows: Tensor = _Sent.apply(tokens, order, places)  # type: ignore[no-untyped-call]
    rows = permuted(compute(rows), places, order).view(*chosen.shape, -1)
    return (rows * gates.unsqueeze(-1)).sum(1)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


class _Sent(torch.autograd.Function):
    """Rows in the order of their experts, each token's row once per chosen expert; the gradient is summed without atomic additions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.n_tokens, per_token = len(tokens), len(order) // len(tokens)
        return tokens[order // per_token]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places].view(ctx.n_tokens, -1, gradient.shape[-1]).sum(1), None, None


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows in another order, given with its inverse."""
    return cast(Tensor, _Permuted.apply(rows, order, inverse))  # type: ignore[no-untyped-call]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


@torch.no_grad()
def balance(
    model: nn.Module, config: ModelConfig, *, taken: bool | Tensor, mean: Callable[[Tensor], Tensor]
) -> Mapping[str, Tensor]:
    """Move the biases of all routers after a step, and return the `routing_figures` of the step.

    A bias moves by `balance_rate` towards equal loads, by the sign of mean load - load (arXiv 2408.15664, algorithm 1).

    Args:
        taken: Whether the step was taken; only then do biases move.
        mean: Function that averages a tensor over ranks, each with other tokens, blocks or both.
    """
    routers = [f"blocks.{layer}.mlp.router" for layer in range(config.first_dense_layers, config.n_layers)]
    counted = take_counts(model, routers, cast(int, config.n_experts), mean)
    load = counted[:, :-1]
    # Rounded, since a load that equals the mean must do so after a division by any number of ranks.
    moves = (1 - load / load.mean(dim=1, keepdim=True)).round(decimals=9).sign() * config.balance_rate * taken
    biases = dict(model.named_buffers())
    for router, move in zip(routers, moves, strict=True):
        if (bias := biases.get(f"{router}.{BALANCE_BIAS}")) is not None:
            bias += move
    return routing_figures(counted, config.experts_per_token)


@torch.no_grad()
def take_counts(model: nn.Module, routers: Sequence[str], n_experts: int, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the buffers `routed` of routers, averaged over ranks, (routers, n_experts + 1), and set them to zero.

    Buffers are found by name, since a rank of a pipeline has some of the routers.
    """
    buffers, device = dict(model.named_buffers()), next(model.parameters()).device
    of_all = torch.zeros(len(routers), n_experts + 1, device=device, dtype=torch.float64)
    for row, router in zip(of_all, routers, strict=True):
        if (counted := buffers.get(f"{router}.{ROUTED}")) is not None:
            row.copy_(counted)
            counted.zero_()
    return mean(of_all)


def routing_figures(counted: Tensor, experts_per_token: int) -> Mapping[str, Tensor]:
    """Return figures of a step's routing from its counts, (blocks with experts, n_experts + 1), as `Family.end_step` returns them.

    Returns:
        Zero-dimensional tensors: `router_entropy` (mean over tokens and blocks, nats), `largest_load` (of any expert, over the mean
        load) and `dead_experts` (number of experts that got no token, in all blocks); and `expert_loads`, over the mean load of each
        block, (blocks with experts, n_experts).
    """
    load = counted[:, :-1]
    relative = load / load.mean(dim=1, keepdim=True)
    return {
        "router_entropy": counted[:, -1].sum() * experts_per_token / load.sum(),
        "largest_load": relative.max(),
        "dead_experts": (load == 0).sum().float(),
        "expert_loads": relative,
    }
