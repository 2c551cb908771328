"""The command line: each command parses, calls one method of `Study`, and prints its result.

Exit codes: 0 done, 1 a check failed (coordinate check, transfer verdict, a run outside its forecast or its band), 2 an error that
the user can mend, 75 a full run that was preempted (SIGTERM) and has saved, 130 interrupted otherwise (Ctrl-C, SIGTERM); the
same command goes on after both. Nothing heavy is imported before a command runs.
"""

from muscale.cli import bundles, full_run, importers, law, ledger, machine, monitoring, search
from muscale.cli.application import app
from muscale.cli.entry import main

__all__ = ["app", "bundles", "full_run", "importers", "law", "ledger", "machine", "main", "monitoring", "search"]
