"""The files that define a family: the file of its class, and the files of its package that this file imports.

The files are found by reading import statements and the package's folder structure, so no module is imported for this, and a package
has the same files wherever it is installed. A helper that a package finds in another way (importlib, a plugin) is missed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib.util import resolve_name
from pathlib import Path


def source_files(module: str, file: Path) -> dict[str, bytes]:
    """Return the contents of a module's file and of its package's files that it imports, also indirectly, by path below the root.

    If the module is in no package, files in its folder count as the package. The module's file comes first, the others by path.

    Raises:
        OSError: If a file can't be read.
    """
    first, *inner = module.split(".")
    root = file.absolute().parents[len(inner) + (file.stem == "__init__")]
    in_package = bool(inner) or file.stem == "__init__"
    found: dict[Path, bytes] = {}
    waiting = [(module, file.absolute())]
    while waiting:
        name, path = waiting.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for candidates in _imported(found[path], package) if path.suffix == ".py" else ():
            places = ((other, _file_of(root, other)) for other in candidates)
            other, place = next(((other, place) for other, place in places if place), (name, path))
            if other.split(".")[0] == first if in_package else place.parent == root:
                waiting.append((other, place))
    own, *others = found
    return {path.relative_to(root).as_posix(): found[path] for path in (own, *sorted(others))}


def _imported(source: bytes, package: str) -> Iterator[Sequence[str]]:
    """Yield for each imported name the modules that it may be or belong to, the most likely first."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ([alias.name] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield from ([f"{module}.{alias.name}", module] for alias in node.names)


def _file_of(root: Path, module: str) -> Path | None:
    """Return a module's file below the folder of its top-level name, or None if there is none."""
    stem = root.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
