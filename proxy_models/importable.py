"""Imports that need help on a CPU build of torch.

mup requires torchvision, whose only wheels are CUDA builds; with a CPU torch its import fails on unregistered operators, and
Lightning (through torchmetrics) and transformers import it. Declaring the two operators that the import looks for is enough:
nothing calls them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_declared: list[Any] = []  # torch drops the operators with the object that declared them


def mend_torchvision() -> None:
    """Make an installed torchvision importable, for Lightning and transformers."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass  # not installed, so nobody imports it
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
