"""The rules that carry tuned values from the base shape to any other, as a table by parameter name.

The table is a plain value: it is computed from shapes alone, saved with every checkpoint, and applied to a model by
parameter name. No rule is stored on a tensor, so sharding can't lose it.

Width follows Tensor Programs V (Yang et al., arXiv 2203.03466, table 8, in the form that keeps the base shape equal to
standard parametrization); depth follows CompleteP (Dey et al., arXiv 2505.01618, table 1, exponent alpha = 1).
With `m` the width multiplier, `m_L = depth / base depth` and `a` the depth exponent:

| tensor class    | init std                 | learning rate | multiplier                    | weight decay        | Adam eps    |
| --------------- | ------------------------ | ------------- | ----------------------------- | ------------------- | ----------- |
| embedding       | 1                        | 1             | 1                             | 1                   | 1/m         |
| hidden matrix   | 1/sqrt(fan_in)           | m_L^(a-1) / m | branch m_L^(-a)               | m_L^(1-a)·(m or √m) | 1/(m·m_L^a) |
| router          | 1/sqrt(fan_in·m)         | m_L^(a-1) / m |                               | m_L^(1-a)·m         | 1/m_L^a     |
| block norm gain | constant 1               | m_L^(a-1)     |                               | 0                   | 1/(m·m_L^a) |
| qk-norm gain    | constant 1               | m_L^(a-1)     |                               | 0                   | 1/m_L^a     |
| final norm gain | constant 1               | 1             |                               | 0                   | 1/m         |
| bias            | constant 0               | as the gain   |                               | 0                   | as the gain |
| readout         | 1/sqrt(base fan_in) or 0 | 1             | 1/m                           | 1                   | 1/m         |
| tied readout    | 1/sqrt(base fan_in)      | 1             | 1/m out, sqrt(base fan_in) in | 1                   | 1/m         |

A bias follows the gain of its location, in a block or at the end. The tied table's values suit its use as a readout; the
multiplier on its use as an embedding gives the residual stream the same size as an untied embedding would. The gradients of
both uses fall as 1/m, so Adam weighs them alike at every width, and one step moves stream and logits equally far. No other
exponents do (the coordinate check detects each): not sqrt(m) on the rate, as for a readout without alignment (Everett et al., arXiv
2407.05872), nor 1/sqrt(m), as for an embedding under a large vocabulary (Hayou and Liu, arXiv 2506.15025). Narrow models are still
far from that limit: `TIED_REACH`.

The weight of a convolution counts as the matrix (outputs, inputs · kernel). In a stack (matrices, outputs, inputs), as for experts,
each matrix follows the rule of a hidden matrix (`TensorClass.HIDDEN_STACK`).

The router of a mixture of experts is a readout of the stream: with initial values and a rate that fall as 1/m, instead of a multiplier
that does, its logits move alike at every width (Malasnicki et al., arXiv 2508.09752, and Boris Hanin's derivation for arXiv 2601.20205
come to this rule). Matrices of experts are hidden matrices with the fan-in of one expert; the last matrix of an expert has the width
multiplier hidden / base hidden. Three schemes (`ModelConfig.expert_scheme`) differ in how an expert's output changes with the number
and size of experts that a token passes, at a fixed width:

- "fan_in": gates that sum to 1, last matrix 1/sqrt(hidden). The sum of k experts falls as 1/sqrt(k) at the start.
- "mean_field": the same gates, last matrix 1/sqrt(hidden) · sqrt(base ratio / ratio) with the ratio hidden / width (arXiv 2601.20205,
  table 1, relative to the base), so that the sum stays as k · hidden stays.
- "sqrt_gate": square roots of these gates, last matrix 1/sqrt(hidden): the sum keeps its variance for any k; shared and routed experts
  have half of it each (HyperP, arXiv 2603.28743).

Adam's eps of router and experts falls with the number of experts E, as their gradients do where tokens agree: a router's gradient is
a token's gate, 1 / k, times the share of tokens that pass the expert, k / E. It does not fall with the width, since the gradient of a
logit is a sum over the width (measured here after 8 steps from E = 8, k = 2: width times 4, .93 of the base's; depth times 4, .28;
experts times 4, .34 at fixed k and .39 at fixed k / E).

Learned positions count as an embedding. All heads share the gains of qk-norm, which therefore have no width, unlike a block's other
gains. Both kinds are inside a branch, and their gradients fall alike with the depth (measured here, depth times 8, three seeds: to .12
to .14 of the base's under a = 1, those of hidden matrices to .14).

An untied readout may start at zero (`Hyperparameters.zero_readout`), as Tensor Programs V, section D.2, recommends: the
random part of its logits vanishes as width grows, so it makes small models differ from large ones.

Every entry is a factor on the value tuned at the base shape. Decay is applied as rate × decay (decoupled, as torch's
AdamW does). Under `decay_scaling` "timescale" a matrix therefore shrinks at the same speed at every width and depth, and the
timescale tau of its average stays as tuned. CompleteP's table leaves the decay unchanged in depth, which is the same for a = 1; at
a = .75 and sixteen times the depth, tau would double. "sublayer_gain" has sqrt(m) instead of m for the decay of hidden matrices:
when decay and updates are in balance, the largest singular value of a matrix is observed to grow as sqrt(rate / decay)·width^.75,
and with a rate of 1/m this rule keeps the matrix's gain constant (Fan et al., arXiv 2510.15262, for AdamW).

The table above is for AdamW. Another optimizer changes only the rate of a hidden matrix or a router, whose width factor
becomes m^-x, and the decay, m^x, so that their product stays; `RATE_EXPONENT` and `_ROUTER_RATE_EXPONENT` have the x. All
optimizers have the same aim: an update whose largest singular value does not depend on width (Yang, Simon and Bernstein, arXiv
2310.17813).

LAMB's step is the rate times the ratio of norms times Adam's direction plus decay · weight. Of tensors that start at random values,
only hidden matrices have a root mean square, and so a ratio, that depends on the width: m^-1/2. With it, the rate m^-1/2 makes Adam's
rate of 1/m, and the decay needs m for the same speed of decay at every width (derived here). Tensors that start at a constant have the
ratio 1 and AdamW's rules, also a readout that starts at zero: its norm would say nothing about the size that it should have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal, TypedDict, Unpack

from proxy_models.architecture.config import ModelConfig
from proxy_models.serialization import Serializable

Scheme = Literal["mup", "standard"]
OptimizerName = Literal["adamw", "adam", "lion", "adafactor", "muon", "lamb", "soap"]
DecayScaling = Literal["timescale", "sublayer_gain"]

RATE_EXPONENT: dict[OptimizerName, float] = {
    # Entries of an update have the size of the rate and add coherently over the fan-in, so their effect grows with the width.
    "adamw": 1.0,  # Tensor Programs V, table 3
    "adam": 1.0,  # as AdamW, but without decay: coupled decay does not scale (Tensor Programs V, appendix B.3)
    "lion": 1.0,  # the sign of the momentum: entries of size 1, like Adam's (Chen et al., arXiv 2302.06675, section 3)
    # The update is the rate times the tensor's root mean square, which falls as m^-1/2 by the initial values (Everett et
    # al., arXiv 2407.05872, section 4, find this exponent for Adafactor); `adafactor` describes the deviations from the paper.
    "adafactor": 0.5,
    # Muon's update is orthogonal, and scaled by .2·sqrt(max(fan_in, fan_out)) to Adam's size (Liu et al., arXiv 2502.16982,
    # section 2.2): the largest singular value is .2·sqrt(width).
    "muon": 0.5,
    "lamb": 0.5,  # as Adafactor: Adam's direction, with the root mean square of the tensor (You et al., arXiv 1904.00962)
    # In the eigenbasis, entries of an update have the size of the rate, as Adam's have, but the features lie along few of its
    # directions, so that entries do not add up over the fan-in: the largest singular value of an update grows as sqrt(width). Derived
    # here, and measured after 24 steps on new batches at widths 32 to 256: that value grows as width^.60, the change of features as
    # width^.52 (AdamW: .98 and .92; Muon: .52 and .51).
    "soap": 0.5,
}
"""Exponent x of each optimizer that has rules; values tuned with another optimizer do not transfer."""
_DECAY_EXPONENT = RATE_EXPONENT | {"lamb": 1.0}
"""Exponent of the width in the decay of a hidden matrix. LAMB's ratio of norms, m^-1/2, multiplies the decay too (`lamb`)."""

