"""Safe reading of a sharded checkpoint in one process, at once or as a stream: only plain records are unpickled.

`torch.distributed.checkpoint` pickles the index of its shards. Here only the classes of that index may be unpickled, so
unpickling can create values but call nothing; tensors are read as by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from muscale.errors import StageError
from proxy_models.tensor_files import cut

MODEL = "model"
"""Prefix of the names of weights in a checkpoint."""
MOMENTS = "optimizer.state."
"""Prefix of the names of moments, before a parameter's name, a dot and the kind of the moment, such as `exp_avg`."""
MEMORY = "memory."
"""Prefix of the names of values that the steps remember."""
READ_BYTES = 1 << 28
"""Bytes to stream at a time (assumed), about one tensor of a large model; each read opens the files of all ranks."""
_RECORDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # returns one of torch's layouts by name
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}
UNREADABLE = (
    *(CheckpointException, OSError, pickle.UnpicklingError, RuntimeError, RecursionError, MemoryError),
    *(EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError),
)
"""Exceptions that unpickling a damaged record can raise, according to Python's documentation, and torch when reading it."""


def read_weights(
    checkpoint: Path, shapes: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A checkpoint's weights by name, written at any world size; nothing else is read.

    Args:
        shapes: Shapes and dtypes by name, as `weight_shapes` returns them; tensors on the meta device suffice.
        device: Device of the weights; other devices than the CPU receive them in parts.

    Raises:
        StageError: If the checkpoint can't be read, or its weights belong to another model.
    """
    reader = RecordReader(checkpoint)
    reader.require_weights(shapes)
    weights = {name: torch.empty_like(shape, device=device) for name, shape in shapes.items()}
    reader.fill_weights(weights)
    return weights


@contextmanager
def alone() -> Iterator[None]:
    """Silence torch's warning that a single process reads the checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner would unpickle non-tensors in full; this planner accepts only plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)


class RecordReader(FileSystemReader):
    """torch's reader, with an index that may hold only plain records and is read once."""

    _index: Metadata | None = None

    def shapes(self) -> dict[str, Tensor]:
        """All tensors by their names in the checkpoint, on the meta device; raises StageError if the index can't be read."""
        with self._readable():
            return {
                name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
                for name, found in self.read_metadata().state_dict_metadata.items()
                if isinstance(found, TensorStorageMetadata)
            }

    def n_weights(self) -> int:
        """Number of weights of the model; raises StageError if the index can't be read."""
        return sum(shape.numel() for name, shape in self.shapes().items() if name.startswith(f"{MODEL}."))

    def require_weights(self, shapes: Mapping[str, Tensor]) -> None:
        """Check that the checkpoint has the weights of a model; raise StageError if a weight is missing or has another shape."""
        saved = self.shapes()
        for name, shape in shapes.items():
            found = saved.get(f"{MODEL}.{name}")
            if found is None or found.shape != shape.shape:
                there = "not there" if found is None else tuple(found.shape)
                raise StageError(
                    f"{self.path}: weights of another model: {name} is {there}, the model's is {tuple(shape.shape)}"
                )

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read tensors in place, by their names in the checkpoint; raise StageError if the tensors can't be read."""
        with self._readable(), alone():
            load_sharded(dict(tensors), storage_reader=self)

    def fill_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read weights in place, by name; ranks read their parts of sharded weights. Raises as `fill`."""
        self.fill({f"{MODEL}.{name}": tensor.detach() for name, tensor in weights.items()})

    def stream(self, shapes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by their names in the checkpoint, on the CPU; `READ_BYTES`, or one larger tensor, are in memory at a time.

        Raises:
            StageError: If the tensors can't be read.
        """
        for names in cut({name: shape.nbytes for name, shape in shapes.items()}, READ_BYTES):
            tensors = {name: torch.empty_like(shapes[name], device="cpu") for name in names}
            self.fill(tensors)
            while tensors:
                yield tensors.popitem()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise StageError(f"{self.path}: can't be read ({describe(error)})") from error

    def names(self) -> Set[str]:
        """All names in the checkpoint; raises StageError if the index can't be read."""
        with self._readable():
            return self.read_metadata().state_dict_metadata.keys()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            with (Path(self.path) / ".metadata").open("rb") as file:
                self._index = _Records(file).load()
            if not isinstance(self._index, Metadata):
                raise pickle.UnpicklingError(f"the record of its shards is a {type(self._index).__name__}")
        if self._index.storage_meta is not None:
            self._index.storage_meta.load_id = self.load_id
        return self._index


class _Records(pickle.Unpickler):
    """An unpickler that accepts only the classes of torch's index and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"the record of its shards names {module}.{name}, which can't be part of it")


def describe(error: BaseException) -> str:
    """Format an error as one line; if several ranks failed, the first error."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if isinstance(failures, dict) and failures else error
    return f"{type(first).__name__}: {str(first).splitlines()[0] if str(first) else ''}"
