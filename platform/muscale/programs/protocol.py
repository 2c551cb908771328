"""The JSON job that a training program reads, and the description and rows that it answers with (docs/own_trainer.md).

Nothing here starts a program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from muscale.errors import TrainerError, TrainingFailedError
from proxy_models.architecture.member import NATS
from proxy_models.architecture.parametrization import TensorClass

CONFIG, STATE = "{config}", "{state}"
"""Placeholders in a command for the path of the job's JSON, and for the folder of state and rows."""
ROWS = "rows.jsonl"
PROTOCOL = 1


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """One segment of a training.

    Attributes:
        width, depth: Shape of the model, in the program's own units (d_model and layers, say).
        hyperparameters: Values at this shape; `learning_rate` applies to tensors that `tensors` does not name.
        tensors: Absolute values of each named tensor, such as its `learning_rate` and `multiplier`.
        schedule: Points (tokens, factor of all learning rates); the factor is linear between points.
        start, end: Tokens that the state has seen when the segment begins and ends.
        seed: Seed of initial values and data order.
    """

    width: int
    depth: int
    hyperparameters: Mapping[str, Any]
    schedule: tuple[tuple[int, float], ...]
    end: int
    start: int = 0
    seed: int = 0
    tensors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise TrainerError(f"job: tokens.from must be at least 0 and below tokens.to, got {self.start}, {self.end}")
        if [tokens for tokens, _ in self.schedule] != sorted({tokens for tokens, _ in self.schedule}):
            raise TrainerError(f"job: schedule must ascend in tokens, got {self.schedule}")

    def to_dict(self) -> dict[str, Any]:
        """The job in the form that the program reads."""
        return {
            "protocol": PROTOCOL,
            "shape": {"width": self.width, "depth": self.depth},
            "hyperparameters": dict(self.hyperparameters),
            "tensors": {name: dict(values) for name, values in self.tensors.items()},
            "schedule": [list(point) for point in self.schedule],
            "tokens": {"from": self.start, "to": self.end},
            "seed": self.seed,
        }

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job's JSON; raise TrainerError if the file is not a job."""
        try:
            found = json.loads(path.read_text())
            return cls(
                width=int(found["shape"]["width"]),
                depth=int(found["shape"]["depth"]),
                hyperparameters=dict(found["hyperparameters"]),
                tensors={name: dict(values) for name, values in found.get("tensors", {}).items()},
                schedule=tuple((int(tokens), float(factor)) for tokens, factor in found["schedule"]),
                start=int(found["tokens"]["from"]),
                end=int(found["tokens"]["to"]),
                seed=int(found["seed"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise TrainerError(f"{path}: must be a job as described in docs/own_trainer.md; {what}") from error


@dataclass(frozen=True, kw_only=True)
class Description:
    """A program's description of one shape.

    Attributes:
        n_params: All parameters.
        n_active_params: Parameters that one token uses, without embedding tables: the N of the scaling law.
        flops_per_token: FLOPs of training: forward and backward pass.
        tensors: Name and dimensions of each tensor; empty if the program takes no values by tensor.
        classes: Classes of tensors whose class does not follow from their dimensions, above all the readout.
        loss_unit: The unit of the rows' losses, with the name of the metric unless both are the usual ones.
    """

    n_params: int
    n_active_params: int
    flops_per_token: float
    tensors: Mapping[str, tuple[int, ...]]
    classes: Mapping[str, TensorClass] = field(default_factory=dict)
    loss_unit: str = NATS

    @classmethod
    def parse(cls, output: str) -> Self:
        """Return the description in the last line that is JSON with n_params; raise TrainerError if there is no such line."""
        lines = [line for line in output.split("\n") if line.strip()]
        last = next(filter(_has_counts, reversed(lines)), lines[-1] if lines else "")
        try:
            found = json.loads(last)
            n_params, flops = found["n_params"], found["flops_per_token"]
            active = found.get("n_active_params", n_params)
            tensors = {str(name): tuple(map(int, dims)) for name, dims in found.get("tensors", {}).items()}
            named = dict(found.get("classes", {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no key {error}" if isinstance(error, KeyError) else f"got {last[:80]!r}"
            rule = "a line of --describe must be JSON with n_params and flops_per_token"
            raise TrainerError(f"{rule}; {what}") from error
        if not (type(n_params) is type(active) is int and 0 < active <= n_params):
            raise TrainerError(
                f"n_active_params must be a whole number from 1 to n_params, got {active!r} of {n_params!r}"
            )
        if not (type(flops) in (int, float) and 0 < flops < math.inf):
            raise TrainerError(f"flops_per_token must be a positive number, got {flops!r}")
        counted = sum(map(math.prod, tensors.values()))
        if tensors and counted != n_params:
            raise TrainerError(f"the tensors must add up to n_params; they have {counted:,}, n_params is {n_params:,}")
        for name, value in named.items():
            if name not in tensors or value not in (*TensorClass,):
                rule = f"classes must give tensors one of {', '.join(TensorClass)}"
                raise TrainerError(f"{rule}, got {value!r} for {name!r}")
        classes = {name: TensorClass(value) for name, value in named.items()}
        return cls(
            n_params=n_params,
            n_active_params=active,
            flops_per_token=float(flops),
            tensors=tensors,
            classes=classes,
            loss_unit=_loss_unit(found),
        )


def rows_of(path: Path, job: TrainerJob, known: int = 0) -> dict[int, float]:
    """Loss by tokens of a job's rows. Rows repeated after a resume replace earlier ones; an incomplete last line is ignored.

    A loss that is null, NaN or infinite, also as text, is returned as infinity.

    Args:
        known: Number of lines that were there before the job was started.

    Raises:
        TrainingFailedError: If a line is not a row, lies beyond the job's tokens, or has a loss that is not above 0.
    """
    rows: dict[int, float] = {}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # text may hold other line ends, like U+2028
    for number, line in enumerate(lines):
        where = f"{path}, line {number + 1}"
        try:
            row = json.loads(line)
            tokens, loss = row["tokens"], _loss(row["loss"])
        except (ValueError, KeyError, TypeError) as error:
            rule = 'must be like {"tokens": 1024, "loss": 3.2}'
            raise TrainingFailedError(f"{where}: {rule}, got {line.decode(errors='replace').strip()[:80]!r}") from error
        if isinstance(tokens, float) and tokens.is_integer():
            tokens = int(tokens)
        if type(tokens) is not int or not 0 <= tokens <= job.end:
            rule = f"tokens must be a whole number up to tokens.to = {job.end:,}"
            raise TrainingFailedError(f"{where}: {rule}, got {tokens!r}")
        if loss <= 0:
            rule = "loss must be above 0, because searches and laws take its logarithm"
            raise TrainingFailedError(f"{where}: {rule}; got {loss:g}; report a positive metric where lower is better")
        if tokens < job.start and number >= known:
            raise TrainingFailedError(
                f"{where}: a segment must begin at tokens.from = {job.start:,}, got a row at {tokens:,}"
            )
        while rows and next(reversed(rows)) >= tokens:  # a restarted program writes these again
            rows.popitem()
        rows[tokens] = loss
    return rows


def _loss_unit(found: Mapping[str, Any]) -> str:
    """The unit of a description's losses, never a bare "bits per token"; raises TrainerError if `metric` or `unit` is no text."""
    for name in ("metric", "unit"):
        if name in found and not (isinstance(found[name], str) and found[name].strip()):
            raise TrainerError(
                f"{name} of --describe must be a text, got {found[name]!r}; leave it out where it is not known"
            )
    metric, unit = found.get("metric", "loss"), found.get("unit", NATS)
    if (metric, unit) == ("loss", NATS):
        return NATS
    return f"{unit} of {metric}" if "unit" in found else str(metric)


def _has_counts(line: str) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and "n_params" in found


def _loss(value: Any) -> float:
    """Return a row's loss, infinity if it is not a finite number; the only texts accepted are names of such values."""
    loss = math.inf if value is None else float(value)
    if isinstance(value, bool | str) and math.isfinite(loss):
        raise ValueError(f"loss must be a number, got {value!r}")
    return loss if math.isfinite(loss) else math.inf


def fill(command: tuple[str, ...], config: Path, state: Path) -> list[str]:
    """Return a command with its paths filled in, for no shell; raise TrainerError if it lacks program, {config} or {state}."""
    for name in (CONFIG, STATE):
        if not any(name in word for word in command[1:]):
            raise TrainerError(f"a trainer's command must have an argument with {name}, got {list(command)}")
    return [word.replace(CONFIG, str(config)).replace(STATE, str(state)) for word in command]
