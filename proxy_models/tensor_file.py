"""Files of safetensors, whose library tells of a full disk in an exception of its own: here it is the system's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_CODE = re.compile(r"\(os error (\d+)\)")  # as Rust writes the system's errors


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name, as other readers take them for PyTorch's.

    Raises:
        OSError: If the disk does not take them, with the file's name.
    """
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if not (code := _CODE.search(str(error))):
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
