"""Narrowing of a space to the best region that trials found, with the reason for each cut.

The best trials of a sweep are those with the lowest losses: a quarter of all, and at least enough that with high probability
they lie on both sides of an optimum. If a hyperparameter matters, they are closer together along it than the same number of
trials drawn at random from all. The range of m uniform draws has a known distribution (David and Nagaraja, Order
Statistics, 2003, section 2.3), which separates evidence from chance. Without evidence nothing is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from search_spaces.base import Distribution
from search_spaces.condition import Condition, OneOf, Range
from search_spaces.cuts import Cut, cut
from search_spaces.discrete import Fixed
from search_spaces.errors import SpaceError
from search_spaces.registry import can_hold
from search_spaces.space import Space

LEVEL = 0.05
"""Upper bound of the probability, over all hyperparameters together, that chance alone makes a cut; finitely many trials lower it."""
BEST_SHARE = 0.25
"""Share of the trials that count as best (assumed); small enough to be near the optimum, large enough to have a range."""


@dataclass(frozen=True, kw_only=True)
class Narrowed:
    """Result of a narrowing.

    Attributes:
        space: The narrowed space; if there is nothing to cut, an equal space.
        table: A row for each hyperparameter: hyperparameter, action ("cut", "kept", "at the edge", "dropped"), before, after,
            trials (in which it was active), best (number of them that count as best), reason.
        n_diverged: Number of the `n_trials` without a loss; they count as worse than all others.
        n_left_out: Number of trials outside the space.
    """

    space: Space
    table: pd.DataFrame
    n_trials: int
    n_diverged: int
    n_left_out: int

    @property
    def at_edge(self) -> tuple[str, ...]:
        """Hyperparameters whose best trials lie at a bound; the search should extend beyond the bound."""
        return tuple(self.table.loc[self.table["action"] == "at the edge", "hyperparameter"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        numbers = {"n_trials": self.n_trials, "n_diverged": self.n_diverged, "n_left_out": self.n_left_out}
        return {"space": self.space.to_dict(), "table": self.table.to_dict("records"), **numbers}

    def _head(self) -> str:
        return f"{self.n_trials} trials, {self.n_diverged} diverged, {self.n_left_out} outside the space and left out"

    def __str__(self) -> str:
        return f"{self._head()}\n{self.table.to_string(index=False)}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._head())}</p>{self.table.to_html(index=False)}"


def narrow(space: Space, results: pd.DataFrame) -> Narrowed:
    """Narrow a space to the best region of a sweep.

    A numeric or ordinal hyperparameter is cut to the range of the best trials and a margin, on its own scale, if that range is
    narrower than chance explains. A value of a choice is dropped if it had enough trials that one of them should be among
    the best. A part of a simplex has its lower bound raised. A bound at which the best trials lie is kept and
    flagged. Conditions and constraints stay; a prior stays, with a centre outside the cut moved to the nearest bound.

    Args:
        results: A row for each trial, a column for each hyperparameter (empty if inactive; a simplex's holds mappings;
            fixed hyperparameters may be left out) and `loss`, NaN for a diverged trial; all losses at the same tokens. The
            trials of an adaptive searcher are closer together from the start, so they lead to fewer cuts than random trials.

    Raises:
        SpaceError: If a column is missing, or no trial inside the space has a loss.
    """
    if missing := [name for name in (*space.searched, "loss") if name not in results]:
        raise SpaceError(f"the results of {', '.join(space)} need columns {', '.join(missing)}")
    configs = [_config(space, row) for row in results.to_dict("records")]
    inside = [space.contains(config) for config in configs]
    losses = pd.to_numeric(results["loss"]).to_numpy(dtype=np.float64)[inside]
    configs = [config for config, there in zip(configs, inside, strict=True) if there]
    if not np.isfinite(losses).any():
        raise SpaceError(f"no trial inside the space has a loss: {len(inside)} trials, {len(losses)} inside")
    losses = np.where(np.isfinite(losses), losses, np.inf)
    steps: dict[str, Cut] = {}
    rows: list[dict[str, Any]] = []
    for name, distribution in space.items():
        had = np.array([name in config for config in configs])
        values = [config[name] for config in configs if name in config]
        best = _best(losses[had], len(space.searched))
        steps[name] = cut(distribution, values, best, LEVEL / max(len(space.searched), 1))
        rows.append({"hyperparameter": name, "trials": len(values), "best": int(best.sum())})
    steps = _with_conditions(space, steps)
    columns = ["hyperparameter", "action", "before", "after", "trials", "best", "reason"]
    for row, (name, step) in zip(rows, steps.items(), strict=True):
        after = str(step.distribution) if step.distribution else ""
        row |= {"action": step.action, "before": str(space[name]), "after": after, "reason": step.reason}
    return Narrowed(
        space=_space(space, steps),
        table=pd.DataFrame(rows, columns=columns),
        n_trials=len(configs),
        n_diverged=int(np.isinf(losses).sum()),
        n_left_out=len(inside) - len(configs),
    )


def _config(space: Space, row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the configuration of a row in plain types, without empty cells and with integers that pandas made real restored."""
    config: dict[str, Any] = {}
    for name, distribution in space.items():
        value = row.get(name)
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
            continue
        if isinstance(value, float) and value.is_integer() and distribution.contains(int(value)):
            value = int(value)
        config[name] = value
    left_out = {name: d.value for name, d in space.items() if isinstance(d, Fixed) and name not in row}
    active = space.active({**config, **left_out})
    return config | {name: value for name, value in left_out.items() if name in active}


