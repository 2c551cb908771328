"""The files that define a family: its class's own, and those of its package that it imports.

They are found by reading import statements, and by where a package has its modules, so nothing is imported that was not, and a
package has the same files wherever it lies. A helper that a package finds in another way (importlib, a plugin) is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib.util import resolve_name
from pathlib import Path


def source_files(module: str, file: Path) -> dict[str, bytes]:
    """Contents of a module's file and of what it imports from its own package, also through others of it, by path below its root.

    Of a module in no package they are those beside it, in its folder. The module's own is the first, the others follow by path.

    Args:
        module: Its name, "package.module".
        file: Its file.

    Raises:
        OSError: If one of them can't be read.
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
    """Each name that a file imports, as the modules that it may be or be in, the likeliest first."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ([alias.name] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield from ([f"{module}.{alias.name}", module] for alias in node.names)


def _file_of(root: Path, module: str) -> Path | None:
    """A module's file below the folder that its first name is found in, if it is there."""
    stem = root.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
