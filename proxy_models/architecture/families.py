"""Lookup of a member's family, and a study's family with the base at which its hyperparameters are tuned."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Generic, cast

from typing_extensions import TypeVar  # with a default, which typing has from Python 3.13 on

from proxy_models.architecture.config import ExpertAxis, ModelConfig
from proxy_models.architecture.config_family import family_from, is_config, make_family
from proxy_models.architecture.counted import counted
from proxy_models.architecture.decoder_family import DecoderFamily
from proxy_models.architecture.family import Family, source_hash
from proxy_models.architecture.member import Member, ModuleConfig
from proxy_models.importable import mend_torchvision

if TYPE_CHECKING:
    from torch import Tensor, nn

M = TypeVar("M", bound=Member, default=ModelConfig)
_NOT_IMPORTED = "the family {} is not imported here; it is imported only for training"


def load(name: str) -> type[Family]:
    """Import the family of a qualified name, "package.module:Class"; this runs the code of the module.

    The class is a `Family`, or a configuration class of transformers from which a family is made.

    Raises:
        ValueError: If there is no family of this name.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise ValueError(f'must be "package.module:Class", got {name!r}')
    if module.partition(".")[0] == "transformers":
        mend_torchvision()
    try:
        found = getattr(import_module(module), attribute, None)
    except Exception as error:  # the user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise ValueError(
                f'transformers is not installed: pip install "muscale[huggingface]"; got {name!r}'
            ) from error
        remedy = "the error is in its own code or in a module that it imports"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            remedy = "install its package, or put its folder on PYTHONPATH wherever it trains, including Ray's workers"
        raise ValueError(
            f"{module} can't be imported ({type(error).__name__}: {error}): {remedy}; got {name!r}"
        ) from error
    if found is not None and is_config(found):
        return make_family(name, found)
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise ValueError(
            f"must be a subclass of proxy_models.Family, or a configuration class of transformers; got {name!r}, which "
            + (f"is {found!r}" if found is not None else f"is not in the module{_near(attribute, module)}")
        )
    return found


def _near(attribute: str, module: str) -> str:
    """Return a hint with the module's name that is closest to the attribute, or an empty string."""
    near = get_close_matches(attribute, vars(import_module(module)), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _loaded(name: str) -> type[Family] | None:
    """Return the family of a qualified name if it is already imported; import nothing."""
    if made := family_from(name):
        return made
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) and issubclass(found, Family) else None


def family_of(member: Member) -> Family:
    """Return the family of a member. Readers never import a custom module and get a family of counted members instead.

    Raises:
        ValueError: If the family was neither imported nor counted here, or was imported from another source than the member's.
    """
    if isinstance(member, ModelConfig):
        return DecoderFamily.of(member)
    if not isinstance(member, ModuleConfig):
        raise TypeError(f"no family has members of type {type(member).__name__}")
    found = _loaded(member.family)
    if found and (source_hash(found) == member.source or not counted(member)):
        return _imported(found, member)
    if counted(member):
        return _Counted(vocab_size=member.vocab_size, context_length=member.context_length, of=member)
    raise ValueError(_NOT_IMPORTED.format(member.family))


@cache
def _imported(found: type[Family], member: ModuleConfig) -> Family:
    here = {"source": source_hash(found), "version": found.version}
    for name, value in here.items():
        if value != (there := getattr(member, name)):
            raise ValueError(f"the {name} of {member.family} is {value!r} here, but {there!r} where the study started")
    return found(vocab_size=member.vocab_size, context_length=member.context_length, **json.loads(member.arguments))


def import_family(member: Member) -> Family:
    """Import the code of a member's family, to train, and return the family; raise ValueError if it is missing or differs."""
    return _imported(load(member.family), member) if isinstance(member, ModuleConfig) else family_of(member)


def is_imported(member: Member) -> bool:
    """Whether this process can build the member: a decoder, or a member of an imported family."""
    return not isinstance(member, ModuleConfig) or _loaded(member.family) is not None


