"""The rules that carry tuned values from the base shape to any other, as a table by parameter name.

The table is a plain value: it is computed from shapes alone, saved with every checkpoint, and applied to a model by
name, so nothing hangs on tensors and sharding can't lose it.

Width follows Tensor Programs V (Yang et al., arXiv 2203.03466, table 8, in the form that keeps the base shape equal to
standard parametrization); depth follows CompleteP (Dey et al., arXiv 2505.01618, table 1, exponent alpha = 1).
With `m` the width multiplier, `m_L = depth / base depth` and `a` the depth exponent:

| tensor class          | init std     | learning rate    | multiplier           | weight decay | Adam eps      |
| --------------------- | ------------ | ---------------- | -------------------- | ------------ | ------------- |
| embedding             | 1            | 1                | 1                    | 1            | 1/m           |
| hidden matrix         | 1/sqrt(fan_in) | m_L^(a-1) / m  | branch m_L^(-a)      | m            | 1/(m·m_L^a)   |
| block norm gain       | constant 1   | m_L^(a-1)        |                      | 0            | 1/(m·m_L^a)   |
| final norm gain       | constant 1   | 1                |                      | 0            | 1/m           |
| readout               | 1/sqrt(base fan_in) | 1         | 1/m                  | 1            | 1/m           |

Every entry is a factor on the value tuned at the base shape. Decay is applied as rate × decay (decoupled, as torch's
AdamW does), so a matrix shrinks at the same speed at every width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal, Self

from proxy_models.config import ModelConfig

Scheme = Literal["mup", "standard"]


class TensorClass(StrEnum):
    """What the rules distinguish."""

    EMBEDDING = "embedding"
    HIDDEN = "hidden"
    BLOCK_NORM = "block_norm"
    FINAL_NORM = "final_norm"
    READOUT = "readout"


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """What the rules need to know of one parameter: its class, its fan-in, and its width against the base."""

    tensor_class: TensorClass
    fan_in: int
    width_mult: float


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """Factors for one parameter; a norm gain has `init_std` 0 and starts at 1."""

    tensor_class: TensorClass
    width_mult: float
    init_std: float
    lr_factor: float
    weight_decay_factor: float
    eps_factor: float


@dataclass(frozen=True, kw_only=True)
class ForwardMultipliers:
    """What the forward pass multiplies by: the embedding's output, each residual branch, the readout's input, the attention logits."""

    embedding: float
    branch: float
    readout: float
    attention: float

    def tuned(self, *, embedding: float, readout: float, attention: float) -> ForwardMultipliers:
        """These multipliers times the tuned ones."""
        return replace(
            self,
            embedding=self.embedding * embedding,
            readout=self.readout * readout,
            attention=self.attention * attention,
        )


@dataclass(frozen=True, kw_only=True)
class Parametrization:
    """The table of one shape against its base.

    Attributes:
        scheme: "mup", or "standard" for comparison (one rate for all, fan-in initialisation).
        rules: By parameter name.
        multipliers: Of the forward pass, before the tuned multipliers are applied to them.
    """

    scheme: Scheme
    rules: Mapping[str, TensorRule]
    multipliers: ForwardMultipliers

    def to_dict(self) -> dict[str, Any]:
        """The table as plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild what `to_dict` wrote."""
        rules = {
            name: TensorRule(**{**rule, "tensor_class": TensorClass(rule["tensor_class"])})
            for name, rule in values["rules"].items()
        }
        return cls(scheme=values["scheme"], rules=rules, multipliers=ForwardMultipliers(**values["multipliers"]))

    def __str__(self) -> str:
        """One aligned line for each kind of tensor."""
        header = f"{'tensor':<32}{'class':<12}{'m':>7}{'init std':>10}{'rate':>9}{'decay':>8}{'eps':>10}"
        lines = [
            f"{name:<32}{rule.tensor_class:<12}{rule.width_mult:>7.3g}{rule.init_std:>10.4g}{rule.lr_factor:>9.4g}"
            f"{rule.weight_decay_factor:>8.3g}{rule.eps_factor:>10.3g}"
            for name, rule in self.rules.items()
        ]
        m = self.multipliers
        footer = (
            f"multipliers: embedding {m.embedding:g}, residual branch {m.branch:g}, readout {m.readout:g}, "
            f"attention logits {m.attention:g}"
        )
        return "\n".join([header, *lines, footer])


def tensor_rule(shape: TensorShape, *, depth_mult: float, depth_exponent: float, scheme: Scheme) -> TensorRule:
    """The rule of one parameter: a row of the table above."""
    m, tensor_class = shape.width_mult, shape.tensor_class
    in_block = tensor_class in (TensorClass.HIDDEN, TensorClass.BLOCK_NORM)
    is_gain = tensor_class in (TensorClass.BLOCK_NORM, TensorClass.FINAL_NORM)
    hidden = tensor_class is TensorClass.HIDDEN
    init_std = {
        TensorClass.EMBEDDING: 1.0,
        TensorClass.HIDDEN: 1 / math.sqrt(shape.fan_in),
        TensorClass.READOUT: math.sqrt(m / shape.fan_in),
    }.get(tensor_class, 0.0)
    if scheme == "standard":
        if tensor_class is TensorClass.READOUT:
            init_std = 1 / math.sqrt(shape.fan_in)
        return TensorRule(
            tensor_class=tensor_class,
            width_mult=m,
            init_std=init_std,
            lr_factor=1.0,
            weight_decay_factor=0.0 if is_gain else 1.0,
            eps_factor=1.0,
        )
    depth_rate = depth_mult ** (depth_exponent - 1) if in_block else 1.0
    depth_eps = depth_mult**depth_exponent if in_block else 1.0
    return TensorRule(
        tensor_class=tensor_class,
        width_mult=m,
        init_std=init_std,
        lr_factor=depth_rate / m if hidden else depth_rate,
        weight_decay_factor=0.0 if is_gain else (m if hidden else 1.0),
        eps_factor=1 / (m * depth_eps),
    )


def decoder_shapes(config: ModelConfig, base: ModelConfig) -> Iterator[tuple[str, TensorShape]]:
    """Name and shape of every parameter of `Decoder`, in its order, written out."""
    width, m = config.d_model, config.d_model / base.d_model

    def shape(tensor_class: TensorClass, fan_in: int = width) -> TensorShape:
        return TensorShape(tensor_class=tensor_class, fan_in=fan_in, width_mult=m)

    yield "embedding.weight", shape(TensorClass.EMBEDDING, fan_in=1)
    for layer in range(config.n_layers):
        block = f"blocks.{layer}."
        yield block + "attention_norm.weight", shape(TensorClass.BLOCK_NORM)
        for projection in ("query", "key", "value", "output"):
            yield block + f"attention.{projection}.weight", shape(TensorClass.HIDDEN)
        yield block + "mlp_norm.weight", shape(TensorClass.BLOCK_NORM)
        yield block + "mlp.gate.weight", shape(TensorClass.HIDDEN)
        yield block + "mlp.up.weight", shape(TensorClass.HIDDEN)
        yield block + "mlp.down.weight", shape(TensorClass.HIDDEN, fan_in=config.d_ff)
    yield "final_norm.weight", shape(TensorClass.FINAL_NORM)
    yield "readout.weight", shape(TensorClass.READOUT)


def parametrize(
    config: ModelConfig, base: ModelConfig, *, scheme: Scheme = "mup", depth_exponent: float = 1.0
) -> Parametrization:
    """The table that carries what was tuned at `base` to `config`.

    Args:
        config: The shape to train.
        base: The shape at which the hyperparameters were tuned.
        scheme: "mup", or "standard".
        depth_exponent: CompleteP's alpha, between 0.5 and 1.

    Raises:
        ValueError: If the two differ in anything but width, depth, or the exponent is out of its range.
    """
    for name in ("head_dim", "mlp_ratio", "vocab_size", "context_length"):
        if getattr(config, name) != getattr(base, name):
            raise ValueError(
                f"muP carries across width and depth only: {name} is {getattr(config, name)} "
                f"but {getattr(base, name)} in the base"
            )
    return parametrization_of(
        dict(decoder_shapes(config, base)),
        depth_mult=config.n_layers / base.n_layers,
        attention=1 / math.sqrt(config.head_dim),  # head_dim is the base's, so the table's sqrt(d0)/d_head is this
        scheme=scheme,
        depth_exponent=depth_exponent,
    )


def parametrization_of(
    shapes: Mapping[str, TensorShape],
    *,
    depth_mult: float,
    attention: float,
    scheme: Scheme = "mup",
    depth_exponent: float = 1.0,
) -> Parametrization:
    """The table of any model whose parameters have these shapes.

    Args:
        shapes: By parameter name; `proxy_models.base_shapes.module_shapes` finds them for any `nn.Module`.
        depth_mult: Depth over base depth.
        attention: Scale of the attention logits.
        scheme: "mup", or "standard".
        depth_exponent: CompleteP's alpha, between 0.5 and 1.

    Raises:
        ValueError: If there is no readout or readouts of several widths, or the exponent is out of its range.
    """
    if not 0.5 <= depth_exponent <= 1:
        raise ValueError(f"depth_exponent must lie in [0.5, 1] (CompleteP, section 3), got {depth_exponent}")
    readout_mults = {shape.width_mult for shape in shapes.values() if shape.tensor_class is TensorClass.READOUT}
    if len(readout_mults) != 1:
        raise ValueError(
            f"the readout multiplier needs one width of readouts, got {sorted(readout_mults) or 'no readout'}"
        )
    rules = {
        name: tensor_rule(shape, depth_mult=depth_mult, depth_exponent=depth_exponent, scheme=scheme)
        for name, shape in shapes.items()
    }
    is_mup = scheme == "mup"
    multipliers = ForwardMultipliers(
        embedding=1.0,
        branch=depth_mult**-depth_exponent if is_mup else 1.0,
        readout=1 / readout_mults.pop() if is_mup else 1.0,
        attention=attention,
    )
    return Parametrization(scheme=scheme, rules=rules, multipliers=multipliers)
