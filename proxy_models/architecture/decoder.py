"""The decoder to search on, from top to bottom: positions, norm, attention, block, model, loss.

The decoder computes in `Decoder.compute_dtype`: the embedding is cast to it, and each layer casts its own weights to the dtype of its
input. Weights, rotary angles and the loss stay fp32.

Forward multipliers (muP's and the tuned ones) are zero-dimensional buffers, so that one compiled graph serves every
trial of a shape. `set_multipliers` sets them from the parametrization; they are never saved with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from proxy_models.architecture.attention import attend
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.cross_entropy import chunked_cross_entropy, shifted, whole_cross_entropy
from proxy_models.architecture.experts import BALANCE_BIAS, RoutedMLP, Router
from proxy_models.architecture.layers import Embedding, LayerNorm, RMSNorm
from proxy_models.architecture.memory import Checkpointing, is_chunked
from proxy_models.architecture.mlp import MLP
from proxy_models.architecture.products import Linear
from proxy_models.architecture.recomputing import recomputing
from proxy_models.architecture.sharded import is_sharded, own
from proxy_models.architecture.sparse_attention import number_documents, visible_blocks

if TYPE_CHECKING:
    from proxy_models.architecture.shared_sequences import SequenceShare


def rotary_angles(config: ModelConfig) -> Tensor:
    """Return the angle of each position and each rotated pair, shape (context_length, rotary_dim / 2), radians."""
    rotary_dim = config.rotary_dim
    frequencies = config.rope_theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    return torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + r/2}) of the first r coordinates of every head by their position's angle.

    x is (batch, time, heads, head_dim); cos and sin of the angles are (time, 1, r / 2), fp32. Coordinates beyond r and the
    dtype stay unchanged.
    """
    n_pairs = cos.shape[-1]
    first, second, rest = x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs], x[..., 2 * n_pairs :]
    rotated = (part.to(x.dtype) for part in (first * cos - second * sin, second * cos + first * sin))
    return torch.cat((*rotated, rest), dim=-1)


def alibi_bias(context_length: int, n_heads: int) -> Tensor:
    """Return the bias that ALiBi adds to the logits, shape (n_heads, context_length, context_length), -inf on the future.

    The bias of head h of n falls by 2^(-8h/n) per token of distance (Press et al., arXiv 2108.12409, section 3).
    """
    slopes = 2.0 ** (-8.0 * torch.arange(1, n_heads + 1, dtype=torch.float32) / n_heads)
    time = torch.arange(context_length, dtype=torch.float32)
    distance = time[:, None] - time
    return torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)


def constants(config: ModelConfig) -> dict[str, Tensor | None]:
    """Return the buffers that a decoder's shape determines: `cos` and `sin` of rotary angles, and `logit_bias`."""
    rotary, alibi = config.positions == "rotary", config.positions == "alibi"
    angles = rotary_angles(config) if rotary else None
    return {
        "cos": angles.cos() if angles is not None else None,
        "sin": angles.sin() if angles is not None else None,
        "logit_bias": alibi_bias(config.context_length, config.n_heads) if alibi else None,
    }


class Cache:
    """Keys and values of the tokens that `Decoder.next_logits` has seen, by attention layer; each (batch, time, heads, head_dim)."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._states: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values, and return those that the new tokens attend to. Those before the window are dropped."""
        last = slice(None if window is None else -window, None)
        if layer in self._states:
            key, value = (
                torch.cat(pair, dim=1)[:, last] for pair in zip(self._states[layer], (key, value), strict=True)
            )
        self._states[layer] = key[:, last], value[:, last]
        return key, value


