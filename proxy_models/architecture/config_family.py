"""A family from a configuration class of transformers, without code: `[model] family = "transformers:Qwen3Config"`.

The class with its arguments is the pattern. At width w, every size in proportion to the hidden size is multiplied by
w / hidden_size. Heads keep their size, so the attention's 1/sqrt(head_dim) is muP's 1/d at every width (Yang et al., arXiv
2203.03466, definition 4.1). Depth is the number of layers. Models are built from the config alone; nothing is downloaded.

Only training imports transformers, through `families.load`; importing this module does not.
"""

from __future__ import annotations

import inspect
import math
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from fractions import Fraction
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from proxy_models.architecture.config_experts import (
    EXPERT_WIDTHS,
    IMPLEMENTATION,
    active_shares,
    expert_classes,
    has_experts,
    register,
    require_chosen,
    router_names,
    units_of_rows,
)
from proxy_models.architecture.family import Family, FamilyError, Loss
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Checkpointing
from proxy_models.architecture.parametrization import ForwardMultipliers, TensorClass

if TYPE_CHECKING:
    from torch import Tensor, nn

    from proxy_models.architecture.causal_lm import CausalLM

_IN_PROPORTION = (
    *("num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"),
)
"""Sizes of a config that grow with its hidden size, if the config has them."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_OURS = ("vocab_size", "num_hidden_layers", "initializer_range", "use_cache", *_TOKENS)
"""Fields that [model] and the parametrization set; they are not arguments."""
_MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("hidden_size", "num_attention_heads"))
"""Pairs of sizes; most classes need the first to be a multiple of the second."""
_LAST_NORM = (TensorClass.FINAL_NORM, TensorClass.FINAL_BIAS)
_TRIED_TOKENS = 64  # length of the forward pass that checks whether a config's sizes fit together
_made: dict[str, type[Family]] = {}


def family_from(name: str) -> type[Family] | None:
    """Return the family that `make_family` made for this qualified name, or None."""
    return _made.get(name)


def is_config(found: Any) -> bool:
    """Return True for a configuration class of transformers or a subclass of one."""
    transformers = sys.modules.get("transformers")
    return isinstance(found, type) and transformers is not None and issubclass(found, transformers.PreTrainedConfig)


def make_family(name: str, config_class: type[Any]) -> type[Family]:
    """Make the family of a configuration class, whose fields are its arguments; raise ValueError if it configures no causal model."""
    from transformers import AutoModelForCausalLM

    if name in _made:
        return _made[name]
    if config_class not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"must be the configuration of a causal language model, got {name!r}")
    mapped = {config_class.attribute_map.get(ours, ours) for ours in _OURS}
    base = {inherited.name for inherited in fields(config_class.__mro__[1])}
    own = {each.name: each.type for each in fields(config_class) if each.name not in mapped | base}
    offered = [(each, hint, field(default=None)) for each, kind in own.items() if (hint := _scalars(kind))]
    if "rope_parameters" in own and "rope_theta" not in own:
        offered.append(("rope_theta", float | None, field(default=None)))
    if config_class.model_type in EXPERT_WIDTHS and "head_dim" not in own:  # Qwen3MoeConfig takes it without a field
        offered.append(("head_dim", int | None, field(default=None)))
    module, _, attribute = name.partition(":")
    made = make_dataclass(
        attribute,
        offered,
        bases=(ConfigFamily,),
        namespace={"config_class": config_class, "__module__": module},
        frozen=True,
        kw_only=True,
    )
    _made[name] = cast(type[Family], made)
    return _made[name]


def _scalars(hint: Any) -> Any:
    """Return the union of None and the single values that a field takes, or None if it takes no single value."""
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind in (bool, int, float, str)]
    return typing.Optional[typing.Union[tuple(kinds)]] if kinds else None  # noqa: UP007, UP045


def allows_none(config_class: type[Any], name: str) -> bool:
    """Return True unless a field of a configuration class must have a value."""
    return all(type(None) in typing.get_args(own.type) for own in fields(config_class) if own.name == name)


@cache
def _require_forward(family: ConfigFamily) -> None:
    """Compute the logits of a few tokens with the smallest model, on the CPU as masks need values; raise FamilyError if that fails."""
    import torch

    width = family.width_step
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        model = family.build(width, 1)
        with family._refusing(d_model=width, n_layers=1):
            model(torch.zeros(1, min(family.context_length, _TRIED_TOKENS), dtype=torch.int64))


@cache
def _routers(family: ConfigFamily, depth: int) -> list[str]:
    """Return the names of the routers of a member of this depth."""
    if not family._has_experts:
        return []
    import torch

    with torch.device("meta"):
        return router_names(family.build(family.width_step, depth))


@dataclass(frozen=True, kw_only=True)
class ConfigFamily(Family):
    """Causal language models of one configuration class; `make_family` adds a field for each single value of the class."""

    config_class: ClassVar[type[Any]]

    def __post_init__(self) -> None:
        self._require_sizes()
        self.config(self.width_step, 1)

    def _require_sizes(self) -> None:
        """Refuse arguments that no model can have, since some classes do not check them; raise FamilyError naming the argument."""
        for name in map(self._own, ("hidden_size", "head_dim", *_IN_PROPORTION)):
            if (size := self.arguments.get(name, 1)) < 1:
                raise FamilyError(f"{name} must be at least 1, got {size}")
        with self._refusing():
            if self._has_experts:
                require_chosen(self._pattern)
        for name in self._longest:
            if (longest := self.arguments.get(name, self.context_length)) < self.context_length:
                raise FamilyError(f"{name} must be at least the context_length, {self.context_length}, got {longest}")

    @contextmanager
    def _refusing(self, **sizes: int) -> Iterator[None]:
        """Turn every exception of transformers into a `FamilyError` that names the sizes and the arguments."""
        import torch

        try:
            yield
        except (FamilyError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each class raises different exceptions
            given = [f"{name} = {value!r}" for name, value in (sizes | self.arguments).items()]
            raise FamilyError(
                f"{self._unmet()}{self.config_class.__name__} must have a model with {', '.join(given) or 'its defaults'}; "
                f"it raises {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    def _unmet(self) -> str:
        """Return the rule of `_MULTIPLES` that the arguments break, or "". Not every class needs it, so only an error calls this."""
        sizes: dict[str, Any] = {own.name: own.default for own in fields(self.config_class)} | self.arguments
        for names in _MULTIPLES:
            size, divisor = (sizes.get(self._own(name)) for name in names)
            is_free = names[0] == "hidden_size" and sizes.get("head_dim")
            if isinstance(size, int) and isinstance(divisor, int) and size % divisor and not is_free:
                name, of = map(self._own, names)
                return f"{name} must be a multiple of {of}, got {size} and {divisor}; "
        return ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the user gave."""
        return {name: value for name, value in super().arguments.items() if value is not None}

    @classmethod
    def source(cls) -> dict[str, bytes]:
        """Return the files of the model and of its config in transformers; the config's file has the defaults."""
        from transformers import AutoModelForCausalLM

        files = [
            Path(inspect.getfile(found))
            for found in (cls.config_class, AutoModelForCausalLM._model_mapping[cls.config_class])
        ]
        return {file.name: file.read_bytes() for file in files}

    @cached_property
    def _pattern(self) -> Any:
        return self.config_class(**self.arguments)

    def _own(self, name: str) -> str:
        """Return the config's name for one of transformers' common fields."""
        return cast(str, self.config_class.attribute_map.get(name, name))

    @cached_property
    def _types(self) -> dict[str, Any]:
        """Types of the config's fields."""
        return {own.name: own.type for own in fields(self.config_class)}

    @property
    def _longest(self) -> list[str]:
        """Config's names of the longest context; MptConfig's is missing in its attribute map."""
        return [name for name in (self._own("max_position_embeddings"), "max_seq_len") if name in self._types]

    @cached_property
    def _proportions(self) -> dict[str, Fraction]:
        """Ratio to the hidden size of each size that grows with the width, by the config's name."""
        names = {self._own(name) for name in _IN_PROPORTION} & self._types.keys()
        sizes = {name: getattr(self._pattern, name) for name in sorted(names)}
        return {name: Fraction(size, self._pattern.hidden_size) for name, size in sizes.items() if size is not None}

    @cached_property
    def width_step(self) -> int:  # type: ignore[override]
        """Smallest width at which every proportional size is whole."""
        with self._refusing():
            shares = [*self._proportions.values()]
            if self._has_experts:
                shares += units_of_rows(self._pattern)
            return math.lcm(*(share.denominator for share in shares))

    def config(self, width: int, depth: int) -> Any:
        """Return the config of a member; raise FamilyError if the class does not allow these sizes."""
        with self._refusing(d_model=width, n_layers=depth):
            sizes: dict[str, Any] = {name: int(share * width) for name, share in self._proportions.items()}
            if "head_dim" in self._types:
                pattern = self._pattern
                # Most models compute a head_dim of None; those of MinistralConfig and HunYuanDenseV1Config fail.
                sizes["head_dim"] = pattern.head_dim or pattern.hidden_size // pattern.num_attention_heads
            sizes |= {
                self._own("hidden_size"): width,
                self._own("num_hidden_layers"): depth,
                "vocab_size": self.vocab_size,
            }
            longest = dict.fromkeys(self._longest, self.context_length)
            if self._has_experts:
                sizes["output_router_logits"] = False  # `CausalLM` collects them
            tokens = {name: None if allows_none(self.config_class, name) else 0 for name in _TOKENS}
            return self.config_class(**{**tokens, **longest, **self.arguments, **sizes})

    def build(self, width: int, depth: int) -> CausalLM:
        """Build a model of transformers with its multipliers on torch's default device; raise FamilyError if sizes are not allowed."""
        from transformers import AutoModelForCausalLM

        from proxy_models.architecture.causal_lm import CausalLM

        options = {}
        if self._has_experts:
            register()
            options["experts_implementation"] = IMPLEMENTATION
        with self._refusing(d_model=width, n_layers=depth):
            network = AutoModelForCausalLM.from_config(self.config(width, depth), **options)
            routers = router_names(network) if self._has_experts else ()
            return CausalLM(network, routers, has_auxiliary_loss=self._asks_for_balance)

    def end_step(
        self, model: nn.Module, member: Member, *, taken: bool | Tensor, mean: Callable[[Tensor], Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the `routing_figures` of the step."""
        if not (routers := _routers(self, member.n_layers)):
            return {}
        from proxy_models.architecture.experts import routing_figures, take_counts

        config = self._pattern
        return routing_figures(take_counts(model, routers, config.num_experts, mean), config.num_experts_per_tok)

    def member(self, width: int, depth: int) -> Member:
        """Return the member of this width and depth. The first call also checks by a forward pass that the sizes fit together.

        Raises:
            ValueError: If there is no such member, a parameter has no rule, or the forward pass fails.
        """
        found = super().member(width, depth)
        _require_forward(self)  # comes last, since a model without rules may be too large for the CPU
        return found

    def tensor_classes(self, width: int, depth: int) -> Mapping[str, str]:
        """Return the classes of experts' stacks and of routers."""
        if not self._has_experts:
            return {}
        import torch

        with torch.device("meta"):
            return expert_classes(name for name, _ in self.build(width, depth).named_parameters())

    def active_shares(self, width: int, depth: int) -> Mapping[str, float]:
        """Return the share of the experts that one token uses, for each stack."""
        return active_shares(self._pattern, self.tensor_classes(width, depth)) if self._has_experts else {}

    @property
    def training_loss(self) -> Loss:
        """Cross-entropy, and the auxiliary loss of routers if the config asks for it by `output_router_logits`."""
        if not self._asks_for_balance:
            return super().training_loss
        from proxy_models.architecture.causal_lm import loss_with_routers

        return loss_with_routers

    @property
    def has_weighted_losses(self) -> bool:
        """True."""
        return True

    @cached_property
    def _has_experts(self) -> bool:
        return self.config_class.model_type in EXPERT_WIDTHS and has_experts(self._pattern)

    def stage_errors(self, member: Member) -> Iterator[str]:
        """Yield also the auxiliary loss of routers, which the last stage does not have."""
        yield from super().stage_errors(member)
        if self._asks_for_balance:
            yield "with output_router_logits, since routers of other stages add nothing to the loss of the last"

    @property
    def _asks_for_balance(self) -> bool:
        return self._has_experts and self._pattern.output_router_logits

    @cached_property
    def readout(self) -> str:  # type: ignore[override]
        """Name of the module that maps the width to logits."""
        from proxy_models.architecture.causal_lm import readout_name

        return readout_name(self._smallest)

    @cached_property
    def blocks(self) -> str:  # type: ignore[override]
        """Name of the list of blocks."""
        from proxy_models.architecture.causal_lm import blocks_name

        return blocks_name(self._smallest)

    @cached_property
    def _smallest(self) -> CausalLM:
        import torch

        with torch.device("meta"):
            return self.build(self.width_step, 1)

    def absorbed(self, member: Member, multipliers: ForwardMultipliers) -> Mapping[str, float]:
        """Return the factors of the embedding table and the readout; the norm before a tied readout absorbs their quotient.

        Raises:
            ValueError: If blocks have a multiplier, since it scales the sum of what a block adds (`causal_lm`).
        """
        from proxy_models.architecture.causal_lm import embedding_name

        if multipliers.branch != 1:
            raise ValueError(
                f"no weight inside a block can absorb its multiplier, which must be 1; got {multipliers.branch:g}"
            )
        table, readout = f"{embedding_name(self._smallest)}.weight", f"{self.readout}.weight"
        rules = self.parametrization(member, member).rules
        if readout in rules and table != readout:
            return {table: multipliers.embedding, readout: multipliers.readout}
        last = [name for name, rule in rules.items() if rule.tensor_class in _LAST_NORM]
        quotient = multipliers.readout / multipliers.embedding
        return {table: multipliers.embedding, **dict.fromkeys(last, quotient)}

    @property
    def attention_window(self) -> int | None:
        """`sliding_window` of the config, if it has one."""
        return getattr(self._pattern, "sliding_window", None)

    def attention_flops_per_token(self, width: int, depth: int) -> float:
        """Return training FLOPs of attention's two products, masked half included (Chowdhery et al., arXiv 2204.02311, appendix B).

        A window of the class is not subtracted.
        """
        config = self.config(width, depth)
        heads = getattr(config, "num_attention_heads", 0)
        head_dim = getattr(config, "head_dim", None) or (width / heads if heads else 0)
        return 12.0 * depth * self.context_length * heads * head_dim

    def set_checkpointing(self, model: nn.Module, checkpointing: Checkpointing) -> None:
        """Make transformers recompute whole blocks; raise ValueError if the model can't, or `checkpointing` is "selective"."""
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks_of(model):
            is_able = hasattr(block, "gradient_checkpointing")  # set by GradientCheckpointingLayer of transformers
            if checkpointing != "none" and not (is_able and checkpointing == "full"):
                raise ValueError(
                    f'checkpointing must be "none" or, if the model supports it, "full", got "{checkpointing}"'
                )
            if is_able:
                layer = cast(Any, block)
                layer.gradient_checkpointing = checkpointing == "full"
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def constants(self, width: int, depth: int) -> dict[str, Tensor]:
        """Return the buffers of a member on the CPU. The parameters, which take most memory, get no values."""
        from torch import nn
        from torch.nn.modules.module import register_module_parameter_registration_hook as replacing

        def without_values(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
            return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

        with replacing(without_values):
            return super().constants(width, depth)
