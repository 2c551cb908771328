"""Importing Lightning where torch is a CPU build.

mup requires torchvision, whose only wheels are CUDA builds; beside a CPU torch its import fails because its operators were not
registered, and Lightning imports it by way of torchmetrics. Declaring the two operators that its import looks for is enough:
nothing here ever calls them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_declared: list[Any] = []  # torch drops the operators together with the object that declared them


def import_lightning() -> Any:
    """The module `lightning.pytorch`, after torchvision was made importable if it was not."""
    mend_torchvision()
    return importlib.import_module("lightning.pytorch")


def mend_torchvision() -> None:
    """Make torchvision importable if it is there and is not, for what imports it: Lightning, and transformers."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass  # not installed, so nothing is in Lightning's way
    except RuntimeError:
        _declare_operators()
        importlib.import_module("torchvision")


def _declare_operators() -> None:
    from torch import library as operators

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library: Any = operators.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
