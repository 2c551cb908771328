"""Reproduction of a study's results: its commands, the hashes that determine them, and the installed versions."""

from __future__ import annotations

import hashlib
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from muscale.fingerprint import package_fingerprint
from muscale.store.lineage import input_key

_LIBRARIES = ("torch", "ray", "optuna", "lightning", "mup", "numpy", "scipy", "pandas", "plotly")


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Everything needed to reproduce a study.

    Attributes:
        commands: Command lines, each with its purpose.
        keys: Name and value of each hash that determines a result.
        versions: Name and version of the libraries that wrote this page.
        study_file: Text of the study file, None where it is gone.
        overrides: Settings that replaced the file's, as given to --set.
        environments: Environments of the ledger's trainings, a line each.
    """

    commands: tuple[tuple[str, str], ...]
    keys: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    study_file: str | None
    overrides: tuple[str, ...]
    environments: tuple[str, ...]


def reproduction(
    path: Path | None,
    overrides: tuple[str, ...],
    identity: dict[str, Any] | None,
    keys: dict[str, str | None],
    environments: tuple[str, ...],
) -> Reproduction:
    """The reproduction of a study.

    Args:
        path: Of the study file.
        overrides: As given to --set.
        identity: The study's, as the ledger has it.
        keys: Further hashes, None where unknown.
        environments: As in `Reproduction`.
    """
    name = path.name if path else "study.toml"
    text = path.read_text() if path and path.exists() else None
    study = shlex.join((name, *(word for override in overrides for word in ("--set", override))))
    hashes = {
        "study": input_key(identity) if identity else None,
        "study file": f"sha256 {hashlib.sha256(text.encode()).hexdigest()}" if text is not None else None,
        **keys,
    }
    return Reproduction(
        commands=(
            (f"muscale run {study}", "every stage; finished work is reused"),
            (f"muscale runs {study}", "the ledger as a table"),
            (f"muscale report {study}", "this page"),
            (f"muscale ui {study}", "this page while the study runs"),
        ),
        keys=tuple((what, key) for what, key in hashes.items() if key),
        versions=(
            ("muscale", package_fingerprint()),
            ("python", sys.version.split()[0]),
            *((library, metadata.version(library)) for library in _LIBRARIES),
        ),
        study_file=text,
        overrides=overrides,
        environments=environments,
    )