_ROUTER_RATE_EXPONENT = RATE_EXPONENT | {"muon": 1.0, "soap": 1.0, "adafactor": 0.0, "lamb": 0.0}
_ROUTER_DECAY_EXPONENT = _ROUTER_RATE_EXPONENT | {"lamb": 1.0}
"""Exponents of a router. Under Muon and SOAP, AdamW moves it. Its root mean square, which scales updates of Adafactor and LAMB, falls
as 1/m."""


class TableOptions(TypedDict, total=False):
    """Options of a table, as `parametrization_of` takes them."""

    scheme: Scheme
    depth_exponent: float
    optimizer: OptimizerName
    decay_scaling: DecayScaling


TIED_REACH = 2.0
"""Largest ratio of widths at which a rate tuned with a tied table is trusted without a grid. From width 16 to 128 the best rate of
GPT-2 and of decoders rose by .11 to .17 octaves per doubling; untied it rose by -.06 to .09 (tests/benchmarks/RESULTS.md)."""


class TensorClass(StrEnum):
    """Classes of parameters that the rules distinguish."""

    EMBEDDING = "embedding"
    HIDDEN = "hidden"
    HIDDEN_STACK = "hidden_stack"
    ROUTER = "router"
    BLOCK_NORM = "block_norm"
    BLOCK_BIAS = "block_bias"
    QK_NORM = "qk_norm"
    FINAL_NORM = "final_norm"
    FINAL_BIAS = "final_bias"
    READOUT = "readout"
    TIED = "tied"


