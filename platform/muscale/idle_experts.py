"""A warning about experts of a mixture that get no tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

IDLE_STEPS = 128
"""Steps in a row over which experts without tokens are reported (assumed)."""


def idle_experts(dead: ArrayLike, *, least_steps: int = 1) -> str | None:
    """Return a warning if some experts got no token in each of the last `IDLE_STEPS` steps, or in each step if there are fewer.

    Args:
        dead: Number of such experts in all blocks for each step; NaN for models without experts.
        least_steps: Return None if there are fewer steps; at least 1.
    """
    counts = np.asarray(dead, dtype=float)
    last = counts[~np.isnan(counts)][-IDLE_STEPS:]
    if len(last) < least_steps or not (least := int(last.min())):
        return None
    return (
        f"in each of the last {len(last)} steps at least {least} of the experts of all blocks got no token; "
        "a larger model.balance_rate or model.balance_loss moves tokens to them; for transformers' mixtures, "
        "output_router_logits = true and a larger router_aux_loss_coef in model.args do"
    )
