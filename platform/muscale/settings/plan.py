"""[plan] of the study file: cost, devices and purpose of the full run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Self, get_type_hints

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.settings.strict import AllDiffer, StrictTable, rule_of
from proxy_models.architecture.families import M, ModelFamily
from proxy_models.architecture.member import DROPPED
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.recipes.hyperparameters import Hyperparameters
from scaling import Accelerator, Budget, accelerator
from search_spaces import TransferClass, transferability

BUDGETS = ("compute_flops", "gpu_hours", "dollars", "days")
MOST_FLOPS = 1e32
"""Largest budget: some 200,000 times the largest run yet (assumed 5e26); a size for more would not fit into 64 bits."""
_OF_DEVICE = ("mfu", "peak_flops", "dollars_per_hour")
REGULARIZERS = (*DROPPED, "label_smoothing", "z_loss")
"""Model settings without a transfer rule; 0 turns a regularizer off."""
OF_EXPERTS = dict(zip(CARRIED_EXPERTS, (int, int, float, int), strict=True))
DECLARED = {"context_length": int, "rope_theta": float, "attention_window": int} | OF_EXPERTS
"""Model settings in which the full run may differ from its proxies if the study file declares it; no forecast covers that."""
OF_MODEL = dict.fromkeys(REGULARIZERS, float) | DECLARED


class Shape(StrictTable):
    """The width and depth of a member of the study's family, and the number of experts of a mixture."""

    width: PositiveInt  # d_model
    depth: PositiveInt | None = None  # n_layers; none: the base's
    n_experts: PositiveInt | None = None  # routed experts in a block of a mixture; none: the base's

    def of(self, family: ModelFamily[M]) -> M:
        """The member of the family with this shape; raises ValueError if the family has no such member."""
        mixtures = family if self.n_experts is None else with_experts(family, self.n_experts)
        return mixtures.at(width=self.width, depth=self.depth)

    def __str__(self) -> str:
        further = {"depth": self.depth, "experts": self.n_experts}
        return ", ".join([f"width {self.width}", *(f"{name} {value}" for name, value in further.items() if value)])


class Stem(Shape):
    """An entry of [[ladder.stems]]: a run of `n_tokens` at a shape; with branches, also annealed at n_tokens / √2, / 2, …."""

    n_tokens: PositiveInt  # of the longest branch
    branches: Annotated[int, Field(gt=0, le=100)] = 2  # annealed lengths


