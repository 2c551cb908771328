"""The report's sections on the law: its data, its optimum, its uncertainty, the next runs, and the study's variants."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from muscale.pages.sections import Drawing, Section, as_table, drawn
from scaling import Forecast, ScalingError, ScalingFit, fit_isoflops

if TYPE_CHECKING:
    from muscale.plans.next_stems import NextStems
    from muscale.proxies.comparison import Comparison
    from scaling import VariantComparison

_WITHIN = 0.005  # of the loss: the band of sizes if there is no plan with another one
_BUDGETS = 4  # isoFLOPs drawn by the law
_GRIDS = 3  # minima needed for a power law through them: a power law fits any two points
_RESAMPLINGS = 200
_PROFILED = {"E": "the irreducible loss E", "params_exponent": "the exponent of the best size"}
GROUP = "The law"
_of_fit = partial(Section, command="fit", group=GROUP)
_of_plan = partial(Section, command="plan", group=GROUP)
_LISTED = [
    "variant",
    "verdict",
    "multiplier",
    "low",
    "high",
    "p_better",
    "change",
    "loss",
    "runs",
    "diverged",
    "beyond",
    "look",
]
_MULTIPLIERS = "multiplier of each variant against compute, with its band up to the target"
_CHANGES = "loss of each variant and of the baseline at the same compute"


def law_sections(
    fit: ScalingFit | None, plan: dict[str, Any] | None = None, further: NextStems | None = None
) -> list[Section]:
    """Return a section for each figure; without a fit only the first one, with the command that makes the fit.

    Args:
        plan: Plain values from `Plan.to_dict`; the figures mark the plan's target.
        further: Runs that would narrow the plan's forecast.
    """
    if fit is None:
        return [_whole(None)]
    following = _of_plan(
        title="What to run next",
        about="The runs that would narrow the forecast's interval most, among those that the family and the corpus allow.",
        result=further.advice if further else None,
        table=as_table(further.table if further else None),
    )
    return [*sections_of_fit(fit, plan), following]


def _whole(fit: ScalingFit | None) -> Section:
    return _of_fit(
        title="The law and its data",
        about="The law is fitted only to annealed runs near their best rate.",
        result=f"L({_variables(fit)})  {fit.law.form.formula}, {fit.loss_unit}\n{fit.about}" if fit else None,
        drawings=drawn(fit and fit.plot(), "predicted against measured loss, and residuals"),
        table=as_table(fit.intervals(0.9).rename_axis("parameter").reset_index() if fit else None),
    )


def _variables(fit: ScalingFit) -> str:
    return "D" if fit.one_size else ", ".join(("N", "D", *fit.law.form.columns[2:]))


def sections_of_fit(fit: ScalingFit, plan: Mapping[str, Any] | None) -> list[Section]:
    """Return a section for each figure of a law.

    Args:
        plan: From `Plan.to_dict`: forecast, compute_flops, and budget_flops, near and tolerance of the decision.
    """
    target = Forecast.from_dict(plan["forecast"]) if plan else None
    parameters = (
        "Uncertainty of the law's parameters",
        "Each point is a bootstrap refit. Where the points form a line, the runs determine only a combination of the two.",
        fit.plot_parameters(),
    )
    if not fit.has_forecast:  # the other figures show the mean of the forecast's fits
        return [_whole(fit), _figure(*parameters), _profiles(fit)]
    against_compute = (
        "Loss against compute",
        "The runs, the best loss that the law gives for each budget, and the forecast with its interval.",
        fit.plot_frontier(target),
    )
    if fit.one_size is not None:  # no section about other sizes
        shown = [_whole(fit), _figure(*against_compute), _figure(*parameters)]
        return shown if target is None else [*shown, _of_each_fit(fit, target)]
    figures = [
        against_compute,
        (
            "Loss over size and tokens",
            "Contours of loss and of compute by the mean of the forecast's fits; the frontier passes through their points of contact.",
            fit.plot_contours(target),
        ),
        (
            "Best size and tokens against compute",
            "N, D and D/N on the frontier; the bands show their spread over the choice of fit and over bootstrap samples.",
            fit.plot_allocation(**target.columns if target else {}),
        ),
        parameters,
    ]
    return [
        _whole(fit),
        *(_figure(*part) for part in figures),
        _profiles(fit),
        _isoflops(fit, plan, target),
        *_of_target(fit, plan, target),
    ]


def _of_target(fit: ScalingFit, plan: Mapping[str, Any] | None, target: Forecast | None) -> list[Section]:
    """Return the sections that depend on the plan's budget and target."""
    if plan is None or target is None:
        return []
    decision = plan["decision"]
    sizes = _of_plan(
        title="Loss at other sizes",
        about="The forecast over sizes at the plan's compute; along the thick part the loss hardly changes.",
        drawings=drawn(
            fit.plot_sizes([decision["budget_flops"]], decision["tolerance"], **target.columns),
            "loss against size at the plan's compute, with its flat part",
        ),
        table=as_table(pd.DataFrame(decision["near"])),
    )
    return [sizes, _of_each_fit(fit, target)]


