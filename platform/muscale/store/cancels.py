"""Requests to cancel a trial or a study: written into the ledger, and read by the processes that train.

A request for a trial is permanent: neither this run of the study nor a later one trains the trial further. A request for a
study acts once, on the processes that run when it is made; its key tells it from older requests, so that clocks of different
machines need not be compared.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from muscale.background import in_background
from muscale.errors import MuscaleError, StageError
from muscale.interrupts import enable_sigint
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.statements import find

POLL_SECONDS = 1.0
LONGEST_REASON = 200
_listening: set[str] = set()  # ledgers that this process polls for requests
_log = logging.getLogger(__name__)


def cancel_trial(ledger: Ledger, sweep: str, trial: int, reason: str) -> None:
    """Ask for a trial to end at its next rung and never train further; a second request changes nothing.

    Raises:
        StageError: If the sweep has no such trial, or the reason is longer than `LONGEST_REASON` characters.
    """
    _require_short(reason)
    if not ledger.read(find, "trials", {"sweep": sweep, "number": trial}, limit=1):
        raise StageError(f"cancel: sweep {sweep} has no trial {trial}")
    payload = {"sweep": sweep, "trial": trial, "reason": reason}
    ledger.record_result(ResultKind.CANCEL_TRIAL, f"{sweep} {trial}", payload)


def cancelled_trials(ledger: Ledger, sweep: str) -> dict[int, str]:
    """The trials of a sweep with a request to end, and the reasons."""
    rows = ledger.results(ResultKind.CANCEL_TRIAL)
    asked = [row["payload"] for row in rows if row["payload"]["sweep"] == sweep]
    return {int(one["trial"]): str(one["reason"]) for one in asked}


def cancel_study(ledger: Ledger, reason: str) -> None:
    """Ask all processes that train for the study to end as at Ctrl-C; raise StageError if the reason is too long."""
    _require_short(reason)
    ledger.record_result(ResultKind.CANCEL_STUDY, secrets.token_hex(8), {"reason": reason})


@contextmanager
def cancellable(ledger: Ledger) -> Iterator[None]:
    """While this context is open, let a request to cancel the study interrupt this process as Ctrl-C does.

    Only the main thread can be interrupted, so in other threads, and inside another such block, this does nothing. Requests made
    before the block are ignored.
    """
    name = ledger.storage.name
    if threading.current_thread() is not threading.main_thread() or name in _listening:
        yield
        return
    seen = set(_requests(ledger))

    def listen(done: threading.Event) -> None:
        while not done.wait(POLL_SECONDS):
            try:
                asked = _requests(ledger)
            except MuscaleError:  # the training itself reports this error
                continue
            if (new := [key for key in asked if key not in seen]) and not done.is_set():
                seen.update(new)
                _log.warning("the study was cancelled: %s", asked[new[-1]])
                os.kill(os.getpid(), signal.SIGINT)

    _listening.add(name)
    try:
        with in_background(listen, "cancels"), enable_sigint():
            yield
    finally:
        _listening.discard(name)


def _requests(ledger: Ledger) -> dict[str, str]:
    """Reasons of all requests to cancel the study, by key, oldest first."""
    rows = ledger.results(ResultKind.CANCEL_STUDY)
    return {row["key"]: row["payload"]["reason"] for row in rows}


def _require_short(reason: str) -> None:
    if len(reason) > LONGEST_REASON:
        raise StageError(f"cancel: the reason must have at most {LONGEST_REASON} characters, got {len(reason)}")
