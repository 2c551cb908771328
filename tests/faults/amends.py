"""A program that amends the study's promoted run with a control and a replay; it stops for ever at the moment that STOP_AT names.

A test that kills it there kills it in a phase that is otherwise too short to hit. With RANKS=1 it trains in this process, without Ray.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muscale.cli import app
from muscale.full_runs.amend import amendment_plan
from muscale.full_runs.train.attempt import train
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind

STOPPED = "stopped"  # file next to the study's


def stop() -> None:
    (Path(sys.argv[1]).parent / STOPPED).touch()
    time.sleep(3600)


def stopping(at: str) -> Callable[..., None]:
    """`Ledger.record_result` that stops after the start of an amendment is recorded, or before its result is."""
    record = Ledger.record_result

    def recorded(ledger: Ledger, kind: ResultKind, key: str, payload: Mapping[str, Any]) -> None:
        if (kind, at) == (ResultKind.AMENDMENT, "ended"):
            stop()
        record(ledger, kind, key, payload)
        if (kind, at) == (ResultKind.AMENDMENT_STARTED, "started"):
            stop()

    return recorded


if __name__ == "__main__":
    Ledger.record_result = stopping(os.environ.get("STOP_AT", ""))  # type: ignore[method-assign]
    if os.environ["RANKS"] == "1":
        amendment_plan.launcher_of = lambda *_: train  # type: ignore[attr-defined]
    at, steps = os.environ["AT"], os.environ["STEPS"]
    words = ["--at", at, "--control", steps, "--replay", steps, "--reason", "a test", "--json"]
    sys.exit(app(["amend", sys.argv[1], *words, "--set", "hyperparameters.beta2=0.9"], result_action="return_value"))
