"""A program that amends the study's promoted run with a control and a replay; it stops for ever at the moment that STOP_AT names.

A test that kills it there kills it in a phase that is otherwise too short to hit.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muscale.cli import app
from muscale.full_runs.amend import train
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind

STOPPED = "stopped"  # file next to the study's


def stop() -> None:
    (Path(sys.argv[1]).parent / STOPPED).touch()
    time.sleep(3600)


def stopping_first(function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def stopped(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            stop()
        return function(*arguments, **named)

    return stopped


if __name__ == "__main__":
    if os.environ.get("STOP_AT") == "started":
        train.train_control = stopping_first(train.train_control, lambda *_: True)
    if os.environ.get("STOP_AT") == "ended":
        Ledger.record_result = stopping_first(  # type: ignore[method-assign]
            Ledger.record_result, lambda _ledger, kind, *_: kind is ResultKind.AMENDMENT
        )
    at, steps = os.environ["AT"], os.environ["STEPS"]
    words = ["--at", at, "--control", steps, "--replay", steps, "--reason", "a test", "--json"]
    sys.exit(app(["amend", sys.argv[1], *words, "--set", "hyperparameters.beta2=0.9"], result_action="return_value"))
