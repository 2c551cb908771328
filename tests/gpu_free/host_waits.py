"""Waits of the host for a GPU in a full run's steps, on fake tensors of one rank of many, and the graphs that are compiled.

The module takes its own steps, as Lightning has it do; only what ranks agree on over gloo is not there.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from muscale.full_runs.checkpoints.save import Checkpoints
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.records.attempts import Attempt
from muscale.full_runs.train import module as full_run_module
from muscale.full_runs.train.interventions import Interventions
from muscale.full_runs.train.module import FullRunModule
from muscale.full_runs.train.sharding import Meshes, build_model, build_pipeline
from muscale.settings.parallelism import Parallelism
from muscale.settings.promote import SpikePolicy
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.architecture.stage_layout import n_stages
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import EMBEDDED
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training import soap
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from tests.gpu_free.cases import LAYOUTS, PIPELINES, agree
from tests.gpu_free.fake_device import fake_gpu
from tests.muscale.fake_ranks import rank_of

READ_EVERY = 2
"""Steps between two reads, here."""
STEPS = 2 * READ_EVERY
RANKS = 64
_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default, _aten.nonzero.default,
    _aten.masked_select.default, _aten._unique2.default, _aten.unique_consecutive.default, _aten.unique_dim.default,
    _aten.repeat_interleave.Tensor, _aten.bincount.default,
}  # fmt: skip
"""Operators whose result is a number of the host's, or whose output is as large as the values say."""
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}  # by a mask as `nonzero`
_COPIES = ("cpu", "numpy", "__array__")  # of what is on the device: here a fake CPU has no such operator


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a run on the first of 64 ranks, in bf16.

    Attributes:
        layout: One of `LAYOUTS` or `PIPELINES`.
        optimizer: Of the run.
        guarded: Whether spikes are left out.
        compiled: Whether each block is compiled.
        experts: Whether the model is a mixture of experts.
        within: Whether attention stays within documents and a window; which blocks of keys a GPU skips, `lowering` finds.
    """

    layout: str = "full"
    optimizer: OptimizerName = "adamw"
    guarded: bool = False
    compiled: bool = False
    experts: bool = False
    within: bool = False

    def __str__(self) -> str:
        options = (name for name in ("guarded", "compiled", "experts", "within") if getattr(self, name))
        return ", ".join([self.layout, self.optimizer, *options])


_EXCHANGING: tuple[OptimizerName, ...] = ("lamb", "muon", "soap")
CASES = (
    *(Steps(layout=layout, guarded=True) for layout in LAYOUTS),
    Steps(optimizer="lion"),
    Steps(optimizer="adafactor"),
    *(Steps(layout=layout, optimizer=optimizer) for optimizer in _EXCHANGING for layout in ("full", "hybrid")),
    *(Steps(layout=layout, compiled=True) for layout in LAYOUTS),
    Steps(optimizer="muon", compiled=True, experts=True),
    *(Steps(layout=layout) for layout in ("1f1b", "zero_bubble_v")),
    Steps(layout="1f1b", optimizer="lamb"),
    Steps(layout="context", compiled=True, within=True),
    Steps(layout="1f1b, context", compiled=True, within=True),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Waits and graphs of the steps.

    Attributes:
        waits: Number of waits by the step that they are in, from 1, and operator; 0: between steps, where figures are read.
        graphs, breaks: Dynamo's.
    """

    waits: Counter[tuple[int, str]] = field(default_factory=Counter)
    graphs: int = 0
    breaks: int = 0

    @property
    def in_steps(self) -> dict[tuple[int, str], int]:
        """Waits in steps after the first, which makes what later ones keep."""
        return {one: n for one, n in self.waits.items() if one[0] > 1}

    @property
    def at_reads(self) -> int:
        """Waits where figures are read: one a figure, as fake tensors are read one number at a time."""
        return sum(n for (step, _), n in self.waits.items() if step == 0)


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what would wait for a device, and answers a read of it with zero.

    Attributes:
        step: Number of the step at hand, which waits are noted with; 0: between steps.
        waits: Number of waits by step and operator.
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.step = 0
        self.waits: Counter[tuple[int, str]] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles nothing below other modes."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note it if it waits."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators are of ordinary tensors
        kwargs = kwargs or {}
        if self._waits(function, args, kwargs):
            self.note(str(function))
            if function is _aten._local_scalar_dense.default:
                return 0.0 if args[0].dtype.is_floating_point else 0
        return function(*args, **kwargs)

    def _waits(self, function: Any, args: Any, kwargs: Any) -> bool:
        if function is _aten.copy_.default:  # in which the second is the source
            return self._is_there(args[1]) and not self._is_there(args[0])
        if not (args and isinstance(args[0], Tensor) and self._is_there(args[0])):
            return False
        if function is _aten._to_copy.default:
            return torch.device(kwargs.get("device") or args[0].device).type != self._device_type
        by_mask = function in _INDEXED and any(one is not None and one.dtype is torch.bool for one in args[1])
        return function in _WAITS or by_mask

    def _is_there(self, tensor: Tensor) -> bool:
        """Return whether the tensor is on the device; real tensors, and fake ones of known value such as counts of steps, are not."""
        return isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.device.type == self._device_type

    def note(self, name: str) -> None:
        self.waits[self.step, name] += 1

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Note copies to the host, too."""
        with ExitStack() as stack:
            for name in _COPIES:
                copy = getattr(Tensor, name)

                def noted(tensor: Tensor, *args: Any, _name: str = name, _copy: Any = copy, **kwargs: Any) -> Any:
                    self.note(_name)
                    return _copy(tensor, *args, **kwargs)

                stack.enter_context(patch.object(Tensor, name, noted))
            yield


class _Flags:
    """Flags of ranks that agree every so many steps, and on nothing."""

    saves = ends = False
    straggler = None
    steps = READ_EVERY

    def __init__(self, **_: Any) -> None: ...

    def agree(self, _taken: int) -> None: ...


@cache
def _corpus() -> Corpus:
    return write_corpus(Path(tempfile.mkdtemp(prefix="host-waits-")) / "corpus", EMBEDDED)


def run_of(case: Steps, directory: Path) -> FullRun:
    """The run whose steps are taken; two passes a step, or a micro-batch for each rank of a pipeline."""
    parallelism: Parallelism = (LAYOUTS | PIPELINES)[case.layout]
    stages, size = parallelism.pipeline_parallel, 2
    layers, n_experts = max(2, n_stages(parallelism.pipeline_schedule, stages)), 8 if case.experts else None
    model = ModelConfig(
        d_model=256, n_layers=layers, head_dim=16, queries_per_kv=2, context_length=64, n_experts=n_experts,
        document_separator=0 if case.within else None, attention_window=16 if case.within else None,
    )  # fmt: skip
    batch = size * max(2, stages) * parallelism.data_ranks(RANKS) * model.context_length
    corpus = _corpus()
    numerics = Numerics(
        model=model, base=model, corpus_key=corpus.key, seed=0, evaluation_tokens=64, precision="bf16",
        guard=GuardSettings(window=8) if case.guarded else None,
    )  # fmt: skip
    values = Hyperparameters(learning_rate=0.01, batch_tokens=batch, optimizer=case.optimizer)
    return FullRun(
        numerics=numerics,
        segments=chain(values, batch * 10 * STEPS),
        directory=directory,
        corpus=corpus.folder,
        checkpoint_every_tokens=batch * 100 * STEPS,
        evaluate_every_tokens=None,
        min_unit_params=0,
        micro_batch=size,
        parallelism=parallelism,
        compile=case.compiled,
        on_spike=SpikePolicy(action="skip") if case.guarded else None,
    )


def taken(case: Steps) -> Found:
    torch._dynamo.reset()
    counters.clear()
    noted = HostWaits()
    device = torch.device("cpu")
    compile, take_step = torch.compile, FullRunModule.take_step

    n_taken = 0

    def counted(self: FullRunModule) -> None:
        nonlocal n_taken
        noted.step = n_taken = n_taken + 1
        take_step(self)
        noted.step = 0

    with tempfile.TemporaryDirectory() as folder, rank_of(0, RANKS), ExitStack() as stack:
        run = run_of(case, Path(folder))
        meshes = Meshes.of(run.parallelism, run.parallelism.grid(RANKS), device.type)
        for owner, name, value in (
            (full_run_module, "RankFlags", _Flags),
            *(
                (full_run_module, build.__name__, partial(_without_values, build))
                for build in (build_model, build_pipeline)
            ),
            (_PipelineSchedule, "_warmup_p2p", agree),
            (soap, "_FREQUENCY", 2),  # so that a step after the first renews eigenbases
            (full_run_module, "broadcast_from_rank0", lambda make: make()),
            (FullRunModule, "take_step", counted),
            (torch, "compile", lambda f, **options: compile(f, backend="eager", **options)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(fake_gpu())
        attempt = Attempt.new(run.directory)
        attempt.begin(tokens=0, step=0)
        module = FullRunModule(
            run, 0, None, attempt=attempt, spent=0.0, checkpoints=Checkpoints(run.directory / "checkpoints"),
            interventions=Interventions(run.on_spike, run.segments[0].recipe.ramp, []),
        )  # fmt: skip
        trainer: Any = _Trainer()
        module.trainer, module.meshes = trainer, meshes
        module.configure_model()
        trainer.optimizers = [module.configure_optimizers()]
        module.on_fit_start()
        stack.enter_context(noted.copies())
        with noted:
            while n_taken < STEPS:
                module.training_step(torch.empty(0), 0)
    return Found(
        waits=noted.waits, graphs=counters["stats"]["unique_graphs"], breaks=sum(counters["graph_break"].values())
    )


def _without_values(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return build(*args, **kwargs | {"initial_values": False})


class _Trainer:
    """The part of Lightning's trainer that the module uses."""

    world_size, global_rank = RANKS, 0
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    optimizers: list[torch.optim.Optimizer]
