"""Import of Lightning with a CPU build of torch."""

from __future__ import annotations

import importlib
from typing import Any

from proxy_models.importable import mend_torchvision


def import_lightning() -> Any:
    """The module `lightning.pytorch`, with torchvision made importable first."""
    mend_torchvision()
    return importlib.import_module("lightning.pytorch")
