"""Ratios of the full run's axes to the proxies', and the ratio up to which each value that depends on an axis is covered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from muscale.plans.batch import FAR
from muscale.plans.plan import Plan
from muscale.settings.config import StudyConfig
from proxy_models.recipes.hyperparameters import OPTIMIZERS_THAT_READ
from scaling.optima.batch_law import PRIOR

Axis = Literal["tokens", "batch", "tokens per parameter"]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The range along an axis in which a value may be kept.

    Attributes:
        axis: Axis that the best value depends on.
        factor: Largest ratio of full run to proxies that is covered without a law.
        basis: Source of the factor.
    """

    name: str
    axis: Axis
    factor: float
    basis: str


COVERAGES = (
    Coverage(
        name="batch_tokens",
        axis="tokens",
        factor=FAR ** (1 / PRIOR[0]),
        basis="until the best batch has moved by the factor that the gate lets pass (2505.13738, 2503.04715)",
    ),
    Coverage(
        name="beta1",
        axis="batch",
        factor=8.0,
        basis="measured: kept, of .8 and .9 the same is better at both batches, and a shorter half-life loses 7 % "
        "(tests/benchmarks/batch_transfer.py)",
    ),
    Coverage(
        name="beta2", axis="batch", factor=8.0, basis="measured: kept, .01 % lost (tests/benchmarks/batch_transfer.py)"
    ),
    *(
        Coverage(name=name, axis="tokens", factor=4.0, basis="assumed: a fixed length is another share of a longer run")
        for name in ("batch_ramp_tokens", "warmup_floor_tokens")
    ),
    Coverage(
        name="weight_decay_tau",
        axis="tokens per parameter",
        factor=16.0,
        basis="measured: kept over 8×, .09 % lost and .33 % by Power Lines' exponent (tests/benchmarks/tau_transfer.py); by the "
        "slope found there, -.18, .2 % at 16×",
    ),
)
"""Values that a plan keeps, and the axis of each. The rate has its horizon law and the batch has its laws, in `batch`."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One value of a plan, and the ratio of its axis to the proxies'.

    Attributes:
        times: Axis of the full run divided by the axis of the proxies.
        by_law: A law that covers the value, or "explicit"; empty if neither.
    """

    coverage: Coverage
    times: float
    by_law: str = ""

    @property
    def is_covered(self) -> bool:
        """Whether the ratio lies within the factor, or a law covers the value."""
        return bool(self.by_law) or max(self.times, 1 / self.times) <= self.coverage.factor

    def __str__(self) -> str:
        held = self.by_law or f"covered up to {self.coverage.factor:.3g}×"
        return f"{self.coverage.name} at {self.times:.3g}× the proxies' {self.coverage.axis} ({held})"


def deviations(plan: Plan, config: StudyConfig) -> tuple[Deviation, ...]:
    """Return a deviation from the sweep for each value in `COVERAGES` that is not 0 and that the run's optimizers read."""
    h, batch = plan.hyperparameters, plan.batch
    tokens = plan.n_tokens / config.sweep.n_tokens
    times: Mapping[Axis, float] = {
        "tokens": tokens,
        "batch": batch.extreme_ratio if batch else 1.0,
        "tokens per parameter": tokens * config.model.n_params / plan.model.n_params,
    }
    laws = dict.fromkeys((one.name for one in plan.provenance if "explicit" in one.rules), "explicit")
    if batch and batch.best_tokens:
        laws["batch_tokens"] = "by law" if batch.source == "stated" else batch.source
    if batch and batch.extreme_ratio < 1:
        laws["beta2"] = laws.get("beta2", "the same half-life in tokens, 2507.07101")
    lengths = config.sweep.n_tokens, plan.n_tokens
    unused = {coverage.name for coverage in COVERAGES if not getattr(h, coverage.name)}
    if all(h.warmup_floor_tokens <= h.warmup_fraction * n_tokens for n_tokens in lengths):
        unused.add("warmup_floor_tokens")
    unread = {name for name, readers in OPTIMIZERS_THAT_READ.items() if h.optimizer not in readers}
    return tuple(
        Deviation(coverage=coverage, times=times[coverage.axis], by_law=laws.get(coverage.name, ""))
        for coverage in COVERAGES
        if coverage.name not in unread | unused
    )
