"""A search from another tool's file. The file is read and never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from muscale.errors import StageError
from muscale.importers.imported_space import ImportedSpace, place_of

SUFFIXES = (".yaml", ".yml", ".db", ".sqlite", ".sqlite3")


def import_space(source: str, rename: Sequence[str] = ()) -> ImportedSpace:
    """The search that a file describes: a sweep of W&B (YAML), or a study in Optuna's SQLite storage.

    Args:
        source: Its path; with "#name" behind it the study of a storage with several.
        rename: Hyperparameters under other names here, each `theirs=ours`.

    Raises:
        StageError: If the file can't be used; the message names the file, the key, the rule and the value.
    """
    names = dict(_pairs(rename))
    path = Path(place_of(source)[0])
    if path.suffix not in SUFFIXES:
        tune = "; in a script of Ray Tune's, print(muscale.tune.space_of(param_space))" if path.suffix == ".py" else ""
        raise StageError(
            f"import-space: {source}: its name must end in {', '.join(SUFFIXES)}, got {path.suffix!r}{tune}"
        )
    if path.suffix in (".yaml", ".yml"):
        from muscale.importers.wandb_sweep import read_sweep

        return read_sweep(path, names)
    from muscale.importers.optuna_study import open_study, space_of

    return space_of(open_study(source), source, names)


def _pairs(rename: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in rename:
        theirs, separator, ours = text.partition("=")
        if not (theirs and separator and ours):
            raise StageError(f"import-space: --rename: write theirs=ours, got {text!r}")
        yield theirs, ours
