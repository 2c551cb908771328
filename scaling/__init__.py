"""Scaling laws: fit the loss of small runs, forecast a large one, and find how the best learning rate moves with size.

    fit(runs, n_params_convention="total")   the loss surface L(N, D), with intervals      -> ScalingFit
    backtest(runs, n_params_convention=…)    how well a ladder forecasts its own largest    -> Backtest
    fit_isoflops(runs, …), fit_envelope(curves, …)   the best sizes without a law, as checks -> ComputePowers
    fit_schedule_law(curves)                 loss along a schedule, from other schedules    -> ScheduleLaw
    fit_two_step(runs, …), fit_downstream(rows)      accuracy by way of the task's loss       -> TwoStep, DownstreamLaw
    fit_optimum(rates, losses)               the best rate of one grid                     -> Optimum
    fit_transfer(rows, along=…, over=…)      does the best value stay put across sizes?    -> Transfer
    fit_horizon_law(rows)                    how the best rate falls with training tokens  -> HorizonLaw
    fit_batch_law(rows)                      how the best batch grows with them            -> BatchLaw
    fit_step_law(cells)                      best rate or batch in N and D at once         -> StepLaw
    fit_verdict(rows)                        all of these, and what to run if undecided    -> Verdict
    fit_regret_surface(rows, …)              what runs give up by their hyperparameters    -> RegretSurface
    compare_leaders(rows)                    which repeated trial is best, how surely      -> Leaders
    seed_noise(rows, settings)               how far runs differ by their seed alone       -> SeedNoise
    hyperparameter_importance(rows, …)       which hyperparameters the loss depends on     -> Importance
    pareto_front(rows)                       the runs of which none is cheaper and better  -> DataFrame
    fit_response(rows, box=SearchBox(…))     loss over all of them, across scales: search  -> ResponseSurface

Knows numpy, scipy, pandas and, inside the figures, plotly. Losses are nats per token.
"""

from scaling.backtest import Backtest, backtest
from scaling.batch import BatchLaw, fit_batch_law
from scaling.compute_powers import ComputePowers
from scaling.curves import ScheduleLaw, fit_schedule_law
from scaling.downstream import DownstreamLaw, fit_downstream
from scaling.envelope import fit_envelope
from scaling.errors import ScalingError
from scaling.fitting import fit
from scaling.forecast import Forecast
from scaling.forms import Chinchilla, Form, Joint, Kaplan, RepeatedData, TiedChinchilla
from scaling.horizon import HorizonLaw, fit_horizon_law
from scaling.importance import Importance, hyperparameter_importance
from scaling.isoflops import fit_isoflops
from scaling.law import Allocation, Law, compute_flops
from scaling.leaders import Leaders, compare_leaders
from scaling.noise import SeedNoise, seed_noise
from scaling.optima import Optimum, fit_optimum
from scaling.pareto import pareto_front, plot_pareto
from scaling.profile import Profile
from scaling.regret import RegretSurface, fit_regret_surface
from scaling.response import ResponseOptimum, ResponseSurface, fit_response
from scaling.result import ScalingFit
from scaling.search_box import SearchBox
from scaling.step_law import StepLaw, fit_step_law
from scaling.transfer import Transfer, fit_transfer
from scaling.two_step import TaskForecast, TwoStep, fit_two_step
from scaling.verdict import Verdict, fit_verdict

__all__ = [
    "Allocation",
    "Backtest",
    "BatchLaw",
    "Chinchilla",
    "ComputePowers",
    "DownstreamLaw",
    "Forecast",
    "Form",
    "HorizonLaw",
    "Importance",
    "Joint",
    "Kaplan",
    "Law",
    "Leaders",
    "Optimum",
    "Profile",
    "RegretSurface",
    "RepeatedData",
    "ResponseOptimum",
    "ResponseSurface",
    "ScalingError",
    "ScalingFit",
    "ScheduleLaw",
    "SearchBox",
    "SeedNoise",
    "StepLaw",
    "TaskForecast",
    "TiedChinchilla",
    "Transfer",
    "TwoStep",
    "Verdict",
    "backtest",
    "compare_leaders",
    "compute_flops",
    "fit",
    "fit_batch_law",
    "fit_downstream",
    "fit_envelope",
    "fit_horizon_law",
    "fit_isoflops",
    "fit_optimum",
    "fit_regret_surface",
    "fit_response",
    "fit_schedule_law",
    "fit_step_law",
    "fit_transfer",
    "fit_two_step",
    "fit_verdict",
    "hyperparameter_importance",
    "pareto_front",
    "plot_pareto",
    "seed_noise",
]
