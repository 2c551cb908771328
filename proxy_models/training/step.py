"""One optimizer step: loss and gradients over micro-batches, norm, guard, rate, update. The lean loop and Lightning use this step.

A step's random numbers (dropout) are a function of (seed, tokens seen, rank), so that a resumed run draws the same. With
another micro-batch size, number of ranks or kind of device, other numbers are drawn from the same distribution.

On a GPU a step waits for the device only in fp16, to read the loss scale, and with a guard that rewinds or whose optimizer is not
AdamW. Only AdamW's fused kernel can leave out a step, including moments and step count, by a flag on the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from proxy_models.architecture.families import family_of
from proxy_models.architecture.family import Loss, weighted
from proxy_models.architecture.parametrization import Parametrization
from proxy_models.data.uncounted import n_counted
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.guard import Divergence, Guard, Spike, Verdict
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import clip, set_rates
from proxy_models.training.precision import LEAST_SCALE, LossScaler
from proxy_models.training.state import buffer_check, capture, restore, without_moments

if TYPE_CHECKING:
    from proxy_models.training.pipeline import Pipeline  # torch's pipelines take 0.5 s to import

GOOD = "good/"  # prefix of the guard's snapshot in `memory`


def step_seed(seed: int, tokens: int, rank: int) -> int:
    """Return the seed of the random numbers that a rank draws in the step after `tokens` tokens."""
    digest = hashlib.sha256(f"step/{seed}/{tokens}/{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Stepper:
    """Steps of one training, with the state that passes between steps besides weights and moments.

    Attributes:
        micro_batch: Sequences of one forward and backward pass; None: the whole (local) batch.
        verdicts: Reasons of refused steps, by step number, as of the last `settle`.
        figures: What the family reports of the last step (`Family.end_step`), tensors by name.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        numerics: Numerics,
        recipe: Recipe,
        *,
        loss: Loss | None = None,
        micro_batch: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        mean: Callable[[Tensor], Tensor] = lambda loss: loss,
        before_part: Callable[[bool], None] = lambda last: None,
        pipeline: Pipeline | None = None,
        all_count: bool = True,
    ) -> None:
        """Prepare for the steps of a training.

        Args:
            module: The model, on its device, sharded or not.
            optimizer: Its optimizer, with a peak rate in each group.
            numerics: Source of seed, guard and the need for a loss scale; the module already computes in their precision.
            loss: `Family.training_loss`, possibly compiled; None: the family's.
            micro_batch: Value of the attribute.
            ranks: Number of ranks that share a batch; the sharding averages their gradients.
            mean: Function that averages a loss over ranks.
            before_part: Called before each of several micro-batches with True for the step's last.
            pipeline: Pipeline whose stages the module has; it takes the passes, by its own micro-batches.
            all_count: Whether every token of every batch counts in the loss (`proxy_models.data.uncounted`).
        """
        self.module, self.optimizer, self.recipe = module, optimizer, recipe
        self.parameters = list(module.parameters())
        self.verdicts: dict[int, Verdict] = {}
        self.figures: Mapping[str, Tensor] = {}
        self._family = family_of(numerics.model)
        self.micro_batch, self._mean = micro_batch, mean
        self._loss = loss or self._family.training_loss
        self._rank, self._ranks, self._before_part, self._pipeline = rank, ranks, before_part, pipeline
        self._all_count = all_count
        self._device = self.parameters[0].device
        self._numerics = numerics
        self._scaler = LossScaler(self._device) if numerics.precision == "fp16" else None
        self._guard = Guard(numerics.guard, self._device) if numerics.guard else None
        self._good: dict[str, Tensor] = {}
        self._check_buffers: Callable[[], None] | None = None

    @property
    def parametrization(self) -> Parametrization:
        """Table of the training's current optimizer."""
        return self._numerics.parametrization(self.recipe.optimizer)

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """Steps that the guard left out."""
        return tuple(verdict for verdict in self.verdicts.values() if isinstance(verdict, Spike))

    @property
    def divergence(self) -> Divergence | None:
        """First step that ended the training, or None."""
        return next((verdict for verdict in self.verdicts.values() if isinstance(verdict, Divergence)), None)

    def settle(self) -> None:
        """Read the guard's verdicts on the steps since the last call; wait for the device."""
        if self._guard:
            self.verdicts |= self._guard.read()

    def step(
        self, sequences: Tensor, *, number: int, tokens: int, rate_factor: float, of: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take step `number`, which starts after `tokens` tokens; return its loss and its gradient norm before clipping.

        The loss is the mean over the tokens of the global batch that count, on however many ranks and micro-batches they lie.
        `of` is the number of sequences in the global batch; None: every rank has as many as this rank. A refused step leaves
        weights, moments and the optimizer's step count unchanged.
        """
        guard = self._guard
        if guard and guard.settings.action == "rewind" and number % guard.settings.snapshot_every == 0:
            self._good = self.capture()
        if self._numerics.model.is_random:
            stage = self._pipeline.rank if self._pipeline else 0
            torch.manual_seed(step_seed(self._numerics.seed, tokens, self._rank + self._ranks * stage))
        is_first = self._check_buffers is None
        self._check_buffers = self._check_buffers or buffer_check(self.module, self._family.state_buffers)
        of = of or len(sequences) * self._ranks
        loss = self._mean(self._accumulate(sequences, of, None if self._all_count else self._scale(sequences, of)))
        if is_first:  # `memory` checks again; each step would be too often, since the check waits for the device
            self._check_buffers()
        if self._scaler:
            self._scaler.unscale(self.optimizer)
        norm = (self._pipeline.clip if self._pipeline else partial(clip, self.parameters))(self.recipe.clip_norm)
        taken = guard is None or self._passes(guard, number, loss, norm)
        set_rates(self.optimizer, rate_factor)
        if self._scaler:
            self._scaler.step(self.optimizer, take=bool(taken))
            taken = taken and bool(torch.isfinite(norm))
            if self._scaler.scale < LEAST_SCALE:
                reason = f"the gradients overflow fp16 at every loss scale at step {number}"
                self.verdicts[number] = Divergence(step=number, reason=reason)
        elif taken is not False:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.figures = self._family.end_step(self.module, self._numerics.model, taken=taken, mean=self._mean)
        return loss, norm

    def capture(self) -> dict[str, Tensor]:
        """Return copies of weights, state buffers and moments, as `proxy_models.training.state.capture` names them."""
        return capture(self.module, self.optimizer, self._family.state_buffers)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Write back what `capture` returned."""
        restore(self.module, self.optimizer, tensors, self._family.state_buffers)

    def _scale(self, sequences: Tensor, of: int) -> Tensor:
        """Return the predicted tokens of the global batch of `of` sequences over those that count; 0 if none counts."""
        counted = n_counted(sequences).double()
        if self._pipeline and self._pipeline.rank:
            counted.zero_()  # each of the pipeline's ranks has these sequences
        total = self._mean(counted) * self._ranks
        return torch.where(total > 0, of * (sequences.shape[1] - 1) / total, 0.0).float()

    def _accumulate(self, sequences: Tensor, of: int, scale: Tensor | None) -> Tensor:
        """Add the gradients of this rank's part of the mean over `of` sequences, and return that part of the loss.

        `scale` is the weight of a token that counts.
        If shares differ by a sequence, a rank may have fewer passes; it then runs a pass of weight 0, as all ranks gather weights.
        """
        if self._pipeline:
            if len(sequences) * self._ranks != of:
                raise ValueError(
                    f"a pipeline needs equal shares of a batch, got {len(sequences)} of {of} sequences for {self._ranks}"
                )
            return self._pipeline.accumulate(sequences, scale)
        largest, loss = -(-of // self._ranks), weighted(self._loss, scale)
        if not self.micro_batch or largest <= self.micro_batch:
            return self._backward(loss, sequences, len(sequences) * self._ranks / of)
        passes, parts = -(-largest // self.micro_batch), torch.split(sequences, self.micro_batch)
        shares = []
        for number in range(passes):
            self._before_part(number == passes - 1)
            if number < len(parts):
                shares.append(self._backward(loss, parts[number], len(parts[number]) * self._ranks / of))
                continue
            counted = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
            shares.append(self._backward(loss, sequences[:1], 0.0))
            for buffer, before in counted:
                buffer.copy_(before)  # what a family counts in a pass, such as loads of experts
        return torch.stack(shares).sum()

    def _backward(self, function: Loss, sequences: Tensor, share: float) -> Tensor:
        loss: Tensor = function(self.module, sequences)
        if share != 1:
            loss = loss * share
        (self._scaler.scaled(loss) if self._scaler else loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _passes(self, guard: Guard, number: int, loss: Tensor, norm: Tensor) -> bool | Tensor:
        """Return whether to take the step: as a tensor if AdamW is called in any case, with a flag by which it does nothing."""
        if self._scaler and bool(torch.isfinite(loss)) and not bool(torch.isfinite(norm)):
            return True  # the scaler leaves the step out and reduces the scale
        passes = guard.judge(number, loss, norm)
        if guard.settings.action == "skip" and isinstance(self.optimizer, AdamW) and not self._scaler:
            self.optimizer.found_inf = (~passes).float()  # type: ignore[attr-defined]  # as torch's own loss scaler sets it
            return passes
        self.settle()
        if isinstance(self.verdicts.get(number), Spike) and self._good:
            self.restore(self._good)
        return number not in self.verdicts

    def forget(self) -> None:
        """Let the guard forget the accepted steps, because the proportions of the data change."""
        if self._guard:
            self._guard.forget()

    def go_on_under(self, recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
        """Continue under another recipe with an optimizer made for this recipe.

        An optimizer of the same kind takes over the moments. Another kind starts with new moments, also in the guard's snapshot.
        """
        if recipe.optimizer == self.recipe.optimizer:
            optimizer.state.update(self.optimizer.state)  # by parameter, so that groups may differ
        else:
            self._good = without_moments(self._good)
        self.optimizer, self.recipe = optimizer, recipe

    def memory(self) -> dict[str, Tensor]:
        """Return the state that the next step needs besides weights and moments: loss scale, guard's window, guard's snapshot.

        Raises:
            FamilyError: If the next step would also need buffers that a step has changed.
        """
        if self._check_buffers:
            self._check_buffers()
        self.settle()
        tensors = {}
        if self._scaler:
            tensors["scaler"] = self._scaler.state()
        if self._guard:
            tensors["guard"] = self._guard.memory
        return tensors | {f"{GOOD}{name}": tensor for name, tensor in self._good.items()}

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors that `memory` returned."""
        if self._scaler:
            self._scaler.load(tensors["scaler"])
        if self._guard:
            self._guard = Guard(self._guard.settings, self._device, tensors["guard"])
        self._good = {n.removeprefix(GOOD): tensor for n, tensor in tensors.items() if n.startswith(GOOD)}
