"""A training that takes no step ends its process and reports its stack; one that is slow, or was stopped itself, continues."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muscale.actors import stalls
from muscale.actors.stalls import ended_where_stalled
from muscale.layout import STALLS

HANGS = """
import sys, time
from pathlib import Path
from muscale.actors.stalls import ended_where_stalled

def waiting_for_a_disk():
    time.sleep(3600)

with ended_where_stalled(Path(sys.argv[1]), 1.0, "segment abc") as moves:
    for _ in range(20):
        time.sleep(0.1)
        moves()
    print("came this far", flush=True)
    waiting_for_a_disk()
"""


def test_a_process_that_hangs_is_ended_and_its_stack_is_kept(tmp_path: Path) -> None:
    began, path = time.time(), tmp_path / STALLS / "abc.txt"
    done = subprocess.run([sys.executable, "-c", HANGS, str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "came this far\n"
    report = path.read_text()
    assert report.startswith("segment abc took no step for 1 s, and its process ")
    assert "in waiting_for_a_disk" in report
    assert str(path) in stalls.hint(tmp_path, began - 1)
    assert stalls.hint(tmp_path, time.time() + 1) == ""


def test_a_process_that_hangs_is_ended_also_where_its_stack_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / STALLS).write_text("in the way of the folder")
    command = [sys.executable, "-c", HANGS, str(tmp_path / STALLS / "abc.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "came this far\n"


def test_time_in_which_the_process_itself_was_stopped_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "abc.txt"
    stopped = subprocess.Popen([sys.executable, "-c", HANGS, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert stopped.stdout
        assert stopped.stdout.readline() == "came this far\n"
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(3)
        stopped.send_signal(signal.SIGCONT)
        time.sleep(0.3)  # of the second that is allowed
        assert stopped.poll() is None
        assert stopped.wait(timeout=600) == -signal.SIGKILL
    finally:
        stopped.kill()
        stopped.communicate()


def test_without_a_limit_or_at_an_error_nobody_is_ended(tmp_path: Path) -> None:
    with ended_where_stalled(tmp_path / "a.txt", float("inf"), "it") as moves:
        moves()
    with pytest.raises(OSError, match="gone"), ended_where_stalled(tmp_path / "a.txt", 0.2, "it"):
        raise OSError("gone")
    time.sleep(0.5)
    assert not list(tmp_path.iterdir())
