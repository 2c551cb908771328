"""Scores of tasks of lm-evaluation-harness: multiple choice, generation and likelihood, from local folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from proxy_models.evaluation.harness import Item, loaded, scored_items, version
from proxy_models.evaluation.measure import Measured, Score, Subject
from proxy_models.evaluation.smooth_scores import CONTAMINATED, TASKS, Bits, Summary, mean, ratio
from proxy_models.evaluation.task_files import TaskFile, read_tasks
from proxy_models.evaluation.task_model import TaskModel
from proxy_models.hashing import content_key

SCORING = 1
"""Version of the computation. Raise it with any change after which the same weights get other scores beyond rounding."""
LM_EVAL_SEED = 1234
"""Seed with which lm-eval draws the examples in contexts by default."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Tasks of a folder as a measure: bits per byte of the right answer, its probability, accuracy, and the tasks' own metrics.

    A killed measurement continues with the requests that had no result. Items that occur in the training text are scored apart, under
    the task's name with `CONTAMINATED`; the task's name alone then means the other items.

    Attributes:
        folder: Folder of YAML files, each with the data files that it names.
        names: Names of tasks; None: all tasks of the folder.
        limit: The first items of each task; None: all.
        seed: Seed of the examples in contexts and of sampled texts.
        contaminated: Numbers of the items that occur in the training text, by task, as `contaminated_items` returns them; None: the
            training text was not searched.
    """

    name: ClassVar[str] = TASKS

    folder: Path
    names: tuple[str, ...] | None = None
    limit: int | None = None
    seed: int = LM_EVAL_SEED
    contaminated: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ValueError(f"tasks: folder must be a folder of YAML files, got {self.folder}")
        if self.names == ():
            raise ValueError("tasks: names must name a task, or be left out for all tasks of the folder, got ()")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"tasks: limit must be at least 1, got {self.limit}")

    @property
    def files(self) -> dict[str, TaskFile]:
        """Files of the tasks by name; raises ValueError if the folder lacks a task, or a task needs more than local files."""
        return read_tasks(self.folder, self.names)

    @property
    def key(self) -> str:
        """Hash of the tasks' files, the settings and the version of lm-eval."""
        return content_key(
            {
                "files": {name: file.hashes for name, file in self.files.items()},
                "limit": self.limit,
                "seed": self.seed,
                "contaminated": {name: sorted(found) for name, found in (self.contaminated or {}).items() if found},
                "lm_eval": version(),
                "scoring": SCORING,
            }
        )

    def measure(self, subject: Subject) -> Measured:
        """Score a model on every task.

        Raises:
            MissingLibraryError: If lm-evaluation-harness is not installed.
            ValueError: If a task or one of its items can't be used.
        """
        model = TaskModel(subject, subject.log(f"{self.name}-{SCORING}"), seed=self.seed)
        scores: list[Score] = []
        with loaded(self.files, seed=self.seed) as tasks:
            for name, task in tasks.items():
                known = set((self.contaminated or {}).get(name, ()))
                try:
                    items = scored_items(task, model, self.limit)
                    clean, apart = ([one for one in items if (one.number in known) == side] for side in (False, True))
                    scores += self._scores(name, clean, task.aggregation())
                    scores += self._scores(f"{name}{CONTAMINATED}", apart, task.aggregation())
                except ValueError as error:
                    raise ValueError(f"task {name}: {error}") from error
        return Measured(scores=tuple(scores))

    def _scores(self, title: str, items: Sequence[Item], aggregations: Mapping[str, Callable[..., Any]]) -> list[Score]:
        scores = []
        for metric in dict.fromkeys(metric for item in items for metric in item.values):
            values = [item.values[metric] for item in items if metric in item.values]
            value, error = _summary(values, aggregations.get(metric.partition(",")[0]))
            scores.append(
                Score(measure=self.name, name=title, metric=metric, value=value, standard_error=error, n=len(values))
            )
        return scores


def _summary(values: Sequence[Any], aggregation: Callable[..., Any] | None) -> Summary:
    """Number over items: a mean, or what the metric's own aggregation gives."""
    if isinstance(values[0], Bits):
        return ratio(values)
    is_mean = aggregation is None or getattr(aggregation, "__name__", "") == "mean"
    if is_mean and all(isinstance(value, Real) for value in values):
        return mean([float(value) for value in values])
    if aggregation is None or is_mean:
        raise ValueError(f"a metric whose mean is taken must have numbers, got {values[0]!r}")
    try:
        return float(aggregation(values)), None
    except OverflowError:  # a perplexity
        return math.inf, None