CARRIED_EXPERTS = ("n_experts", "experts_per_token", "expert_ratio", "n_shared_experts")
"""Fields of a mixture of experts in which a member may differ from its base."""
_LISTED = 3  # largest number of differences between two tables that an error lists

HIDDEN_MATRICES = {TensorClass.HIDDEN, TensorClass.HIDDEN_STACK}
_IN_BLOCK = {*HIDDEN_MATRICES, TensorClass.ROUTER, TensorClass.BLOCK_NORM, TensorClass.BLOCK_BIAS, TensorClass.QK_NORM}
MATRICES = {*HIDDEN_MATRICES, TensorClass.ROUTER, TensorClass.EMBEDDING, TensorClass.READOUT, TensorClass.TIED}
_READOUTS = {TensorClass.READOUT, TensorClass.TIED}


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """Shape of one parameter as the rules take it: its class, fan-in (1 for vectors), and width relative to the base.

    Attributes:
        width_mult: Fan-in of a hidden matrix, and otherwise width, over the base's.
        init_factor: Factor on the rule's initial standard deviation.
        gradient_factor: Size of the gradient relative to the base's, beyond what width and depth change.
    """

    tensor_class: TensorClass
    fan_in: int
    width_mult: float
    init_factor: float = 1.0
    gradient_factor: float = 1.0


