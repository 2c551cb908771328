"""A thread next to a block ends with the block, also if the block raises."""

import threading

import pytest

from muscale.background import in_background


def test_the_thread_has_ended_when_the_block_has() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(done: threading.Event) -> None:
        begun.set()
        done.wait()
        ended.set()

    with pytest.raises(ValueError, match="from the block"), in_background(work, "test"):
        assert begun.wait(10)
        assert not ended.is_set()
        assert "test" in {thread.name for thread in threading.enumerate()}
        raise ValueError("from the block")
    assert ended.is_set()
    assert "test" not in {thread.name for thread in threading.enumerate()}
