"""A training program as a model family: `--describe` returns the members, and tensors get muP's rules from their dimensions.

A process needs permission to run the program: a stage that trains first prints the command; readers use recorded members.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.errors import TrainerError
from muscale.programs.program_process import describe
from muscale.programs.protocol import Description, TrainerJob
from proxy_models.architecture.counted import counted, remember
from proxy_models.architecture.family import Family, qualified_name, source_hash
from proxy_models.architecture.member import Counts, Member, ModuleConfig
from proxy_models.architecture.parametrization import (
    ForwardMultipliers,
    Parametrization,
    TensorClass,
    TensorShape,
    fan_in_of,
    parametrization_of,
)
from proxy_models.hashing import content_key, file_sha256

if TYPE_CHECKING:
    from torch import nn

_SPACING = 1.1  # ratio between a plan's widths; the loss is flat over such steps near the best size (assumed)
_NO_COUNTS = Counts(n_params=1, n_params_total=1, train_flops_per_token=1.0)
_NOT_RUN = "the trainer is not run here, and width {}, depth {} has not been described yet; commands that train describe and record it"
_allowed: dict[Program, Path] = {}  # programs that this process may run, and the study's folder, in which they start


@dataclass(frozen=True, kw_only=True)
class Program(Family):
    """A training program that keeps the protocol of docs/own_trainer.md.

    Attributes:
        command: Command with {config} and {state}, quoted as for a shell, though no shell reads it.
        digest: `digest_of` the command: hash of its files in the study's folder.
        release: The study's `trainer.version`.
        step: Every width is a multiple of this step.
    """

    vocab_size: int = 1
    context_length: int = 1
    command: str
    digest: str
    release: str = ""
    step: int = 1

    @classmethod
    def source(cls) -> dict[str, bytes]:
        """Nothing, since `digest` covers the program's files."""
        return {}

    def allow(self, directory: Path) -> None:
        """Let this process run the program, and report that once; raise TrainerError if its files differ from the study's."""
        if (found := digest_of(self.words, directory)) != self.digest:
            raise TrainerError(
                f"the files of {self.command} in {directory} have the hash {found}, the study's {self.digest}"
            )
        if _allowed.get(self) != directory:
            sys.stderr.write(f"running the trainer {self.command} in {directory}\n")
            sys.stderr.flush()
        _allowed[self] = directory

    @property
    def words(self) -> tuple[str, ...]:
        """The command, split into words."""
        return tuple(shlex.split(self.command))

    @property
    def directory(self) -> Path:
        """Folder in which the program is run; raises ValueError if this process may not run the program."""
        if self not in _allowed:
            raise ValueError(f"the trainer {self.command} is not run here")
        return _allowed[self]

    def build(self, width: int, depth: int) -> nn.Module:
        """Raise: a program builds its own model."""
        raise ValueError(f"only the program can build the model of the trainer {self.command}")

    def is_tied(self, member: Member) -> bool:
        """False: the program itself decides what a readout that starts at zero means."""
        return False

    def fixed_hyperparameters(self, member: Member) -> Mapping[str, str]:
        """Return none, since the program itself decides what each value means."""
        return {}

    def member(self, width: int, depth: int) -> Member:
        """The member as the program described it.

        Raises:
            ValueError: If there is none, or the shape was not described yet and this process may not run the program.
            TrainerError: If the program breaks the protocol.
        """
        if width < 1 or width % self.step:
            raise ValueError(f"d_model must be a multiple of trainer.width_step = {self.step}, got {width}")
        member = ModuleConfig(
            d_model=width,
            n_layers=depth,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            family=qualified_name(type(self)),
            source=source_hash(type(self)),
            arguments=json.dumps(self.arguments, sort_keys=True),
            counts=_NO_COUNTS,
        )
        if known := counted(member).get((width, depth)):
            return known
        if self not in _allowed:
            raise ValueError(_NOT_RUN.format(width, depth))
        found = described(self, width, depth)
        counts = Counts(
            n_params=found.n_active_params,
            n_params_total=found.n_params,
            train_flops_per_token=found.flops_per_token,
            loss_unit=found.loss_unit,
        )
        remember([counted_member := replace(member, counts=counts)])
        return counted_member

    def widths(self) -> Iterator[int]:
        """Widths in steps of a constant factor, since describing each width starts the program."""
        width = self.step
        while True:
            yield width
            width = max(width + self.step, round(_SPACING * width / self.step) * self.step)

    def member_for(self, n_params: float, depth: int) -> Member:
        """The member of `widths` whose `n_params` is nearest in ratio; a bisection keeps the number of described widths small."""
        ascending, widths = self.widths(), list[int]()

        def at(number: int) -> Member:
            while len(widths) <= number:
                widths.append(next(ascending))
            return self.member(widths[number], depth)

        low, high = 0, 1
        while at(high).n_params < n_params:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if at(middle).n_params < n_params else (low, middle)
        return min((at(low), at(high)), key=lambda member: abs(math.log(member.n_params / n_params)))

    def parametrization(self, member: Member, base: Member, **rules: Any) -> Parametrization:
        """The table of the tensors that the program names, or an empty one; raises TrainerError if a tensor has no rule."""
        sizes = (member.d_model, base.d_model, 2 * base.d_model)
        target, at_base, wider = (described(self, width, member.n_layers) for width in sizes)
        return table_of(target, at_base, wider, depth_mult=member.n_layers / base.n_layers, **rules)


