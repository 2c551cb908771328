"""The variants of a study and their runs: rate grids at a few widths, then the sizes shared with the study.

A variant starts from the sweep's best hyperparameters and differs in the keys of its table. Its rate follows the study's policy,
muP across size and the horizon law across tokens, shifted by the octaves between its best rate and the study's on equal grids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import SupportsFloat

import numpy as np

from muscale.actors.jobs import Job
from muscale.proxies.ladder import branches, stem_lengths
from muscale.settings.compare import BASELINE
from muscale.settings.config import StudyConfig
from muscale.settings.plan import Stem
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics

PURPOSE = "compare"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A recipe to compare with the study's; the study itself is also one.

    Attributes:
        name: Name in the study file; `BASELINE` for the study.
        best: Hyperparameters at the base shape; the rate is the centre of its grid.
        log2_rate: Best rate of its grid at the base shape; None before tuning.
        at_end: Whether the best rate lies at an end of the widened grid.
    """

    name: str
    numerics: Numerics
    best: Hyperparameters
    log2_rate: float | None = None
    at_end: bool = False

    @property
    def family(self) -> ModelFamily[Member]:
        """The variant's models."""
        return ModelFamily(base=self.numerics.model)

    def grid_job(self, config: StudyConfig, width: int, step: float) -> Job:
        """Return the run of a rate grid at a width; `step` counts the spacings of [transfer]'s grid from its centre."""
        settings = config.transfer
        spacing = settings.octaves / (settings.rates - 1)
        rate = float(f"{self.best.learning_rate * 2 ** (spacing * step):.6g}") if step else self.best.learning_rate
        member = replace(self.numerics, model=self.family.at(width=width), seed=settings.seeds[0])
        length = settings.n_tokens * max(settings.shared_horizons)
        (job,) = branches(
            member,
            replace(self.best, learning_rate=rate),
            [length],
            tuned_at=settings.n_tokens,
            purpose=PURPOSE,
            label=f"{self.name}, width {width}, rate {rate:.4g}",
        )
        return job

    def size_job(self, stem: Stem, seed: int, rate: Callable[[float], float]) -> Job:
        """Return the run of a shared size, the ladder's longest branch; `rate` gives the rate for a number of tokens."""
        middle = float(np.exp(np.mean(np.log(stem_lengths(stem)))))
        h = replace(self.best, learning_rate=rate(middle))
        member = replace(self.numerics, model=stem.of(self.family), seed=seed)
        label = f"{self.name}, {stem}, seed {seed}"
        (job,) = branches(member, h, [stem.n_tokens], tuned_at=middle, purpose=PURPOSE, label=label)
        return job


def variants(
    config: StudyConfig, numerics: Numerics, best: Hyperparameters, corpora: Mapping[str, Corpus] = MappingProxyType({})
) -> list[Variant]:
    """Return the study and its variants, in the file's order.

    Args:
        numerics: Numerics of the study at its base shape.
        corpora: Corpora of the variants that have their own data, evaluated on the study's.
    """
    found = [Variant(name=BASELINE, numerics=numerics, best=best)]
    for name, settings in config.variants.items():
        model = config.variant_model(name)
        own = replace(numerics, model=model, base=model)
        if corpus := corpora.get(name):
            own = replace(own, corpus_key=corpus.key, stages_by_fraction=corpus.stages_by_fraction)
        found.append(Variant(name=name, numerics=own, best=settings.hyperparameters_of(best)))
    return found


def policy(study: Callable[[float], SupportsFloat], octaves: float) -> Callable[[float], float]:
    """Return the study's rate as a function of tokens, shifted by octaves."""

    def rate(n_tokens: float) -> float:
        own = float(study(n_tokens))
        return float(f"{own * 2**octaves:.6g}") if octaves else own

    return rate


def stems_of(config: StudyConfig) -> list[Stem]:
    """Return the shared sizes by the compute of the study's model, ascending."""
    stems = config.compare.stems or config.ladder.stems
    return sorted(stems, key=lambda stem: stem.of(config.family).n_params * stem.n_tokens)


def widths_of(config: StudyConfig) -> tuple[int, ...]:
    """Widths of the rate grids."""
    return config.compare.widths or tuple(sorted(config.transfer.widths)[:2])