def _best(losses: NDArray[np.float64], n_searched: int) -> NDArray[np.bool_]:
    """Select the best trials: a quarter, and enough that all on one side of an optimum is as rare as `LEVEL`."""
    finite = int(np.isfinite(losses).sum())
    if not finite:
        return np.zeros(len(losses), dtype=bool)
    least = math.ceil(math.log2(2 * max(n_searched, 1) / LEVEL))
    count = min(max(math.ceil(BEST_SHARE * len(losses)), least), finite)
    best: NDArray[np.bool_] = losses <= np.sort(losses)[count - 1]
    return best


def _with_conditions(space: Space, steps: Mapping[str, Cut]) -> dict[str, Cut]:
    """Reduce conditions to the remaining values, and drop hyperparameters that can no longer be active."""
    done: dict[str, Cut] = {}
    for name in space.order:
        step, condition = steps[name], space[name].when
        distribution = step.distribution
        if condition is not None and distribution is not None:
            left = [(parent, _left(allowed, done[parent].distribution)) for parent, allowed in condition.parents]
            gone = [parent for parent, allowed in left if allowed is None]
            if gone:
                step = Cut(action="dropped", reason=f"{gone[0]} is no longer what it needs", distribution=None)
            else:
                kept = Condition(parents=tuple((parent, allowed) for parent, allowed in left if allowed is not None))
                step = replace(step, distribution=replace(distribution, when=kept))
        done[name] = step
    return {name: done[name] for name in space}


def _left(allowed: OneOf | Range, parent: Distribution | None) -> OneOf | Range | None:
    """Reduce a condition's allowed values to the remaining values of its parent; None: no value remains."""
    if parent is None:
        return None
    if isinstance(allowed, Range):
        return allowed if can_hold(allowed, parent) else None
    values = tuple(filter(parent.contains, allowed.values))
    return OneOf(values=values) if values else None


def _space(space: Space, steps: Mapping[str, Cut]) -> Space:
    left = {name: step.distribution for name, step in steps.items() if step.distribution is not None}
    constraints = {
        key: constraint
        for key, constraint in space.constraints.items()
        if all(name in left for name in constraint.names)
    }
    return Space(left, constraints)
