"""Tasks of lm-evaluation-harness, loaded from local files, and the scores of their items."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from proxy_models.data.cleaning.cleaning_step import MissingLibraryError
from proxy_models.evaluation.smooth_scores import Bits, bits_per_byte, choice_scores
from proxy_models.evaluation.task_files import TaskFile
from proxy_models.evaluation.task_model import TaskModel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

_REPLACED = {"acc", "bits_per_byte", "brier_score", "bypass"}
"""Metrics of lm-eval for which there are scores here; `brier_score` fails on different numbers of choices."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item of a task under a model.

    Attributes:
        number: Number of the item in its task, from 0.
        values: Value of each metric, as the metric's aggregation takes it.
    """

    number: int
    values: Mapping[str, Any]


def version() -> str:
    """Return the version of lm-evaluation-harness; raise MissingLibraryError if it is not installed."""
    try:
        return metadata.version("lm_eval")
    except metadata.PackageNotFoundError as error:
        raise MissingLibraryError(
            "tasks: need the library lm_eval, which is not installed: pip install 'muscale[scores]'"
        ) from error


@cache
def _compile_templates_once() -> None:
    """Make lm-eval compile each template once; it compiles it for every item and choice, which takes most of the time."""
    from lm_eval.utils import env

    env.from_string = cache(env.from_string)


@contextmanager
def loaded(files: Mapping[str, TaskFile], *, seed: int) -> Iterator[dict[str, ConfigurableTask]]:
    """Load tasks with their data; what the datasets library writes goes into a temporary folder.

    Args:
        seed: Seed of the examples that a task puts into its contexts.

    Raises:
        MissingLibraryError: If lm-evaluation-harness is not installed.
        ValueError: If a metric is unknown to it, which it would look for on the internet, or it can't load a task.
    """
    version()
    import lm_eval.api.metrics  # noqa: F401, registers the metrics
    from lm_eval.api.registry import metric_registry
    from lm_eval.tasks import TaskManager

    with TemporaryDirectory(prefix="tasks-") as cache, _offline():
        manager = TaskManager(include_path=[*{file.folder for file in files.values()}], include_defaults=False)
        tasks = {}
        for name, file in files.items():
            if odd := [metric for metric in file.metrics if metric not in metric_registry]:
                raise ValueError(f"{file.path}: metric_list must name metrics of lm-eval, got {', '.join(odd)}")
            data = {**file.config["dataset_kwargs"], "data_files": file.data_files, "cache_dir": cache}
            changed = {"group": name, "task": [{"task": name, "dataset_kwargs": data}]}
            try:
                with redirect_stderr(io.StringIO()):  # progress bars
                    task = manager.load([changed])["tasks"][name]
            except Exception as error:
                raise ValueError(
                    f"{file.path}: lm-eval can't load this task ({type(error).__name__}: {error})"
                ) from error
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(seed)
            tasks[name] = task
        yield tasks


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the libraries from downloading, whatever a task's own functions ask them for."""
    import datasets.config
    import huggingface_hub.constants

    switches = [
        (module, name)
        for module in (datasets.config, huggingface_hub.constants)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
        if hasattr(module, name)
    ]
    before = [getattr(module, name) for module, name in switches]
    for module, name in switches:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)


def scored_items(task: ConfigurableTask, model: TaskModel, limit: int | None) -> list[Item]:
    """Ask a model for all items of a task, or the first `limit` ones, and score them.

    Raises:
        ValueError: If lm-eval can't read an item, an item has no right answer, or a text has no token.
    """
    _compile_templates_once()
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar
            task.build_all_requests(limit=limit)
    except Exception as error:
        raise ValueError(f"lm-eval can't make the requests ({type(error).__name__}: {error})") from error
    asked = [instance for instance in task.instances for _ in range(instance.repeats)]
    for instance, response in zip(asked, getattr(model, asked[0].request_type)(asked), strict=True):
        instance.resps.append(response)
    task.apply_filters()
    by_item: defaultdict[int, list[Instance]] = defaultdict(list)
    for instance in sorted(task.instances, key=lambda instance: instance.idx):
        by_item[instance.doc_id].append(instance)
    likeliest = _target_bits(task, model, by_item) if task.OUTPUT_TYPE == "generate_until" else {}
    return [
        Item(number=number, values=_smooth(task, instances) | likeliest.get(number, {}) | _own(task, instances))
        for number, instances in sorted(by_item.items())
    ]


