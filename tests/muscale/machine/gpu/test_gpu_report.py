"""The report's table: aligned by its numbers, whatever the length of a reason."""

from muscale.machine.gpu.gpu_report import Check, GpuReport


def test_a_long_reason_does_not_widen_the_table() -> None:
    checks = (
        Check(what="losses", status="pass", found="1.0e-04 off", bound="≤ 0.001", value=1e-4),
        Check(what="memory", status="fail", found="rank 0: " + 99 * "x", bound="trains to its end"),
        Check(what="MFU", status="skipped", found="no prediction"),
    )
    report = GpuReport(machine={}, checks=checks, trainings=())
    first, second, third, last = str(report).splitlines()
    assert first == "pass     losses  1.0e-04 off  ≤ 0.001"
    assert second.endswith(99 * "x" + "  trains to its end")
    assert third == "skipped  MFU     no prediction"
    assert last == "pass: 1, fail: 1, skipped: 1"
    assert not report.passed
