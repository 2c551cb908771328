"""The protocol's checks find what is wrong with a training program, and nothing in one that keeps it; each is a real process."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muscale.machine.trainer_checks import SMALL, STALL_SECONDS, _Checks, check_trainer
from muscale.programs.protocol import TrainerJob
from tests.muscale.command_lines import json_output, muscale

PROGRAM = Path(__file__).parents[1] / "training_program.py"
JOB = replace(SMALL, width=4)
FAULTS = {
    "chatter": ("protocol", "no describe here"),
    "miscounts": ("protocol", "add up to n_params"),
    "names no readout": ("describe", "no readout"),
    "one depth": ("describe", "depth 4 has no more parameters"),
    "counts anew": ("describe", ""),
    "negative": ("protocol", "rows.jsonl, line 1"),
    "prose": ("protocol", "rows.jsonl, line 1"),
    "silent": ("training", "without a row at tokens.to"),
    "crashes": ("training", "MemoryError: out of memory"),
    "random": ("repeat", "differs"),
    "saves nothing": ("two segments", "must begin at tokens.from = 8,192, got a row at 1,024"),
    "ignores seed": ("seed", "the same losses"),
    "ignores tensors": ("tensors", "the same losses"),
    "own schedule": ("schedule", "the same losses"),
    "exits on divergence": ("divergence", "loss is too large"),
}


def command(fault: str) -> tuple[str, ...]:
    return (sys.executable, "-S", str(PROGRAM), fault, "{config}", "{state}")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_program_is_found(fault: str, tmp_path: Path) -> None:
    what, message = FAULTS[fault]
    checks = _Checks(command(fault), JOB, STALL_SECONDS, tmp_path).run()
    found = next(finding for finding in checks if finding.what == what)  # the checks after it take seconds
    assert found.status == "fail"
    assert message in found.found
    assert found.do


def test_a_program_that_keeps_the_protocol_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB.to_dict()))
    assert TrainerJob.read(path) == JOB
    program = shlex.join(command("none"))
    found = json_output(capfd, "doctor", "--trainer", program, "--job", path)
    assert {finding["status"] for finding in found["findings"]} == {"ok"}
    assert len(found["findings"]) == 10
    path.write_text("{}")
    refused = muscale(capfd, "doctor", "--trainer", program, "--job", path)
    assert refused.code == 2
    assert "must be a job" in refused.err
    assert f"running {program}" in refused.err


def test_segments_of_an_odd_number_of_batches_meet_between_two(tmp_path: Path) -> None:
    batch = JOB.hyperparameters["batch_tokens"]
    job = replace(JOB, end=15 * batch)
    checks = _Checks(command("none"), job, STALL_SECONDS, tmp_path).run()
    found = next(finding for finding in checks if finding.what == "two segments")
    assert found.status == "ok"


@pytest.mark.soak
def test_the_documented_loop_passes() -> None:
    loop = Path(__file__).parents[3] / "docs" / "own_trainer.py"
    found = check_trainer((sys.executable, str(loop), "--config", "{config}", "--state", "{state}"))
    assert {finding.status for finding in found.findings} == {"ok"}
