"""What a log says of a stage."""

import threading
from pathlib import Path

import pytest

from muscale.formatting import format_duration
from muscale.progress import Display, Pace, following


def test_a_log_has_a_line_for_every_tenth_of_each_pass_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Display(clock=clock).stage("sweep") as update:

        def step(done: float, total: float, note: str) -> None:
            clock.now += 1.0
            update(done, total, note)

        for done in range(1, 41):
            step(done, 40, "trials")
        for done in (20, 21):
            step(done, 21, "annealed")
        for done in (31, 36):
            step(done, 60, "a further round")
        step(30, 60, "again")
    lines = [line.split(", ")[0] for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 11 + 5
    assert lines[:2] == ["sweep     1 of 40  trials", "sweep     4 of 40  trials"]
    assert lines[11:] == [
        "sweep     20 of 21  annealed",
        "sweep     21 of 21  annealed",
        "sweep     31 of 60  a further round",
        "sweep     36 of 60  a further round",
        "sweep     30 of 60  again",
    ]


def test_the_time_left_of_a_run_does_not_count_its_start(tmp_path: Path) -> None:
    metrics, clock, seen = tmp_path / "metrics.jsonl", Clock(), threading.Event()
    pace, looks = Pace(clock), []

    def update(done: float, total: float, note: str, *, share: float | None = None) -> None:
        clock.now += 100.0 if not done else 10.0  # slow to start
        pace.update(done, total)
        looks.append(done)
        if len(looks) == 3:
            metrics.write_text('{"tokens": 100, "train_loss": 2.0}\n')
        elif done:
            seen.set()

    with following(metrics, 1000, update):
        assert seen.wait(30)
    assert looks[:4] == [0, 0, 0, 100]
    assert pace.left is not None
    assert pace.left <= 9 * 10.0


def test_what_is_over_within_a_second_is_two_lines_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(clock=Clock()).stage("corpus") as update:
        for done in range(1, 41):
            update(done, 40, "bytes read")
    assert capsys.readouterr().err.splitlines() == ["corpus    1 of 40  bytes read", "corpus    40 of 40  bytes read"]


def test_runs_of_different_size_are_counted_and_their_compute_tells_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Display(clock=clock).stage("ladder") as update:
        update(0, 4, "runs; waiting for workers", share=0.0)
        clock.now = 50.0  # they start, which is no part of the pace
        update(0, 4, "runs; training", share=0.0)
        clock.now = 110.0
        update(1, 4, "runs", share=0.5)
        clock.now = 170.0
        update(3, 4, "runs", share=0.8)
        clock.now = 200.0
        update(4, 4, "runs", share=1.0)
    assert capsys.readouterr().err.splitlines() == [
        "ladder    0 of 4  runs; waiting for workers",
        "ladder    1 of 4  runs, 60 s left",
        "ladder    3 of 4  runs, 30 s left",
        "ladder    4 of 4  runs",
    ]


def test_a_quiet_display_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(quiet=True).stage("sweep") as update:
        update(1, 2, "trials")
    assert capsys.readouterr().err == ""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_the_pace_of_each_way() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.left is None
    pace.update(10, 40)  # known already, and no sign of how fast it goes
    assert pace.left is None
    clock.now = 100.0
    pace.update(20, 40)
    assert pace.left == pytest.approx(200.0)
    clock.now = 150.0
    assert pace.left == pytest.approx(150.0), "it runs on between two updates, however long they are apart"
    clock.now = 1000.0
    assert pace.left == 0.0
    pace.update(0, 5)
    assert pace.left is None, "another way has its own pace"


def test_a_log_shows_the_time_left_where_it_is_long_enough(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Display(clock=clock).stage("sweep") as update:
        for done in range(5):
            clock.now = 600.0 * done
            update(done, 4, "trials")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "sweep     0 of 4  trials",
        "sweep     1 of 4  trials, 30 min left",
        "sweep     2 of 4  trials, 20 min left",
        "sweep     3 of 4  trials, 10 min left",
        "sweep     4 of 4  trials",
    ]


def test_what_is_known_already_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Display(clock=clock).stage("sweep") as update:
        update(24, 24, "annealed")
        clock.now = 30.0
        update(9, 9, "finalists repeated")
    assert capsys.readouterr().err.splitlines() == ["sweep     9 of 9  finalists repeated"]


def test_durations_are_formatted_in_a_fitting_unit() -> None:
    assert [format_duration(seconds) for seconds in (3.4, 89, 91, 5300, 5401, 12_000)] == [
        "3 s",
        "89 s",
        "2 min",
        "88 min",
        "1 h 30 min",
        "3 h 20 min",
    ]
