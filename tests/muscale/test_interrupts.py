"""Ctrl-C and SIGTERM wait where they would be lost, and come through afterwards."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ray.tune.tune import _setup_signal_catching

from muscale import interrupts
from muscale.interrupts import defer_sigint, enable_sigint, interruptible
from tests.quick import quick_and_soak


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


def test_a_later_second_signal_interrupts_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "ECHO_SECONDS", 0.2)
    reached = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        for pause in (0.0, 0.05, 0.3):
            time.sleep(pause)
            reached.append(pause)
            signal.raise_signal(signal.SIGINT)
        reached.append(1.0)
    assert reached == [0.0, 0.05, 0.3]


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


@pytest.mark.parametrize("left", ["ignored", "by a Tuner"])
def test_a_block_is_interrupted_by_the_first_signal_whatever_handler_was_left(left: str) -> None:
    def swallow(_signal: int, _frame: object) -> None:
        pytest.fail("the signal was swallowed")

    swallow.__module__ = _setup_signal_catching.__module__
    handler = signal.SIG_IGN if left == "ignored" else swallow
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), enable_sigint():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_sigterm_soon_after_the_first_is_the_same_one_and_a_later_one_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[float] = []
    monkeypatch.setattr(interrupts, "ECHO_SECONDS", 0.2)
    with interruptible(lambda: heard.append(time.monotonic())):
        for pause in (0.0, 0.05, 0.3):
            time.sleep(pause)
            signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
        for pause in (0.0, 0.05, 0.3):
            time.sleep(pause)
            signal.raise_signal(signal.SIGINT)
        assert len(heard) == 4


@pytest.mark.parametrize("which", quick_and_soak((signal.SIGINT, signal.SIGTERM), signal.SIGTERM))
def test_the_training_of_a_tokenizer_ends_at_once_with_the_process_that_it_runs_in(
    which: signal.Signals, make_study: Callable[[], Path]
) -> None:
    study = make_study()
    letters = "".join(random.Random(0).choices("ACGT", k=4_000_000))  # trains for a dozen seconds of a processor
    (study.parent / "unbroken.txt").write_text(letters)
    settings = [
        "corpus.source=unbroken.txt",
        "corpus.tokenizer=bpe",
        "model.vocab_size=4096",
        "plan.compute_flops=1e12",
    ]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    command = [sys.executable, "-m", "muscale", "check", str(study), *(f"--set={one}" for one in settings)]
    checked = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, before)
    trainers: list[psutil.Process] = []
    try:
        while not trainers or sum(trainers[0].cpu_times()[:2]) < 2:  # seconds, by which it has read the text
            assert checked.poll() is None, "it ended before it could be interrupted"
            time.sleep(0.05)
            trainers = psutil.Process(checked.pid).children()
        checked.send_signal(which)
        assert checked.wait(timeout=600) == 130
        assert not any(trainer.is_running() for trainer in trainers)
        assert not [*(study.parent / "corpus").rglob("*")]
    finally:
        checked.kill()  # nothing, if it has ended
        checked.wait()
