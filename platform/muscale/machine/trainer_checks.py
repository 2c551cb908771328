"""Short trainings with a user's training program: does it keep the protocol of docs/own_trainer.md?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from muscale.errors import TrainerError
from muscale.machine.diagnosis import Diagnosis, Finding, Status
from muscale.programs.program_family import table_of
from muscale.programs.program_process import TrainerEnd, TrainerStatus, describe, train
from muscale.programs.protocol import Description, TrainerJob

SMALL = TrainerJob(
    width=64,
    depth=2,
    hyperparameters={"learning_rate": 0.01, "weight_decay": 0.0, "batch_tokens": 1024},
    schedule=((0, 0.0), (1024, 1.0), (12288, 1.0), (16384, 0.0)),
    end=16384,
)
"""The default job."""
STALL_SECONDS = 300.0  # several times as long as a compilation takes (assumed)
_TOLERANCE = 1e-3  # relative, for losses: another order of parallel sums changes them by less (assumed)
_AXES = ("width", "depth")
_FAR = 1e6  # factor on the learning rate that makes a training diverge


class _KilledError(Exception):
    """Raised to end a training at its first row."""


def check_trainer(command: tuple[str, ...], job: TrainerJob = SMALL, stall_seconds: float = STALL_SECONDS) -> Diagnosis:
    """Describe three shapes, train one job about ten times, and compare; stop at a fault that prevents the other checks.

    Args:
        command: The program and its arguments, with {config} and {state}.
        job: A job from 0 tokens to the end of its schedule.
        stall_seconds: Longest time between two rows.
    """
    with tempfile.TemporaryDirectory(prefix="muscale-trainer-") as folder:
        return Diagnosis(findings=tuple(_Checks(command, job, stall_seconds, Path(folder)).run()))


class _Checks:
    def __init__(self, command: tuple[str, ...], job: TrainerJob, stall_seconds: float, folder: Path) -> None:
        self.command, self.job, self.stall_seconds, self.folder = command, job, stall_seconds, folder

    def run(self) -> Iterator[Finding]:
        """All findings, in order."""
        try:
            description = describe(self.command, self.job)
            yield self._describes(description)
            self.job = job = self._with_tensors(description)
            whole = self._train("whole", job)
        except TrainerError as error:
            yield Finding(what="protocol", status="fail", found=str(error), do="docs/own_trainer.md has the protocol")
            return
        if whole.loss is None:
            yield Finding(what="training", status="fail", found=whole.reason, do=_REMEDIES[whole.status])
            return
        found = f"{len(whole.rows)} rows, loss {whole.loss:.4g} at {job.end:,} tokens"
        yield Finding(what="training", status="ok", found=found)
        yield self._same("repeat", [job], whole, "derive initial values and data order from `seed` only")
        batch = int(job.hyperparameters["batch_tokens"])
        if half := job.end // batch // 2 * batch:  # segments begin and end with whole batches
            halves = [replace(job, end=half), replace(job, start=half)]
            do = "save the state of model, optimizer and data at tokens.to, and start from it; take rates from `schedule`"
            yield self._same("two segments", halves, whole, do)
        yield self._killed(whole)
        yield self._differs("seed", replace(job, seed=job.seed + 1), whole)
        rate = job.hyperparameters["learning_rate"]
        lower = {
            name: {**values, "learning_rate": values["learning_rate"] / 16} for name, values in job.tensors.items()
        }
        given = {**job.hyperparameters, "learning_rate": rate / 16}
        yield self._differs("learning_rate", replace(job, hyperparameters=given, tensors=lower), whole)
        if lower:
            yield self._differs("tensors", replace(job, tensors=lower), whole)
        yield self._differs("schedule", replace(job, schedule=tuple((at, 0.25 * f) for at, f in job.schedule)), whole)
        yield self._diverges()

    def _train(self, name: str, job: TrainerJob) -> TrainerEnd:
        return train(self.command, job, self.folder / name, stall_seconds=self.stall_seconds)

    def _with_tensors(self, description: Description) -> TrainerJob:
        """The job with the global learning rate for each tensor, for a program that takes values by tensor."""
        if self.job.tensors or not description.tensors:
            return self.job
        values = {"learning_rate": float(self.job.hyperparameters["learning_rate"])}
        return replace(self.job, tensors=dict.fromkeys(description.tensors, values))

    def _describes(self, base: Description) -> Finding:
        """Check that the description is the same when requested again, and grows with the shape."""
        if (again := describe(self.command, self.job)) != base:
            found = (
                f"one shape has {base.n_params:,} parameters, asked again {again.n_params:,}, or other FLOPs or tensors"
            )
            return Finding(
                what="describe", status="fail", found=found, do="make the description depend only on the shape's values"
            )
        grown = {
            axis: describe(self.command, replace(self.job, **{axis: 2 * getattr(self.job, axis)})) for axis in _AXES
        }
        for axis, larger in grown.items():
            size = getattr(self.job, axis)
            if larger.n_params <= base.n_params or larger.flops_per_token <= base.flops_per_token:
                found = f"{axis} {2 * size} has no more parameters and FLOPs per token than {size}"
                return Finding(what="describe", status="fail", found=found, do=f"build the model from shape.{axis}")
        found = f"{base.n_params:,} parameters, {base.flops_per_token:.3g} FLOPs per token"
        if base.tensors:
            found = f"{found}, {len(base.tensors)} tensors"
            try:
                table_of(base, base, grown["width"])
            except TrainerError as error:
                return Finding(what="describe", status="fail", found=f"{found}: {error}", do="add to `classes`")
            return Finding(what="describe", status="ok", found=found)
        do = "also return `tensors` with names and dimensions: without them muP can't transfer the learning rate"
        return Finding(what="describe", status="warning", found=f"{found}, no tensors", do=do)

    def _same(self, what: str, jobs: list[TrainerJob], whole: TrainerEnd, do: str) -> Finding:
        """Check that other ways through the same job end at the same loss."""
        try:
            ends = [self._train(what, job) for job in jobs]
        except TrainerError as error:
            return Finding(what=what, status="fail", found=str(error), do=do)
        return _compare(what, ends[-1], whole, do)

    def _killed(self, whole: TrainerEnd) -> Finding:
        """Check that a training that is killed at its first row and run again ends at the same loss."""

        def kill(tokens: int, _loss: float) -> None:
            if tokens < self.job.end:
                raise _KilledError

        what, do = "killed and resumed", "save by renaming a finished file, and start from the last saved state"
        try:
            train(self.command, self.job, self.folder / what, grace_seconds=0.0, on_row=kill)
        except _KilledError:
            return self._same(what, [self.job], whole, do)
        do = "write a row every few seconds, each with its newline, and flush it"
        return Finding(what=what, status="warning", found="only one row, so there was no time to kill it", do=do)

    def _differs(self, what: str, job: TrainerJob, whole: TrainerEnd) -> Finding:
        """Check that another value of one setting changes the loss."""
        try:
            end = self._train(f"other {what}", job)
        except TrainerError as error:
            return Finding(what=what, status="fail", found=str(error), do=_REMEDIES[TrainerStatus.FAILED])
        if end.status in (TrainerStatus.FAILED, TrainerStatus.STALLED):
            return Finding(what=what, status="fail", found=end.reason, do=_REMEDIES[end.status])
        if end.rows == whole.rows:
            return Finding(what=what, status="fail", found="another value gives the same losses", do=f"use `{what}`")
        return Finding(what=what, status="ok", found="another value gives another loss")

    def _diverges(self) -> Finding:
        """Check that a far too large learning rate is a result, not a failure."""
        rate = self.job.hyperparameters["learning_rate"] * _FAR
        tensors = {name: {**values, "learning_rate": rate} for name, values in self.job.tensors.items()}
        job = replace(self.job, hyperparameters={**self.job.hyperparameters, "learning_rate": rate}, tensors=tensors)
        try:
            end = self._train("divergence", job)
        except TrainerError as error:
            end = TrainerEnd(status=TrainerStatus.FAILED, rows={}, reason=str(error))
        if end.status in (TrainerStatus.FAILED, TrainerStatus.STALLED):
            do = 'write a row with "loss": null and exit: a failure is tried again, a divergence is a result'
            return Finding(what="divergence", status="fail", found=f"at {rate:g}: {end.reason}", do=do)
        loss = end.reason if end.loss is None else f"the loss stays finite ({end.loss:.4g})"
        return Finding(what="divergence", status="ok", found=f"at a learning rate of {rate:g} {loss}")


_REMEDIES = {
    TrainerStatus.FAILED: "write a row at tokens.to and exit with 0; the program's whole output is what its own run prints",
    TrainerStatus.STALLED: "write and flush a row at least every few minutes",
    TrainerStatus.DIVERGED: "try a job with a lower learning rate by --job FILE",
}


def _compare(what: str, end: TrainerEnd, whole: TrainerEnd, do: str) -> Finding:
    if end.loss is None or whole.loss is None:
        return Finding(what=what, status="fail", found=end.reason, do=do)
    apart = abs(end.loss - whole.loss) / max(abs(whole.loss), 1e-12)
    if apart == 0:
        return Finding(what=what, status="ok", found="the same loss to the bit")
    status: Status = "fail" if apart > _TOLERANCE else "warning"
    return Finding(what=what, status=status, found=f"the loss differs by {apart:.1g} of itself", do=do)
