"""Repairs of imports on a CPU build of torch.

mup requires torchvision, which has only CUDA wheels; with a CPU torch its import fails on unregistered operators. Lightning
(through torchmetrics) and transformers import torchvision. Declaring the two operators that the import looks for is enough, since
nothing calls them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_declared: list[Any] = []  # keeps the declaring object alive, since torch drops the operators with it


def mend_torchvision() -> None:
    """Make an installed torchvision importable, for Lightning and transformers."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass  # torchvision is not installed, so nothing imports it
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