def fan_in_of(name: str, tensor_class: TensorClass, dims: Sequence[int], grows: Sequence[bool]) -> int:
    """Return the fan-in of a parameter of this class, with outputs before inputs; 1 for embeddings and vectors.

    Args:
        name: Name of the parameter, for the error.
        tensor_class: Class, found or stated by the user.
        dims: Dimensions of the parameter.
        grows: Whether each dimension is width.

    Raises:
        ValueError: If the dimensions can't be those of the class.
    """
    if tensor_class is TensorClass.HIDDEN_STACK:
        if list(grows) == [False, True, True]:
            return dims[-1]
        rule = "a hidden_stack is (matrices, outputs, inputs), whose outputs and inputs grow with the width"
    elif tensor_class is TensorClass.HIDDEN and any(grows[2:]):
        rule = "a hidden tensor is (outputs, inputs, kernel), and no kernel grows; (matrices, outputs, inputs) is a hidden_stack"
    else:
        return math.prod(dims[1:]) if tensor_class in MATRICES - {TensorClass.EMBEDDING} else 1
    growing = [number for number, grow in enumerate(grows) if grow]
    raise ValueError(f"{name}: {rule}; got shape {tuple(dims)}, which grows in the dimensions {growing}")


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """Factors for one parameter. If `init_std` is 0, all entries start at `init_mean`: a gain at 1, a bias at 0."""

    tensor_class: TensorClass
    width_mult: float
    init_std: float
    lr_factor: float
    weight_decay_factor: float
    eps_factor: float

    @property
    def init_mean(self) -> float:
        """1 for the gains of norms, 0 for everything else."""
        return float(self.tensor_class in (TensorClass.BLOCK_NORM, TensorClass.QK_NORM, TensorClass.FINAL_NORM))


_MOST = (2 - 2**-23) * 2.0**127  # largest fp32 number, since decoders keep multipliers in fp32


@dataclass(frozen=True, kw_only=True)
class ForwardMultipliers:
    """Multipliers of the forward pass: on the embedding's output, each residual branch, the readout's input, the attention logits."""

    embedding: float
    branch: float
    readout: float
    attention: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or not abs(value) <= _MOST:
                raise ValueError(f"the multiplier {name} must be a number of 32 bits, got {value!r}")

    def tuned(self, *, embedding: float, readout: float, attention: float) -> ForwardMultipliers:
        """Return these multipliers times the tuned multipliers."""
        return replace(
            self,
            embedding=self.embedding * embedding,
            readout=self.readout * readout,
            attention=self.attention * attention,
        )


MULTIPLIERS = {
    "embedding": "embedding_multiplier",
    "branch": "branch_multiplier",
    "readout": "readout_multiplier",
    "attention": "attention_scale",
}
"""Name of the model's zero-dimensional buffer for each of `ForwardMultipliers`; a model may lack buffers."""
TUNED = {"embedding_multiplier": "embedding", "output_multiplier": "readout", "attention_multiplier": "attention"}
"""Hyperparameters that multiply one of `ForwardMultipliers`."""


@dataclass(frozen=True, kw_only=True)
class Parametrization(Serializable):
    """Table of one shape relative to its base.

    Attributes:
        scheme: "mup", or "standard" for comparison (one rate for all, fan-in initialisation).
        rules: Rule of each parameter, by name.
        multipliers: Multipliers of the forward pass, before the tuned ones are applied.
    """

    scheme: Scheme
    optimizer: OptimizerName
    rules: Mapping[str, TensorRule]
    multipliers: ForwardMultipliers

    def require(self, saved: Parametrization) -> None:
        """Refuse a state that was trained under another table; raise ValueError naming the parameters and fields that differ."""
        here, there = self._entries(), saved._entries()
        odd = [name for name in here | there if here.get(name) != there.get(name)]
        if odd:
            listed = "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in odd[:_LISTED])
            more = f"; and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
            raise ValueError(f"the state was trained with another parametrization: {listed}{more}")

    def _entries(self) -> dict[str, Any]:
        """Return the values of the table by their paths."""
        plain = self.to_dict()
        entries = {"scheme": self.scheme, "optimizer": self.optimizer}
        entries |= {
            f"{name}'s {field}": value for name, rule in plain["rules"].items() for field, value in rule.items()
        }
        return entries | {f"the multiplier {name}": value for name, value in plain["multipliers"].items()}

    def __str__(self) -> str:
        kinds = {(re.sub(r"\.\d+\.", ".*.", name), rule): None for name, rule in self.rules.items()}
        longest = max(len(name) for name, _ in kinds) + 2
        header = f"{'tensor':<{longest}}{'class':<12}{'m':>7}{'init std':>10}{'rate':>9}{'decay':>8}{'eps':>10}"
        lines = [
            f"{name:<{longest}}{rule.tensor_class:<12}{rule.width_mult:>7.3g}{rule.init_std:>10.4g}{rule.lr_factor:>9.4g}"
            f"{rule.weight_decay_factor:>8.3g}{rule.eps_factor:>10.3g}"
            for name, rule in kinds
        ]
        m = self.multipliers
        footer = (
            f"multipliers: embedding {m.embedding:g}, residual branch {m.branch:g}, readout {m.readout:g}, "
            f"attention logits {m.attention:g}"
        )
        return "\n".join([header, *lines, footer])


