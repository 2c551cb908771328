"""Population-based training: the worst members continue from the best ones' states, with other hyperparameters.

Generations are synchronous: members are compared once all have arrived, so the choice of copies depends neither on the
order of arrival nor on the number of workers. A copy is a path in the record; it starts from the donor's state at that rung,
which exists because the donor arrived there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from muscale.search.protocols import Advance, Start
from muscale.search.record import CompleteGeneration, Record
from muscale.search.schedulers import PreferenceScheduler
from muscale.settings.sweep import changeable
from search_spaces import Config, Distribution, Integer, LogUniform, Ordinal, Space, Uniform
from search_spaces.base import Scalar, Value


class Explore(Protocol):
    """Choice of a copy's hyperparameters."""

    def changed(self, record: Record, trial: int, rung: int, donor: int) -> Config:
        """The configuration with which `trial` continues from the donor's state at `rung`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Population(PreferenceScheduler):
    """Truncation selection (Jaderberg et al., arXiv 1711.09846, section 4.1.1), in synchronous generations.

    Attributes:
        top: The last rung; each rung is a generation's end.
        share: Share of the members at the bottom that copy a member of an equal share at the top.
        explore: Choice of a copy's hyperparameters.
    """

    share: float
    explore: Explore
    seed: int

    def moves(self, record: Record, *, may_start: bool) -> Iterator[Start | Advance]:
        """Yield a new member, or a member's next generation; if the budget does not allow it, that of the best member."""
        if may_start:
            yield Start(until=0)
            return
        if (decision := self._next_decision(record)) is not None:
            yield decision
        yield from self.last_moves(record)

    def _next_decision(self, record: Record) -> Advance | None:
        """The next generation of the first member that has not begun it, once all members have arrived."""
        of = (record.rounds[-1].first_trial, len(record.configs), len(record.cancelled))
        known = record.generation if record.generation and record.generation.of == of else None
        for rung in range(known.rung if known else 0, self.top):
            if known is None or known.rung < rung:
                members = members_of(record)
                if any((member, rung) not in record.results for member in members):
                    return None
                ranking = sorted((record.loss(trial, rung), trial) for trial in members)
                known = record.generation = CompleteGeneration(of=of, rung=rung, members=members, ranking=ranking)
            for member in known.members:
                if (member, rung) not in record.advanced:
                    return self._decision(record, known.ranking, member, rung)
        return None

    def _decision(self, record: Record, ranking: Sequence[tuple[float, int]], member: int, rung: int) -> Advance | None:
        n = max(1, int(len(ranking) * self.share)) if len(ranking) > 1 else 0
        best = [trial for loss, trial in ranking[:n] if math.isfinite(loss)]
        worst = [trial for _, trial in ranking[len(ranking) - n :]]
        if math.isfinite(record.loss(member, rung)) and (member not in worst or member in best):
            return Advance(trial=member, until=rung + 1)
        if not best:
            return None  # all members diverged
        donor = int(_generator(self.seed, rung, member).choice(best))
        config = self.explore.changed(record, member, rung, donor)
        path = (*record.path_towards(donor, rung), (rung + 1, config))
        return Advance(trial=member, until=rung + 1, path=path, donor=donor)


def members_of(record: Record) -> list[int]:
    """Return the trials of the latest round that were not cancelled; trials of earlier rounds may lie outside its space."""
    first = record.rounds[-1].first_trial
    return [trial for trial in record.configs if trial >= first and trial not in record.cancelled]


@dataclass(frozen=True, kw_only=True)
class Perturb:
    """PBT's original exploration (arXiv 1711.09846, section 4.1.2): a factor of .8 or 1.2 on each value, or a fresh draw.

    Values change one after the other. A number or the rank of an ordinal takes a step; a value without an order changes only by
    fresh draws. A hyperparameter that becomes active gets a draw. A step that leaves the space is tried in the other direction,
    and skipped if that leaves the space too.

    Attributes:
        space: Bounds, conditions and constraints.
        resample: Probability of a fresh draw.
    """

    space: Space
    resample: float
    seed: int

    def changed(self, record: Record, trial: int, rung: int, donor: int) -> Config:
        """Return the donor's configuration with its changeable values perturbed."""
        generator = _generator(self.seed + 1, rung, trial)
        copied = config = record.config_at(donor, rung)
        for name in changeable(self.space):
            distribution = self.space[name]
            fresh = generator.random() < self.resample
            up = generator.random() < 0.5
            drawn = distribution.sample(generator)
            if name not in copied or name not in config:  # `completed` drew it as it became active, or it is inactive
                continue
            values = [drawn] if fresh else [_step(distribution, config[name], up=way) for way in (up, not up)]
            moved = (completed(self.space, {**config, name: value}, generator) for value in values)
            config = next((one for one in moved if may_follow(self.space, one, copied)), config)
        return config


def completed(space: Space, config: Mapping[str, Value], generator: np.random.Generator) -> Config:
    """Return a configuration without inactive values, and with draws for active ones that are missing."""
    values = dict(config)
    while missing := [name for name in space.active(values) if name not in values]:
        values |= {name: space[name].sample(generator) for name in missing}
    return {name: values[name] for name in space.active(values)}


def may_follow(space: Space, config: Config, copied: Config) -> bool:
    """Whether a copy may continue with a configuration: it lies in the space and keeps the values that can't change in mid-run."""
    fixed = {*space} - {*changeable(space)}
    return space.contains(config) and all(config.get(name) == copied.get(name) for name in fixed)


def _step(distribution: Distribution, value: Value, *, up: bool) -> Value:
    """Return the value one step away, within the bounds; a value without an order stays."""
    match distribution:
        case Ordinal(values=values):
            return values[min(max(values.index(cast(Scalar, value)) + (1 if up else -1), 0), len(values) - 1)]
        case Integer(low=low, high=high):
            whole = cast(int, value)
            step = max(1, round(0.2 * abs(whole)))
            return min(max(whole + (step if up else -step), low), high)
        case Uniform(low=low, high=high) | LogUniform(low=low, high=high):
            return min(max(cast(float, value) * (1.2 if up else 0.8), low), high)
    return value


def _generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng([abs(entry) for entry in seed])
