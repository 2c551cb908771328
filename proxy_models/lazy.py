"""Public names of a package that are imported at first use, so that importing the package stays light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__`, and its `__dir__`, which completion in notebooks needs.

    Args:
        homes: Module of each public name, below the package.
    """

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return found, lambda: [*homes, *sys.modules[package].__dict__]
