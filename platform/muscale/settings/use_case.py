"""[use_case] of the study file: what the full run's model must reach, and the limits of training and serving it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from muscale.settings.plan import PlanSettings
from muscale.settings.strict import StrictTable
from scaling import MemoryLimit, accelerator

LOSS = "loss"
"""Target for the held-out loss; a target for a score is TASK.METRIC, such as "sums.accuracy"."""


class UseCaseSettings(StrictTable):
    """[use_case]: the card that `muscale plan` prints; it changes no plan."""

    # loss: at most this, in the unit of the study's losses; "TASK.METRIC" of a task of [scores]: at least this, bits_per_byte at most
    targets: Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    probability: Annotated[float, Field(gt=0, lt=1)] = 0.9  # with which each target must be reached
    max_params: PositiveFloat | None = None  # with the embedding table
    serving_device: str | None = None  # a name of scaling.ACCELERATORS
    serving_devices: PositiveInt = 1  # that share one copy of the model
    serving_bits: Literal[16, 8, 4] = 16  # of a stored weight
    latency_ms_per_token: PositiveFloat | None = None  # for one sequence; the time in which the weights are read
    deadline_days: PositiveFloat | None = None  # of training on plan.n_devices of plan.accelerator

    @pydantic.field_validator("serving_device")
    @classmethod
    def _is_known(cls, device: str | None) -> str | None:
        return None if device is None else accelerator(device).name

    @pydantic.model_validator(mode="after")
    def _has_a_device(self) -> Self:
        if self.latency_ms_per_token is not None and self.serving_device is None:
            raise ValueError(
                f"latency_ms_per_token needs use_case.serving_device; got latency_ms_per_token = {self.latency_ms_per_token:g} alone"
            )
        return self

    @property
    def memory(self) -> MemoryLimit | None:
        """Limit of the weights in serving; None without a serving device."""
        if self.serving_device is None:
            return None
        return MemoryLimit.serving(
            self.serving_device, n_devices=self.serving_devices, bytes_per_param=self.serving_bits / 8
        )

    def cross_field_errors(self, plan: PlanSettings, tasks: Sequence[str]) -> Iterator[str]:
        """The broken rules, one per line: `table.key: rule, got value`."""
        for name in self.targets:
            task, _, metric = name.rpartition(".")
            if name != LOSS and (task not in tasks or not metric):
                known = ", ".join(tasks) or "none"
                yield f'use_case.targets: must be "loss" or TASK.METRIC with a task of scores.tasks ({known}), got {name!r}'
        if self.deadline_days is not None and plan.budget.days is None:
            yield (
                f"use_case.deadline_days: needs plan.accelerator and plan.n_devices, the devices that train, got "
                f"accelerator = {plan.accelerator} and n_devices = {plan.n_devices}"
            )
