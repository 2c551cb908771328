"""The page of a mixture law: the best mixture, whose data lowers which loss, and the runs to make next."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.pages.report import write_page
from muscale.pages.sections import Section, as_table, drawn, moment
from muscale.store.ledger import now

if TYPE_CHECKING:
    from scaling import MixtureFit
    from scaling.mixtures.best import BestMixture
    from scaling.mixtures.following import NextMixtures

_section = partial(Section, command="mixture")


def write_mixture_page(
    path: Path, name: str, fit: MixtureFit, best: BestMixture, following: NextMixtures | None
) -> Path:
    """Write the page and return its path.

    Args:
        following: The runs to make next, if they were asked for.
    """
    weights = best.table.sort_values("weight", ascending=False, kind="stable")
    sections = [
        _section(
            title="The best mixture",
            group="Mixture",
            about="Weight of each domain; its interval is where the best mixtures of laws as likely as this one lie.",
            result=best.about,
            drawings=drawn(best.plot(), "weight of each domain in the best mixture, with its interval"),
            table=as_table(weights),
        ),
        _section(
            title="Its losses",
            group="Mixture",
            about="Loss that a run of the best mixture is expected to have on each held-out set of the objective.",
            table=as_table(best.losses),
        ),
        _section(
            title="Whose data lowers which loss",
            group="The law",
            about="Change of each loss where .1 of the runs' mean mixture gives way to one domain.",
            result=fit.about,
            drawings=drawn(fit.plot(), "change of each loss by each domain's data"),
            table=as_table(fit.quality.rename_axis("loss on").reset_index()),
        ),
    ]
    if following:
        shown = following.runs.round(dict.fromkeys(following.runs.filter(like="weight_"), 4))
        columns = shown.rename(columns=lambda name: name.removeprefix("weight_")).T
        table = columns.rename(columns=lambda number: f"run {number + 1}").rename_axis("weight of").reset_index()
        sections.append(
            _section(
                title="What to train next",
                group="The law",
                about="A column for each run: its weights, and what it is worth once those before it have ended as expected.",
                result=following.about,
                table=as_table(table),
            )
        )
    written = f"written {moment(now())} · {len(fit.weights)} runs over {len(fit.domains)} domains"
    return write_page(path, sections, name=name, written=written)
