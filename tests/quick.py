"""Which variants of a test run every time, and which in `make soak` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_and_soak(variants: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the variants for `parametrize`; all but the quick ones are marked `soak`.

    Args:
        variants: Values of one parameter, or tuples of several.
        quick: The variants that run every time; each must be among `variants`.

    Raises:
        ValueError: If a quick variant is not among the variants.
    """
    variants = list(variants)
    if unknown := [variant for variant in quick if variant not in variants]:
        raise ValueError(f"quick variants must be among {variants}; got {unknown}")
    return [
        pytest.param(
            *(variant if isinstance(variant, tuple) else (variant,)), marks=() if variant in quick else pytest.mark.soak
        )
        for variant in variants
    ]
