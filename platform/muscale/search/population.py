"""Population-based training: the worst members go on from the best ones' states, with other hyperparameters.

Generations are synchronous: nobody is judged before all members have arrived, so who copies whom depends neither on the
order of arrival nor on the number of workers. A copy is a path in the record; the state that it starts from is the donor's
own at that rung, which exists because the donor arrived there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from muscale.search.config_history import ConfigHistory
from muscale.search.record import Record
from muscale.search.schedulers import GoOn, Start
from muscale.settings.sweep import changeable
from search_spaces import Config, Integer, LogUniform, Space, Uniform


class Explore(Protocol):
    """Choice of a copy's hyperparameters."""

    def changed(self, record: Record, trial: int, rung: int, donor: int) -> Config:
        """The configuration with which `trial` continues from the donor's state at `rung`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Population:
    """Truncation selection (Jaderberg et al., arXiv 1711.09846, section 4.1.1), in synchronous generations.

    Attributes:
        top: The last rung; each rung is a generation's end.
        share: Of the members, at the bottom, that copy one of as many at the top.
        explore: How a copy's hyperparameters are chosen.
        seed: Of the choice among the best.
    """

    top: int
    share: float
    explore: Explore
    seed: int

    def next(self, record: Record, *, may_start: bool) -> Start | GoOn | None:
        """A new member, or the next generation of one."""
        if may_start:
            return Start(until=0)
        members = list(record.configs)
        for rung in range(self.top):
            if len(record.ranking(rung)) < len(members):
                return None
            if record.n_went_on.get(rung, 0) == len(members):
                continue
            for member in members:
                if (member, rung) not in record.went_on:
                    return self._decision(record, member, rung)
        return None

    def _decision(self, record: Record, member: int, rung: int) -> GoOn | None:
        ranking = record.ranking(rung)
        n = max(1, int(len(ranking) * self.share)) if len(ranking) > 1 else 0
        best = [trial for loss, trial in ranking[:n] if math.isfinite(loss)]
        worst = [trial for _, trial in ranking[len(ranking) - n :]]
        if math.isfinite(record.loss(member, rung)) and (member not in worst or member in best):
            return GoOn(trial=member, until=rung + 1)
        if not best:
            return None  # everybody diverged
        donor = int(_generator(self.seed, rung, member).choice(best))
        config = self.explore.changed(record, member, rung, donor)
        return GoOn(trial=member, until=rung + 1, path=_grafted(record.paths[donor], rung, config), donor=donor)


@dataclass(frozen=True, kw_only=True)
class Perturb:
    """PBT's own exploration (arXiv 1711.09846, section 4.1.2): a factor of .8 or 1.2 on each value, or a fresh draw.

    Attributes:
        space: Bounds; what the space has no order for is only drawn afresh.
        resample: Probability of a fresh draw.
        seed: Of the draws.
    """

    space: Space
    resample: float
    seed: int

    def changed(self, record: Record, trial: int, rung: int, donor: int) -> Config:
        """The donor's configuration, its changeable values perturbed."""
        generator = _generator(self.seed + 1, rung, trial)
        config = dict(record.paths[donor][-1][1])
        for name in changeable(self.space):
            distribution = self.space[name]
            fresh = generator.random() < self.resample
            factor = 1.2 if generator.random() < 0.5 else 0.8
            value = distribution.sample(generator)
            if not fresh and isinstance(distribution, Uniform | LogUniform | Integer):
                scaled = min(max(cast(float, config[name]) * factor, distribution.low), distribution.high)
                value = round(scaled) if isinstance(distribution, Integer) else scaled
            elif not fresh:
                continue
            config[name] = value
        return config


def _grafted(path: ConfigHistory, rung: int, config: Config) -> ConfigHistory:
    """The donor's path up to a rung, then another configuration."""
    return (*(entry for entry in path if entry[0] <= rung), (rung + 1, config))


def _generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng([abs(entry) for entry in seed])
