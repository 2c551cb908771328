"""The plan as a TOML file to read, compare and share, made from the plan registered in the ledger.

The ledger decides what a run computes: an edit of such a value in the file is refused with its key. Only [resources] may be
edited, since it describes how the run is executed. Comments, order and white space may change too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pydantic
import tomlkit
from tomlkit.items import Table

from muscale.errors import StageError
from muscale.layout import PLANS
from muscale.plans.plan import Plan, format_decision
from muscale.settings.config import StudyConfig
from muscale.settings.cross_field_rules import cross_field_errors
from muscale.settings.promote import PromoteSettings
from muscale.settings.strict import StrictTable, lists_to_tuples, rule_of, short_repr
from muscale.settings.tables import ResourceSettings
from muscale.settings.toml_file import inline, read_toml
from muscale.store.ledger import Ledger
from proxy_models.files import write_text

EDITABLE = "resources"
DIGEST = "sha256"
# not registered: values of the day when the file was written
_INFORMATIVE = (DIGEST, "study", EDITABLE, "cost", "decision")
_OF_THE_RUN = ("precision", "seed", "on_spike", "spike_threshold", "spike_margin_tokens", "rewarm_tokens")
"""Settings of [promote] that change what is computed, and so belong to the plan."""
_OF_SEARCHES = ("workers", "ranks_per_trial")  # in [resources] of the study file
_TITLES = {
    "run": "Size of the run. N does not count the embedding table; compute is 6·N·D.",
    "data": "Hashes of the corpus and its tokenizer; `muscale promote` compares them.",
    "model": "Shape of the full-size model.",
    "hyperparameters": "At the base shape, which the parametrization carries to the model above; rules: what took each value here.\n"
    "To state one for this run alone: `muscale plan --set plan.explicit.NAME=VALUE`, which makes another plan.",
    EDITABLE: "Machines to train on. This table may be edited; a key that is removed gets the study file's value.",
    "cost": "Estimated on the day the file was written; prices are assumed unless the study file sets them.",
    "forecast": "Registered forecast of the final annealed validation loss. If the loss along the run is forecast too, `along` has\n"
    "its points: tokens, loss, low, high.",
    "decision": "Reasons for this size.",
}
_Contents = dict[str, Any]


def path_of(directory: Path, key: str) -> Path:
    """Return the path of a plan's file in a study's directory."""
    return directory / PLANS / f"{key}.toml"


def contents(plan: Plan, config: StudyConfig, *, along: Sequence[Mapping[str, float]] = ()) -> _Contents:
    """Return the tables of the file as plain values; None is left out, since TOML has no null.

    Args:
        config: Study settings, for the resources and costs.
        along: Forecast along the run: rows of `tokens`, `loss`, `low` and `high`.
    """
    decision = plan.decision
    forecast = {name: value for name, value in plan.forecast.to_dict().items() if name not in ("n_params", "n_tokens")}
    # Keep six digits: another machine's exponential may differ in the last one.
    points = [{name: n if name == "tokens" else float(f"{n:.6g}") for name, n in point.items()} for point in along]
    hyperparameters = {
        one.name: {"value": one.value, "rules": list(one.rules), "source": one.source, "rule": plan.rules.get(one.name)}
        for one in plan.provenance
    }
    tables = {
        "plan": plan.key,
        "study": config.name,
        "registered_at": plan.registered_at,
        "run": {
            **{name: getattr(plan, name) for name in ("n_tokens", "seed", "precision", "n_params", "compute_flops")},
            "compute_optimal_n_params": plan.wanted_n_params,
            **plan.spike_handling,
        },
        "data": plan.data,
        "model": plan.model.to_dict(),
        "hyperparameters": hyperparameters,
        EDITABLE: _resources(config),
        "cost": {name: decision.get(name) for name in ("budget", "cost", "gpu_hours", "dollars", "days")}
        | {"accelerator": config.plan.accelerator, "n_devices": config.plan.n_devices},
        "forecast": forecast | ({"along": points} if points else {}),
        "decision": {"summary": format_decision(plan.decision)},
    }
    plain: _Contents = _without_none(json.loads(json.dumps(tables)))
    return plain


def text(values: _Contents) -> str:
    """Return the file's text: `contents` with its hash and comments."""
    head = [
        f"# The full run of study {values['study']}, written by `muscale plan`.",
        f"# `muscale promote --plan {values['plan']}` trains it, --dry-run shows what it would do.",
        "# [resources] may be edited; [cost] and [decision] are for information; any other edit is an error.",
        f"# {DIGEST} shows whether the file was edited; `muscale plan` does not overwrite an edited file.",
        "",
    ]
    first = {name: value for name, value in values.items() if not isinstance(value, dict)} | {DIGEST: hash_of(values)}
    parts = ["\n".join(head) + tomlkit.dumps(first)]
    for name, value in values.items():
        if isinstance(value, dict):
            title = "".join(f"# {line}\n" for line in _TITLES[name].splitlines())
            parts.append(title + tomlkit.dumps({name: _lines(value)}))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def write(
    plan: Plan,
    config: StudyConfig,
    directory: Path,
    *,
    along: Sequence[Mapping[str, float]] = (),
    completed: Callable[[str], str] = str,
) -> Path:
    """Write the plan's file into a study's directory, or update an existing one.

    Args:
        completed: Completes the commands that the file names.

    Raises:
        StageError: If an existing file was edited by hand.
    """
    path, values = path_of(directory, plan.key), contents(plan, config, along=along)
    if path.exists():
        _require_unedited(path, values)
    path.parent.mkdir(exist_ok=True)
    write_text(path, completed(text(values)))
    return path


