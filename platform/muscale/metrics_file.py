"""The metrics of a full run on disk: a JSON object a line, one for each step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def last_row(metrics: Path) -> dict[str, Any]:
    """What was written last."""
    return dict(json.loads(metrics.read_text().splitlines()[-1]))


def drop_after(metrics: Path, tokens: int) -> None:
    """Forget the steps that will be trained again; a torn last line goes with them."""
    if not metrics.exists():
        return
    kept = [json.dumps(row) + "\n" for row in whole_rows(metrics) if row["tokens"] <= tokens]
    unfinished = metrics.with_suffix(".unfinished")
    unfinished.write_text("".join(kept))
    unfinished.replace(metrics)


def whole_rows(metrics: Path) -> Iterator[dict[str, Any]]:
    """The rows up to the first that was not written whole."""
    for line in metrics.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
