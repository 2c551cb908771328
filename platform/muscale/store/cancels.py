"""Requests to cancel a trial or a study: written into the ledger, and read there by the processes that train.

A trial's request stands for ever: nothing more of the trial is trained, by this run of the study or a later one. A study's
request is heeded once, by the processes that are at work when it is made; so its key tells it from older ones, and
no two machines' clocks are compared.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from muscale.errors import MuscaleError, StageError
from muscale.interrupts import enable_sigint
from muscale.store.ledger import Ledger
from muscale.store.statements import find
from muscale.store.tables import ResultKind

POLL_SECONDS = 1.0
LONGEST_REASON = 200
_listening: set[str] = set()  # ledgers that this process listens to
_log = logging.getLogger(__name__)


def cancel_trial(ledger: Ledger, sweep: str, trial: int, reason: str) -> None:
    """Ask that a trial ends at its next rung and is never trained further; a second request changes nothing.

    Raises:
        StageError: If the sweep has no such trial, or the reason is longer than `LONGEST_REASON` characters.
    """
    _require_short(reason)
    if not ledger.read(find, "trials", {"sweep": sweep, "number": trial}, limit=1):
        raise StageError(f"cancel: sweep {sweep} has no trial {trial}")
    payload = {"sweep": sweep, "trial": trial, "reason": reason}
    ledger.record_result(ResultKind.CANCEL_TRIAL, f"{sweep} {trial}", payload)


def cancelled_trials(ledger: Ledger, sweep: str) -> dict[int, str]:
    """The trials of a sweep that were asked to end, with the reasons."""
    rows = ledger.results(ResultKind.CANCEL_TRIAL)
    asked = [row["payload"] for row in rows if row["payload"]["sweep"] == sweep]
    return {int(one["trial"]): str(one["reason"]) for one in asked}


def cancel_study(ledger: Ledger, reason: str) -> None:
    """Ask every process that trains for the study to end as at Ctrl-C; the same command continues.

    Raises:
        StageError: If the reason is longer than `LONGEST_REASON` characters.
    """
    _require_short(reason)
    ledger.record_result(ResultKind.CANCEL_STUDY, secrets.token_hex(8), {"reason": reason})


@contextmanager
def cancellable(ledger: Ledger) -> Iterator[None]:
    """Within this context, a request to cancel the study interrupts this process as Ctrl-C does.

    Only in the main thread, as only that is interrupted; within another such block it does nothing. A request from before the
    block is not about it.
    """
    name = ledger.storage.name
    if threading.current_thread() is not threading.main_thread() or name in _listening:
        yield
        return
    seen = set(_requests(ledger))
    done = threading.Event()

    def listen() -> None:
        while not done.wait(POLL_SECONDS):
            try:
                asked = _requests(ledger)
            except MuscaleError:  # whoever trains hears of it, too
                continue
            if (new := [key for key in asked if key not in seen]) and not done.is_set():
                seen.update(new)
                _log.warning("the study was cancelled: %s", asked[new[-1]])
                os.kill(os.getpid(), signal.SIGINT)

    ear = threading.Thread(target=listen, name="cancels", daemon=True)
    _listening.add(name)
    ear.start()
    try:
        with enable_sigint():
            yield
    finally:
        done.set()
        _listening.discard(name)
        ear.join()


def _requests(ledger: Ledger) -> dict[str, str]:
    """Reasons of all requests to cancel the study, by key, the oldest first."""
    rows = ledger.results(ResultKind.CANCEL_STUDY)
    return {row["key"]: row["payload"]["reason"] for row in rows}


def _require_short(reason: str) -> None:
    if len(reason) > LONGEST_REASON:
        raise StageError(f"cancel: a reason must have at most {LONGEST_REASON} characters, got {len(reason)}")
