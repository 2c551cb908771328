"""An amendment: what a full run changes from a checkpoint on; a file, or settings on the command line, read strictly."""

from __future__ import annotations

from typing import Annotated, Any, Self

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.settings.continuation_file import FurtherRun, require_comparable_rates
from muscale.settings.corpus import Weight
from muscale.settings.plan import OF_MODEL
from muscale.settings.strict import StrictTable, rule_of
from proxy_models.architecture.parametrization import CARRIED_EXPERTS, OptimizerName
from proxy_models.recipes.continued import ContinuedSchedule

OF_ROUTING = {"balance_rate": float, "balance_loss": float, "router_z_loss": float}
MODEL_CHANGES = {name: kind for name, kind in (OF_MODEL | OF_ROUTING).items() if name not in CARRIED_EXPERTS}
"""Settings of the model that leave the tensors' shapes as they are, and their types."""

Share = Annotated[float, Field(ge=0, lt=1)]


class AmendedHyperparameters(StrictTable):
    """[hyperparameters] of an amendment: values from the checkpoint on. A value that is left out stays the parent's."""

    learning_rate: PositiveFloat | None = None  # peak rate at the base shape
    learning_rate_factor: PositiveFloat | None = None  # on the parent's rates, instead
    rewarm_tokens: Annotated[int, Field(ge=0)] | None = None  # over which the rate rises from zero to its peak
    weight_decay_tau: PositiveFloat | None = None  # none: the decay's timescale in tokens stays
    batch_tokens: PositiveInt | None = None
    batch_doublings: PositiveInt | None = None
    batch_ramp_tokens: PositiveInt | None = None  # counted from the checkpoint
    optimizer: OptimizerName | None = None  # starts with fresh moments
    beta1: Share | None = None
    beta2: Share | None = None
    eps: PositiveFloat | None = None
    clip_norm: PositiveFloat | None = None
    embedding_rate: PositiveFloat | None = None
    output_rate: PositiveFloat | None = None
    schedule: ContinuedSchedule | None = None
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] | None = None  # share of the whole run
    final_fraction: Share | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The values that are set."""
        return {name: value for name, value in self if value is not None}

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        require_comparable_rates(self)
        return self


class AmendmentFile(FurtherRun):
    """An amendment. Without [corpus], the run reads on where its parent stopped."""

    reason: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] | None = None  # none: amended_<tokens>
    n_tokens: PositiveInt | None = None  # length of the whole run, with the parent's tokens; none: the parent's length
    seed: int | None = None  # seed of the data order of a new corpus; none: the parent's
    control: PositiveInt | None = None  # steps of the parent's recipe to train for comparison
    hyperparameters: AmendedHyperparameters = AmendedHyperparameters()
    model: dict[str, Any] = Field(default_factory=dict)
    mixture: dict[str, Weight] = Field(default_factory=dict)  # new weights of the parent's sources
    # share of the whole run at which the last stage of the parent's corpus begins; 1: not in this run
    until_fraction: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """Everything that changes the run, as plain values by dotted key."""
        stated = self.model_dump(mode="json", exclude_unset=True, exclude={"reason", "name", "parent", "control"})
        found: dict[str, Any] = {}
        for key, value in stated.items():
            if key in ("hyperparameters", "model", "mixture"):
                found |= {f"{key}.{name}": entry for name, entry in value.items()}
            else:
                found[key] = value
        return found

    @pydantic.field_validator("model")
    @classmethod
    def _is_valid_model(cls, model: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in model.items():
            if name not in MODEL_CHANGES:
                raise ValueError(
                    f"{name}: must stay the parent's, because the checkpoint's weights fit no other value; a run may change "
                    f"{', '.join(sorted(MODEL_CHANGES))}; got {value!r}"
                )
            try:
                found[name] = pydantic.TypeAdapter(MODEL_CHANGES[name]).validate_python(value, strict=True)
            except pydantic.ValidationError as error:
                raise ValueError(f"{name}: {rule_of(error.errors()[0])}, got {value!r}") from error
        return found

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        stated = {"mixture": self.mixture, "until_fraction": self.until_fraction, "corpus": self.own_corpus}
        if len(given := [name for name, value in stated.items() if value]) > 1:
            raise ValueError(f"{' and '.join(given)} all change what the run reads; give one of them")
        if self.seed is not None and not self.own_corpus:
            raise ValueError(f"seed orders the text of a new corpus and needs [corpus], got {self.seed}")
        return self
