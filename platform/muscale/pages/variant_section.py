"""Section of the report on the study's variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muscale.pages.sections import Section, as_table, drawn

if TYPE_CHECKING:
    from muscale.proxies.comparison import Comparison

_LISTED = ["variant", "verdict", "multiplier", "low", "high", "p_better", "change", "loss", "runs", "diverged", "look"]


def variant_sections(found: Comparison | None) -> list[Section]:
    """The section, once variants were compared."""
    if found is None:
        return []
    outcome = found.outcome
    table = outcome.table[_LISTED].rename(columns={"p_better": "P(better)", "change": "loss there, log ratio"})
    several = outcome.n_sizes > 1
    return [
        Section(
            title="Variants",
            command="compare",
            group="The law",
            about="Compute that the study would need for each variant's loss at the target, over the variant's own, and the verdict.",
            result=found.about,
            drawings=(
                *drawn(found.plot(), "multiplier of each variant against compute, with its band up to the target"),
                *drawn(outcome.plot_losses(), "loss of each variant beside the study's at the same compute"),
                *(
                    drawn(outcome.plot_looks(), "probability that each variant is better, look by look")
                    if several
                    else ()
                ),
            ),
            table=as_table(table),
        )
    ]