class PlanSettings(StrictTable):
    """[plan]: the full run. Exactly one of `compute_flops`, `gpu_hours`, `dollars` and `days` is its budget."""

    compute_flops: PositiveFloat | None = None  # for training and serving together
    gpu_hours: PositiveFloat | None = None  # of plan.accelerator
    dollars: PositiveFloat | None = None  # at dollars_per_hour
    days: PositiveFloat | None = None  # on n_devices
    # a name of scaling.ACCELERATORS: converts budgets, and is the device for memory, step time and "auto" layouts
    accelerator: str | None = None
    n_devices: PositiveInt | None = None  # for durations
    mfu: Annotated[float, Field(gt=0, le=1)] | None = None  # share of the peak; replaces the accelerator's value
    peak_flops: PositiveFloat | None = None  # dense FLOP/s of one device; likewise
    dollars_per_hour: PositiveFloat | None = None  # for one device; likewise
    # tokens read and written over the model's life, paid from the same budget
    served_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_epochs: Annotated[float, Field(ge=1)] | None = None  # over the corpus; none: as many as are worth their compute
    # shapes that the full run may have; none: any width, at the base's depth
    shapes: Annotated[tuple[Shape, ...], AllDiffer] = ()
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.005  # of the loss; sizes this close to the best are listed
    level: Annotated[float, Field(gt=0, lt=1)] = 0.9  # level of the forecast's interval
    # hyperparameters of the full run alone, instead of transferred ones
    explicit: dict[str, Any] = Field(default_factory=dict)

    @pydantic.field_validator("explicit")
    @classmethod
    def _is_valid(cls, explicit: dict[str, Any]) -> dict[str, Any]:
        return validate_explicit(explicit)

    @pydantic.model_validator(mode="after")
    def _is_one_budget(self) -> Self:
        given = {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            found = " and ".join(f"{name} = {value:g}" for name, value in given.items())
            raise ValueError(f"give exactly one of {', '.join(BUDGETS)}, got {found or 'none'}")
        wanting = [name for name in ("gpu_hours", "dollars", "days", *_OF_DEVICE, "n_devices") if getattr(self, name)]
        if self.accelerator is None and wanting:
            raise ValueError(f"{wanting[0]} needs plan.accelerator, the name of the device; got none")
        if self.days is not None and self.n_devices is None:
            raise ValueError(f"days needs plan.n_devices, the number of devices; got days = {self.days:g} alone")
        _require_possible(self.budget)  # which raises for an unknown accelerator or a budget that is not finite
        return self

    @property
    def device(self) -> Accelerator | None:
        """The accelerator, with values that the study file replaces."""
        if self.accelerator is None:
            return None
        known = accelerator(self.accelerator)
        edited = {name: value for name in ("mfu", "dollars_per_hour") if (value := getattr(self, name)) is not None}
        if self.peak_flops is not None:
            edited["peak_flops"] = {**known.peak_flops, known.precision: self.peak_flops}
        return replace(known, **edited)

    @property
    def budget(self) -> Budget:
        """The budget in FLOPs, on the device if one is named."""
        device = self.device
        if self.compute_flops is not None or device is None:
            return Budget(compute_flops=self.compute_flops or 0.0, accelerator=device, n_devices=self.n_devices)
        if self.gpu_hours is not None:
            return Budget.of_gpu_hours(self.gpu_hours, device, self.n_devices)
        if self.dollars is not None:
            return Budget.of_dollars(self.dollars, device, self.n_devices)
        return Budget.of_days(self.days or 0.0, device, self.n_devices or 0)

    def at(self, compute_flops: float) -> Self:
        """The same settings with another budget; raises ValueError if it is not finite, above 0 and at most `MOST_FLOPS`."""
        _require_possible(Budget(compute_flops=compute_flops))
        return self.model_copy(update=dict.fromkeys(BUDGETS) | {"compute_flops": float(compute_flops)})


def _require_possible(budget: Budget) -> None:
    if budget.compute_flops > MOST_FLOPS:
        equal = f", which is {budget.terms}" if budget.terms else ""
        raise ValueError(f"the budget must be at most {MOST_FLOPS:g} FLOPs, got {budget.compute_flops:.3g}{equal}")


def validate_explicit(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The values of [plan.explicit], converted to the types of their hyperparameters; raises ValueError naming key, rule and value."""
    types = get_type_hints(Hyperparameters)
    hints = {field.name: types[field.name] for field in fields(Hyperparameters)} | OF_MODEL
    found = {}
    for name, value in explicit.items():
        if name not in hints or name == "stages":
            known = ", ".join(sorted(set(hints) - {"stages"}))
            raise ValueError(f"explicit.{name}: can't be set for a full run; allowed are {known}")
        known_as = transferability(name)
        if known_as.transfer is TransferClass.MUST_MATCH and name not in DECLARED:
            raise ValueError(
                f"explicit.{name}: must equal the proxies' value, or nothing tuned on them holds ({known_as.reason}), got {value!r}"
            )
        try:
            found[name] = pydantic.TypeAdapter(hints[name]).validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            raise ValueError(f"explicit.{name}: {rule_of(error.errors()[0])}, got {value!r}") from error
    return found


def with_explicit(hyperparameters: Hyperparameters, explicit: Mapping[str, Any]) -> Hyperparameters:
    """Replace hyperparameters by the explicit values."""
    return replace(hyperparameters, **{name: v for name, v in explicit.items() if name not in OF_MODEL})


def with_experts(family: ModelFamily[M], n_experts: int) -> ModelFamily[M]:
    """Return the family's mixtures with so many experts; raise ValueError if its members are no mixtures, or not of so many."""
    if not getattr(family.base, "n_experts", None):
        raise ValueError(f"n_experts is for a mixture of experts, a model with model.n_experts; got {n_experts}")
    return ModelFamily(base=model_with_explicit(family.base, {"n_experts": n_experts}))


def model_with_explicit(model: M, explicit: Mapping[str, Any]) -> M:
    """Replace settings of the model by the explicit values; raise ValueError if the family has no such setting."""
    stated = {name: value for name, value in explicit.items() if name in OF_MODEL}
    if unknown := next((name for name in stated if not hasattr(model, name)), None):
        raise ValueError(f"{unknown}: must be a setting of the model's family, got {stated[unknown]!r}")
    if all(getattr(model, name) == value for name, value in stated.items()):
        return model  # unchanged, so that readers need not count a new member
    return ModelFamily(base=replace(model, **stated)).at()
