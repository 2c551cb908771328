"""What a log says of a stage."""

import pytest

from muscale.progress import Display


def test_a_log_tells_every_tenth_of_each_way_that_a_stage_goes(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_quiet_display_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(quiet=True).stage("sweep") as update:
        update(1, 2, "trials")
    assert capsys.readouterr().err == ""
