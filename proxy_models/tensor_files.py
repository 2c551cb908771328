"""Tensors by name in safetensors files, written and read one at a time, so that a model may be larger than memory.

The format is an 8-byte length, a JSON table with dtype, shape and position of each tensor, and their bytes
(https://huggingface.co/docs/safetensors). Tensors that exceed a file's size are split over several files with an index, as
transformers writes them: `<stem>-00001-of-00002.safetensors` and `<stem>.safetensors.index.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from proxy_models.files import named

MAX_FILE_BYTES = 5 * 10**9  # the default of transformers 4; its loader holds one file in memory
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFiles(Mapping[str, Tensor]):
    """Tensors in files; each is mapped into memory when it is read, and none is kept.

    Attributes:
        path: The file; if there are several files, the name to which their index belongs.
        shapes: Shape of each tensor.
        dtypes: Type of each tensor, by its name in the format, such as "BF16".
    """

    def __init__(self, path: Path) -> None:
        """Read the tables.

        Raises:
            FileNotFoundError: If there is neither the file nor an index.
            ValueError: If a file is not in the safetensors format, or the index is invalid or lists a file that is missing.
        """
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        for file in [path] if path.exists() else _listed(index_of(path)):
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                        described = tensors.get_slice(name)
                        self.shapes[name], self._files[name] = tuple(described.get_shape()), file
                        self.dtypes[name] = described.get_dtype()
            except SafetensorError as error:
                raise ValueError(f"{file}: not safetensors ({error})") from error

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as tensors:
            return cast(Tensor, tensors.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_tensors(
    path: Path,
    shapes: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors as they arrive, in any order, with one tensor in memory at a time.

    Args:
        path: The file, `<stem>.safetensors`.
        shapes: The tensors' shapes and dtypes, on any device ("meta" takes no memory).
        max_file_bytes: Larger sets of tensors are split over several files.

    Raises:
        OSError: If writing to disk fails, with the file's name.
        ValueError: If a tensor is missing or differs from `shapes`.
    """
    # large dtypes come first, so that each tensor begins at a multiple of its element size
    aligned = sorted(shapes, key=lambda name: -shapes[name].element_size())
    parts = cut({name: shapes[name].nbytes for name in aligned}, max_file_bytes)
    files = [path]
    if len(parts) > 1:
        count = len(parts)
        files = [
            path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}") for number in range(1, count + 1)
        ]
    places: dict[str, tuple[Path, int]] = {}
    for file, part in zip(files, parts, strict=True):
        places |= _begin(file, {name: shapes[name] for name in part})
    if len(files) > 1:
        total = sum(shape.nbytes for shape in shapes.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file.name for name, (file, _) in places.items()},
        }
        index_of(path).write_text(json.dumps(index, indent=2) + "\n")
    for name, tensor in tensors:
        if name not in places or (tensor.shape, tensor.dtype) != (shapes[name].shape, shapes[name].dtype):
            raise ValueError(
                f"{path}: {name} of {tensor.dtype}{tuple(tensor.shape)} must be announced so, and come once"
            )
        file, offset = places.pop(name)
        with named(file), file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if places:
        raise ValueError(f"{path}: {next(iter(places))} was announced and did not come")


def index_of(path: Path) -> Path:
    """Return the path of the index for tensors in several files."""
    return path.with_name(f"{path.name}.index.json")


def cut(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names in their order, cut where the next tensor would exceed `most`."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts


def _begin(file: Path, shapes: Mapping[str, Tensor]) -> dict[str, tuple[Path, int]]:
    """Write a file's table and return the position of each tensor's bytes."""
    offset, begins = 0, dict[str, int]()
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        begins[name], offset = offset, offset + shape.nbytes
        table[name] = {
            "dtype": _DTYPES[shape.dtype],
            "shape": list(shape.shape),
            "data_offsets": [begins[name], offset],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with named(file):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    return {name: (file, 8 + len(header) + begin) for name, begin in begins.items()}


def _listed(index: Path) -> list[Path]:
    """Return the files of an index, which lie in its folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if any(Path(name).name != name for name in names):
            raise ValueError("each file must be in the same folder")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{index}: not an index of tensors ({error})") from error
    files = [index.with_name(name) for name in sorted(names)]
    if missing := [file.name for file in files if not file.exists()]:
        raise ValueError(f"{index}: lists files that are not in its folder: {', '.join(missing)}")
    return files
