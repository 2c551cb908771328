"""Prints the licence of every distribution in requirements.lock, as its own metadata states it, copyleft ones marked.

make licences
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL|EUPL", re.IGNORECASE)


def locked(text: str) -> list[str]:
    """Names of the distributions of a lock file."""
    return [re.split(r"[=\[; @]", line)[0] for line in text.splitlines() if line and not line.startswith("#")]


def licence(name: str) -> str:
    """Return the licence as the distribution states it: its expression, else its classifiers, else the first line of the text."""
    try:
        stated = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if expression := stated.get("License-Expression"):
        return str(expression)
    classified = [c.split(" :: ")[-1] for c in stated.get_all("Classifier") or [] if c.startswith("License")]
    first = next(iter((stated.get("License") or "").splitlines()), "")
    return "; ".join(classified) or first[:60] or "not stated"


def main() -> int:
    """Print the table; exit code 1 if a distribution is not installed or states nothing."""
    found = {name: licence(name) for name in locked(LOCK.read_text())}
    width = max(map(len, found))
    for name, terms in found.items():
        print(f"{name:<{width}}  {'copyleft  ' if COPYLEFT.search(terms) else '          '}{terms}")
    return 1 if {"not installed", "not stated"} & set(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
