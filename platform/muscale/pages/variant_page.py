"""The page of a table's variants: the report's section on variants alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from muscale.pages.law_sections import variant_section
from muscale.pages.report import write_page
from muscale.pages.sections import moment
from muscale.store.ledger import now

if TYPE_CHECKING:
    from scaling import VariantComparison


def write_variant_page(path: Path, name: str, outcome: VariantComparison) -> Path:
    """Write the page and return its path."""
    written = f"written {moment(now())} · {len(outcome.table)} variants against {outcome.baseline}"
    return write_page(path, [variant_section(outcome, outcome.about)], name=name, written=written)
