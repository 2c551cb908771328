"""What a GPU can do at most: the denominator of model FLOP utilisation (Chowdhery et al., arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import re

from proxy_models.architecture.memory import Precision

_HALF_PRECISION = {
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"G?H200|H100": 989e12,
    r"GB200": 2500e12,
    r"B200": 2250e12,
    r"A100": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
}
"""FLOP/s of one GPU in bf16 or fp16 with fp32 sums, dense, by a pattern in the name that the driver tells; the first that
matches counts. From NVIDIA's datasheets of A100, H100, H200, GH200, L4, L40S, HGX B200 and GB200 NVL72; where they state
the rate of sparse matrices, half of it."""


def datasheet_flops(name: str, precision: Precision) -> float | None:
    """FLOP/s that the vendor states for the GPU of this name (`torch.cuda.get_device_name`), or None where none is known here.

    In fp32 none is: what matrix products reach then depends on whether TF32 is allowed. Nor for a slice of a GPU (MIG).
    """
    if precision == "fp32" or "MIG" in name.split():
        return None
    return next((flops for part, flops in _HALF_PRECISION.items() if re.search(rf"\b({part})\b", name)), None)
