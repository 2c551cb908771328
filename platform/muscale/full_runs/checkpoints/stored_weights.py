"""Safe reading of a sharded checkpoint's weights in one process: only plain records are unpickled.

`torch.distributed.checkpoint` pickles the index of its shards. Here only the classes of that index may be unpickled, so it can
create values but call nothing; tensors are read as by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import math
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

MODEL = "model"
"""What the weights are under in a checkpoint."""
_RECORDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # a function that returns one of torch's layouts by name
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
"""What unpickling a broken record raises, as Python's own documentation warns, and torch at what it says."""


def read_weights(checkpoint: Path, weights: Mapping[str, Tensor]) -> None:
    """Fill tensors with a checkpoint's weights by name; nothing else is read.

    Args:
        checkpoint: Its folder, written at any world size.
        weights: By parameter name, on the CPU; written in place.

    Raises:
        StageError: If the checkpoint can't be read, or its weights are another model's.
    """
    reader = RecordReader(checkpoint)
    try:
        saved = reader.read_metadata().state_dict_metadata
        for name, tensor in weights.items():
            found = saved.get(f"{MODEL}.{name}")
            if not isinstance(found, TensorStorageMetadata) or found.size != tensor.shape:
                shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "not there"
                raise StageError(
                    f"{checkpoint}: weights of another model: {name} is {shape}, the model's is {tuple(tensor.shape)}"
                )
        with alone():
            load_sharded({MODEL: dict(weights)}, storage_reader=reader)
    except UNREADABLE as error:
        raise StageError(f"{checkpoint}: can't be read ({describe(error)})") from error


@contextmanager
def alone() -> Iterator[None]:
    """Silence torch's warning that a single process reads the checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner, which would unpickle non-tensors in full; here they must be plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)


class RecordReader(FileSystemReader):
    """torch's reader, with an index that may hold plain records only."""

    def names(self) -> Set[str]:
        """Names in the checkpoint.

        Raises:
            StageError: If its index can't be read.
        """
        try:
            return self.read_metadata().state_dict_metadata.keys()
        except UNREADABLE as error:
            raise StageError(f"{self.path}: can't be read ({describe(error)})") from error

    def n_weights(self) -> int:
        """Number of weights of the model, from the index.

        Raises:
            StageError: If the index can't be read.
        """
        try:
            found = self.read_metadata().state_dict_metadata.items()
            tensors = [
                what for name, what in found if name.startswith(MODEL) and isinstance(what, TensorStorageMetadata)
            ]
            return sum(math.prod(map(int, tensor.size)) for tensor in tensors)
        except UNREADABLE as error:
            raise StageError(f"{self.path}: can't be read ({describe(error)})") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Records(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"the record of its shards is a {type(metadata).__name__}")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _Records(pickle.Unpickler):
    """An unpickler of the classes of torch's index and of dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"the record of its shards names {module}.{name}, which is none of its own")


def describe(error: BaseException) -> str:
    """An error in one line; of the errors of several ranks the first."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if isinstance(failures, dict) and failures else error
    return f"{type(first).__name__}: {str(first).splitlines()[0] if str(first) else ''}"
