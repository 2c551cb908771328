"""What one suggestion of a sweep means: a run at the base shape, its rungs and its branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from muscale.lineage import Chain
from proxy_models.hyperparameters import Hyperparameters, branch, stem
from proxy_models.numerics import Numerics

NUMBER = "trial"  # the key of a suggestion's number in the config that Tune carries


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """The trial of every suggestion: what it starts from, and the stable tokens of each rung.

    Where the corpus's stages end at fractions of a run, all of a trial sees the data of its longest run; the branches of
    its lower rungs are then no runs of their own, and tell no law.
    """

    numerics: Numerics
    defaults: Hyperparameters
    n_tokens: int
    rung_tokens: tuple[int, ...]

    def hyperparameters(self, config: Mapping[str, Any]) -> Hyperparameters:
        """The study's hyperparameters with the suggestion's in place."""
        return replace(self.defaults, **{name: value for name, value in config.items() if name != NUMBER})

    @property
    def _numerics(self) -> Numerics:
        return self.numerics.for_run(self.defaults.annealed_tokens(self.rung_tokens[-1]))

    def rung(self, config: Mapping[str, Any], rung: int) -> Chain:
        """The stem up to a rung; warmup and decay are those of the whole trial."""
        recipe = self.hyperparameters(config).resolve(self.n_tokens)
        return Chain(numerics=self._numerics, segments=(stem(recipe, self.rung_tokens[rung]),))

    def branch(self, config: Mapping[str, Any], rung: int) -> Chain:
        """The run that cools down from a rung."""
        hyperparameters = self.hyperparameters(config)
        stable = self.rung_tokens[rung]
        recipe = hyperparameters.resolve(self.n_tokens)
        annealed = hyperparameters.annealed_tokens(stable)
        return Chain(numerics=self._numerics, segments=branch(recipe, stable, annealed, hyperparameters.schedule))
