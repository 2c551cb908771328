"""The protocol of a family: how to build a model of any width and depth. The rest is found by comparing members.

A family is a subclass of `Family` with one method. Its model maps token ids (batch, time) to logits (batch, time, vocab_size), and
has a list of residual blocks and a readout without a bias. Three models of different width on the meta device show which dimensions
are width, and so the class, initial values, rate, decay and eps of every tensor. The model itself applies the forward multipliers,
which are buffers; a model has only those that its forward pass uses (`proxy_models.architecture.parametrization.MULTIPLIERS`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Unpack

from proxy_models.architecture.counted import remember
from proxy_models.architecture.member import AttentionKernel, Counts, Member, ModuleConfig, StepSizes
from proxy_models.architecture.memory import Checkpointing, MemoryEstimate, Precision
from proxy_models.architecture.parametrization import (
    MULTIPLIERS,
    TUNED,
    ForwardMultipliers,
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
    from torch.distributed.device_mesh import DeviceMesh

SIZE_STEP = 1.1
"""Factor in n_params between members that a plan looks at; the loss is flat over such steps near the best size (assumed)."""
Loss: TypeAlias = "Callable[..., Tensor]"
"""Loss function of a model and sequences (batch, time + 1), in nats per token.

If some tokens do not count (`proxy_models.data.uncounted`), a third argument is the weight of those that do, fp32: the loss is then
the sum of weight · cross-entropy over tokens that count, divided by the number of all predicted tokens, so that micro-batches and
ranks add up whatever their shares of such tokens are.
"""


def fixed_by(classes: Container[TensorClass]) -> dict[str, str]:
    """Return the hyperparameters that must keep their defaults in a model with tensors of these classes, each with the reason."""
    reasons = {}
    if TensorClass.TIED in classes:
        reasons["zero_readout"] = "a readout tied to the embedding table (model.tied) can't start at zero"
    if TensorClass.EMBEDDING not in classes:
        reasons["embedding_rate"] = "a tied table (model.tied) has the rate of the readout, which output_rate changes"
    return reasons


def weighted(loss: Loss, scale: Tensor | None) -> Loss:
    """Return the loss of sequences in which a token that counts has the weight `scale`; None: every token counts."""
    return loss if scale is None else lambda model, sequences: loss(model, sequences, scale)


class FamilyError(ValueError):
    """Error for a model that breaks the protocol of its family."""


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """Builder of a model of any width and depth; subclasses are frozen dataclasses whose fields are `model.args`.

    Attributes:
        context_length: Tokens in one training sequence.
        readout: Name of the module that maps the width to logits.
        blocks: Name of the list of residual blocks.
        branch_ends: Last names of the modules in a block, or of their stacks, whose outputs are multiplied by the branch multiplier;
            if empty, the whole block's output is.
        width_step: Divisor of all widths.
        state_buffers: Last names of the buffers that `end_step` changes; they must be persistent, and are part of every state and
            checkpoint. All other buffers stay constant.
        version: Part of every key; change it if the model changes but no file in `source` does.
    """

    vocab_size: int
    context_length: int

    readout: ClassVar[str] = "readout"
    blocks: ClassVar[str] = "blocks"
    branch_ends: ClassVar[tuple[str, ...]] = ()
    width_step: ClassVar[int] = 1
    state_buffers: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[str] = ""

    @abstractmethod
    def build(self, width: int, depth: int) -> nn.Module:
        """Build the model on torch's default device."""

    # Methods that a family may override

    @property
    def arguments(self) -> dict[str, Any]:
        """Fields except the two sizes, by name, as members store them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _SIZES}

    @classmethod
    def source(cls) -> dict[str, bytes]:
        """Return the files that define the family, by name: its file, and those of its package that the file imports (`source_files`).

        For a family in a notebook, return the cell that defines `build`.

        Raises:
            TypeError, OSError: If the files can't be read.
        """
        try:
            return source_files(cls.__module__, Path(inspect.getfile(cls)))
        except (TypeError, OSError):
            # Python finds the source of a class in a cell only from 3.13 on, but always that of its method.
            lines, _ = inspect.findsource(vars(cls).get("build", cls))
            return {f"{cls.__name__}.py": "".join(lines).encode()}

    def tensor_classes(self, width: int, depth: int) -> Mapping[str, str]:
        """Return classes of parameters by name where the shapes suggest a wrong class: {"blocks.0.decay": "block_bias"}.

        Several matrices in one tensor (matrices, outputs, inputs), such as those of experts, are a "hidden_stack".
        """
        return {}

    def active_shares(self, width: int, depth: int) -> Mapping[str, float]:
        """Return the share of a parameter's entries that one token uses, by name, if not 1: 2 / 8 for two of eight experts."""
        return {}

    @property
    def attention(self) -> float:
        """Scale of the attention logits, before the tuned multiplier."""
        return 1.0

    def attention_flops_per_token(self, width: int, depth: int) -> float:
        """Return training FLOPs per token in addition to 6 for each parameter of `Member.n_params`."""
        return 0.0

    @property
    def training_loss(self) -> Loss:
        """Loss that a step minimises."""
        return self.evaluation_loss

    @property
    def has_weighted_losses(self) -> bool:
        """Whether both losses take the weight of tokens that count (`Loss`); override it where custom losses do."""
        own = type(self)
        return own.training_loss is Family.training_loss and own.evaluation_loss is Family.evaluation_loss

    @property
    def evaluation_loss(self) -> Loss:
        """Mean cross-entropy, nats per token, without regularizers."""
        from proxy_models.architecture.cross_entropy import sequence_loss

        return sequence_loss

    def set_precision(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Make the model compute in this dtype: by its attribute `compute_dtype`, or else by torch's autocast over fp32 weights."""
        if hasattr(model, "compute_dtype"):
            model.compute_dtype = dtype  # type: ignore[assignment]
        else:
            _autocast(model, dtype)

    def set_checkpointing(self, model: nn.Module, checkpointing: Checkpointing) -> None:
        """Make each block keep or recompute its activations, by its attribute `checkpointing`.

        Raises:
            ValueError: If a block lacks the attribute and activations are to be recomputed.
        """
        for block in self.blocks_of(model):
            if hasattr(block, "checkpointing"):
                block.checkpointing = checkpointing  # type: ignore[assignment]
            elif checkpointing != "none":
                raise ValueError(f'checkpointing must be "none" for blocks without it, got "{checkpointing}"')

    def compile_block(self, block: nn.Module, *, outside_recomputing: bool) -> None:
        """Compile a block and its recomputation as one graph; with `outside_recomputing`, compile only the recomputed function."""
        block.compile(dynamic=False)

    def compile_loss(self, model: nn.Module) -> None:  # noqa: B027
        """Compile what the model computes outside its blocks, if that pays; the default compiles nothing."""

    def constants(self, width: int, depth: int) -> dict[str, Tensor]:
        """Return the buffers of a member by name, with their values after a build on the CPU."""
        import torch

        with torch.device("cpu"):
            return dict(self.build(width, depth).named_buffers())

    def write_constants(self, model: nn.Module, width: int, depth: int) -> None:
        """Write the buffers of a model of this width and depth that was built without values."""
        if buffers := dict(model.named_buffers()):
            constants = self.constants(width, depth)
            for name, buffer in buffers.items():
                buffer.copy_(constants[name])

    def end_step(
        self, model: nn.Module, member: Member, *, taken: bool | Tensor, mean: Callable[[Tensor], Tensor]
    ) -> Mapping[str, Tensor]:
        """Update the buffers `state_buffers` after a step, and return figures for its row; neither may wait for the device.

        Args:
            model: The model; for a rank of a pipeline, a module with the parameters and buffers of its stages by their names.
            taken: Whether weights moved. Buffers may move only then; a zero-dimensional tensor if only the device knows.
            mean: Function that averages a tensor over all ranks; all of them must call it.

        Returns:
            Tensors by the name of the figure, on the device. Zero-dimensional ones are recorded for each step, larger ones only when
            a full run is evaluated.
        """
        return {}

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the modules that ranks gather one at a time: the embeddings outside the blocks, each block, the readout.

        Tied tables belong to the rest of the model, so that both uses find them.
        """
        from torch import nn

        readout, blocks = model.get_submodule(self.readout), list(self.blocks_of(model))
        within = {inner for block in blocks for inner in block.modules()}
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in within]
        if any(table.weight is readout.weight for table in tables):
            return blocks
        return [*blocks, *tables, readout]

    def fitting(
        self, member: Member, sequences: int, *, limit: int, precision: Precision, optimizer: str, ranks: int
    ) -> tuple[int | None, Checkpointing]:
        """Return how many sequences of one pass fit in `limit` bytes of a rank (None: all of them), and the checkpointing.

        The default has no estimate of memory and so returns all sequences.
        """
        return None, "none"

    def is_tied(self, member: Member) -> bool:
        """Whether the member's readout is its embedding table; readers that do not import the family get False."""
        shapes = _shapes(self, member.d_model, member.n_layers, member.d_model)
        return any(shape.tensor_class is TensorClass.TIED for shape in shapes.values())

    def fixed_hyperparameters(self, member: Member) -> Mapping[str, str]:
        """Return the hyperparameters that must keep their defaults with this member's tensors, each with the reason.

        Readers that do not import the family get none.
        """
        import torch

        shapes = _shapes(self, member.d_model, member.n_layers, member.d_model)
        with torch.device("meta"):
            buffers = {name for name, _ in self.build(member.d_model, member.n_layers).named_buffers()}
        missing = {name: MULTIPLIERS[of] for name, of in TUNED.items() if MULTIPLIERS[of] not in buffers}
        return fixed_by({shape.tensor_class for shape in shapes.values()}) | {
            name: f"this family's models have no buffer {buffer}" for name, buffer in missing.items()
        }

    @property
    def position_base(self) -> float | None:
        """Base of the rotary wavelengths, in which a full run may differ from its proxies; None for other positions."""
        return None

    @property
    def attention_window(self) -> int | None:
        """Tokens that some blocks attend to at most, which the gate compares with the proxies' context; None: no block has a limit."""
        return None

    def training_memory(self, member: Member, **conditions: Any) -> MemoryEstimate | None:
        """Return the memory of training on each device; None: it is found by tracing a pass.

        `conditions` are the arguments of `proxy_models.architecture.decoder_memory.training_memory`.
        """
        return None

    def evaluation_memory(
        self, member: Member, sequences: int, training: MemoryEstimate, precision: Precision, **layout: Any
    ) -> int | None:
        """Return the bytes on each device during an evaluation within training; None: they are found by tracing a pass.

        `layout` are the arguments from sharding on of `proxy_models.architecture.decoder_memory.evaluation_memory`.
        """
        return None

    def step_sizes(self, member: Member) -> StepSizes | None:
        """Return the sizes from which the time of a step is predicted; None: it is unknown."""
        return None

    def attention_kernel(
        self, member: Member, dtype: torch.dtype, *, context_parallel: int = 1
    ) -> AttentionKernel | None:
        """Return the kernel that a GPU takes for the member's attention in this dtype; None: it is unknown.

        `context_parallel` is the number of ranks that share every sequence.
        """
        return None

    def absorbed(self, member: Member, multipliers: ForwardMultipliers) -> Mapping[str, float]:
        """Return a factor for each parameter by name: a model whose weights have them, and whose multipliers are 1, computes the same.

        Only for families whose trainings can start from given weights (`proxy_models.training.initial_weights`).

        Raises:
            ValueError: If weights can't absorb these multipliers, or the family does not define how they do.
        """
        raise ValueError(f"{type(self).__name__} does not define how weights absorb forward multipliers (`absorbed`)")

    def shared_sizes(self, member: Member) -> Mapping[str, int]:
        """Return the sizes, by name, that the number of ranks that share a product must divide; empty: ranks can't share products."""
        return {}

    def sharing_errors(self, member: Member) -> Iterator[str]:
        """Yield further reasons why ranks can't share the member's products, which follow "tensor_parallel must be 1"."""
        return iter(())

    def share_products(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Split the products of a model without values over the ranks of a mesh; for families with `shared_sizes`."""
        raise NotImplementedError(f"{type(self).__name__} does not define how ranks share its products")

    def context_rules(self, member: Member, ranks: int, tensor_ranks: int) -> Iterator[str]:
        """Yield the rules that `ranks` sharing every sequence would break, which follow "context_parallel must".

        Each of them may be a group of `tensor_ranks` that share products.
        """
        yield "be 1 for a family that does not define how ranks share a sequence"

    def share_sequences(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Make the ranks of a mesh share every sequence; for families whose `context_rules` allow it."""
        raise NotImplementedError(f"{type(self).__name__} does not define how ranks share a sequence")

    def n_shared_out(self, member: Member) -> int:
        """Return the number of a block's experts that ranks may share out (`share_experts`); 0: ranks can't."""
        return 0

    def share_experts(self, model: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Module]:
        """Give each rank of a mesh as many experts of each block of a model without values, and return the modules of these experts.

        Their parameters become DTensors on the mesh; `n_shared_out` is a multiple of its ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define how ranks share out experts")

    def stage_errors(self, member: Member) -> Iterator[str]:
        """Yield reasons why the member can't be cut into the stages of a pipeline, which follow "pipeline_parallel must be 1"."""
        if self.is_tied(member):
            yield "for a tied table, which the first and last stage use"

    # Methods that follow from the methods above

    def blocks_of(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the residual blocks of a model."""
        return model.get_submodule(self.blocks).children()

    def stored(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what stored weights consist of, by name: parameters, a tied table once, and the buffers `state_buffers`."""
        return {**dict(model.named_parameters()), **state_buffers(model, self.state_buffers)}

    def member(self, width: int, depth: int) -> Member:
        """Return the member of this width and depth, counted on the meta device.

        Raises:
            ValueError: If there is no such member, or a parameter has no rule.
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
        """Return the widths of members, ascending."""
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
            ValueError: If a parameter has no rule, its constant initial value differs from its rule's, or two builds have
                different buffers.
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


def state_buffers(module: nn.Module, names: Container[str]) -> dict[str, Tensor]:
    """Return the buffers whose last name is one of these (`Family.state_buffers`), by their whole names."""
    return {name: buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] in names}


def qualified_name(family: type[Family]) -> str:
    """Return the name as "package.module:Class"."""
    return f"{family.__module__}:{family.__qualname__}"


@cache
def source_hash(family: type[Family]) -> str:
    """Return the SHA-256 of the source of a family; raise ValueError if the source can't be read."""
    try:
        files = family.source()
    except (TypeError, OSError) as error:
        raise ValueError(
            f"the source of {qualified_name(family)} is part of its keys and can't be read: {error}"
        ) from error
    return hashlib.sha256(b"".join(files.values())).hexdigest()


def _autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the model's forward pass compute its products in this dtype; fp32 restores the original."""
    import torch

    def forward(tokens: torch.Tensor, **named: Any) -> Any:
        with torch.autocast(tokens.device.type, dtype):
            # FSDP2 changes the class, so its forward is looked up here
            return type(model).forward(model, tokens, **named)

    vars(model).pop("forward", None)
    if dtype != torch.float32:
        model.forward = forward


def _require_trainable(model: nn.Module) -> None:
    """Raise FamilyError for a tensor that a run can't initialize and train."""
    import torch

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise FamilyError(
                f"{name}: a parameter must be trained, because a run gives it random initial values; got requires_grad = False; "
                "register it as a buffer, whose values are kept"
            )
        if parameter.dtype != torch.float32:
            raise FamilyError(
                f"{name}: parameters must be built in float32, in which their updates are summed; got {parameter.dtype}; "
                "numerics.precision sets the dtype of the model's products"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module.sparse:
            raise FamilyError(f"{name}: gradients must be dense, to be clipped and averaged; got sparse = True")


@cache
def _shapes(family: Family, width: int, depth: int, base_width: int) -> dict[str, TensorShape]:
    import torch

    from proxy_models.architecture.base_shapes import module_shapes  # a late import, since mup imports torch

    with torch.device("meta"):
        target, base, delta = (family.build(size, depth) for size in (width, base_width, 2 * base_width))
    for attribute, name in (("readout", family.readout), ("blocks", family.blocks)):
        if name not in (modules := dict(target.named_modules())):
            found = ", ".join(child for child in modules if child and "." not in child) or "none"
            raise FamilyError(
                f"{type(family).__name__}.{attribute} must name a module of {type(target).__name__}, got {name!r}; it has {found}"
            )
    _require_trainable(target)
    weight = target.get_parameter(f"{family.readout}.weight")
    shapes = module_shapes(
        target,
        base,
        delta,
        readout=[name for name, parameter in target.named_parameters() if parameter is weight],
        block_prefix=f"{family.blocks}.",
        classes=family.tensor_classes(width, depth),
    )
    if (n_outputs := weight.shape[0]) < family.vocab_size:
        raise FamilyError(
            f"{family.readout}: must have an output for each of {family.vocab_size} tokens, got {n_outputs}"
        )
    return shapes


@cache
def _built_constants(family: Family, width: int, depth: int) -> dict[str, float]:
    """Return the parameters that start constant, by name; a second build distinguishes a constant from a random number."""
    import torch

    from proxy_models.architecture.sharded import have_same_values  # a late import, since the module imports torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        one, other = (family.build(width, depth) for _ in range(2))
    buffers, second = dict(other.named_buffers()), dict(other.named_parameters())
    if random := [name for name, buffer in one.named_buffers() if not have_same_values(buffer, buffers[name])]:
        raise FamilyError(
            f"{type(one).__name__}: two builds must have the same buffers, because each rank and each run builds its "
            f"own; got others in {', '.join(random)}; draw them from a torch.Generator with a fixed seed"
        )
    return {
        name: value
        for name, parameter in one.named_parameters()
        if bool((parameter == (value := parameter.flatten()[0].item())).all()) and bool((second[name] == value).all())
    }


@cache
def count_member(family: Family, width: int, depth: int) -> Counts:
    """Return the counts of a member, n_params without looked-up and inactive entries; raise FamilyError for an invalid share."""
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
        n_inactive_params=round(sum(sizes[name] * (1 - share) for name, share in active.items())),
    )
