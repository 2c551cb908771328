"""What a log says of a stage."""

import pytest

from muscale.formatting import format_duration
from muscale.progress import Display, Pace


def test_a_log_has_a_line_for_every_tenth_of_each_pass_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with Display().stage("sweep") as update:
        for done in range(1, 41):
            update(done, 40, "trials")
        for done in (20, 21):
            update(done, 21, "annealed")
        update(31, 60, "a further round")
        update(36, 60, "a further round")
        update(30, 60, "again")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 + 5
    assert lines[:2] == ["sweep     1 of 40  trials", "sweep     4 of 40  trials"]
    assert lines[11:] == [
        "sweep     20 of 21  annealed",
        "sweep     21 of 21  annealed",
        "sweep     31 of 60  a further round",
        "sweep     36 of 60  a further round",
        "sweep     30 of 60  again",
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