def _smooth(task: ConfigurableTask, instances: list[Instance]) -> dict[str, Any]:
    """Scores of an item from its log-likelihoods."""
    first = instances[0]
    if task.OUTPUT_TYPE == "multiple_choice":
        instances = instances[: len(task.doc_to_choice(first.doc))]  # some metrics ask for choices without context
        sizes = [_n_bytes(task, instance.args[1]) for instance in instances]
        return choice_scores([instance.resps[0][0] for instance in instances], sizes, _right(task, first.doc))
    if task.OUTPUT_TYPE == "loglikelihood":
        nats, is_greedy = first.resps[0]
        return {
            "bits_per_byte": bits_per_byte(nats, _n_bytes(task, first.args[1])),
            "accuracy": float(is_greedy),
        }
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        n_bytes = len(first.args[0].encode())
        return {"bits_per_byte": Bits(bits_per_byte(first.resps[0], n_bytes) * max(1, n_bytes), n_bytes)}
    return {}


def _target_bits(
    task: ConfigurableTask, model: TaskModel, by_item: Mapping[int, list[Instance]]
) -> dict[int, dict[str, float]]:
    """Bits per byte of each generation item's most likely target."""
    asked = [(n, target) for n, instances in by_item.items() for target in _targets(task, instances[0].doc)]
    delimiter = task.config.target_delimiter
    found = model.continuations([(by_item[n][0].args[0], delimiter + target) for n, target in asked])
    best: dict[int, tuple[float, int]] = {}
    for (n, target), one in zip(asked, found, strict=True):
        best[n] = max(best.get(n, (one.nats, len(target.encode()))), (one.nats, len(target.encode())))
    return {n: {"bits_per_byte": bits_per_byte(*likeliest)} for n, likeliest in best.items()}


def _own(task: ConfigurableTask, instances: list[Instance]) -> dict[str, Any]:
    """Values of the task's other metrics, with each filter."""
    if not task.config.process_results and not set(task.aggregation()) - _REPLACED:
        return {}
    values: dict[str, Any] = {}
    for name in instances[0].filtered_resps:
        results = task.process_results(instances[0].doc, [instance.filtered_resps[name] for instance in instances])
        suffix = "" if name == "none" else f",{name}"
        values |= {f"{metric}{suffix}": value for metric, value in results.items() if metric not in _REPLACED}
    return values


def _n_bytes(task: ConfigurableTask, continuation: str) -> int:
    return len(continuation.removeprefix(task.config.target_delimiter).encode())


def _right(task: ConfigurableTask, doc: Any) -> list[int]:
    """Numbers of the right choices."""
    choices = task.doc_to_choice(doc)
    given = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    listed = given if isinstance(given, list) else [int(given) if isinstance(given, bool) else given]
    right = [choices.index(one) if one in choices else one for one in listed]
    if not right or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < len(choices) for one in right
    ):
        raise ValueError(f"doc_to_target must give texts or numbers of the {len(choices)} choices, got {given!r}")
    if len({*right}) < len(right):
        raise ValueError(
            f"doc_to_target must name each right choice once, got {given!r}; marks of all choices are no numbers"
        )
    return right


def _targets(task: ConfigurableTask, doc: Any) -> list[str]:
    """Right answers of an item."""
    if task.OUTPUT_TYPE == "multiple_choice" and not task.multiple_input:
        return [task.doc_to_choice(doc)[number] for number in _right(task, doc)]
    given = task.doc_to_target(doc)
    if isinstance(given, int) and task.config.doc_to_choice is not None:
        given = task.doc_to_choice(doc)[given]
    return [str(one) for one in given] if isinstance(given, list) else [str(given)]


def item_texts(task: ConfigurableTask, limit: int | None) -> dict[int, str]:
    """Return each item's question with its right answer, without examples, by the item's number."""
    texts = {}
    for number, doc in task.doc_iterator(limit=limit):
        question = "" if task.OUTPUT_TYPE == "loglikelihood_rolling" else task.doc_to_text(doc)
        if isinstance(question, int):  # the choices are the questions
            question = task.doc_to_choice(doc)[question]
        texts[number] = " ".join([question, _targets(task, doc)[0]])
    return texts