def tensor_rule(
    shape: TensorShape,
    *,
    depth_mult: float,
    depth_exponent: float,
    scheme: Scheme,
    optimizer: OptimizerName,
    decay_scaling: DecayScaling,
) -> TensorRule:
    """Return the rule of one parameter: a row of the module docstring's table, with the optimizer's exponent."""
    m, tensor_class = shape.width_mult, shape.tensor_class
    in_block, is_matrix = tensor_class in _IN_BLOCK, tensor_class in MATRICES
    base_fan_in = shape.fan_in / m if scheme == "mup" else shape.fan_in
    init_std = {
        TensorClass.EMBEDDING: 1.0,
        **dict.fromkeys(HIDDEN_MATRICES, 1 / math.sqrt(shape.fan_in)),
        TensorClass.READOUT: 1 / math.sqrt(base_fan_in),
        TensorClass.TIED: 1 / math.sqrt(base_fan_in),
        TensorClass.ROUTER: 1 / math.sqrt(shape.fan_in * (m if scheme == "mup" else 1)),
    }.get(tensor_class, 0.0) * (shape.init_factor if scheme == "mup" else 1.0)
    if scheme == "standard":
        return TensorRule(
            tensor_class=tensor_class,
            width_mult=m,
            init_std=init_std,
            lr_factor=1.0,
            weight_decay_factor=1.0 if is_matrix else 0.0,
            eps_factor=1.0,
        )
    is_hidden, is_router = tensor_class in HIDDEN_MATRICES, tensor_class is TensorClass.ROUTER
    rate_exponents, decay_exponents = (
        (_ROUTER_RATE_EXPONENT, _ROUTER_DECAY_EXPONENT) if is_router else (RATE_EXPONENT, _DECAY_EXPONENT)
    )
    width_lr_divisor = m ** rate_exponents[optimizer] if is_hidden or is_router else 1.0
    width_decay_factor = m ** decay_exponents[optimizer] if is_hidden or is_router else 1.0
    if decay_scaling == "sublayer_gain" and is_hidden:
        width_decay_factor = math.sqrt(width_decay_factor)
    depth_lr_factor = depth_mult ** (depth_exponent - 1) if in_block else 1.0
    depth_eps_divisor = depth_mult**depth_exponent if in_block else 1.0
    return TensorRule(
        tensor_class=tensor_class,
        width_mult=m,
        init_std=init_std,
        lr_factor=depth_lr_factor / width_lr_divisor,
        weight_decay_factor=width_decay_factor / depth_lr_factor if is_matrix else 0.0,
        eps_factor=shape.gradient_factor / ((1 if is_router else m) * depth_eps_divisor),
    )


