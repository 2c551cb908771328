"""Runs of one suggestion of a sweep: at the base shape, with rungs and branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from muscale.search.sweep_jobs import ConfigHistory
from muscale.store.lineage import Chain
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import COOLING
from proxy_models.recipes.segments import Segment, chain, staged_branch
from proxy_models.recipes.stages import CHANGEABLE, HyperparameterStage
from proxy_models.training.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """Plan of every trial: the settings around its suggestion, and the tokens of each rung.

    If the corpus's stages end at fractions of a run, the whole trial sees the data of its longest run. Branches of lower rungs
    then differ from separate runs of their length, so laws are not fitted to them.

    Attributes:
        numerics: Model, data and precision, with the seed of the search.
        defaults: The study's hyperparameters, under the schedule of the search.
        rung_tokens: Tokens at each rung: of the stem if the schedule has a cooldown, else of the run.
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
        return self.defaults.schedule in COOLING

    def hyperparameters(self, config: Mapping[str, Any]) -> Hyperparameters:
        """Return the study's hyperparameters with the suggested values."""
        return replace(self.defaults, **config)

    def run_tokens(self, rung: int) -> int:
        """Return D of the run that ends with a rung's branch."""
        tokens = self.rung_tokens[rung]
        return self.defaults.annealed_tokens(tokens) if self.cools_down else tokens

    def has_branch(self, rung: int) -> bool:
        """Whether an annealed run ends from this rung: from every rung with a cooldown, else from the last."""
        return self.cools_down or rung == self.top

    def rung(self, path: ConfigHistory, rung: int) -> Chain:
        """Return the training up to a rung; warmup and decay are those of the whole trial."""
        if self.cools_down:
            return self._chain(self._run(path, rung)[:-1])
        (segment,) = chain(self.hyperparameters(path[0][1]), self.n_tokens)
        return self._chain((replace(segment, end=self.rung_tokens[rung]),))

    def branch(self, path: ConfigHistory, rung: int, *, seed: int | None = None) -> Chain:
        """Return the annealed run from a rung; another seed changes the initial values and the data order."""
        segments = self._run(path, rung) if self.cools_down else self.rung(path, rung).segments
        return self._chain(segments, seed)

    def followed(self, path: ConfigHistory, rung: int) -> Hyperparameters:
        """Return hyperparameters of the run that ends from a rung, with the path up to that rung as stages.

        Stages of all trials begin at shares of the longest run; for a shorter run the shares are recomputed.
        """
        start = self.hyperparameters(path[0][1])
        longest, reached = self.rung_tokens[self.top], self.rung_tokens[rung]
        if len(path) == 1:
            if not start.stages or rung == self.top:
                return start
            begins = [start.whole_batches(stage.after * longest) for stage in start.stages]
            kept = zip(start.stages, begins, strict=True)
            return replace(start, stages=tuple(replace(s, after=at / reached) for s, at in kept if at < reached))
        stages, before = [], start
        for first, config in path[1:]:
            after = self.hyperparameters(config)
            if first <= rung and after != before:
                stages.append(_stage(start, before, after, self.rung_tokens[first - 1] / reached))
                before = after
        return replace(start, stages=tuple(stages))

    def given(self, path: ConfigHistory, rung: int) -> Hyperparameters:
        """Return hyperparameters that repeat this run at any length; stages of all trials keep their shares."""
        return self.hyperparameters(path[0][1]) if len(path) == 1 else self.followed(path, rung)

    def _run(self, path: ConfigHistory, rung: int) -> tuple[Segment, ...]:
        """Return the run that ends from a rung: a segment for each stage, then the cooldown."""
        tokens = self.rung_tokens[rung]
        return staged_branch(self.followed(path, rung), tokens, self.run_tokens(rung), tuned_at=self.n_tokens)

    def _chain(self, segments: tuple[Segment, ...], seed: int | None = None) -> Chain:
        numerics = self.numerics if seed is None else replace(self.numerics, seed=seed)
        return Chain(numerics=numerics.for_run(self.run_tokens(self.top)), segments=segments)


def _stage(
    start: Hyperparameters, before: Hyperparameters, after: Hyperparameters, share: float
) -> HyperparameterStage:
    """Return the stage that turns `before` into `after`, in a run that began with `start`."""
    changes = {name: getattr(after, name) for name in CHANGEABLE if getattr(after, name) != getattr(before, name)}
    if rate := changes.get("learning_rate"):
        changes["learning_rate"] = rate / start.learning_rate
    return HyperparameterStage(after=share, **changes)
