"""Axes of a mixture of experts along which the full run differs from its proxies, and what covers its learning rate there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from muscale.plans.gate import GateLine
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import Member
from scaling import AxisLaw, Verdict
from scaling.optima.tokens_law import plural


@dataclass(frozen=True, kw_only=True)
class AxisChange:
    """The sizes of the full run and of its proxies along one axis."""

    axis: str
    full: float
    proxies: float

    def __str__(self) -> str:
        return f"{self.axis} {self.full:g}, {self.proxies:g} in proxies"


def axis_changes(full: Member, proxies: Member) -> tuple[AxisChange, ...]:
    """Return the axes along which a mixture differs from its proxies; none for other models."""
    if not (
        isinstance(full, ModelConfig) and isinstance(proxies, ModelConfig) and full.n_experts and proxies.n_experts
    ):
        return ()
    sizes, before = full.expert_sizes(proxies), proxies.expert_sizes(proxies)
    found = (AxisChange(axis=axis, full=size, proxies=before[axis]) for axis, size in sizes.items())
    return tuple(change for change in found if not math.isclose(change.full, change.proxies, rel_tol=1e-9))


def laws_of(changes: tuple[AxisChange, ...], laws: Mapping[str, AxisLaw | str]) -> dict[AxisChange, AxisLaw]:
    """Return the law of each changed axis that has one and is followed to the full run's size."""
    return {
        change: law
        for change in changes
        if isinstance(law := laws.get(change.axis), AxisLaw) and law.supports(change.full)
    }


def experts_line(changes: tuple[AxisChange, ...], verdict: Verdict, *, stated: bool) -> GateLine:
    """Whether the rate transfers along each changed axis, by its verdict or by its law, or is stated for the full run."""
    laws = laws_of(changes, verdict.axis_laws)
    judged = {transfer.along: transfer.verdict for transfer in verdict.transfers if transfer.over == "rate"}
    found, uncovered = [], []
    for change in changes:
        basis = f"by law: {laws[change]}" if change in laws else judged.get(change.axis, "no grids")
        found.append(f"{change} ({'rate stated' if stated else basis})")
        if not stated and change not in laws and basis != "pass":
            uncovered.append(change.axis)
    keys = " and ".join(f"transfer.{plural(axis)}" for axis in uncovered)
    advice = f"measure it: {keys}, several sizes around the proxies', or set plan.explicit.learning_rate"
    return GateLine.judged("experts", not uncovered, "; ".join(found), advice)
