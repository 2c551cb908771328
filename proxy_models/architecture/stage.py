"""A stage of a pipeline: some of a model's blocks, with what comes before the first or after the last block.

A stage runs the model's own forward pass under the family's own loss, so that any family with a list of blocks has stages. The block
before its first is replaced by an entry, which returns the activations that another stage has sent; behind its last block it leaves
the pass. Names are those of the whole model. Parameters of other stages are zeros that take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from proxy_models.architecture.families import build, family_of
from proxy_models.architecture.family import Family, FamilyError, weighted
from proxy_models.architecture.member import Member

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, kw_only=True)
class Edges:
    """The two edges of a model's list of blocks, as a pass without values shows them.

    Attributes:
        before, after: Names of the parameters outside the blocks that act before the first and after the last block.
        stream: Output of a block for one sequence, (1, time, width), on the meta device.
    """

    before: frozenset[str]
    after: frozenset[str]
    stream: Tensor


def edges_of(member: Member, dtype: torch.dtype = torch.float32) -> Edges:
    """Find the edges of a model that computes in a dtype, by its gradients on fake tensors.

    Raises:
        FamilyError: If the model can't be cut between blocks: a block takes something else than the block before returned, or
            returns no tensor like its first input; a parameter outside the blocks acts on both sides or is an input of blocks; or
            a pass fails on fake tensors.
    """
    family = family_of(member)
    name = type(family).__name__
    try:
        with FakeTensorMode():
            model = build(member)
            family.set_precision(model, dtype)
            found = _edges(model, family, name)
    except FamilyError:
        raise
    except Exception as error:  # the model may raise anything
        raise FamilyError(f"{name}: a pass can't be traced on fake tensors: {type(error).__name__}: {error}") from error
    stream = torch.empty(found.stream.shape, dtype=found.stream.dtype, device="meta")
    return replace(found, stream=stream)


def _edges(model: nn.Module, family: Family, name: str) -> Edges:
    blocks = list(family.blocks_of(model))
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outside = {name: parameter for name, parameter in model.named_parameters() if parameter not in inside}
    inputs: list[list[Any]] = []
    outputs: list[Any] = []

    def enter(_block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not given:
            raise FamilyError(f"{name}: the first input of a block must be positional to be cut into stages")
        inputs.append([*given, *named.values()])

    def leave(block: nn.Module, _given: Any, output: Any) -> Any:
        outputs.append(
            output.detach().requires_grad_() if block is blocks[-1] and isinstance(output, Tensor) else output
        )
        return outputs[-1]

    hooks: list[RemovableHandle] = []
    for block in blocks:
        hooks += [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
    try:
        tokens = torch.zeros(1, family.context_length + 1, dtype=torch.int64)
        loss = family.training_loss(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    streams = [given[0] for given in inputs]
    if len(inputs) != len(blocks) or any(
        one is not other for one, other in zip(outputs[:-1], streams[1:], strict=True)
    ):
        raise FamilyError(
            f"{name}: each block must be called once, with what the block before returned, to be cut into stages"
        )
    if not isinstance(outputs[-1], Tensor) or outputs[-1].shape != streams[0].shape:
        raise FamilyError(f"{name}: each block must return a tensor like its first input to be cut into stages")
    if any(isinstance(given, Tensor) and given.requires_grad for _, *others in inputs for given in others):
        raise FamilyError(
            f"{name}: only the first input of a block may depend on parameters outside the blocks, since other stages lack them"
        )
    before, after = (_with_gradient(on, outside) for on in (streams[0], loss))
    if both := before & after:
        raise FamilyError(
            f"{name}: a parameter outside the blocks must act before or after them, got both for {', '.join(both)}"
        )
    return Edges(before=before, after=after, stream=outputs[-1])


def _with_gradient(of: Tensor, parameters: dict[str, nn.Parameter]) -> frozenset[str]:
    gradients = torch.autograd.grad(of.sum(), list(parameters.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None)


class Stage(nn.Module):
    """A model of which other stages have all but some blocks; a pass takes what the stage before returned.

    Attributes:
        model: The model, with its names; parameters of other stages are no parameters here.
        blocks: Numbers of the blocks.
        scale: Weight of tokens that count, as the family's losses take it; None: every token counts.
    """

    scale: Tensor | None = None

    def __init__(self, model: nn.Module, family: Family, blocks: range, edges: Edges, *, device: torch.device) -> None:
        """Cut a model without values, which becomes part of the stage; `device` is where it will get its values."""
        super().__init__()
        self.model, self.blocks, self._family = model, blocks, family
        names = [name for name, _ in model.get_submodule(family.blocks).named_children()]
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(names)
        self._entry = _Entry()
        for number, name in enumerate(names):
            if number not in blocks:
                other = (
                    self._entry if number == blocks.start - 1 else _Exit() if number == blocks.stop else _OtherBlock()
                )
                model.get_submodule(family.blocks).add_module(name, other)
        inside = {parameter for block in family.blocks_of(model) for parameter in block.parameters()}
        for name, parameter in list(model.named_parameters()):
            if parameter not in inside and not (self.is_last if name in edges.after else self.is_first):
                _remove(model, name, like=edges.stream.new_zeros((), device=device))

    def forward(self, received: Tensor, sequences: Tensor) -> Tensor:
        """Map what was received, (batch, time, width), to what the next stage receives; the last stage to the loss, shape (1,).

        The first stage ignores `received`. All stages take the sequences (batch, time + 1), from which a model has its positions.
        """
        self._entry.received = received
        try:
            loss = self._family.training_loss if self.training else self._family.evaluation_loss
            return torch.stack([weighted(loss, self.scale)(self.model, sequences)])  # FSDP2 warns of a view
        except _LeftError as left:
            return left.stream
        finally:
            self._entry.received = None


class _Entry(nn.Module):
    """The block before a stage's first: it returns what the stage has received."""

    received: Tensor | None = None

    def forward(self, _stream: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.received is None:
            raise RuntimeError("a stage enters with what it has received")
        return self.received


class _OtherBlock(nn.Module):
    """Any other block of another stage."""

    def forward(self, stream: Tensor, *_: Any, **__: Any) -> Tensor:
        return stream


class _Exit(nn.Module):
    """The block after a stage's last: it ends the pass."""

    def forward(self, stream: Tensor, *_: Any, **__: Any) -> Tensor:
        raise _LeftError(stream)


class _LeftError(Exception):
    """Carries what the stage's last block returned out of the model's forward pass."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


def _remove(model: nn.Module, name: str, *, like: Tensor) -> None:
    """Replace a parameter by zeros of its shape that take no memory and are neither a parameter nor a buffer."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    shape = getattr(module, attribute).shape
    delattr(module, attribute)
    setattr(module, attribute, like.expand(shape))


def joined(stages: list[Stage]) -> nn.Module:
    """Return one module with the parameters and buffers of a rank's stages under their names in the whole model."""
    root = nn.Module()
    for stage in stages:
        for path, module in stage.model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                _at(root, path).register_parameter(name, parameter)
            for name, buffer in module.named_buffers(recurse=False):
                persistent = name not in module._non_persistent_buffers_set
                _at(root, path).register_buffer(name, buffer, persistent=persistent)
    return root


def _at(root: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root
