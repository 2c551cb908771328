"""Pipeline parallelism by `torch.distributed.pipelining`: micro-batches pass through the stages of several ranks.

Each rank has all sequences of its share of a batch, and sends only activations and their gradients. Every schedule gives the same
gradients. Shapes are stated, not inferred by a first pass, so a change of the batch takes another schedule of the same stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from proxy_models.architecture.pipeline_counts import PipelineShare
from proxy_models.architecture.sharded import whole
from proxy_models.architecture.stage import Stage, joined
from proxy_models.architecture.stage_layout import PipelineSchedule, micro_batches, n_stages

_SCHEDULES: dict[PipelineSchedule, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zero_bubble_v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.ScheduleDualPipeV,
}
_BACKWARD = (
    schedules.FULL_BACKWARD,
    schedules.BACKWARD_INPUT,
    schedules.BACKWARD_WEIGHT,
    schedules.REDUCE_GRAD,
)
"""Actions that an evaluation leaves out. torch 2.13 leaves them out itself, but fails where a rank has two neighbouring stages; it
also fails in DualPipe's pairs of passes, so an evaluation takes the other V."""


class Pipeline:
    """The stages of this rank, and the passes that it takes together with the pipeline's other ranks.

    Attributes:
        stages: This rank's stages by number, ascending.
        module: Their parameters and buffers, under the names of the whole model.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: PipelineSchedule,
        *,
        group: dist.ProcessGroup,
        stream: Tensor,
        micro_batch: int | None = None,
    ) -> None:
        """Prepare the passes.

        Args:
            stages: Stages with values, sharded or not.
            group: The pipeline's ranks, in the order of their first stages.
            stream: What this rank sends for one sequence, (1, time, width), on the meta device.
            micro_batch: Most sequences of a micro-batch; None: the largest of `PipelineShare.sizes`.
        """
        self.stages, self.module = stages, joined(list(stages.values()))
        self._schedule, self._group, self._stream, self._micro_batch = schedule, group, stream, micro_batch
        self._parameters = list(self.module.parameters())
        self._device = self._parameters[0].device
        self._passes: tuple[tuple[bool, int, int], Any] | None = None

    @property
    def rank(self) -> int:
        """Index of this rank in the pipeline."""
        return self._group.rank()

    @property
    def n_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return self._group.size()

    @property
    def _has_first(self) -> bool:
        return any(stage.is_first for stage in self.stages.values())

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self.stages.values())

    def accumulate(self, sequences: Tensor, scale: Tensor | None = None) -> Tensor:
        """Add the gradients of the mean training loss of a share's sequences; return that loss, or 0 on ranks without the last stage.

        `scale` is the weight of a token that counts; None: every token counts.

        Raises:
            ValueError: If the schedule takes no equal micro-batches of so many sequences.
        """
        share = PipelineShare(schedule=self._schedule, ranks=self._group.size(), sequences=len(sequences))
        number = share.micro_batches(self._micro_batch or share.sizes[-1])
        losses: list[Tensor] = []
        self._weigh(scale)
        self._run(sequences, number, trains=True).step(
            *self._inputs(sequences), **self._named(sequences), losses=losses, return_outputs=False
        )
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)

    @torch.no_grad()
    def held_out_loss(self, sequences: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the mean evaluation loss of some sequences, or 0 on ranks without the last stage; all ranks call this.

        `scale` is that of `accumulate`.
        """
        self._weigh(scale)
        n, fitting = len(sequences), partial(micro_batches, self._schedule_of(trains=False), self.n_ranks)
        most = self._micro_batch or max(1, n // self.n_ranks)
        if (number := fitting(n, most=most)) is None:  # one sequence each, and some more that do not count
            number = next(more for more in count(n) if fitting(more, most=1))
            sequences = torch.cat([sequences, sequences[:1].expand(number - n, -1)])
        for stage in self.stages.values():
            stage.eval()
        try:
            found = self._run(sequences, number, trains=False).eval(*self._inputs(sequences), **self._named(sequences))
        finally:
            for stage in self.stages.values():
                stage.train()
        if not self._has_last:
            return torch.zeros((), device=self._device)
        return cast(Tensor, found[:n].mean())

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients to a global norm of at most `max_norm` over all stages, and return the previous norm."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        square = whole(get_total_norm(gradients, foreach=True)).square()
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        clip_grads_with_norm_(self._parameters, max_norm, norm, foreach=True)
        return norm

    def _weigh(self, scale: Tensor | None) -> None:
        for stage in self.stages.values():
            stage.scale = scale

    def _inputs(self, sequences: Tensor) -> Iterable[Tensor]:
        return (sequences,) if self._has_first else ()

    def _named(self, sequences: Tensor) -> dict[str, Tensor]:
        return {"sequences": sequences} | ({"target": sequences} if self._has_last else {})

    def _run(self, sequences: Tensor, number: int, *, trains: bool) -> Any:
        """Return torch's schedule for so many micro-batches; only the last one is kept, since its buffers take memory."""
        size = len(sequences) // number
        kind = trains, number, size
        if self._passes is None or self._passes[0] != kind:
            self._passes = None  # before the next one has its buffers
            self._passes = kind, self._schedule_for(sequences[:size], number, trains=trains)
        return self._passes[1]

    def _schedule_for(self, sequences: Tensor, number: int, *, trains: bool) -> Any:
        stages = [self._torch_stage(at, sequences, trains=trains) for at in self.stages]
        passes = _SCHEDULES[self._schedule_of(trains=trains)](
            stages if len(stages) > 1 else stages[0],
            n_microbatches=number,
            loss_fn=lambda loss, _target: loss.sum() / number,
            scale_grads=False,
        )
        if len(stages) > 1 and not trains:
            for backward in _BACKWARD:
                passes.register_custom_function(backward, _leave_out)
        return passes

    def _schedule_of(self, *, trains: bool) -> PipelineSchedule:
        """Return the schedule of a pass; DualPipe's V needs backward passes, and ZB-V has its stages."""
        return self._schedule if trains or self._schedule != "dualpipe_v" else "zero_bubble_v"

    def _torch_stage(self, number: int, sequences: Tensor, *, trains: bool) -> pipelining.PipelineStage:
        stage, stream = self.stages[number], self._stream.expand(len(sequences), -1, -1).contiguous()
        stream.requires_grad_(trains)
        loss = self._stream.new_zeros(1, dtype=torch.float32).requires_grad_(trains)
        return pipelining.PipelineStage(
            stage,
            number,
            n_stages(self._schedule, self._group.size()),
            self._device,
            input_args=sequences if stage.is_first else stream,
            output_args=loss if stage.is_last else stream,
            group=self._group,
        )


def _leave_out(action: Any, context: Any) -> None:
    """Do nothing in place of a backward pass, whose gradients nobody sends."""
    context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index), None)
