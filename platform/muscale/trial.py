"""What one suggestion of a sweep means: a run at the base shape, its rungs and its branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from muscale.lineage import Chain
from muscale.search.path import Path
from proxy_models.hyperparameters import Hyperparameters, Segment, chain, stem
from proxy_models.hyperparameters import branch as branch_of
from proxy_models.numerics import Numerics

WITH_COOLDOWN = ("wsd", "wsd_linear")
"""Schedules with a stem that runs of several lengths share; under the others a rung lies in the middle of the decay."""


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """The trial of every suggestion: what it starts from, and the tokens of each rung.

    Where the corpus's stages end at fractions of a run, all of a trial sees the data of its longest run; the branches of
    its lower rungs are then no runs of their own, and tell no law.

    Attributes:
        numerics: Model, data and precision; its seed is the search's.
        defaults: The study's hyperparameters, under the schedule of the search.
        n_tokens: Of a trial to its end.
        rung_tokens: Tokens at each rung: of the stem under a schedule with a cooldown, else of the run itself.
    """

    numerics: Numerics
    defaults: Hyperparameters
    n_tokens: int
    rung_tokens: tuple[int, ...]

    @property
    def top(self) -> int:
        """The last rung."""
        return len(self.rung_tokens) - 1

    @property
    def cools_down(self) -> bool:
        """Whether a rung lies on a stem, from which a branch cools down."""
        return self.defaults.schedule in WITH_COOLDOWN

    def hyperparameters(self, config: Mapping[str, Any]) -> Hyperparameters:
        """The study's hyperparameters with the suggestion's in place."""
        return replace(self.defaults, **config)

    def run_tokens(self, rung: int) -> int:
        """D of the run that a rung's branch ends."""
        tokens = self.rung_tokens[rung]
        return self.defaults.annealed_tokens(tokens) if self.cools_down else tokens

    def has_branch(self, rung: int) -> bool:
        """Whether an annealed run ends from this rung: from any with a cooldown, else from the last."""
        return self.cools_down or rung == self.top

    def rung(self, path: Path, rung: int) -> Chain:
        """The training up to a rung; warmup and decay are those of the whole trial."""
        if self.cools_down:
            return self._chain(self._stem(path, rung))
        (segment,) = chain(self.hyperparameters(path[0][1]), self.n_tokens)
        return self._chain((replace(segment, end=self.rung_tokens[rung]),))

    def branch(self, path: Path, rung: int, *, seed: int | None = None) -> Chain:
        """The run that ends from a rung, annealed; with another seed, of its own initial values and data order."""
        if not self.cools_down:
            return self._chain(self.rung(path, rung).segments, seed)
        *before, last = self._stem(path, rung)
        hyperparameters = self.hyperparameters(path[-1][1])
        _, cooldown = branch_of(last.recipe, last.end, self.run_tokens(rung), hyperparameters.schedule)
        return self._chain((*before, last, cooldown), seed)

    def _chain(self, segments: tuple[Segment, ...], seed: int | None = None) -> Chain:
        numerics = self.numerics if seed is None else replace(self.numerics, seed=seed)
        return Chain(numerics=numerics.for_run(self.run_tokens(self.top)), segments=segments)

    def _stem(self, path: Path, rung: int) -> tuple[Segment, ...]:
        """The constant phase up to a rung, a segment for each configuration of the path; equal neighbours are one."""
        segments: list[Segment] = []
        ends = [first - 1 for first, _ in path[1:] if first <= rung] + [rung]
        for (_, config), end in zip(path, ends, strict=False):
            recipe = self.hyperparameters(config).resolve(self.n_tokens)
            whole = stem(recipe, self.rung_tokens[end])
            if segments and segments[-1].recipe == recipe:
                segments[-1] = replace(segments[-1], end=whole.end)
            else:
                segments.append(replace(whole, start=segments[-1].end if segments else 0))
        return tuple(segments)
