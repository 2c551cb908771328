"""The report's sections on the law: its data, where its optimum lies, how sure it is, and what to run next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from muscale.pages.sections import Drawing, Section, as_table, drawn
from scaling import Forecast, ScalingError, ScalingFit, fit_isoflops

if TYPE_CHECKING:
    from muscale.plans.next_stems import NextStems

_WITHIN = 0.005  # of the loss: the band of sizes, where a plan says no other
_BUDGETS = 4  # isoFLOPs that are drawn by the law
_GRIDS = 3  # from which a power through their minima is shown at all: through two points any goes
_RESAMPLINGS = 200
_PROFILED = {"E": "the irreducible loss E", "params_exponent": "the exponent of the best size"}
GROUP = "The law"


def law_sections(
    fit: ScalingFit | None, plan: dict[str, Any] | None = None, further: NextStems | None = None
) -> list[Section]:
    """A section for each figure; without a fit the first alone, which says how to get it.

    Args:
        fit: The law.
        plan: As `Plan.to_dict` gives it, for what hangs on a target.
        further: Runs that would make its forecast surer.
    """
    whole = Section(
        title="The law and its data",
        command="fit",
        group=GROUP,
        about="Only annealed runs near their own best rate tell the law.",
        result=str(fit) if fit else None,
        drawings=drawn(fit and fit.plot(), "predicted against measured loss, and residuals"),
    )
    if fit is None:
        return [whole]
    target = Forecast.from_dict(plan["forecast"]) if plan else None
    figures = [
        (
            "Loss against compute",
            "The runs, the best loss that the law gives for each budget, and the forecast with its interval.",
            fit.plot_frontier(target),
        ),
        (
            "Loss over size and tokens",
            "Lines of equal loss and of equal compute by the mean of the forecast's fits; its frontier passes where they touch.",
            fit.plot_contours(target),
        ),
        (
            "Best size and tokens against compute",
            "N, D and D/N on the frontier; the bands tell how they move with the choice of fit and with the runs drawn again.",
            fit.plot_allocation(),
        ),
        (
            "How surely the law's parameters are known",
            "Each point is a refit. Where two lean along a line, the runs tell their combination and not each of them.",
            fit.plot_parameters(),
        ),
    ]
    return [
        whole,
        *(_figure(*part, "fit") for part in figures),
        _profiles(fit),
        _isoflops(fit, plan),
        *_of_plan(fit, plan, target),
        Section(
            title="What to run next",
            command="plan",
            group=GROUP,
            about="Runs that the family can build and the corpus can feed, which would shrink the forecast's interval most.",
            result=further.advice if further else None,
            table=as_table(further.table if further else None),
        ),
    ]


def _of_plan(fit: ScalingFit, plan: dict[str, Any] | None, target: Forecast | None) -> list[Section]:
    """What hangs on the plan's budget and its target."""
    if plan is None or target is None:
        return []
    decision = plan["decision"]
    sizes = Section(
        title="What another size would cost",
        command="plan",
        group=GROUP,
        about="The forecast over sizes at the plan's compute: on the thick part it hardly matters which one is trained.",
        drawings=drawn(
            fit.plot_sizes([decision["budget_flops"]], decision["tolerance"]),
            "loss against size at the plan's compute, with its flat part",
        ),
        table=as_table(pd.DataFrame(decision["near"])),
    )
    variants = Section(
        title="What each fit says",
        command="plan",
        group=GROUP,
        about="The forecast is a mean of several fits; how far they lie apart is part of its interval.",
        drawings=drawn(
            fit.plot_variants(target), "the loss of the full run by each fit behind the forecast", wide=True
        ),
    )
    return [sizes, variants]


def _figure(title: str, about: str, figure: go.Figure, command: str) -> Section:
    return Section(title=title, command=command, group=GROUP, about=about, drawings=drawn(figure, title.lower()))


def _profiles(fit: ScalingFit) -> Section:
    """Where the runs bound the law's floor and its split of compute; E most often is what they bound least."""
    results: list[str] = []
    drawings: tuple[Drawing, ...] = ()
    for name, called in _PROFILED.items():
        try:
            profile = fit.profile(name)
        except ScalingError as error:
            results.append(f"no profile of {called}: {error}")
        else:
            results.append(str(profile))
            drawings += drawn(profile.plot(), f"profile likelihood of {called}")
    return Section(
        title="How far the law can move before it fits worse",
        command="fit",
        group=GROUP,
        about="Each point is the best fit with that value held. A side that stays low is one on which the runs set no bound.",
        result="\n\n".join(results),
        drawings=drawings,
    )


def _isoflops(fit: ScalingFit, plan: dict[str, Any] | None) -> Section:
    """Loss over size at fixed budgets by the law; and by parabolas through the runs, where the ladder has such grids."""
    flops = (6.0 * fit.rows["n_params"] * fit.rows["n_tokens"]).astype(float)
    last = max(flops.max(), plan["compute_flops"] if plan else 0.0)
    budgets = [float(budget) for budget in np.geomspace(flops.median(), last, _BUDGETS)]
    drawings = drawn(fit.plot_sizes(budgets, _WITHIN), "loss over size at fixed budgets, by the law")
    try:
        powers = fit_isoflops(
            fit.rows, n_params_convention=fit.n_params_convention, loss_unit=fit.loss_unit, n_bootstrap=_RESAMPLINGS
        )
        if len(powers.points) < _GRIDS:
            raise ScalingError(f"{len(powers.points)} budgets have a minimum among their sizes, {_GRIDS} are wanted")
        result, beside = (
            str(powers),
            drawn(powers.plot(), "parabolas of loss over size through the runs of each budget"),
        )
    except (ScalingError, ValueError) as error:
        result, beside = f"no parabolas beside the law, as the ladder is no isoFLOP grid: {error}", ()
    return Section(
        title="IsoFLOPs",
        command="fit",
        group=GROUP,
        about="What each size comes to at fixed budgets, from the middle of the ladder to the plan; the lowest point is the best.",
        result=result,
        drawings=(*drawings, *beside),
    )
