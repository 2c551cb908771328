"""Ctrl-C and SIGTERM among libraries that swallow them, exit on them, or leave handlers of their own behind."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)  # `ray job stop` and batch systems send the second
_ECHO_SECONDS = 1.0  # assumed: `timeout` signals its child and then the whole group, so its child gets SIGTERM twice


def once(handle: Callable[[], None]) -> Callable[[int, object], None]:
    """A signal handler that calls `handle`, but not for a signal within `_ECHO_SECONDS` of the one before."""
    latest = -math.inf

    def handler(_signal: int, _frame: object) -> None:
        nonlocal latest
        before, latest = latest, time.monotonic()
        if latest - before > _ECHO_SECONDS:
            handle()

    return handler


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Both wait for the end of the block: around imports of Ray, where import machinery and compiled modules swallow them.

    They are noted rather than masked: a mask holds for one thread, the system gives a signal to any, and Python then raises it
    in the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no handler runs here
        return
    received: list[int] = []
    before = {which: signal.signal(which, lambda number, _frame: received.append(number)) for which in STOPS}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def enable_sigint() -> Iterator[None]:
    """Within it, SIGINT interrupts the main thread also where it is ignored, as in a shell's background jobs and all they start."""
    deaf = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if deaf:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def interruptible(stop: Callable[[], None] | None = None) -> Iterator[None]:
    """An interruption ends the block as KeyboardInterrupt, and the handlers are afterwards what they were.

    Args:
        stop: Called at a signal in place of an interruption; only the main thread's blocks get any.
    """
    on_main = threading.current_thread() is threading.main_thread()
    before = {which: signal.getsignal(which) for which in (*STOPS, signal.SIGUSR1)}
    if stop and on_main:
        signal.signal(signal.SIGINT, lambda _signal, _frame: stop())
        signal.signal(signal.SIGTERM, once(stop))
    try:
        yield
    except SystemExit as error:  # Tune's and Train's own way
        raise KeyboardInterrupt from error
    finally:
        for which, handler in before.items():
            if on_main:
                signal.signal(which, handler)
