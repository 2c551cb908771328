"""Tensor parallelism of the decoder: ranks that share each product, and the positions of the residual stream.

Norms and residual sums are computed for a rank's own positions (Korthikanti et al., arXiv 2205.05198, section 4.2): their outputs
are gathered before a matrix reads them, and partial sums of products are scattered over the ranks.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from proxy_models.architecture.decoder import Block, Decoder

_BY_POSITION = Shard(1)


def share_products(model: Decoder, mesh: DeviceMesh) -> None:
    """Split matrices and tables of a decoder without values over the ranks of a mesh, and the residual stream by positions."""
    for block in (cast(Block, block) for block in model.blocks):
        plan: dict[str, ParallelStyle] = {
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.output": RowwiseParallel(output_layouts=_BY_POSITION),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=_BY_POSITION),
            "attention_norm": _Gathered(),
        }
        if block.config.activation == "swiglu":
            plan["mlp.gate"] = ColwiseParallel()
        if not block.config.parallel:
            plan["mlp_norm"] = _Gathered()
        if block.config.qk_norm:  # a rank norms its own heads (dimension 2) with gains that all heads share
            plan |= {
                f"attention.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
                for name in ("query_norm", "key_norm")
            }
        parallelize_module(block, mesh, plan)
    rest: dict[str, ParallelStyle] = {"embedding": _ByRows(), "final_norm": _Gathered(local=True), "readout": _ByRows()}
    if model.config.positions == "learned":
        rest["position"] = _ByRows()
    parallelize_module(model, mesh, rest)
    if model.config.tied:
        model.readout.weight = model.embedding.weight
    if model.logit_bias is not None:
        n_own = len(model.logit_bias) // mesh.size()
        first = n_own * mesh.get_local_rank()
        model.own_heads = slice(first, first + n_own)
        model.logit_bias = model.logit_bias[model.own_heads]


class _Gathered(ParallelStyle):
    """A norm of a rank's own positions; its output is gathered for products of which each rank computes a part.

    With `local`, the output is an ordinary tensor whose gradient on each rank is that rank's part of the gradient.
    """

    def __init__(self, *, local: bool = False) -> None:
        super().__init__()
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        leave: Any = self._leave  # torch's annotation omits the return value
        return distribute_module(module, device_mesh, None, self._enter, leave)

    @staticmethod
    def _enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(tensor, mesh, [_BY_POSITION], run_check=False) for tensor in inputs)

    def _leave(self, _module: nn.Module, output: Any, _mesh: DeviceMesh) -> Tensor:
        whole = cast(DTensor, output.redistribute(placements=[Replicate()]))
        return whole.to_local(grad_placements=[Partial()]) if self._local else whole


class _ByRows(ParallelStyle):
    """A module that uses the rows of its weight that the rank holds."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut)

    @staticmethod
    def _cut(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        module.weight = nn.Parameter(distribute_tensor(cast(Tensor, module.weight), mesh, [Shard(0)]))