def decoder_shapes(config: ModelConfig, base: ModelConfig) -> Iterator[tuple[str, TensorShape]]:
    """Yield the name and shape of every parameter of `Decoder`, in its order, without building a decoder."""
    width, m = config.d_model, config.d_model / base.d_model

    def experts(name: str) -> Iterator[tuple[str, TensorShape]]:
        share = (base.n_experts or 1) / (config.n_experts or 1)
        yield f"{name}.router.weight", replace(shape(TensorClass.ROUTER), gradient_factor=share)
        stack = replace(shape(TensorClass.HIDDEN_STACK), gradient_factor=share)
        if config.activation == "swiglu":
            yield f"{name}.experts.gate", stack
        yield f"{name}.experts.up", stack
        hidden, of_base = config.expert_width, base.expert_width
        ratio = (of_base / base.d_model) / (hidden / width)
        init_factor = math.sqrt(ratio) if config.expert_scheme == "mean_field" else 1.0
        yield f"{name}.experts.down", replace(from_hidden(stack, hidden, of_base), init_factor=init_factor)
        if n_shared := config.n_shared_experts:
            yield from mlp(f"{name}.shared", n_shared * hidden, base.n_shared_experts * of_base, biases=False)

    def from_hidden(of: TensorShape, hidden: int, of_base: int) -> TensorShape:
        """A matrix that reads a hidden layer, of another width in the base; its gradient keeps to the width of the stream."""
        apart = hidden / of_base / m
        return replace(of, fan_in=hidden, width_mult=hidden / of_base, gradient_factor=of.gradient_factor * apart)

    def mlp(name: str, hidden: int, of_base: int, *, biases: bool) -> Iterator[tuple[str, TensorShape]]:
        if config.activation == "swiglu":
            yield from linear(f"{name}.gate", biases=biases)
        yield from linear(f"{name}.up", biases=biases)
        yield from linear(f"{name}.down", biases=biases, of=from_hidden(shape(TensorClass.HIDDEN), hidden, of_base))

    def shape(tensor_class: TensorClass, fan_in: int = width) -> TensorShape:
        return TensorShape(tensor_class=tensor_class, fan_in=fan_in, width_mult=m)

    def linear(
        name: str, *, biases: bool = config.biases, of: TensorShape | None = None
    ) -> Iterator[tuple[str, TensorShape]]:
        yield f"{name}.weight", of or shape(TensorClass.HIDDEN)
        if biases:
            yield f"{name}.bias", shape(TensorClass.BLOCK_BIAS, 1)

    def norm(name: str, gain: TensorClass, bias: TensorClass) -> Iterator[tuple[str, TensorShape]]:
        yield f"{name}.weight", shape(gain, 1)
        if config.norm == "layernorm" and config.biases:
            yield f"{name}.bias", shape(bias, 1)

    if config.tied:
        yield "embedding.weight", shape(TensorClass.TIED)
    else:
        yield "embedding.weight", shape(TensorClass.EMBEDDING, fan_in=1)
    if config.positions == "learned":
        yield "position.weight", shape(TensorClass.EMBEDDING, fan_in=1)
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        yield from norm(block + "attention_norm", TensorClass.BLOCK_NORM, TensorClass.BLOCK_BIAS)
        for projection in ("query", "key", "value"):
            yield from linear(block + f"attention.{projection}")
        if config.qk_norm:
            for kind in ("query", "key"):
                yield (
                    block + f"attention.{kind}_norm.weight",
                    TensorShape(tensor_class=TensorClass.QK_NORM, fan_in=1, width_mult=1.0),
                )
        yield from linear(block + "attention.output")
        if not config.parallel:
            yield from norm(block + "mlp_norm", TensorClass.BLOCK_NORM, TensorClass.BLOCK_BIAS)
        if config.is_sparse(layer):
            yield from experts(block + "mlp")
        else:
            yield from mlp(block + "mlp", config.d_ff, base.d_ff, biases=config.biases)
    yield from norm("final_norm", TensorClass.FINAL_NORM, TensorClass.FINAL_BIAS)
    if not config.tied:
        yield "readout.weight", shape(TensorClass.READOUT)