def _of_each_fit(fit: ScalingFit, target: Forecast) -> Section:
    return _of_plan(
        title="Forecast of each fit",
        about="The forecast is the mean of several fits; their spread is part of its interval.",
        drawings=drawn(fit.plot_variants(target), "the loss of the full run by each fit behind the forecast"),
    )


def _figure(title: str, about: str, figure: go.Figure) -> Section:
    return _of_fit(title=title, about=about, drawings=drawn(figure, title.lower()))


def _profiles(fit: ScalingFit) -> Section:
    """Return the bounds that the runs set on the law's floor and its split of compute; E is usually the least bounded."""
    results: list[str] = []
    drawings: tuple[Drawing, ...] = ()
    for name, called in _PROFILED.items():
        if fit.law.params_exponent is None if name == "params_exponent" else name not in fit.law.form.parameters:
            continue
        try:
            profile = fit.profile(name)
        except ScalingError as error:
            results.append(f"no profile of {called}: {error}")
        else:
            results.append(str(profile))
            drawings += drawn(profile.plot(), f"profile likelihood of {called}")
    return _of_fit(
        title="Profile likelihood of the law",
        about="Each point is the best fit with that value held fixed. Where a side of the curve stays low, the runs set no bound.",
        result="\n\n".join(results),
        drawings=drawings,
    )


def _isoflops(fit: ScalingFit, plan: Mapping[str, Any] | None, target: Forecast | None) -> Section:
    """Return the law's loss over size at fixed budgets, and parabolas through the runs if the ladder has isoFLOP grids."""
    flops = (6.0 * fit.rows["n_params"] * fit.rows["n_tokens"]).astype(float)
    last = max(flops.max(), plan["compute_flops"] if plan else 0.0)
    budgets = [float(budget) for budget in np.geomspace(flops.median(), last, _BUDGETS)]
    columns = target.columns if target else {}
    drawings = drawn(fit.plot_sizes(budgets, _WITHIN, **columns), "loss over size at fixed budgets, by the law")
    try:
        if len(fit.law.form.columns) > 2:
            raise ScalingError("its runs differ in more than size and length")
        powers = fit_isoflops(
            fit.rows, n_params_convention=fit.n_params_convention, loss_unit=fit.loss_unit, n_bootstrap=_RESAMPLINGS
        )
        if len(powers.points) < _GRIDS:
            raise ScalingError(f"{len(powers.points)} budgets have a minimum among their sizes, {_GRIDS} are needed")
        result, beside = (
            str(powers),
            drawn(powers.plot(), "parabolas of loss over size through the runs of each budget"),
        )
    except (ScalingError, ValueError) as error:
        result, beside = f"no parabolas, because the ladder is not an isoFLOP grid: {error}", ()
    return _of_fit(
        title="IsoFLOPs",
        about="The loss of each size at fixed budgets, from the middle of the ladder to the plan; the lowest point is the best.",
        result=result,
        drawings=(*drawings, *beside),
    )


def variant_sections(found: Comparison | None) -> list[Section]:
    """Return the section if variants were compared."""
    return [] if found is None else [variant_section(found.outcome, found.about)]


def variant_section(outcome: VariantComparison, about: str) -> Section:
    """Return multipliers, losses and verdicts of variants.

    Args:
        about: Basis of the verdicts.
    """
    table = outcome.table.reindex(columns=_LISTED, fill_value=0).rename(  # results of earlier versions have no `beyond`
        columns={
            "beyond": "left out",
            "p_better": "P(better)",
            "change": "loss there, log ratio",
            "loss": f"loss, {outcome.unit}" if outcome.unit else "loss",
        }
    )
    looks = outcome.plot_looks() if outcome.looks["look"].max() > 1 else None
    return Section(
        title="Variants",
        command="compare",
        group=GROUP,
        about="Compute that the baseline would need for each variant's loss at the target, divided by the variant's; and the verdict.",
        result=about,
        drawings=(
            *(drawn(outcome.plot(), _MULTIPLIERS) if len(outcome.band) else ()),
            *(drawn(outcome.plot_losses(), _CHANGES) if len(outcome.measured) else ()),
            *drawn(looks, "probability that each variant is better, look by look"),
        ),
        table=as_table(table),
    )
