"""Ray Tune's `param_space` in a Python file, which is parsed and never run."""

from __future__ import annotations

import ast
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muscale.errors import StageError
from muscale.formatting import format_read_error
from muscale.importers.imported_space import ImportedSpace
from muscale.importers.tune_space import ARGUMENTS, Parameter, imported

_DEFAULTS = {"mean": 0.0, "sd": 1.0, "base": 10}
_MOST_VALUES = 10_000  # of a space, constants expanded
_MOST_BYTES = 1 << 20  # of a file
_LONGEST = 80  # characters of code in a message
_MOST_BASE, _MOST_EXPONENT = 1e6, 64  # of a power; larger whole numbers take memory and describe no parameter
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def read_param_space(path: Path, name: str, names: Mapping[str, str]) -> ImportedSpace:
    """The space of a Tune script. Only literals, constants of the module and calls of Tune's functions are understood.

    Args:
        name: Of the variable that holds the space; "": the `param_space` of the file's only Tuner, or else of its variables.
        names: Our name of each parameter that is called otherwise here.

    Raises:
        StageError: Naming the file, the key, the rule and the value, with its line.
    """
    source = f"{path}#{name}" if name else str(path)
    try:
        content = path.read_bytes()[: _MOST_BYTES + 1]
    except OSError as error:
        raise StageError(f"import-space: {path}: {format_read_error(error)}") from error
    if len(content) > _MOST_BYTES:
        raise StageError(f"import-space: {path}: must have at most {_MOST_BYTES:,} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own escapes
            script = _Script(ast.parse(content))
        tree = script.space(name)
        return imported(source, tree, names)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise StageError(f"import-space: {path}: can't be read as Python: {error}") from error
    except (ValueError, ArithmeticError, TypeError) as error:
        raise StageError(f"import-space: {source}: {error}") from error


class _Script:
    """A parsed Python file: its imports, and in each scope the names that are assigned once."""

    def __init__(self, module: ast.Module) -> None:
        self._n_read = 0
        self._imported = {"tune": "ray.tune"}  # also where a snippet leaves the import out
        self._bound: defaultdict[tuple[ast.AST, str], list[ast.expr | None]] = defaultdict(
            list
        )  # None: not by a plain assignment
        self._scopes: dict[ast.Name, tuple[ast.AST, ...]] = {}  # of each name that is read, the innermost last
        self._given: list[ast.expr] = []  # to a Tuner
        self._look(module, (module,))

    def _look(self, node: ast.AST, scopes: tuple[ast.AST, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import(names=names):
                    self._imported |= {each.asname: each.name for each in names if each.asname}
                case ast.ImportFrom(module=str(package), names=names, level=0):
                    self._imported |= {each.asname or each.name: f"{package}.{each.name}" for each in names}
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if child.value:
                    self._bound[scopes[-1], name].append(child.value)
                    child = ast.Expr(child.value)
                case ast.Name(id=name, ctx=ast.Load()):
                    self._scopes[child] = scopes
                case ast.Name(id=name) | ast.arg(arg=name):
                    self._bound[scopes[-1], name].append(None)
                case ast.keyword(arg="param_space", value=value):
                    self._given.append(value)
            self._look(child, (*scopes, child) if isinstance(child, _SCOPES) else scopes)

    def space(self, name: str) -> dict[str, Any]:
        """The mapping that is assigned to a name, or that the file's Tuner is given."""
        if not name and len(self._given) == 1:
            return self._mapping("param_space", self._given[0], frozenset())
        if not name and self._given:
            lines = ", ".join(str(node.lineno) for node in self._given)
            raise ValueError(f"param_space: {len(self._given)} are given, in lines {lines}; name a variable with #name")
        name = name or "param_space"
        found = [value for (_, bound), values in self._bound.items() if bound == name for value in values if value]
        if len(found) != 1:
            raise ValueError(f"{name}: must be a variable that is assigned once, and is so {len(found)} times")
        return self._mapping(name, found[0], frozenset([found[0]]))

    def _constant(self, name: ast.Name) -> ast.expr | None:
        """The value of a name where it is read, None where it is not known."""
        scopes = (scope for scope in reversed(self._scopes.get(name, ())) if (scope, name.id) in self._bound)
        values = self._bound[scope, name.id] if (scope := next(scopes, None)) else []
        return values[0] if len(values) == 1 else None

    def _mapping(self, where: str, node: ast.expr, seen: frozenset[ast.expr]) -> dict[str, Any]:
        found = self._read(where, node, seen)
        if not isinstance(found, dict):
            raise ValueError(f"{where}, line {node.lineno}: must be a dict, got {ast.unparse(node)[:_LONGEST]}")
        return found

    def _read(self, where: str, node: ast.expr, seen: frozenset[ast.expr]) -> Any:
        """A literal, a constant, or a call of Tune's."""
        self._n_read += 1
        if self._n_read > _MOST_VALUES:
            raise ValueError(f"{where}: a space has at most {_MOST_VALUES:,} values, constants expanded")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() if (assigned := self._constant(node)) and assigned not in seen:
                return self._read(where, assigned, seen | {assigned})
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self._read(where, element, seen) for element in elements]
            case ast.Dict(keys=keys, values=values):
                return self._dict(where, zip(keys, values, strict=True), seen)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self._number(where, operand, seen)
                return -number if isinstance(sign, ast.USub) else number
            case ast.BinOp(left=left, op=by, right=right) if type(by) in _OPERATORS:
                a, b = self._number(where, left, seen), self._number(where, right, seen)
                if isinstance(by, ast.Pow) and (abs(a) > _MOST_BASE or abs(b) > _MOST_EXPONENT):
                    raise ValueError(
                        f"{where}, line {node.lineno}: a power's base is at most {_MOST_BASE:g} and its exponent {_MOST_EXPONENT}, "
                        f"got {ast.unparse(node)[:_LONGEST]}"
                    )
                result = _OPERATORS[type(by)](a, b)
                if isinstance(result, int | float):
                    return result
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                pairs = ((ast.Constant(word.arg) if word.arg else None, word.value) for word in keywords)
                return self._dict(where, pairs, seen)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                if (kind := self._tunes(function)) is not None:
                    return self._parameter(where, node, kind, arguments, keywords, seen)
        raise ValueError(
            f"{where}, line {node.lineno}: can't be known without running the file: {ast.unparse(node)[:_LONGEST]}; "
            "write a literal, or give the objects to muscale.tune.space_of"
        )

    def _number(self, where: str, node: ast.expr, seen: frozenset[ast.expr]) -> Any:
        value = self._read(where, node, seen)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}, line {node.lineno}: must be a number, got {ast.unparse(node)[:_LONGEST]}")
        return value

    def _dict(self, where: str, pairs: Any, seen: frozenset[ast.expr]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key is None:  # **other
                found |= self._mapping(where, value, seen)
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                found[key.value] = self._read(f"{where}.{key.value}", value, seen)
            else:
                raise ValueError(f"{where}, line {key.lineno}: a key must be text, got {ast.unparse(key)[:_LONGEST]}")
        return found

    def _tunes(self, function: ast.expr) -> str | None:
        """The name of one of Tune's functions, None of any other."""
        first, *rest = ast.unparse(function).split(".")
        *package, name = ".".join((self._imported.get(first, first), *rest)).split(".")
        return name if package[:2] == ["ray", "tune"] and name in ARGUMENTS else None

    def _parameter(
        self,
        where: str,
        node: ast.expr,
        kind: str,
        arguments: list[ast.expr],
        keywords: list[ast.keyword],
        seen: frozenset[ast.expr],
    ) -> Parameter:
        if kind == "sample_from":
            return Parameter(kind, {})
        wanted = ARGUMENTS[kind]
        given: dict[str | None, ast.expr] = dict(zip(wanted, arguments, strict=False))
        given |= {word.arg: word.value for word in keywords}
        defaults = _DEFAULTS | ({"q": 1} if kind.endswith("randint") else {})
        known = [name for name in wanted if name in given or name in defaults]
        if len(arguments) > len(wanted) or set(given) - set(wanted) or len(known) < len(wanted):
            raise ValueError(
                f"{where}, line {node.lineno}: {kind} takes {', '.join(wanted)}, got {ast.unparse(node)[:_LONGEST]}"
            )
        values = {name: self._read(where, given[name], seen) if name in given else defaults[name] for name in wanted}
        return Parameter(kind, values)
