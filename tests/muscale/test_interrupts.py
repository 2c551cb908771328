"""Ctrl-C and SIGTERM wait where they would be lost, and come through afterwards."""

import os
import signal
import threading
import time

import pytest

from muscale.interrupts import defer_sigint


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