def digest_of(words: tuple[str, ...], directory: Path) -> str:
    """Hash of the files below a folder that a command names; "" if it names none; raises OSError if a file can't be read."""
    within = files_of(words, directory)
    return content_key({word: file_sha256(path) for word, path in within.items()}) if within else ""


def files_of(words: tuple[str, ...], directory: Path) -> dict[str, Path]:
    """Files below a folder that a command names, by word of the command."""
    paths = {word: (directory / word).resolve() for word in words}
    return {word: path for word, path in paths.items() if path.is_relative_to(directory.resolve()) and path.is_file()}


@cache
def described(program: Program, width: int, depth: int) -> Description:
    """A program's description of one shape, requested once per process.

    Raises:
        ValueError: If this process may not run the program.
        TrainerError: If the program breaks the protocol.
    """
    job = TrainerJob(width=width, depth=depth, hyperparameters={}, schedule=(), end=1)
    return describe(program.words, job, cwd=program.directory)


def table_of(
    target: Description, base: Description, wider: Description, *, depth_mult: float = 1.0, **rules: Any
) -> Parametrization:
    """The muP table of the tensors that a program names; empty if it names none, and so takes no values by tensor.

    Args:
        base, wider: Descriptions at the target's depth, at the base width and at another width.
        rules: Further arguments of `parametrization_of`.

    Raises:
        TrainerError: If a tensor has no rule.
    """
    if not target.tensors:
        ones = ForwardMultipliers(embedding=1.0, branch=1.0, readout=1.0, attention=1.0)
        scheme, optimizer = rules.get("scheme", "mup"), rules.get("optimizer", "adamw")
        return Parametrization(scheme=scheme, optimizer=optimizer, rules={}, multipliers=ones)
    try:
        return parametrization_of(tensor_shapes(target, base, wider), depth_mult=depth_mult, attention=1.0, **rules)
    except ValueError as error:
        raise TrainerError(
            f"--describe: {error}; `classes` names classes that dimensions don't show, such as the readout"
        ) from error


def tensor_shapes(target: Description, base: Description, wider: Description) -> dict[str, TensorShape]:
    """Class, fan-in and width multiplier of every tensor. The descriptions differ only in width; dimensions are (outputs, inputs).

    Raises:
        ValueError: If a tensor fits no rule.
    """
    found = {}
    for name, dims in target.tensors.items():
        try:
            at_base, at_wider = base.tensors[name], wider.tensors[name]
            grows = [b != w for b, w in zip(at_base, at_wider, strict=True)]
            factors = {t / b for t, b, grow in zip(dims, at_base, grows, strict=True) if grow}
        except (KeyError, ValueError) as error:
            raise ValueError(f"the tensor {name} does not have the same number of dimensions at every width") from error
        tensor_class = target.classes.get(name) or _class(name, grows, dims)
        if len(factors) > 1:
            raise ValueError(f"the dimensions of {name} grow by several factors, {sorted(factors)}")
        found[name] = TensorShape(
            tensor_class=tensor_class,
            fan_in=fan_in_of(f"the tensor {name}", tensor_class, dims, grows),
            width_mult=factors.pop() if factors else 1.0,
        )
    return found


def _class(name: str, grows: list[bool], dims: tuple[int, ...]) -> TensorClass:
    in_block = bool(re.search(r"(^|\.)\d+(\.|$)", name))
    is_gain = "norm" in name.lower() and not name.rpartition(".")[2].startswith("bias")
    if len(dims) > 1 and all(grows[:2]):
        return TensorClass.HIDDEN
    if grows == [False, True]:
        return TensorClass.EMBEDDING
    if len(dims) == 1 and is_gain and (any(grows) or in_block):
        outer = TensorClass.BLOCK_NORM if in_block else TensorClass.FINAL_NORM
        return outer if any(grows) else TensorClass.QK_NORM
    if len(dims) == 1:
        return TensorClass.BLOCK_BIAS if in_block else TensorClass.FINAL_BIAS
    raise ValueError(f"the tensor {name} of dimensions {dims} is none of embedding, matrix, norm gain, bias")
