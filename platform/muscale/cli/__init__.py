"""The command line: each command parses, calls one method, in most cases of `Study`, and prints its result.

Exit codes are in `muscale.cli.application`. Nothing heavy is imported before a command runs.
"""

from muscale.cli import (
    bundles,
    data,
    evaluation,
    full_run,
    importers,
    law,
    ledger,
    machine,
    mixture,
    monitoring,
    search,
)
from muscale.cli.application import app
from muscale.cli.entry import main

__all__ = [
    "app",
    "bundles",
    "data",
    "evaluation",
    "full_run",
    "importers",
    "law",
    "ledger",
    "machine",
    "main",
    "mixture",
    "monitoring",
    "search",
]
