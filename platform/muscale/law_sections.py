"""The report's sections on the law: its data, where its optimum lies, how sure it is, and what to run next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go

from muscale.sections import Section, as_table, drawn
from scaling import Forecast, ScalingFit

if TYPE_CHECKING:
    from muscale.next_stems import NextStems

_WITHIN = 0.005  # of the loss: the band of sizes, where a plan says no other


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
        *_of_plan(fit, plan, target),
        Section(
            title="What to run next",
            command="plan",
            about="Runs that the family can build and the corpus can feed, which would shrink the forecast's interval most.",
            result=further.advice if further else None,
            table=as_table(further.table if further else None),
        ),
    ]


def _of_plan(fit: ScalingFit, plan: dict[str, Any] | None, target: Forecast | None) -> list[Section]:
    """What hangs on the plan's budget and its target."""
    if plan is None or target is None:
        return []
    decision = plan.get("decision") or {}
    flops, within = decision.get("budget_flops", plan["compute_flops"]), decision.get("tolerance", _WITHIN)
    sizes = Section(
        title="What another size would cost",
        command="plan",
        about="The forecast over sizes at the plan's compute: on the thick part it hardly matters which one is trained.",
        drawings=drawn(
            fit.plot_sizes([flops], within),
            "loss against size at the plan's compute, with its flat part",
        ),
        table=as_table(pd.DataFrame(decision["near"]) if decision.get("near") else None),
    )
    variants = Section(
        title="What each fit says",
        command="plan",
        about="The forecast is a mean of several fits; how far they lie apart is part of its interval.",
        drawings=drawn(
            fit.plot_variants(target), "the loss of the full run by each fit behind the forecast", wide=True
        ),
    )
    return [sizes, variants]


def _figure(title: str, about: str, figure: go.Figure, command: str) -> Section:
    return Section(title=title, command=command, about=about, drawings=drawn(figure, title.lower()))