def with_weights(member: Member, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a member on the CPU with these values (`Family.stored`); a decoder uses the tensors themselves, other families copy them.

    Raises:
        ValueError: If the state of a router is missing.
        KeyError: If another tensor is missing.
    """
    if isinstance(member, ModelConfig):
        from proxy_models.architecture.decoder import Decoder

        return Decoder.with_weights(member, weights)
    model = build(member)
    for name, tensor in family_of(member).stored(model).items():
        tensor.data.copy_(weights[name])
    return model


def build(member: Member) -> nn.Module:
    """Build a member on torch's default device."""
    return family_of(member).build(member.d_model, member.n_layers)


def parameter_shapes(member: Member) -> dict[str, Tensor]:
    """Return a member's parameters by name, on the meta device; a tied table appears once."""
    import torch

    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in build(member).named_parameters()}


def weight_shapes(member: Member) -> dict[str, Tensor]:
    """Return what a member's stored weights consist of (`Family.stored`), on the meta device."""
    import torch

    with torch.device("meta"):
        return {name: tensor.detach() for name, tensor in family_of(member).stored(build(member)).items()}


@dataclass(frozen=True, kw_only=True)
class _Counted(Family):
    """Counted members of a family, for readers that do not import the family."""

    of: ModuleConfig

    def build(self, width: int, depth: int) -> nn.Module:
        raise ValueError(_NOT_IMPORTED.format(self.of.family))

    def is_tied(self, member: Member) -> bool:
        return False

    def fixed_hyperparameters(self, member: Member) -> Mapping[str, str]:
        return {}

    def member(self, width: int, depth: int) -> Member:
        if found := counted(self.of).get((width, depth)):
            return found
        raise ValueError(
            f"width {width}, depth {depth} of {self.of.family} has not been counted yet; commands that train count and record it"
        )

    def member_for(self, n_params: float, depth: int) -> Member:
        members = [member for member in counted(self.of).values() if member.n_layers == depth]
        if not members:
            raise ValueError(f"no member of depth {depth} of {self.of.family} has been counted yet")
        return min(members, key=lambda member: abs(math.log(member.n_params / n_params)))


@dataclass(frozen=True, kw_only=True)
class ModelFamily(Generic[M]):
    """A model with width and depth left open; hyperparameters are tuned at the base and transferred to other sizes."""

    base: M

    def at(self, *, width: int | None = None, depth: int | None = None) -> M:
        """Return the member of this width and depth; an omitted dimension stays as in the base.

        Raises:
            ValueError: If the family has no such member.
        """
        width, depth = (self.base.d_model if width is None else width), (self.base.n_layers if depth is None else depth)
        return cast(M, family_of(self.base).member(width, depth))

    def along(self, axis: str, size: float) -> M:
        """Return the member that differs from the base along one axis: "width", "depth", or an axis of experts.

        Raises:
            ValueError: If the family has no such member, or no such axis.
        """
        if axis in ("width", "depth"):
            return self.at(**{axis: int(size)})
        if not isinstance(self.base, ModelConfig):
            raise ValueError(
                f"{axis} is an axis of the built-in decoder with experts; other families have width and depth"
            )
        return cast(M, self.base.along(cast(ExpertAxis, axis), size))

    def for_params(self, n_params: float, *, depth: int | None = None) -> M:
        """Return the member whose `n_params` is nearest to the requested number in ratio.

        Raises:
            ValueError: If the number is not positive and finite.
        """
        if not 0 < n_params < math.inf:
            raise ValueError(f"n_params must be positive and finite, got {n_params}")
        return cast(M, family_of(self.base).member_for(n_params, self.base.n_layers if depth is None else depth))

    def between(self, least: float, most: float) -> list[M]:
        """Return members of the base's depth in this range of parameters, ascending, so far apart that their losses differ."""
        return cast(list[M], family_of(self.base).between(least, most, self.base.n_layers))
