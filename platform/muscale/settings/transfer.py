"""[transfer] of the study file: the grids that the transfer check trains, and their rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.settings.strict import AllDiffer, StrictTable
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from scaling.optima.tokens_law import plural

FOLLOWED = (
    *("attention_multiplier", "clip_norm", "embedding_multiplier", "embedding_rate", "eps", "init_scale"),
    *("output_multiplier", "output_rate", "warmup_fraction", "weight_decay_tau"),
)
"""Hyperparameters on a logarithmic scale; for a beta, octaves do not measure the distance from the optimum."""
MIN_VALUES = 5  # of a hyperparameter: enough for a parabola and an estimate of its noise
MIN_BATCHES = 4  # of the batch law: enough for a parabola in the batch and an estimate of its noise


class OverSettings(StrictTable):
    """[transfer.over.NAME]: grid of another hyperparameter: values (`at`), or their number and span around the sweep's best."""

    at: tuple[PositiveFloat, ...] = ()  # values; or set points and octaves
    points: Annotated[int, Field(ge=MIN_VALUES)] = 5  # number of values
    octaves: PositiveFloat = 4.0  # from the lowest value to the highest


class WideHorizon(StrictTable):
    """[transfer.wide_horizon]: one more rate grid, at a wider model with about as many tokens per parameter as the full run."""

    width: PositiveInt  # one of transfer.widths above the smallest
    tokens_per_param: PositiveFloat = 20.0  # of the grid's runs


class TransferSettings(StrictTable):
    """[transfer]: the learning-rate grid at several sizes and horizons, and grids of the hyperparameters in `over`."""

    # each gets a rate grid at every horizon up to 1
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1), AllDiffer]
    # at the base width, such as [2, 4, 8]; none: only widths are checked
    depths: Annotated[tuple[PositiveInt, ...], AllDiffer] = ()
    # of a mixture, at the base's width and depth, by model.n_experts; of them a token passes the base's share
    experts: Annotated[tuple[PositiveInt, ...], AllDiffer] = ()
    # likewise, by mlp_ratio / expert_ratio: finer experts, as many more of them, and as many more passed
    granularities: Annotated[tuple[PositiveFloat, ...], AllDiffer] = ()
    # likewise, by n_experts / experts_per_token, which stays; a law of experts counts total over active parameters instead
    sparsities: Annotated[tuple[PositiveFloat, ...], AllDiffer] = ()
    n_tokens: PositiveInt  # of a run at horizon 1
    rates: Annotated[int, Field(ge=5)] = 7  # number of rates of a grid
    octaves: PositiveFloat = 4.0  # from the lowest rate to the highest, centred on the sweep's best
    # in units of n_tokens; those above 1 serve the horizon law, at the smallest width alone
    horizons: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1), AllDiffer] = (0.25, 0.5, 1.0)
    wide_horizon: WideHorizon | None = None  # gives the horizon law a second width; both widths share its exponent
    seeds: Annotated[tuple[int, ...], Field(min_length=1), AllDiffer] = (0,)  # every grid is trained with each
    # each hyperparameter is varied alone, at each width and the longest horizon of at most 1
    over: dict[str, OverSettings] = Field(default_factory=dict)
    # in tokens; each gets a rate grid at every horizon on the smallest width
    batches: Annotated[tuple[PositiveInt, ...], AllDiffer] = ()

    @pydantic.field_validator("over", mode="before")
    @classmethod
    def _lists(cls, over: Any) -> Any:
        """Accept a list of values instead of the table that holds it."""
        if not isinstance(over, dict):
            return over
        return {name: {"at": grid} if isinstance(grid, tuple) else grid for name, grid in over.items()}

    @property
    def sizes(self) -> dict[str, tuple[float, ...]]:
        """Sizes of each axis that has grids of rates."""
        return {
            "width": self.widths,
            "depth": self.depths,
            "experts": self.experts,
            "granularity": self.granularities,
            "sparsity": self.sparsities,
        }

    @property
    def shared_horizons(self) -> tuple[float, ...]:
        """Horizons at which every width and depth is trained."""
        return tuple(horizon for horizon in self.horizons if horizon <= 1)

    @property
    def further_horizons(self) -> tuple[float, ...]:
        """Horizons of the smallest width alone."""
        return tuple(horizon for horizon in self.horizons if horizon > 1)

    def cross_field_errors(self, h: Hyperparameters, context_length: int, *, one_size: bool = False) -> list[str]:
        """Broken rules across keys, one per line: `transfer.key: rule, got value`; with `one_size` no sizes are compared."""
        least = 1 if one_size else 2
        problems = [
            *(problem for axis, sizes in self.sizes.items() for problem in _too_few(plural(axis), sizes, least)),
            *_too_few("batches", self.batches, MIN_BATCHES),
        ]
        if self.wide_horizon and self.wide_horizon.width not in set(self.widths) - {min(self.widths)}:
            wider = sorted(set(self.widths) - {min(self.widths)})
            rule = f"must be one of transfer.widths above the smallest, {wider}"
            problems.append(f"transfer.wide_horizon.width: {rule}, got {self.wide_horizon.width}")
        if not self.shared_horizons:
            rule = "needs a value of at most 1, at which sizes are compared"
            problems.append(f"transfer.horizons: {rule}, got {list(self.horizons)}")
        if self.batches and h.batch_doublings:
            ramp = f"hyperparameters.batch_doublings = {h.batch_doublings}"
            problems.append(f"transfer.batches: a batch law needs batches without a ramp, got {ramp}")
            return problems
        for batch in self.batches:
            if batch % context_length:
                rule = f"must be multiples of model.context_length = {context_length}"
                problems.append(f"transfer.batches: {rule}, got {batch}")
            elif unfit := _unfit(h, "batch_tokens", batch, self.n_tokens * min(self.horizons, default=1.0)):
                problems.append(f"transfer.batches: {unfit}, got {batch}")
        for name, grid in self.over.items():
            problems += _over_errors(h, name, grid, self.n_tokens)
        return problems


def _too_few(key: str, values: Sequence[float], least: int) -> list[str]:
    if 0 < len(values) < least:
        return [f"transfer.{key}: needs at least {least} to compare, got {list(values)}"]
    return []


def _over_errors(h: Hyperparameters, name: str, grid: OverSettings, n_tokens: int) -> list[str]:
    """Reasons why a hyperparameter's optimum can't be measured on its grid."""
    key = f"transfer.over.{name}"
    if name not in FOLLOWED:
        return [f"{key}: not a hyperparameter with a scale in octaves; allowed are {', '.join(FOLLOWED)}"]
    if name in h.set_by_stages:
        return [f"{key}: hyperparameters.stages change it during the run, so a grid would vary the first stage only"]
    if grid.at and {"points", "octaves"} & grid.model_fields_set:
        return [
            f"{key}: points and octaves are for a grid around the sweep's best and can't be combined with at, got at = {list(grid.at)}"
        ]
    if grid.at and len(set(grid.at)) < MIN_VALUES:
        return [f"{key}: needs at least {MIN_VALUES} different values, got {list(grid.at)}"]
    return [f"{key}: {unfit}" for value in grid.at if (unfit := _unfit(h, name, value, n_tokens))]


def _unfit(h: Hyperparameters, name: str, value: float, n_tokens: float) -> str:
    """The reason why a run of `n_tokens` can't be trained with this value; "" if it can."""
    changed: dict[str, Any] = {name: value}
    try:
        varied = replace(h, **changed)
        chain(varied, varied.whole_batches(n_tokens))
    except ValueError as error:
        return str(error)
    return ""
