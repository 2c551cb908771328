"""The page of a law that was fitted to a table of runs: the decision, the law, its backtest, and the runs to make next."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.pages.law_sections import GROUP, sections_of_fit
from muscale.pages.report import write_page
from muscale.pages.sections import Section, as_table, drawn, moment
from muscale.store.ledger import now
from scaling import ScalingError, backtest, next_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scaling import Decision, ScalingFit

_section = partial(Section, command="fit")


def write_fit_page(
    path: Path, name: str, fit: ScalingFit, decision: Decision | None, warnings: Sequence[str] = ()
) -> Path:
    """Write the page and return its path.

    Args:
        decision: For a budget; its run is marked in the figures, and the next runs are those that would narrow its forecast.
        warnings: About the table.
    """
    decided = [_decided(decision)] if decision else []
    noted = (
        [_section(title="Warnings", group=GROUP, about="What the table makes doubtful.", result="\n".join(warnings))]
        if warnings
        else []
    )
    plan = None
    if decision and decision.forecast:
        plan = {
            "forecast": decision.forecast.to_dict(),
            "compute_flops": decision.total_flops,
            "decision": {
                "budget_flops": decision.total_flops,
                "near": decision.near,
                "tolerance": decision.tolerance,
            },
        }
    sections = [*decided, *noted, *sections_of_fit(fit, plan), _backtest(fit), *_following(fit, decision)]
    written = f"written {moment(now())} · {len(fit.rows)} runs fitted, {len(fit.left_out)} left out"
    return write_page(path, sections, name=name, written=written)


def _decided(decision: Decision) -> Section:
    return _section(
        title="The decision",
        group=GROUP,
        about="Size and tokens of least loss for the budget, and the sizes that are about as good.",
        result=str(decision),
        table=as_table(decision.near),
    )


def _backtest(fit: ScalingFit) -> Section:
    section = partial(
        _section,
        title="Backtest",
        group=GROUP,
        about="The larger runs, forecast from those below a tenth and a thirtieth of the largest compute; errors in per cent.",
    )
    try:
        found = backtest(fit.rows, n_params_convention=fit.n_params_convention, loss_unit=fit.loss_unit)
        return section(
            drawings=drawn(found.plot(), "losses forecast from smaller runs against those measured"),
            table=as_table(found.table().drop(columns=["coverage_0.95", "width_0.95"])),
        )
    except (ScalingError, ValueError) as error:
        return section(result=f"none: {error}")


def _following(fit: ScalingFit, decision: Decision | None) -> list[Section]:
    """The runs to make next, for as much compute as the largest has, or a tenth of the budget."""
    if decision is None or decision.forecast is None:
        return []
    affordable = max(0.1 * decision.total_flops, fit.compute_range[1])
    found = next_runs(fit, decision.n_params, decision.n_tokens, affordable_flops=affordable)
    return [
        _section(
            title="What to run next",
            group=GROUP,
            about=f"The runs that would narrow the forecast's interval most, for up to {affordable:.3g} FLOPs in all.",
            result=found.about,
            table=as_table(found.runs),
        )
    ]
