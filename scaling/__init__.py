"""Scaling laws: fit the loss of small runs, forecast a large one, and find how the best learning rate moves with size.

    fit(runs, n_params_convention="total")   the loss surface L(N, D), with intervals      -> ScalingFit
    fit(runs, form=MixtureOfExperts(), …)    the same with a sparsity: active and total parameters -> ScalingFit
    backtest(runs, n_params_convention=…)    how well a ladder forecasts its own largest    -> Backtest
    decide(fit, Budget.of_dollars(…))        the size and tokens for a budget              -> Decision
    next_runs(fit, n_params, n_tokens, …)    what to train next for a narrower forecast    -> NextRuns
    simulate(ladder_design(…), law, …)       how good a ladder's forecasts would be        -> Simulation
    fit_isoflops(runs, …), fit_envelope(curves, …)   the best sizes without a law, as checks -> ComputePowers
    fit_schedule_law(curves)                 loss along a schedule, from other schedules    -> ScheduleLaw
    fit_schedules(curves)                    a run's loss under a changed schedule, with intervals   -> ScheduleFit
    fit_two_step(runs, …), fit_downstream(rows)      accuracy through the task's loss         -> TwoStep, DownstreamLaw
    fit_score(models, metric="mmlu")         a score in N and D, with offsets of families     -> ScoreLaw
    fit_task(runs, …)                        a task's score on one ladder, by the better of both -> TaskLaw
    signal_to_noise(runs, metric)            do runs differ by more than their noise?       -> SignalToNoise
    fit_optimum(rates, losses)               the best rate of one grid                     -> Optimum
    fit_transfer(rows, along=…, over=…)      does the best value stay put across sizes?    -> Transfer
    fit_axis_law(optima, along=…)            how the best value moves where it does not transfer -> AxisLaw
    fit_horizon_law(rows)                    how the best rate falls with training tokens  -> HorizonLaw
    fit_batch_law(rows)                      how the best batch grows with them            -> BatchLaw
    fit_verdict(rows)                        all of these, and what to run if undecided    -> Verdict
    fit_regret_surface(rows, …)              loss that runs lose by their hyperparameters  -> RegretSurface
    compare_variants(runs, "baseline", …)      does a change of the recipe still win at scale?   -> VariantComparison
    fit_mixture(runs)                        each domain's loss over mixture weights       -> MixtureFit
    fit_stages(runs, fit)                    loss by the share of tokens after a change of the data -> StageLaw
    compare_finalists(rows)                    which repeated trial is best, and how certain -> Finalists
    seed_noise(rows, settings)               how far runs differ by their seed alone       -> SeedNoise
    hyperparameter_importance(rows, …)       which hyperparameters the loss depends on     -> Importance
    pareto_front(rows)                       the runs that no run beats in cost and loss   -> DataFrame
    fit_response(rows, box=SearchBox(…))     loss over hyperparameters and scales, for searches -> ResponseSurface

The library uses numpy, scipy, pandas and, inside the figures, plotly. Losses are in nats per token unless a `loss_unit` is given.
"""