def _require_unedited(path: Path, values: _Contents) -> None:
    """Refuse to overwrite a file with edited values, unless they equal the new ones."""
    found = _read(path)
    digest = found.pop(DIGEST, None)
    difference = _first_difference(values, found)
    if difference is None or digest == hash_of(found):
        return
    edit, key, ours, theirs = _registered_edit(found, values), *difference
    problem = (
        edit
        or f"{key} was edited: {_shown(ours)} by the study file, {_shown(theirs)} in the file; promote the file with --plan"
    )
    raise StageError(f"{path}: {problem}; or remove the file, so that it is written again from the study file")


def read(
    path: Path,
    ledger: Ledger,
    config: StudyConfig,
    *,
    along: Callable[[Plan], Sequence[Mapping[str, float]]] = lambda plan: (),
) -> tuple[Plan, StudyConfig]:
    """Return the registered plan of a file, and the study's settings with the file's [resources].

    Args:
        ledger: The study's ledger, against which the file is checked.
        along: Returns the forecast along a plan's run for `contents`.

    Raises:
        StageError: If the file can't be read, its plan is not registered in this study, or a key that must not change was edited.
    """
    found = _read(path)
    key = found.get("plan")
    registered = ledger.forecast(key) if isinstance(key, str) else None
    if registered is None:
        raise StageError(
            f"{path}: plan: must be one that this study registered, got {short_repr(key)}; `muscale plan` writes such a file"
        )
    plan = Plan.of_row(registered)
    if edit := _registered_edit(found, contents(plan, config, along=along(plan))):
        raise StageError(f"{path}: {edit}")
    table = found.get(EDITABLE, {})
    if not isinstance(table, dict):
        raise StageError(f"{path}: {EDITABLE}: must be a table, got {short_repr(table)}")
    for name in _OF_THE_RUN:
        if name in table:
            raise StageError(
                f"{path}: {EDITABLE}.{name}: changes what is computed, got {_shown(table[name])}; another value is another plan, "
                f"made by `muscale plan --set promote.{name}=…`"
            )
    of_run = {"precision": plan.precision, "seed": plan.seed, **plan.spike_handling}
    return plan, _with_resources(config, {**_resources(config), **table, **of_run}, path)


