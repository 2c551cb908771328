"""Notices of preemption: each signal is heard, and a second Ctrl-C interrupts."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muscale.full_runs.records import preemption
from muscale.full_runs.records.preemption import NOTICE, PreemptionNotice


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    yield
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_notice(which: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "ECHO_SECONDS", 0.2)
    notice = PreemptionNotice(tmp_path)
    notice.listen()
    assert not notice()
    signal.raise_signal(which)
    assert notice()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # an echo, as of a wrapper that passes a group's signal on
    time.sleep(0.3)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / NOTICE).touch()
    assert PreemptionNotice(tmp_path)()
