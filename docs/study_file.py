"""Write docs/study_file.md, all keys of a study file, from the settings' classes and comments: `python docs/study_file.py`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from muscale.settings.sweep import TuneName
from muscale.settings.tables import StudyTables
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Space

PAGE = Path(__file__).with_suffix(".md")
BUILT = {"model": ModelConfig, "hyperparameters": Hyperparameters}
SEE = {
    "corpus": "models.md#the-corpus",
    "corpus.clean": "data.md",
    "corpus.stages": "mixtures.md",
    "model": "models.md",
    "hyperparameters": "models.md",
    "check": "own_model.md#the-class",
    "sweep": "searching.md",
    "transfer": "searching.md#the-transfer-check",
    "ladder": "searching.md#the-ladder",
    "fit": "forecast.md",
    "plan": "planning.md",
    "promote": "full_run.md",
    "variants": "compare.md",
    "compare": "compare.md",
    "trainer": "own_trainer.md",
    "scores": "scores.md",
    "use_case": "planning.md",
    "resources": "cluster.md#devices",
    "numerics": "models.md#precision",
    "storage": "cluster.md#storage",
    "tracking": "tracking.md",
}
NOTES = {
    "model": "These are the keys of the built-in decoder. `family` names a custom class or a configuration of transformers instead, "
    "and `args` its settings ([own_model.md](own_model.md)). In a study with [trainer], [model] has d_model and n_layers alone.",
    "hyperparameters": "An entry of `stages` has `after`, the share of the tokens before the cooldown at which it begins, and new "
    "values: `learning_rate` as a factor on the run's rate, `weight_decay_tau`, `beta1`, `beta2`, `clip_norm`, `embedding_rate` or "
    "`output_rate`.",
    "compare.stems": "`branches` only sets the length at which the rate is tuned.",
}
HEAD = """# All keys of a study file

`muscale init` writes a study file to begin with, with comments on the keys that most studies need. This page lists all keys;
those of custom models and training programs are in [own_model.md](own_model.md) and [own_trainer.md](own_trainer.md).
A key that does not exist, or a value that breaks a rule, is refused with file, key, rule and value. `--set table.key=value`
changes a key for one command. A default of "–" means that the key is not set.

`python docs/study_file.py` writes this page from the source; don't edit it by hand.
"""
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Space: "[a space](searching.md)"}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """Return the page's text."""
    return "\n".join([HEAD, *_section(StudyTables, "")])


def _section(table: type[Any], path: str) -> Iterator[str]:
    """Yield a table's heading, what it is for, its keys, and the sections of the tables in it."""
    if path:
        about = re.sub(
            r"^(An entry of )?\[.*?\]+: ", "", " ".join((inspect.getdoc(table) or "").split("\n\n")[0].split())
        )
        see = f" [More]({SEE[path]})." if path in SEE else ""
        yield f"{about[0].upper()}{about[1:]}{see}\n"
    rows, inner = [], []
    for name, hint, default, meaning in _keys(table):
        below = f"{path}.{name}" if path else name
        if found := BUILT.get(below) or _table_in(hint):
            inner.append((found, below, hint, default, meaning))
        else:
            rows.append(f"| `{name}` | {_kind(hint)} | {_default(default)} | {_escaped(meaning)} |")
    if rows:
        yield from ["| key | value | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    for found, below, hint, default, meaning in inner:
        holder = get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint)
        yield {tuple: f"## [[{below}]]\n", dict: f"## [{below}.NAME]\n"}.get(holder, f"## [{below}]\n")
        needed = ["Required."] if default is ... else ["Off without this table."] if default is None else []
        said_of = [f"{meaning[0].upper()}{_escaped(meaning[1:])}."] if meaning else []
        if said := " ".join([*needed, *said_of, *([NOTES[below]] if below in NOTES else [])]):
            yield f"{said}\n"
        yield from _section(found, below)


def _keys(table: type[Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, annotation, default and meaning of each key; `...` for a required one."""
    hints = get_type_hints(table, include_extras=True)
    if issubclass(table, BaseModel):
        meanings = _comments(table)
        for name, field in table.model_fields.items():
            default = ... if field.is_required() else field.get_default(call_default_factory=True)
            yield name, hints[name], default, meanings.get(name, "")
        return
    meanings = _attributes(table)
    for one in dataclass_fields(table):
        factory = one.default_factory
        default = one.default if one.default is not MISSING else ... if factory is MISSING else factory()
        yield one.name, hints[one.name], default, meanings.get(one.name, "")


def _comments(table: type[Any]) -> dict[str, str]:
    """Return the comments on a class's fields: those of the lines above, then the one at the end of the line."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(table.__mro__) if issubclass(base, BaseModel) and base is not BaseModel):
        source = textwrap.dedent(inspect.getsource(base))
        lines, (body,) = source.splitlines(), ast.parse(source).body
        for node in ast.walk(body):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            said = [line.strip().lstrip("# ") for line in lines[first : node.lineno - 1]]
            after = lines[node.lineno - 1 : node.end_lineno]
            said += [line.split("  # ")[-1] for line in after if "  # " in line]
            found[node.target.id] = " ".join(said)
    return found


def _attributes(table: type[Any]) -> dict[str, str]:
    """Return the meanings of a dataclass's fields by its docstring."""
    found: dict[str, str] = {}
    for base in reversed(table.__mro__):
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \w)", listed.split("\n\n")[0]):
            names, _, meaning = entry.strip().partition(": ")
            found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return found


def _table_in(hint: Any) -> type[BaseModel] | None:
    """Return the table that a key holds, by itself, in a list or under names."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((found for part in get_args(hint) if (found := _table_in(part))), None)


def _kind(hint: Any) -> str:
    """Return the values that a key takes, in words."""
    if hint == TuneName:
        return '`"tune:CLASS"`'
    if get_origin(hint) is Annotated:
        base, *rules = get_args(hint)
        said = [text for rule in rules for text in _bounds(rule)]
        return " ".join([_kind(base), *([", ".join(said)] if said else [])])
    if get_origin(hint) is Literal:
        return ", ".join(_default(value) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_kind(part) for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0])}"
    if isinstance(get_origin(hint), type):
        return f"table of {_kind(get_args(hint)[1])}" if get_args(hint)[1] is not Any else "table"
    return WORDS.get(hint, "table")


def _bounds(rule: Any) -> Iterator[str]:
    """Yield the bounds that a type's annotation states."""
    for part in (rule, *getattr(rule, "metadata", ())):
        yield from (f"{sign} {getattr(part, name)}" for name, sign in BOUNDS.items() if hasattr(part, name))


def _default(value: Any) -> str:
    """Return a value as TOML has it."""
    match value:
        case e if e is ...:
            return "required"
        case None:
            return "–"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case int():
            return f"`{value:_}`" if value >= 10_000 else f"`{value}`"
        case float():
            return f"`{value:g}`"
        case tuple() | list():
            return f"`[{', '.join(_default(one).strip('`') for one in value)}]`"
        case dict() if not value:
            return "–"
    return "see there"


def _escaped(text: str) -> str:
    """Return a meaning as a cell of Markdown."""
    return re.sub(r"\b[Nn]one: ", "not set: ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    main()
