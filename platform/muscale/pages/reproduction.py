"""Reproduction of a study's results: its commands, the hashes that determine them, and the installed versions."""

from __future__ import annotations

import hashlib
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from muscale.fingerprint import package_fingerprint
from muscale.store.lineage import input_key

_LIBRARIES = ("torch", "ray", "optuna", "lightning", "mup", "numpy", "scipy", "pandas", "plotly")


def reproduction(
    path: Path | None,
    overrides: tuple[str, ...],
    identity: dict[str, Any] | None,
    keys: dict[str, str | None],
    environments: tuple[str, ...],
) -> dict[str, Any]:
    """Return the page template's values for reproducing a study: commands, keys, versions, study_file and the arguments.

    Args:
        overrides: Settings from --set that replaced the file's.
        identity: The study's identity in the ledger.
        keys: Further hashes that determine a result, None if unknown.
        environments: Environments of the ledger's runs, a line each.
    """
    name = path.name if path else "study.toml"
    text = path.read_text() if path and path.exists() else None
    study = shlex.join((name, *(word for override in overrides for word in ("--set", override))))
    hashes = {
        "study": input_key(identity) if identity else None,
        "study file": f"sha256 {hashlib.sha256(text.encode()).hexdigest()}" if text is not None else None,
        **keys,
    }
    return {
        "commands": (
            (f"muscale run {study}", "every stage; finished work is reused"),
            (f"muscale runs {study}", "the ledger as a table"),
            (f"muscale report {study}", "this page"),
            (f"muscale ui {study}", "this page while the study runs"),
        ),
        "keys": tuple((what, key) for what, key in hashes.items() if key),
        "versions": (
            ("muscale", package_fingerprint()),
            ("python", sys.version.split()[0]),
            *((library, metadata.version(library)) for library in _LIBRARIES),
        ),
        "study_file": text,
        "overrides": overrides,
        "environments": environments,
    }