def parametrize(config: ModelConfig, base: ModelConfig, **options: Unpack[TableOptions]) -> Parametrization:
    """Return the table that carries values tuned at `base` to `config`; options as for `parametrization_of`.

    Raises:
        ValueError: If the shapes differ in more than width, depth and the experts of a mixture, the exponent is out of its range, or
            the optimizer has no rules, or no rule for the decay.
    """
    carried = ("d_model", "n_layers", *(CARRIED_EXPERTS if config.n_experts and base.n_experts else ()))
    for name in (field.name for field in fields(base)):
        if name not in carried and getattr(config, name) != getattr(base, name):
            raise ValueError(
                f"muP carries across {', '.join(carried)} only: {name} is {getattr(config, name)} "
                f"but {getattr(base, name)} in the base"
            )
    if (
        not config.n_shared_experts == base.n_shared_experts == 0
        and not config.n_shared_experts * base.n_shared_experts
    ):
        raise ValueError(
            f"a mixture and its base must both have shared experts or none, got {config.n_shared_experts} and {base.n_shared_experts}"
        )
    return parametrization_of(
        dict(decoder_shapes(config, base)),
        depth_mult=config.n_layers / base.n_layers,
        attention=1
        / math.sqrt(config.head_dim),  # equals the table's sqrt(d0)/d_head, since the base has the same head_dim
        **options,
    )


def parametrization_of(
    shapes: Mapping[str, TensorShape],
    *,
    depth_mult: float,
    attention: float,
    scheme: Scheme = "mup",
    depth_exponent: float = 1.0,
    optimizer: OptimizerName = "adamw",
    decay_scaling: DecayScaling = "timescale",
) -> Parametrization:
    """Return the table of any model whose parameters have these shapes.

    Args:
        shapes: Shape of each parameter, by name; `proxy_models.architecture.base_shapes.module_shapes` finds them for any `nn.Module`.
        depth_mult: Depth over base depth.
        attention: Scale of the attention logits.
        scheme: "mup", or "standard".
        depth_exponent: CompleteP's alpha, between 0.5 and 1.
        decay_scaling: Rule for the decay of hidden matrices across width; "sublayer_gain" is for AdamW only.

    Raises:
        ValueError: If there is no readout or readouts of several widths, the exponent is out of its range, or the
            optimizer has no rules, or no rule for the decay.
    """
    if optimizer not in RATE_EXPONENT:
        raise ValueError(
            f"there are no rules for the optimizer {optimizer!r}, so values tuned with it do not transfer; rules exist for "
            f"{', '.join(RATE_EXPONENT)}"
        )
    if decay_scaling == "sublayer_gain" and optimizer != "adamw":
        raise ValueError(
            f'decay_scaling "sublayer_gain" is available for adamw only (arXiv 2510.15262), got {optimizer}'
        )
    if not 0.5 <= depth_exponent <= 1:
        raise ValueError(f"depth_exponent must lie in [0.5, 1] (CompleteP, section 3), got {depth_exponent}")
    readout_mults = {shape.width_mult for shape in shapes.values() if shape.tensor_class in _READOUTS}
    if len(readout_mults) != 1:
        raise ValueError(
            f"the readout multiplier needs one width of readouts, got {sorted(readout_mults) or 'no readout'}"
        )
    rules = {
        name: tensor_rule(
            shape,
            depth_mult=depth_mult,
            depth_exponent=depth_exponent,
            scheme=scheme,
            optimizer=optimizer,
            decay_scaling=decay_scaling,
        )
        for name, shape in shapes.items()
    }
    is_mup = scheme == "mup"
    tied = [rule.init_std for rule in rules.values() if rule.tensor_class is TensorClass.TIED]
    multipliers = ForwardMultipliers(
        embedding=1 / tied[0] if tied else 1.0,
        branch=depth_mult**-depth_exponent if is_mup else 1.0,
        readout=1 / readout_mults.pop() if is_mup else 1.0,
        attention=attention,
    )
    return Parametrization(scheme=scheme, optimizer=optimizer, rules=rules, multipliers=multipliers)