def hash_of(values: _Contents) -> str:
    """Return the SHA-256 of a file's values; their order and comments do not matter."""
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def _first_difference(ours: Any, theirs: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Return the location of the first difference between two JSON trees, and both values; None if there is none."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        inner = [(str(key), ours.get(key), theirs.get(key)) for key in dict.fromkeys([*ours, *theirs])]
    elif isinstance(ours, list) and isinstance(theirs, list):
        inner = [(str(number), *pair) for number, pair in enumerate(zip_longest(ours, theirs))]
    else:
        return None if _canonical(ours) == _canonical(theirs) else (place, ours, theirs)
    found = (_first_difference(here, there, f"{place}.{name}" if place else name) for name, here, there in inner)
    return next(filter(None, found), None)


def _registered_edit(found: _Contents, values: _Contents) -> str | None:
    """Describe the first edit of a registered value; None if there is none."""
    difference = _first_difference(_registered(values), _registered(found))
    if difference is None:
        return None
    key, ours, theirs = difference
    problem = f"{key} was edited: {_shown(ours)} in the ledger, {_shown(theirs)} in the file"
    table, _, name = key.partition(".")
    if table == "hyperparameters":
        return f"{problem}; state it with `muscale plan --set plan.explicit.{name.partition('.')[0]}=…`, which makes another plan"
    return f"{problem}; only [{EDITABLE}] may be edited, another value is another plan, made by `muscale plan --set`"


def _registered(values: _Contents) -> _Contents:
    return {name: value for name, value in values.items() if name not in _INFORMATIVE}


def _shown(value: Any) -> str:
    return "nothing" if value is None else _canonical(value)


def _canonical(value: Any) -> str:
    """Return sorted JSON; a date, which only an edit can contain, becomes a string."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _read(path: Path) -> _Contents:
    return read_toml(path, StageError, missing="no such file; `muscale plan` writes one and prints its path")


def _resources(config: StudyConfig) -> _Contents:
    """Return [resources] of the file: the settings of [promote] and [resources] of the study file that change no result."""
    promote = {name: v for name, v in config.promote.model_dump(mode="json").items() if name not in _OF_THE_RUN}
    return promote | {
        name: v for name, v in config.resources.model_dump(mode="json").items() if name not in _OF_SEARCHES
    }


def _with_resources(config: StudyConfig, table: _Contents, path: Path) -> StudyConfig:
    own = {name for name in ResourceSettings.model_fields if name not in _OF_SEARCHES}
    given = {name: value for name, value in table.items() if name in own}
    launch = {name: value for name, value in table.items() if name not in own}
    promote = _settings(PromoteSettings, launch, path)
    resources = _settings(
        ResourceSettings, {**given, **{name: getattr(config.resources, name) for name in _OF_SEARCHES}}, path
    )
    changed = config.model_copy(update={"promote": promote, "resources": resources})
    problems = set(cross_field_errors(changed)) - set(cross_field_errors(config))
    if problems:
        raise StageError(
            "\n".join(f"{path}: {problem.replace('promote.', f'{EDITABLE}.', 1)}" for problem in sorted(problems))
        )
    return changed


def _settings(kind: type[StrictTable], values: _Contents, path: Path) -> Any:
    try:
        return kind(**lists_to_tuples(values))
    except pydantic.ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, (EDITABLE, *detail["loc"])))
        if detail["type"] == "extra_forbidden":
            raise StageError(f"{path}: {key}: unknown key (value {short_repr(detail['input'])})") from error
        raise StageError(f"{path}: {key}: {rule_of(detail)}, got {short_repr(detail['input'])}") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(entry) for name, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def _lines(values: _Contents) -> Table:
    """Return a table with one line for each key; nested tables are inline, and long lists have a line for each entry."""
    table = tomlkit.table()
    for name, value in values.items():
        table.add(name, inline(value, wrap=True))
    return table
