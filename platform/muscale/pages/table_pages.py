"""Pages about tables of runs: a fitted law, the variants of a recipe, a mixture law."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from muscale.pages.law_sections import GROUP, sections_of_fit, variant_section
from muscale.pages.report import write_page
from muscale.pages.sections import Section, as_table, drawn, moment
from muscale.store.ledger import now
from scaling import Decision, MixtureFit, ScalingError, ScalingFit, VariantComparison, backtest, next_runs
from scaling.fits.backtest import FORMS_COMPARED
from scaling.mixtures.best import BestMixture
from scaling.mixtures.following import NextMixtures

_of_fit = partial(Section, command="fit", group=GROUP)
_of_mixture = partial(Section, command="mixture", group="Mixture")
_of_mixture_law = partial(Section, command="mixture", group=GROUP)


def write_fit_page(
    path: Path, name: str, fit: ScalingFit, decision: Decision | None, warnings: Sequence[str] = ()
) -> Path:
    """Write the page of a fitted law: the decision, the law, its backtest, and the runs to make next; return its path.

    Args:
        decision: Decision for a budget; the figures mark its run, and the next runs are chosen to narrow its forecast.
        warnings: Warnings about the table.
    """
    decided = [_decided(decision)] if decision else []
    noted = (
        [_of_fit(title="Warnings", about="Reasons to doubt the result.", result="\n".join(warnings))]
        if warnings
        else []
    )
    plan = None
    if decision and decision.forecast:
        plan = {
            "forecast": decision.forecast.to_dict(),
            "compute_flops": decision.total_flops,
            "decision": {"budget_flops": decision.total_flops, "near": decision.near, "tolerance": decision.tolerance},
        }
    sections = [*decided, *noted, *sections_of_fit(fit, plan), _backtest(fit), *_following(fit, decision)]
    written = f"written {moment(now())} · {len(fit.rows)} runs fitted, {len(fit.left_out)} left out"
    return write_page(path, sections, name=name, written=written)


def write_variant_page(path: Path, name: str, outcome: VariantComparison) -> Path:
    """Write the page of a table's variants, with the report's section on variants alone, and return its path."""
    written = f"written {moment(now())} · {len(outcome.table)} variants against {outcome.baseline}"
    return write_page(path, [variant_section(outcome, outcome.about)], name=name, written=written)


def write_mixture_page(
    path: Path, name: str, fit: MixtureFit, best: BestMixture, following: NextMixtures | None
) -> Path:
    """Write the page of a mixture law: the best mixture, the domains' effects on each loss, and the next runs; return its path.

    Args:
        following: Next runs, if requested.
    """
    weights = best.table.sort_values("weight", ascending=False, kind="stable")
    sections = [
        _of_mixture(
            title="The best mixture",
            about="Weight of each domain; the interval is the range of best mixtures over laws as likely as this one.",
            result=best.about,
            drawings=drawn(best.plot(), "weight of each domain in the best mixture, with its interval"),
            table=as_table(weights),
        ),
        _of_mixture(
            title="Losses of the best mixture",
            about="Loss expected on each held-out set of the objective after training on the best mixture.",
            table=as_table(best.losses),
        ),
        _of_mixture_law(
            title="Which data lowers which loss",
            about="Change of each loss when .1 of the runs' mean mixture is replaced by one domain.",
            result=fit.about,
            drawings=drawn(fit.plot(), "change of each loss by each domain's data"),
            table=as_table(fit.quality.rename_axis("loss on").reset_index()),
        ),
    ]
    if following:
        shown = following.runs.round(dict.fromkeys(following.weights, 4))
        columns = shown.rename(columns=lambda name: name.removeprefix(following.weight_prefix)).T
        table = columns.rename(columns=lambda number: f"run {number + 1}").rename_axis("weight of").reset_index()
        sections.append(
            _of_mixture_law(
                title="What to train next",
                about="One column per run: its weights, and its value if the runs before it end as expected.",
                result=following.about,
                table=as_table(table),
            )
        )
    written = f"written {moment(now())} · {len(fit.weights)} runs over {len(fit.domains)} domains"
    return write_page(path, sections, name=name, written=written)


def _decided(decision: Decision) -> Section:
    return _of_fit(
        title="The decision",
        about="Size and tokens with the lowest loss for the budget, and sizes that are about as good.",
        result=str(decision),
        table=as_table(decision.near),
    )


def _backtest(fit: ScalingFit) -> Section:
    below = "a tenth and a thirtieth" if fit.one_size is None else "a half and a quarter"
    section = partial(
        _of_fit,
        title="Backtest",
        about=f"Larger runs, forecast from the runs below {below} of the largest compute; errors in per cent.",
    )
    try:
        forms = fit.law.form if len(fit.law.form.columns) > 2 else FORMS_COMPARED
        found = backtest(fit.rows, n_params_convention=fit.n_params_convention, loss_unit=fit.loss_unit, forms=forms)
        return section(
            drawings=drawn(found.plot(), "losses forecast from smaller runs against measured losses"),
            table=as_table(found.table().drop(columns=["coverage_0.95", "width_0.95"])),
        )
    except (ScalingError, ValueError) as error:
        return section(result=f"none: {error}")


def _following(fit: ScalingFit, decision: Decision | None) -> list[Section]:
    """Return the next runs, for as much compute as the largest run has, or a tenth of the budget if that is more."""
    if decision is None or decision.forecast is None:
        return []
    affordable = max(0.1 * decision.total_flops, fit.compute_range[1])
    columns: dict[str, Any] = decision.forecast.columns
    found = next_runs(fit, decision.n_params, decision.n_tokens, affordable_flops=affordable, **columns)
    return [
        _of_fit(
            title="What to run next",
            about=f"The runs that would narrow the forecast's interval most, for up to {affordable:.3g} FLOPs in all.",
            result=found.about,
            table=as_table(found.runs),
        )
    ]
