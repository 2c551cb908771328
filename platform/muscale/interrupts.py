"""Handling of Ctrl-C and SIGTERM next to libraries that swallow them, exit on them, or leave their own handlers behind."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)  # `ray job stop` and batch systems send SIGTERM
ECHO_SECONDS = 1.0  # assumed: `timeout` signals its child and then the whole group, so its child gets SIGTERM twice


def once(handle: Callable[[], None]) -> Callable[[int, object], None]:
    """Return a signal handler that calls `handle`, except for a signal within `ECHO_SECONDS` of the previous one."""
    latest = -math.inf

    def handler(_signal: int, _frame: object) -> None:
        nonlocal latest
        before, latest = latest, time.monotonic()
        if latest - before > ECHO_SECONDS:
            handle()

    return handler


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block ends. During imports of Ray, import machinery and compiled modules swallow them.

    The signals are recorded instead of masked: a mask applies to one thread, but the system may deliver a signal to any thread,
    and Python then raises it in the main thread. A second signal, later than an echo of the first, interrupts the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    received: list[int] = []
    echo_until = math.inf

    def receive(number: int, _frame: object) -> None:
        nonlocal echo_until
        received.append(number)
        if time.monotonic() > echo_until:
            raise KeyboardInterrupt
        echo_until = min(echo_until, time.monotonic() + ECHO_SECONDS)

    before = {which: signal.signal(which, receive) for which in STOPS}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def enable_sigint() -> Iterator[None]:
    """Let SIGINT interrupt the main thread within the block even if it is ignored, or swallowed by what Ray Tune left behind.

    A shell's background jobs and their children ignore it. A Tuner does not restore the handler, which swallows the next signal.
    """
    handler = signal.getsignal(signal.SIGINT)
    deaf = handler is signal.SIG_IGN or getattr(handler, "__module__", "") == "ray.tune.tune"
    if replaced := deaf and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if replaced:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def interruptible(stop: Callable[[], None] | None = None) -> Iterator[None]:
    """Turn an interruption of the block into KeyboardInterrupt, and restore the signal handlers afterwards.

    Args:
        stop: Called at a signal instead of the interruption, in the main thread only; not at an echo.
    """
    on_main = threading.current_thread() is threading.main_thread()
    before = {which: signal.getsignal(which) for which in (*STOPS, signal.SIGUSR1)}
    if stop and on_main:
        for which in STOPS:
            signal.signal(which, once(stop))
    try:
        yield
    except SystemExit as error:  # raised by Tune and Train
        raise KeyboardInterrupt from error
    finally:
        for which, handler in before.items():
            if on_main:
                signal.signal(which, handler)