from scaling.approaches.compute_powers import ComputePowers
from scaling.approaches.envelope import fit_envelope
from scaling.approaches.isoflops import fit_isoflops
from scaling.comparisons.finalists import Finalists, compare_finalists
from scaling.comparisons.noise import SeedNoise, seed_noise
from scaling.decisions.accelerators import ACCELERATORS, Accelerator, Budget, accelerator
from scaling.decisions.decide import decide
from scaling.decisions.decision import Decision
from scaling.decisions.limits import Limits, MemoryLimit
from scaling.decisions.next_runs import NextRuns, candidate_runs, next_runs
from scaling.decisions.simulation import Simulation, isoflop_design, ladder_design, simulate
from scaling.downstream.score_law import Emergence, ScoreForecast, ScoreLaw, fit_score
from scaling.downstream.sigmoid import DownstreamLaw, fit_downstream
from scaling.downstream.signal import SignalToNoise, signal_to_noise
from scaling.downstream.task_law import TaskLaw, fit_task
from scaling.downstream.two_step import TaskForecast, TwoStep, fit_two_step
from scaling.errors import ScalingError
from scaling.fits.backtest import Backtest, backtest
from scaling.fits.fitting import fit
from scaling.fits.forecast import Forecast
from scaling.fits.profile import Profile
from scaling.fits.result import ScalingFit
from scaling.forms import Chinchilla, Form, Joint, Kaplan, MixtureOfExperts, OneSize, RepeatedData, TiedChinchilla
from scaling.forms.law import Allocation, Law, compute_flops
from scaling.mixtures.best import BestMixture
from scaling.mixtures.fit import MixtureFit, fit_mixture
from scaling.mixtures.following import NextMixtures
from scaling.mixtures.stage_law import StageEffect, StageLaw, fit_stages
from scaling.optima.axis_law import AxisLaw, fit_axis_law
from scaling.optima.batch_law import BatchLaw, fit_batch_law
from scaling.optima.drift import Transfer, fit_transfer
from scaling.optima.horizon import HorizonLaw, fit_horizon_law
from scaling.optima.optimum import Optimum, fit_optimum
from scaling.optima.regret import RegretSurface, fit_regret_surface
from scaling.optima.verdict import Verdict, fit_verdict
from scaling.schedules.schedule_fit import ScheduleFit, fit_schedules
from scaling.schedules.schedule_forecast import ScheduleEffect, ScheduleForecast
from scaling.schedules.schedule_law import ScheduleLaw, fit_schedule_law
from scaling.search.importance import Importance, hyperparameter_importance
from scaling.search.pareto import pareto_front
from scaling.search.response import ResponseOptimum, ResponseSurface, fit_response
from scaling.search.search_box import SearchBox
from scaling.variants.compare import compare_variants
from scaling.variants.variant_comparison import VariantComparison

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Allocation",
    "AxisLaw",
    "Backtest",
    "BatchLaw",
    "BestMixture",
    "Budget",
    "Chinchilla",
    "ComputePowers",
    "Decision",
    "DownstreamLaw",
    "Emergence",
    "Finalists",
    "Forecast",
    "Form",
    "HorizonLaw",
    "Importance",
    "Joint",
    "Kaplan",
    "Law",
    "Limits",
    "MemoryLimit",
    "MixtureFit",
    "MixtureOfExperts",
    "NextMixtures",
    "NextRuns",
    "OneSize",
    "Optimum",
    "Profile",
    "RegretSurface",
    "RepeatedData",
    "ResponseOptimum",
    "ResponseSurface",
    "ScalingError",
    "ScalingFit",
    "ScheduleEffect",
    "ScheduleFit",
    "ScheduleForecast",
    "ScheduleLaw",
    "ScoreForecast",
    "ScoreLaw",
    "SearchBox",
    "SeedNoise",
    "SignalToNoise",
    "Simulation",
    "StageEffect",
    "StageLaw",
    "TaskForecast",
    "TaskLaw",
    "TiedChinchilla",
    "Transfer",
    "TwoStep",
    "VariantComparison",
    "Verdict",
    "accelerator",
    "backtest",
    "candidate_runs",
    "compare_finalists",
    "compare_variants",
    "compute_flops",
    "decide",
    "fit",
    "fit_axis_law",
    "fit_batch_law",
    "fit_downstream",
    "fit_envelope",
    "fit_horizon_law",
    "fit_isoflops",
    "fit_mixture",
    "fit_optimum",
    "fit_regret_surface",
    "fit_response",
    "fit_schedule_law",
    "fit_schedules",
    "fit_score",
    "fit_stages",
    "fit_task",
    "fit_transfer",
    "fit_two_step",
    "fit_verdict",
    "hyperparameter_importance",
    "isoflop_design",
    "ladder_design",
    "next_runs",
    "pareto_front",
    "seed_noise",
    "signal_to_noise",
    "simulate",
]
