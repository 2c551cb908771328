"""The methods by the names that the study file gives them."""

from __future__ import annotations

from muscale.search.bandit import Bandit
from muscale.search.population import Perturb, Population
from muscale.search.rules import Asha, Hyperband, MedianStopping, Rule, ToTheEnd
from muscale.search.samplers import CmaEs, Draws, Grid, QuasiRandom, Sampler, gaussian_process, tpe
from muscale.sweep_settings import SweepSettings
from search_spaces import Space


def make_rule(settings: SweepSettings) -> Rule:
    """The scheduler of a sweep."""
    top = settings.rungs - 1
    match settings.scheduler:
        case "none":
            return ToTheEnd(top=top)
        case "asha":
            return Asha(top=top, eta=settings.reduction_factor)
        case "hyperband":
            return Hyperband(top=top, eta=settings.reduction_factor)
        case "median":
            return MedianStopping(top=top)
        case "pbt":
            explore = Perturb(space=settings.space, resample=settings.resample, seed=settings.seed)
            return Population(top=top, share=settings.share, explore=explore, seed=settings.seed)
        case "pb2":
            bandit = Bandit(space=settings.space, seed=settings.seed)
            return Population(top=top, share=settings.share, explore=bandit, seed=settings.seed)


def make_sampler(settings: SweepSettings, space: Space) -> Sampler:
    """The searcher of a sweep over a space: the settings' own, or a narrower one."""
    seed, searcher = settings.seed, settings.searcher
    if searcher == "auto":
        searcher = "quasi_random" if settings.is_population else "tpe"
    match searcher:
        case "grid":
            return Grid(configs=space.grid(settings.grid_points))
        case "random":
            return Draws(space=space, seed=seed)
        case "quasi_random":
            return QuasiRandom(space=space, seed=seed)
        case "tpe":
            return tpe(space, seed)
        case "gp":
            return gaussian_process(space, seed)
        case "cma_es":
            return CmaEs(space=space, seed=seed)
        case "across_scales":
            raise NotImplementedError
