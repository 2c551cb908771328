"""Folders of tasks for lm-evaluation-harness: YAML files and the data next to them, from which nothing is ever downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proxy_models.hashing import file_sha256

LOADERS = ("csv", "json", "parquet", "text")
"""Values of `dataset_path`: loaders of the datasets library that read local files."""
_REFUSED = {
    "class": "a task in Python loads its own data",
    "custom_dataset": "a task must load its data from files",
    "use_prompt": "its prompts would be downloaded",
    "unsafe_code": "generated programs are not run",
    "doc_to_image": "the models read text only",
    "doc_to_audio": "the models read text only",
}


class Function(str):
    """Name of a Python function in a YAML file, as `module.function`."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which `!function` is a name."""


_Loader.add_constructor("!function", lambda loader, node: Function(loader.construct_scalar(node)))


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """A task in a folder.

    Attributes:
        folder: Folder of all tasks.
        path: YAML file of the task.
        config: Its content, with that of the files it includes.
        sources: The YAML file, the files it includes, and the Python files of its functions.
    """

    folder: Path
    path: Path
    config: Mapping[str, Any]
    sources: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Name of the task."""
        return str(self.config["task"])

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that lm-eval must know; the task's own functions are not among them."""
        if self.config.get("process_results"):
            return []
        names = [metric["metric"] for metric in self.config.get("metric_list") or ()]
        return [name for name in names if not isinstance(name, Function)]

    @property
    def data_files(self) -> dict[str, list[str]]:
        """Absolute paths of the data files of each split; relative ones are relative to the YAML file.

        Raises:
            ValueError: If there are none, or a file does not exist.
        """
        given = (self.config.get("dataset_kwargs") or {}).get("data_files")
        by_split = given if isinstance(given, dict) else {"train": given}
        found = {split: [files] if isinstance(files, str) else files or [] for split, files in by_split.items()}
        for name in [name for names in found.values() for name in names] or [None]:
            if name is None or "://" in name or not (self.path.parent / name).is_file():
                raise ValueError(
                    f"{self.path}: dataset_kwargs.data_files must name files that exist, by paths relative to this file, "
                    f"since nothing is downloaded; got {name or given!r}"
                )
        return {split: [str(self.path.parent / name) for name in names] for split, names in found.items()}

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each source and data file, by its path in the folder."""
        data = [Path(name) for names in self.data_files.values() for name in names]
        return {self._short(path): file_sha256(path) for path in (*self.sources, *data)}

    def _short(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix() if path.is_relative_to(self.folder) else path.name

    def require_local(self) -> None:
        """Require a task that needs only local files; raise ValueError naming the file, the key and the value."""
        for key, why in _REFUSED.items():
            if value := self.config.get(key):
                raise ValueError(f"{self.path}: {key} must not be set, since {why}; got {value!r}")
        if (loader := self.config.get("dataset_path")) not in LOADERS:
            raise ValueError(
                f"{self.path}: dataset_path must be one of {', '.join(LOADERS)}, since nothing is downloaded; got {loader!r}"
            )
        if any(metric.get("hf_evaluate") for metric in self.config.get("metric_list") or ()):
            raise ValueError(
                f"{self.path}: metric_list: hf_evaluate must not be set, since it would download the metric"
            )
        _ = self.data_files


def read_tasks(folder: Path, names: Sequence[str] | None = None) -> dict[str, TaskFile]:
    """Return tasks of a folder and its subfolders by name.

    Args:
        names: Names of tasks; None: all.

    Raises:
        ValueError: If the folder, a file or a task is missing, or a task needs more than local files.
    """
    folder = folder.resolve()
    found: dict[str, TaskFile] = {}
    for path in sorted(folder.rglob("*.yaml")):
        sources: list[Path] = []
        config = _read(path, sources)
        if "group" in config or not isinstance(config.get("task"), str):
            continue  # groups, and what tasks include
        task = TaskFile(folder=folder, path=path, config=config, sources=tuple(dict.fromkeys(sources)))
        if same := found.get(task.name):
            raise ValueError(f"{path}: a task's name must be unique, {same.path} has {task.name!r}, too")
        found[task.name] = task
    if not found:
        raise ValueError(f"{folder}: no task; a task is a *.yaml file with the key `task`")
    if missing := [name for name in names or () if name not in found]:
        raise ValueError(f"{folder}: tasks must be among {', '.join(found)}; got {', '.join(missing)}")
    chosen = {name: found[name] for name in (found if names is None else names)}
    for task in chosen.values():
        task.require_local()
    return chosen


def _read(path: Path, sources: list[Path]) -> dict[str, Any]:
    """Content of a file and of the files that it includes; adds them and the files of their functions to the sources."""
    if path in sources:
        raise ValueError(f"{path}: include must not lead back to the same file")
    sources.append(path)
    try:
        config = yaml.load(path.read_bytes(), _Loader)  # noqa: S506, a subclass of the safe loader
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: can't be read as YAML ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a table of keys, got {config!r}")
    modules = [path.parent / f"{name.rpartition('.')[0].replace('.', '/')}.py" for name in _functions(config)]
    sources += [module for module in modules if module.is_file()]
    included = config.pop("include", ())
    merged: dict[str, Any] = {}
    for name in [included] if isinstance(included, str) else included:
        merged |= _read((path.parent / name).resolve(), sources)
    return merged | config


def _functions(value: Any) -> Iterator[Function]:
    if isinstance(value, Function):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _functions(one)
