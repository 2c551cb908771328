"""Ctrl-C and SIGTERM wait where they would be lost, and come through afterwards."""

import os
import signal
import threading
import time

import pytest

from muscale import interrupts
from muscale.interrupts import defer_sigint, interruptible


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_the_block_comes_after_it_whatever_thread_the_system_gives_it_to(which: signal.Signals) -> None:
    done, reached = threading.Event(), []
    other = threading.Thread(target=done.wait, args=(30,))
    other.start()
    before = signal.signal(which, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), defer_sigint():
            os.kill(os.getpid(), which)
            time.sleep(0.1)
            reached.append("the end of the block")
        assert reached == ["the end of the block"]
        assert signal.getsignal(which) is signal.default_int_handler
    finally:
        signal.signal(which, before)
        done.set()
        other.join()


def test_without_a_signal_nothing_happens_and_other_threads_may_use_it() -> None:
    entered = []

    def enter() -> None:
        with defer_sigint():
            entered.append(True)

    before = signal.getsignal(signal.SIGINT)
    enter()
    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert entered == [True, True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_sigterm_soon_after_the_first_is_the_same_one_and_a_later_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[float] = []
    monkeypatch.setattr(interrupts, "_ECHO_SECONDS", 0.2)
    with interruptible(lambda: heard.append(time.monotonic())):
        for pause in (0.0, 0.05, 0.3):
            time.sleep(pause)
            signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert len(heard) == 4
