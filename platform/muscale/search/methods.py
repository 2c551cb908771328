"""The search methods, by their names in the study file."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from muscale.search.across_scales import AcrossScales
from muscale.search.population import Perturb, Population
from muscale.search.protocols import Scheduler, Searcher
from muscale.search.record import Round
from muscale.search.schedulers import Asha, ToTheEnd
from muscale.search.searchers import CmaEs, Draws, Grid, QuasiRandom, gaussian_process, tpe
from muscale.settings.sweep import SweepSettings
from proxy_models.architecture.member import NATS
from search_spaces import Space

MIN_PRIOR_RUNS = 5
"""Runs at other scales from which our own searcher is the better one (assumed: a grid of rates at one scale has as many)."""


def make_scheduler(settings: SweepSettings, space: Space, loss_unit: str = NATS) -> Scheduler:
    """Return the scheduler of a sweep over a space; raise StageError if a class of Ray Tune's can't be made from the study file."""
    top = settings.rungs - 1
    match settings.scheduler:
        case "none":
            return ToTheEnd(top=top)
        case "asha":
            return Asha(top=top, eta=settings.reduction_factor)
        case "pbt":
            explore = Perturb(space=space, resample=settings.resample, seed=settings.seed)
            return Population(top=top, share=settings.share, explore=explore, seed=settings.seed)
    from muscale.search.tune_methods import tune_scheduler
    from muscale.search.tune_scheduler import TuneScheduler  # it imports ray.tune, which takes seconds

    tune_scheduler(settings, space)  # raises now for a name or an argument that Tune refuses
    return TuneScheduler(top=top, settings=settings, space=space, loss_unit=loss_unit)


def resolve_searcher(settings: SweepSettings, prior_runs: pd.DataFrame) -> str:
    """The searcher that "auto" stands for: our own where enough runs at other scales are known, else TPE."""
    if settings.searcher != "auto":
        return settings.searcher
    if settings.is_population:
        return "quasi_random"
    return "across_scales" if len(prior_runs) >= MIN_PRIOR_RUNS else "tpe"


def make_searcher(
    search_round: Round,
    settings: SweepSettings,
    *,
    n_params: int,
    n_tokens: int,
    prior_runs: Callable[[], pd.DataFrame],
    loss_unit: str = NATS,
) -> Searcher:
    """The searcher of a round, for a proxy of N parameters and trials that train `n_tokens` up to the last rung.

    `prior_runs` gives the runs at other scales where they are asked for.
    """
    seed, space = settings.seed, search_round.space
    match search_round.searcher:
        case "grid":
            return Grid(configs=space.grid(settings.grid_points), first=search_round.first_trial)
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
            return AcrossScales(space=space, seed=seed, n_params=n_params, n_tokens=n_tokens, prior_runs=prior_runs)
    from muscale.search.tune_searcher import TuneSearcher  # it imports ray.tune, which takes seconds

    top, first = settings.rungs - 1, search_round.first_trial
    return TuneSearcher(settings, search_round.searcher, space, first_trial=first, top=top, loss_unit=loss_unit)
