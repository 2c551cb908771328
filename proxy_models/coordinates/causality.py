"""Does a model of one's own see the future? A token that is changed must not move the logits before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from proxy_models.architecture.family import Family, FamilyError

_NOISE = 0.1  # added to every weight, as what starts at zero hides what it would mix; assumed
_ROUNDING = (
    1e-4  # of the logits' change: a convolution by FFT computes every position from all, which rounds by about 1e-6
)


@torch.no_grad()
def require_causal(family: Family, model: nn.Module, tokens: Tensor) -> None:
    """Change the token in the middle of a sequence, and compare the logits before it. The model's weights are changed, too.

    A family with a loss of its own may predict something else than the next token, and is not asked.

    Args:
        model: A member on the CPU, in evaluation mode.
        tokens: Ids (batch, time).

    Raises:
        FamilyError: If they move by more than rounding; such a model's loss would say nothing.
    """
    if type(family).evaluation_loss is not Family.evaluation_loss or tokens.shape[1] < 2:
        return
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(_NOISE * torch.randn(parameter.shape, generator=generator))
    changed, place = tokens.clone(), tokens.shape[1] // 2
    changed[:, place] = (tokens[:, place] + 1) % family.vocab_size
    moved = (model(changed) - model(tokens)).abs().amax(dim=(0, 2))  # (time,)
    if moved[:place].max() > _ROUNDING * moved.max():
        first = int((moved > _ROUNDING * moved.max()).nonzero()[0])
        raise FamilyError(
            f"{type(model).__name__} must be causal, as its loss is of the next token: token {place} of a sequence, changed, moves "
            f"the logits from position {first} on, by {moved[:place].max() / moved.max():.2g} of the largest change"
        )
