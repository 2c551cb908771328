"""Result of cleaning: the folder, and what each step removed from each source, with examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd

from proxy_models.data.sources import CLEANING, CorpusError, Source

FORMAT = 1
COUNTS = ["documents", "documents_left", "bytes", "bytes_left"]


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """Cleaned text in `folder`."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a folder that `clean` finished.

        Raises:
            CorpusError: If the manifest is missing or broken.
        """
        path = folder / CLEANING
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            found = manifest["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path}: not the manifest of cleaned text ({error})") from error
        if found != FORMAT:
            raise CorpusError(
                f"{path}: format must be {FORMAT}, got {found!r}; remove the folder to have it written again"
            )
        return cls(folder=folder, manifest=manifest)

    @property
    def sources(self) -> dict[str, Source]:
        """The cleaned sources by name."""
        return {name: Source(path=str(self.folder / name), kind="cleaned") for name in self.manifest["sources"]}

    def table(self) -> pd.DataFrame:
        """Return one row per step and source: documents and bytes before and after, and the share of bytes removed."""
        return removal_table(self.manifest["removed"])

    def examples(self) -> pd.DataFrame:
        """Return one row per example of what was removed."""
        return removal_examples(self.manifest["removed"])

    def to_dict(self) -> dict[str, Any]:
        """Return the folder, the table's rows and the examples, as plain values."""
        return {
            "folder": str(self.folder),
            "steps": self.table().to_dict("records"),
            "examples": self.examples().to_dict("records"),
        }

    def __str__(self) -> str:
        formats = dict.fromkeys(COUNTS, "{:,}".format) | {"removed": "{:.2%}".format}
        shown = str(self.table().to_string(index=False, formatters=formats))
        for example in self.examples().to_dict("records"):
            kept = f"; kept: {example['kept']}" if example["kept"] else ""
            shown += f"\n\n{example['source']}, {example['file']}:{example['line']}: {example['step']}: {example['reason']}{kept}"
            shown += f"\n    {' '.join(example['text'].split())[:100]}"
        return shown


def removal_table(removed: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """Return one row per step and source, from what each step removed from each source."""
    rows = [
        {"step": step["step"], "source": source}
        | {name: step[name] for name in COUNTS}
        | {"removed": share_removed(step)}
        for source, steps in removed.items()
        for step in steps
    ]
    return pd.DataFrame(rows, columns=["step", "source", *COUNTS, "removed"])


def removal_examples(removed: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """Return one row per example of what was removed."""
    rows = [
        {"step": step["step"], "source": source, **example}
        for source, steps in removed.items()
        for step in steps
        for example in step["examples"]
    ]
    return pd.DataFrame(rows, columns=["step", "source", "file", "line", "reason", "kept", "text"])


def share_removed(step: Mapping[str, Any]) -> float:
    """Return the share of a source's bytes that a step removed."""
    return float(1 - step["bytes_left"] / step["bytes"]) if step["bytes"] else 0.0
