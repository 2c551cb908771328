"""The protocol of a family: how to build a model of any width and depth. All else is found by comparing members of it.

A family is a subclass of `Family` with one method. Its model maps token ids (batch, time) to logits (batch, time, vocab_size), and
has a list of residual blocks and a readout without a bias. What tells width from other dimensions, and so the class, initial values,
rate, decay and eps of every tensor, are three models of different width on the meta device. The forward multipliers are the
model's own to apply: buffers, of which it has those in its forward pass (`proxy_models.training.optimizer.MULTIPLIERS`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Unpack

from proxy_models.architecture.counted import remember
from proxy_models.architecture.member import Counts, Member, ModuleConfig
from proxy_models.architecture.memory import Checkpointing, Precision
from proxy_models.architecture.parametrization import (
    Parametrization,
    TableOptions,
    TensorClass,
    TensorShape,
    parametrization_of,
)
from proxy_models.architecture.source_files import source_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SIZE_STEP = 1.1
"""Factor in n_params between members that a plan looks at; the loss is flat over such steps near the best size (assumed)."""
Loss: TypeAlias = "Callable[[Any, Tensor], Tensor]"
"""A plain function of a model and sequences (batch, time + 1), in nats per token."""


class FamilyError(ValueError):
    """A model that does not keep to the protocol of its family."""


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """Builder of a model of any width and depth; subclasses are frozen dataclasses whose fields are `model.args`.

    Attributes:
        context_length: Tokens in one training sequence.
        readout: Name of the module that maps the width to logits.
        blocks: Name of the list of residual blocks.
        width_step: Widths are multiples of it.
        version: Part of every key; change it where the model changes and none of the files in `source` does.
    """

    vocab_size: int
    context_length: int

    readout: ClassVar[str] = "readout"
    blocks: ClassVar[str] = "blocks"
    width_step: ClassVar[int] = 1
    version: ClassVar[str] = ""

    @abstractmethod
    def build(self, width: int, depth: int) -> nn.Module:
        """Build the model on torch's default device."""

    # What a family may replace

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields besides the two sizes, by name, as members keep them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _SIZES}

    @classmethod
    def source(cls) -> dict[str, bytes]:
        """The files that define the family, by name: its own, and those of its package that it imports (`source_files`).

        Of a family in a notebook it is the cell that has its `build`.

        Raises:
            TypeError, OSError: If they can't be read.
        """
        try:
            return source_files(cls.__module__, Path(inspect.getfile(cls)))
        except (TypeError, OSError):
            # Of a class in a cell, Python finds the source from 3.13 on; of its method always.
            lines, _ = inspect.findsource(vars(cls).get("build", cls))
            return {f"{cls.__name__}.py": "".join(lines).encode()}

    def tensor_classes(self, width: int, depth: int) -> Mapping[str, str]:
        """Classes of parameters by name, where they are not those that the shapes tell: {"blocks.0.decay": "block_bias"}.

        Matrices that lie in one tensor (matrices, outputs, inputs), as those of experts, are a "hidden_stack".
        """
        return {}

    def active_shares(self, width: int, depth: int) -> Mapping[str, float]:
        """Share of a parameter's entries that one token uses, by name, where it is not 1: 2 / 8 for two of eight experts."""
        return {}

    @property
    def attention(self) -> float:
        """Scale of the attention logits, before the tuned multiplier."""
        return 1.0

    def attention_flops_per_token(self, width: int, depth: int) -> float:
        """Training FLOPs per token besides 6 for each parameter of `Member.n_params`."""
        return 0.0

    @property
    def training_loss(self) -> Loss:
        """The loss that a step minimises."""
        return self.evaluation_loss

    @property
    def evaluation_loss(self) -> Loss:
        """Mean cross-entropy, nats per token, without regularizers."""
        from proxy_models.architecture.cross_entropy import sequence_loss

        return sequence_loss

    def set_precision(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Let the model compute in this dtype: by its attribute `compute_dtype`, or else by torch's autocast over fp32 weights."""
        if hasattr(model, "compute_dtype"):
            model.compute_dtype = dtype  # type: ignore[assignment]
        else:
            _autocast(model, dtype)

    def set_checkpointing(self, model: nn.Module, checkpointing: Checkpointing) -> None:
        """Let each block keep or recompute its activations, by its attribute `checkpointing`.

        Raises:
            ValueError: If a block has none and something is to be recomputed.
        """
        for block in self.blocks_of(model):
            if hasattr(block, "checkpointing"):
                block.checkpointing = checkpointing  # type: ignore[assignment]
            elif checkpointing != "none":
                raise ValueError(f'checkpointing must be "none" for blocks without it, got "{checkpointing}"')

    def compile_loss(self, model: nn.Module) -> None:  # noqa: B027
        """Compile what the model computes outside its blocks, where that pays; by default nothing."""

    def constants(self, width: int, depth: int) -> dict[str, Tensor]:
        """Return the buffers of a member by name, with the values that it is built with on the CPU."""
        import torch

        with torch.device("cpu"):
            return dict(self.build(width, depth).named_buffers())

    def write_constants(self, model: nn.Module, width: int, depth: int) -> None:
        """Write the buffers of a model that was built without values, of which it has the width and depth."""
        if buffers := dict(model.named_buffers()):
            constants = self.constants(width, depth)
            for name, buffer in buffers.items():
                buffer.copy_(constants[name])

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that ranks gather one at a time: the embeddings outside the blocks, each block, the readout.

        Tables that are tied go with the rest of the model, where both uses find them.
        """
        from torch import nn

        readout, blocks = model.get_submodule(self.readout), list(self.blocks_of(model))
        within = {inner for block in blocks for inner in block.modules()}
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in within]
        if any(table.weight is readout.weight for table in tables):
            return blocks
        return [*blocks, *tables, readout]

    def fitting(
        self,
        member: Member,
        sequences: int,
        *,
        limit: int,
        precision: Precision,
        optimizer: str,
        ranks: int,
    ) -> tuple[int | None, Checkpointing]:
        """Sequences of one pass that fit in `limit` bytes of a rank (None: all of them), and what is recomputed.

        Nothing is known of the memory of a family without an estimate: it takes all.
        """
        return None, "none"

    # What follows from it

    def blocks_of(self, model: nn.Module) -> Iterable[nn.Module]:
        """The residual blocks of a model."""
        return model.get_submodule(self.blocks).children()

    def member(self, width: int, depth: int) -> Member:
        """The member of this width and depth, counted on the meta device.

        Raises:
            ValueError: If there is none, or a parameter has no rule.
        """
        if width < 1 or width % self.width_step:
            raise ValueError(f"d_model must be a multiple of {self.width_step}, got {width}")
        member = ModuleConfig(
            d_model=width,
            n_layers=depth,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            family=qualified_name(type(self)),
            source=source_hash(type(self)),
            version=self.version,
            arguments=json.dumps(self.arguments, sort_keys=True),
            counts=count_member(self, width, depth),
        )
        remember([member])
        return member

    def widths(self) -> Iterator[int]:
        """Widths of members, ascending."""
        return count(self.width_step, self.width_step)

    def member_for(self, n_params: float, depth: int) -> Member:
        """The member whose `n_params` is nearest to the wanted one in ratio; few are counted.

        n_params is nearly a power of the width, so that a line in logarithms finds the width in a few steps; every third step
        halves the range instead, whatever the family.
        """
        step, low, high = next(self.widths()), 0, 1
        while self.member(high * step, depth).n_params < n_params:
            low, high = high, 2 * high
        for turn in count(1):
            if high - low <= 1:
                break
            below, above = (math.log(self.member(number * step, depth).n_params) for number in (low, high))
            share = 0.5 if turn % 3 == 0 or above <= below else (math.log(n_params) - below) / (above - below)
            middle = min(max(round(low * (high / low) ** share), low + 1), high - 1)
            if self.member(middle * step, depth).n_params < n_params:
                low = middle
            else:
                high = middle
        around = (self.member(number * step, depth) for number in (low, high) if number)
        return min(around, key=lambda member: abs(math.log(member.n_params / n_params)))

    def between(self, least: float, most: float, depth: int) -> list[Member]:
        """Members of about so many parameters, the smallest first: those nearest to sizes a factor of `SIZE_STEP` apart.

        Of these few, readers of a study find the same among the members that were counted.
        """
        n_steps = math.ceil(math.log(most / least) / math.log(SIZE_STEP))
        wanted = (least * (most / least) ** (number / max(n_steps, 1)) for number in range(n_steps + 1))
        found = {member.d_model: member for member in (self.member_for(n_params, depth) for n_params in wanted)}
        return [found[width] for width in sorted(found)]

    def parametrization(self, member: Member, base: Member, **options: Unpack[TableOptions]) -> Parametrization:
        """Return the table that carries values tuned at `base` to `member`; options as for `parametrization_of`.

        Raises:
            ValueError: If a parameter has no rule, or is built with another constant than its rule starts it at, or two builds
                have different buffers.
        """
        table = parametrization_of(
            _shapes(self, member.d_model, member.n_layers, base.d_model),
            depth_mult=member.n_layers / base.n_layers,
            attention=self.attention,
            **options,
        )
        for name, value in _built_constants(self, base.d_model, base.n_layers).items():
            if name in table.rules and not (rule := table.rules[name]).init_std and value != rule.init_mean:
                raise FamilyError(
                    f"{name}: a {rule.tensor_class} must be built with {rule.init_mean:g}, at which training starts it; "
                    f"got {value:g}, as a gain of 1 + weight has; write the module so that its neutral value is {rule.init_mean:g}"
                )
        return table


_SIZES = ("vocab_size", "context_length")


def qualified_name(family: type[Family]) -> str:
    """Return "package.module:Class"."""
    return f"{family.__module__}:{family.__qualname__}"


@cache
def source_hash(family: type[Family]) -> str:
    """Return the SHA-256 of the source of a family.

    Raises:
        ValueError: If it can't be read.
    """
    try:
        files = family.source()
    except (TypeError, OSError) as error:
        raise ValueError(
            f"the source of {qualified_name(family)} is part of its keys and can't be read: {error}"
        ) from error
    return hashlib.sha256(b"".join(files.values())).hexdigest()


def _autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the model's forward pass compute its products in this dtype; fp32 undoes it."""
    import torch

    def forward(tokens: torch.Tensor) -> Any:
        with torch.autocast(tokens.device.type, dtype):
            return type(model).forward(model, tokens)  # of the class that FSDP2 gives it

    vars(model).pop("forward", None)
    if dtype != torch.float32:
        model.forward = forward


@cache
def _shapes(family: Family, width: int, depth: int, base_width: int) -> dict[str, TensorShape]:
    import torch

    from proxy_models.architecture.base_shapes import module_shapes  # mup imports torch

    with torch.device("meta"):
        target, base, delta = (family.build(size, depth) for size in (width, base_width, 2 * base_width))
    for attribute, name in (("readout", family.readout), ("blocks", family.blocks)):
        if name not in (modules := dict(target.named_modules())):
            found = ", ".join(child for child in modules if child and "." not in child) or "none"
            raise FamilyError(
                f"{type(family).__name__}.{attribute} must name a module of {type(target).__name__}, got {name!r}; it has {found}"
            )
    weight = target.get_submodule(family.readout).weight
    return module_shapes(
        target,
        base,
        delta,
        readout=[name for name, parameter in target.named_parameters() if parameter is weight],
        block_prefix=f"{family.blocks}.",
        classes=family.tensor_classes(width, depth),
    )


@cache
def _built_constants(family: Family, width: int, depth: int) -> dict[str, float]:
    """Parameters that a model is built with one constant in, by name; two builds tell a constant from a single random number."""
    import torch

    from proxy_models.architecture.sharded import have_same_values  # it imports torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        one, other = (family.build(width, depth) for _ in range(2))
    buffers, second = dict(other.named_buffers()), dict(other.named_parameters())
    if random := [name for name, buffer in one.named_buffers() if not have_same_values(buffer, buffers[name])]:
        raise FamilyError(
            f"{type(one).__name__}: two builds must have the same buffers, as each rank and each run builds its own; "
            f"got others in {', '.join(random)}; draw them from a torch.Generator with a fixed seed"
        )
    return {
        name: value
        for name, parameter in one.named_parameters()
        if bool((parameter == (value := parameter.flatten()[0].item())).all()) and bool((second[name] == value).all())
    }


@cache
def count_member(family: Family, width: int, depth: int) -> Counts:
    """Counts of a member; n_params are the parameters that one token uses but embeddings, which are looked up.

    Raises:
        FamilyError: If an active share is none, or of no parameter.
    """
    import torch

    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in family.build(width, depth).named_parameters()}
    shapes, active = _shapes(family, width, depth, width), family.active_shares(width, depth)
    for name, share in active.items():
        if name not in sizes or not 0 < share <= 1:
            raise FamilyError(
                f"{type(family).__name__}.active_shares: must be shares in (0, 1] by parameter name; got {share!r} for {name!r}"
            )
    n_params = round(
        sum(
            size * active.get(name, 1)
            for name, size in sizes.items()
            if shapes[name].tensor_class is not TensorClass.EMBEDDING
        )
    )
    return Counts(
        n_params=n_params,
        n_params_total=sum(sizes.values()),
        train_flops_per_token=6.0 * n_params + family.attention_flops_per_token(width, depth),
    )