class Positions(NamedTuple):
    """Positions in the form that attention uses: rotary angles or a bias on the logits, and documents. Unused entries are None.

    `local` has the documents of blocks with a window, which on a GPU include the window.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    bias: Tensor | None = None
    documents: Tensor | BlockMask | None = None
    local: Tensor | BlockMask | None = None
    cache: Cache | None = None


def norm_of(config: ModelConfig) -> nn.Module:
    """Build a norm over the width."""
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, eps=config.norm_eps, bias=config.biases)
    return RMSNorm(config.d_model, eps=config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention; groups of query heads share a key and value head. The scale of the logits is an argument.

    Attributes:
        share: Positions that this rank has, if ranks share a sequence.
    """

    share: SequenceShare | None = None

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__()
        self.config, self.window = config, window
        width, d_kv = config.d_model, config.n_kv_heads * config.head_dim
        self.query = Linear(width, width, bias=config.biases)
        self.key = Linear(width, d_kv, bias=config.biases)
        self.value = Linear(width, d_kv, bias=config.biases)
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
            self.key_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.output = Linear(width, width, bias=config.biases)

    def forward(self, x: Tensor, positions: Positions, scale: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        config = self.config
        heads = (-1, config.head_dim)
        query, key, value = (project(x).unflatten(-1, heads) for project in (self.query, self.key, self.value))
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if positions.cos is not None and positions.sin is not None:
            query, key = (rotate(states, positions.cos, positions.sin) for states in (query, key))
        bias, documents = positions.bias, positions.documents if self.window is None else positions.local
        if positions.cache is not None:
            key, value = positions.cache.extend(self, key, value, self.window)
            bias = None if bias is None else bias[..., -key.shape[1] :]
        begins: tuple[int, ...] = (0,)
        if self.share is not None:
            key, value = self.share.gathered(key, value)
            begins = self.share.begins(key.shape[1])
        dropout = config.attention_dropout if self.training else 0.0
        mixed = attend(
            query * scale,
            key,
            value,
            bias=bias,
            dropout=dropout,
            documents=documents,
            window=self.window,
            begins=begins,
        )
        return cast(Tensor, self.output(mixed.flatten(-2)))


class Block(nn.Module):
    """Pre-norm attention and MLP; the depth multiplier scales each sum into the residual stream, or a single sum of both.

    In a mixture of experts the MLP is `RoutedMLP`, except in the first dense layers.

    Attributes:
        checkpointing: Kind of activation checkpointing.
        penalty: Terms that the router of the last training pass adds to the loss, if the config has any.
    """

    penalty: Tensor | None = None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.drop = config, config.stochastic_depth * layer / max(1, config.n_layers - 1)
        self.checkpointing: Checkpointing = "none"
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, config.window_of(layer))
        if not config.parallel:
            self.mlp_norm = norm_of(config)
        self.mlp = RoutedMLP(config) if config.is_sparse(layer) else MLP(config, config.d_ff, bias=config.biases)

    def forward(self, x: Tensor, positions: Positions, attention_scale: Tensor, branch: Tensor) -> Tensor:
        """Map the residual stream (batch, time, width) to the same shape."""
        arguments, is_random = (x, positions, attention_scale, branch), self.training and self.config.is_random
        mapped = recomputing(self.checkpointing, self._map, *arguments, is_random=is_random)
        if not isinstance(mapped, tuple):
            return mapped
        x, routed, penalty = mapped
        self.penalty = penalty if self.training and self.config.has_penalty else None
        if self.training:  # here, since a recomputation would count again
            cast(RoutedMLP, self.mlp).router.routed.add_(routed.detach())
        return x

    def compile_recomputed(self) -> None:
        """Compile what full checkpointing recomputes, and leave the recomputing itself eager."""
        self._map = torch.compile(self._map, dynamic=False)  # type: ignore[method-assign]

    def _map(
        self, x: Tensor, positions: Positions, attention_scale: Tensor, branch: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        if self.training and self.drop:
            kept = torch.rand(len(x), 1, 1, device=x.device) >= self.drop
            branch = (branch * kept / (1 - self.drop)).to(x.dtype)
        normed = self.attention_norm(x)
        if self.config.parallel:
            attended = self.attention(normed, positions, attention_scale)
            mixed, *of_routing = self._mixed(normed)
            x = x + branch * (attended + mixed)
        else:
            x = x + branch * self.attention(normed, positions, attention_scale)
            mixed, *of_routing = self._mixed(self.mlp_norm(x))
            x = x + branch * mixed
        return (x, *of_routing) if of_routing else x

    def _mixed(self, normed: Tensor) -> tuple[Tensor, ...]:
        mixed = self.mlp(normed)
        return mixed if isinstance(mixed, tuple) else (mixed,)


class Readout(Linear):
    """Readout that maps hidden states to logits (…, vocab_size), or with targets to their mean cross-entropy in nats.

    The loss is computed here because a sharded weight is gathered only during the forward pass of its module.

    Attributes:
        compiled: Whether the computation on a chunk of logits is compiled.
    """

    compiled = False

    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Map (…, width) to logits, or with targets (…) to the loss; too many or sharded logits are then not kept.

        `weights` (…) of the positions are those of `whole_cross_entropy`.
        """
        if targets is None:
            return super().forward(input)
        terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        if is_sharded(self.weight) or is_chunked(targets.numel(), self.out_features):
            low = self.weight.to(input.dtype)
            return chunked_cross_entropy(input, low, targets, weights, **terms, compiled=self.compiled)
        return whole_cross_entropy(super().forward(input), targets, weights, **terms)


class Decoder(nn.Module):
    """Decoder that maps token ids (batch, time) to logits (batch, time, vocab_size).

    `time` may be anything up to `config.context_length`. A new decoder has torch's default initial values;
    `proxy_models.initialize` writes those of the parametrization.

    Attributes:
        compute_dtype: Dtype of the residual stream and of all products.
        own_heads: Heads that this rank computes; other ranks may share its products.
        share: Positions that this rank computes if ranks share a sequence: of their logits and the loss. Each gets all tokens.
    """

    own_heads = slice(None)
    share: SequenceShare | None = None
    cos: Tensor | None
    sin: Tensor | None
    logit_bias: Tensor | None
    embedding_multiplier: Tensor
    attention_scale: Tensor
    branch_multiplier: Tensor
    readout_multiplier: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.embedding = Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.position = nn.Embedding(config.context_length, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = norm_of(config)
        self.readout = Readout(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.readout.weight = self.embedding.weight
        for name, value in constants(config).items():
            self.register_buffer(name, value, persistent=False)
        for name in ("embedding_multiplier", "attention_scale", "branch_multiplier", "readout_multiplier"):
            self.register_buffer(name, torch.ones(()), persistent=False)

    @classmethod
    def with_weights(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> Self:
        """Return a decoder on the CPU that uses these tensors as its parameters and state, without a copy; its multipliers are 1.

        Raises:
            ValueError: If the state of a router is missing.
        """
        with torch.device("meta"):
            decoder = cls(config)
        for module in decoder.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.ones_like(buffer, device="cpu"))
        decoder.write_constants()
        missing = decoder.load_state_dict(weights, strict=False, assign=True).missing_keys
        if lost := [name for name in missing if name.endswith(BALANCE_BIAS)]:
            raise ValueError(f"a router's weights need its state, which is missing: {', '.join(lost)}")
        if config.tied:
            decoder.readout.weight = decoder.embedding.weight
        return decoder

    @torch.no_grad()
    def write_constants(self) -> None:
        """Write `constants`, and the first state of routers, into a decoder without values. All are computed on the CPU."""
        for name, value in constants(self.config).items():
            if value is not None:
                self.get_buffer(name).copy_(value[self.own_heads] if name == "logit_bias" else value)
        for router in (module for module in self.modules() if isinstance(module, Router)):
            router.balance_bias.zero_()
            router.routed.zero_()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        regularized: bool = False,
    ) -> Tensor:
        """Return the logits of the next token at every position; with targets, their mean cross-entropy in nats.

        `weights` of the positions are those of `whole_cross_entropy`. `regularized` adds the config's label smoothing and z-loss,
        and what routers add, which has no weights.
        """
        x = self._hidden(tokens, self.positions(tokens))
        if targets is None:
            return cast(Tensor, self.readout(x))
        targets, weights = self._own(targets), None if weights is None else self._own(weights)
        smoothing, z_loss = (self.config.label_smoothing, self.config.z_loss) if regularized else (0.0, 0.0)
        loss = cast(Tensor, self.readout(x, targets, weights, label_smoothing=smoothing, z_loss=z_loss))
        if regularized and self.config.has_penalty:
            for block in (cast(Block, block) for block in self.blocks):
                if block.penalty is not None:
                    loss, block.penalty = loss + block.penalty, None
        return loss

    def next_logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the logits (batch, vocab_size) of the token after `tokens` (batch, time), of which the cache knows the first ones.

        A new cache knows none; later calls must continue the same tokens by one. They cost one token instead of `time`.
        """
        known, time = cache.n_tokens, tokens.shape[1]
        positions = self._positions_of_last(tokens) if known else self.positions(tokens)
        if known not in (0, time - 1):
            raise ValueError(f"tokens must continue the {known} of the cache by one, got {time}")
        cache.n_tokens = time
        x = self._hidden(tokens[:, known:], positions._replace(cache=cache), known)
        return cast(Tensor, self.readout(x[:, -1]))

    def _hidden(self, tokens: Tensor, positions: Positions, start: int = 0) -> Tensor:
        """Return what the readout maps, (batch, time, width), for tokens from position `start` on."""
        x = self.embedding(self._own(tokens), dtype=self.compute_dtype) * self.embedding_multiplier
        if self.config.positions == "learned":
            if is_sharded(self.position.weight) and tokens.shape[1] != self.config.context_length:
                raise ValueError(
                    f"ranks that share learned positions need sequences of context_length={self.config.context_length}, "
                    f"got {tokens.shape[1]}"
                )
            x = x + self._own(own(self.position.weight)[start : start + tokens.shape[1]], 0).to(x.dtype)
        x = F.dropout(x, self.config.embedding_dropout, self.training)
        for block in self.blocks:
            x = block(x, positions, self.attention_scale, self.branch_multiplier)
        return cast(Tensor, self.final_norm(x) * self.readout_multiplier)

    def _own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's positions along a dimension."""
        return whole if self.share is None else self.share.own(whole, dim)

    def _positions_of_last(self, tokens: Tensor) -> Positions:
        """Return the positions of the last of the tokens (batch, time), which attends to all of them within its document."""
        time, separator = tokens.shape[1], self.config.document_separator
        last = slice(time - 1, time)
        if self.logit_bias is not None:
            bias = self.logit_bias[:, last, :time].to(self.compute_dtype)
        else:
            bias = torch.zeros(1, 1, time, dtype=self.compute_dtype, device=tokens.device)
        if separator is not None:
            documents = number_documents(tokens, separator)
            others = (documents != documents[:, -1:])[:, None, None]
            bias = bias.expand(len(tokens), *bias.shape).masked_fill(others, -torch.inf)
        if self.cos is None or self.sin is None:
            return Positions(bias=bias)
        return Positions(cos=self.cos[last, None], sin=self.sin[last, None], bias=bias)

    def positions(self, tokens: Tensor) -> Positions:
        """Return the positions of tokens (batch, time) as attention takes them."""
        time = tokens.shape[1]
        documents, local = self._documents(tokens)
        if self.cos is not None and self.sin is not None:
            cos, sin = (self._own(table[:time, None], 0) for table in (self.cos, self.sin))
            return Positions(cos=cos, sin=sin, documents=documents, local=local)
        bias = None if self.logit_bias is None else self.logit_bias[:, :time, :time].to(self.compute_dtype)
        return Positions(bias=bias, documents=documents, local=local)

    def _documents(self, tokens: Tensor) -> tuple[Tensor | BlockMask | None, Tensor | BlockMask | None]:
        """Return `documents` and `local` of `Positions`."""
        (time, device), separator = (tokens.shape[1], tokens.device), self.config.document_separator
        window = self.config.attention_window
        documents = None if separator is None else number_documents(tokens, separator)
        if device.type != "cuda":
            return documents, documents
        at = None if self.share is None else self.share.own(torch.arange(time, device=device), 0)
        is_whole, is_local = documents is None and at is None, window is not None and window < time
        blocks = None if is_whole else visible_blocks(documents, None, time, device, at)
        return blocks, visible_blocks(documents, window, time, device, at) if is_local else blocks


def next_token_loss(model: nn.Module, sequences: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy on (batch, context_length + 1) tokens, each predicted from those before it, nats per token.

    `scale` is that of `proxy_models.architecture.family.Loss`.
    """
    return cast(Tensor, model(*shifted(sequences, scale)))


def training_loss(model: nn.Module, sequences: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the loss that a step minimises: `next_token_loss` with the config's label smoothing, z-loss and routers' terms."""
    return cast(Tensor, model(*shifted(sequences, scale), regularized=True))
