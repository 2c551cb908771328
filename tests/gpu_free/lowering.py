"""Lower compiled code for an H100 that is not there: graphs, attention's kernels, and every Triton kernel to a cubin.

Models of one rank, then stages of a pipeline and ranks that share every sequence, in a fake process group without other ranks.
Then whole steps on fake tensors of that H100, uncompiled as optimizers are: what of them would make the host wait.

    make lowering

It needs Linux, gcc and torch's CUDA build, for which the Makefile makes a separate environment (5.5 GB); no GPU and no driver.
Exits with 1 if a case has more graphs than kinds of blocks, attention by another kernel than FlashAttention, or FlexAttention within
windows and for shared sequences, a kernel that ptxas refuses, no collectives where keys are gathered, or if a step waits.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import _PipelineSchedule

from proxy_models.architecture.attention import cuda_kernel
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.cross_entropy import _gradient_of_chunk, _statistics_of_chunk
from proxy_models.architecture.decoder import Decoder, training_loss
from proxy_models.architecture.families import family_of
from proxy_models.architecture.memory import CHUNK_ENTRIES, Checkpointing
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.architecture.stage import Stage, edges_of
from proxy_models.architecture.stage_layout import blocks_of_stages
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training import soap
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import make_optimizer
from proxy_models.training.pipeline import Pipeline
from proxy_models.training.step import Stepper
from tests.gpu_free.cases import agree
from tests.gpu_free.fake_device import _attention
from tests.gpu_free.host_waits import HostWaits
from tests.muscale.fake_ranks import rank_of

# Of the data sheet: docs.nvidia.com/cuda/hopper-tuning-guide, and cudaGetDeviceProperties of an H100 SXM.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 * 2**20, gcnArchName="", clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
)  # fmt: skip
DEVICE = torch.device("cuda", 0)
SHAPE = ModelConfig(d_model=2048, n_layers=2, head_dim=128, mlp_ratio=2.75, vocab_size=50_304, context_length=2048)
_FLASH = "_scaled_dot_product_flash_attention"
_FLEX = "flex_attention"
_OF_ATTENTION = re.compile(r"^ .*torch\.ops\.aten\.(_scaled_dot_product_\w+|_softmax)", re.MULTILINE)
_FUSED = {name: {name, f"{name}_backward"} for name in (_FLASH, _FLEX)}
MODELS = {  # with the attention that each has, and the graphs of its blocks
    "equal heads": (SHAPE, _FUSED[_FLASH], 1),
    "grouped heads": (replace(SHAPE, queries_per_kv=4), _FUSED[_FLASH], 1),
    "documents": (replace(SHAPE, document_separator=0), _FUSED[_FLEX], 1),
    "window": (replace(SHAPE, attention_window=512), _FUSED[_FLEX], 1),
    "every second window": (
        replace(SHAPE, attention_window=512, global_attention_every=2),
        _FUSED[_FLASH] | _FUSED[_FLEX],
        2,
    ),
    "experts": (replace(SHAPE, n_experts=8, experts_per_token=2, expert_ratio=1.0), _FUSED[_FLASH], 1),
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's share of a model: a stage of a pipeline, and its positions of every sequence."""

    config: ModelConfig
    stages: int = 1
    stage: int = 0
    context: int = 1

    def __str__(self) -> str:
        model = "documents, every second window" if self.config.attention_window else "grouped heads"
        return f"{model}, stage {self.stage + 1} of {self.stages}, {self.context} ranks a sequence"

    @property
    def blocks(self) -> range:
        return blocks_of_stages(self.config, self.stages)[self.stage]

    @property
    def kinds(self) -> int:
        """Number of kinds of the stage's blocks."""
        return len({self.config.window_of(layer) for layer in self.blocks})

    @property
    def attention(self) -> set[str]:
        return _FUSED[_FLEX if self.config.attention_window or self.context > 1 else _FLASH]

    @property
    def collectives(self) -> set[str]:
        return {"all_gather_into_tensor", "reduce_scatter_tensor"} if self.context > 1 else set()


_GROUPED = replace(SHAPE, queries_per_kv=4, n_layers=6)
_WITHIN = replace(_GROUPED, document_separator=0, attention_window=512, global_attention_every=2)
SHARES: tuple[tuple[Share, Checkpointing], ...] = (
    *((Share(config=_GROUPED, stages=3, stage=stage), "none") for stage in range(3)),
    *((Share(config=_WITHIN, stages=3, stage=stage), "full") for stage in range(3)),
    *((Share(config=_GROUPED, context=4), checkpointing) for checkpointing in ("none", "selective")),
    *((Share(config=_WITHIN, context=4), checkpointing) for checkpointing in get_args(Checkpointing)),
    (Share(config=_WITHIN, stages=3, stage=1, context=4), "selective"),
)
_OF_COLLECTIVES = re.compile(r"torch\.ops\._c10d_functional\.(\w+?)(?:_out)?\.default\(")
_SWITCHES = {
    "torch._inductor.config.compile_threads": 1,
    "torch._inductor.config.fx_graph_cache": False,
    "torch._inductor.config.joint_graph_constant_folding": False,
    "torch._inductor.config.triton.autotune_at_compile_time": False,
    "torch._functorch.config.enable_autograd_cache": False,
    "torch._functorch.config.graphsafe_rng_functionalization": False,  # the GPU's random numbers have a state to read
    "torch._functorch.config.force_non_lazy_backward_lowering": True,  # the backward graph too, though nothing runs
}


class Lowered:
    """Results of Inductor on the graphs that it receives.

    Attributes:
        graphs: Dynamo's.
        kernels: Triton's, compiled by ptxas.
        attention: Attention's operators in the code of the graphs, forward and backward.
        collectives: Collectives there.
        refused: Errors of kernels.
    """

    def __init__(self) -> None:
        self.graphs, self.kernels = 0, 0
        self.attention: set[str] = set()
        self.collectives: set[str] = set()
        self.refused: list[str] = []

    def lower(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Dynamo's backend: lower a graph, and run the graph itself on fake tensors."""
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        compile_fx(graph, inputs)
        return graph.forward  # type: ignore[no-any-return]

    def compile(self, model: Decoder) -> None:
        """Compile each block, as full runs do."""
        for block in model.blocks:
            block.compile(backend=self.lower, dynamic=False, fullgraph=True)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the code that is written, and compile its kernels for the device, which launches none."""
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        write = PyCodeCache.write

        def written(source: str, *rest: Any, **named: Any) -> Any:
            if "async_compile" in source:
                self.attention.update(_OF_ATTENTION.findall(source))
                self.collectives.update(set(_OF_COLLECTIVES.findall(source)) - {"wait_tensor"})
                self.attention.update(
                    re.findall(rf"'kernel_name': 'triton_tem_fused\w*?({_FLEX}(?:_backward)?)", source)
                )
            return write(source, *rest, **named)

        def precompile(tuner: Any, *_: Any, **__: Any) -> None:
            try:
                tuner._precompile_config(tuner.configs[0])
                self.kernels += 1
            except Exception as error:
                self.refused.append(f"{type(error).__name__}: {error}"[:300])

        with patch.object(PyCodeCache, "write", written), patch.object(CachingAutotuner, "precompile", precompile):
            yield


@contextmanager
def h100() -> Iterator[None]:
    """Tensors made inside are fake and on an H100, for which Inductor and Triton compile."""
    import torch._inductor.config
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.runtime import driver  # type: ignore[import-not-found]

    state = torch.zeros(16, dtype=torch.uint8)
    asked: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: H100.name,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (79 * 2**30, 80 * 2**30),
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
    }
    interface = {
        "get_device_properties": lambda *_: H100,
        "get_compute_capability": lambda *_: 90,
        "get_raw_stream": lambda *_: 0,
        "exchange_device": lambda *_: 0,
        "maybe_exchange_device": lambda *_: 0,
    } | {name: asked[name] for name in ("is_available", "device_count", "current_device", "set_device", "synchronize")}
    interface["is_bf16_supported"] = asked["is_bf16_supported"]
    builtins = ("getCurrentRawStream", "getDevice", "exchangeDevice", "maybeExchangeDevice", "setDevice")
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: DEVICE,
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_device_interface=lambda: torch.cuda,
            launcher_cls=lambda *_, **__: None,
            utils=SimpleNamespace(
                get_device_properties=lambda _: {
                    "max_shared_mem": H100.shared_memory_per_block_optin,
                    "multiprocessor_count": H100.multi_processor_count,
                    "warpSize": 32,
                    "max_num_regs": 65_536,
                }
            ),
        )
    )
    with ExitStack() as stack:
        for name, function in asked.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        for name, function in interface.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(function)))
        for name in ("get_device_properties", "current_device", "set_device"):
            stack.enter_context(patch.object(CudaInterface.Worker, name, staticmethod(asked[name])))
        for name in builtins:
            stack.enter_context(patch.object(torch._C, f"_cuda_{name}", lambda *_: 0))
        stack.enter_context(patch.object(torch._C, "_cuda_getDeviceProperties", lambda *_: H100, create=True))
        stack.enter_context(patch("torch.accelerator.is_available", lambda: False))  # dynamo asks it for a stream
        stack.enter_context(patch("torch.accelerator.current_device_index", lambda: 0))
        stack.enter_context(patch("torch.cuda.random.get_rng_state", lambda *_: state))
        stack.enter_context(patch("torch.cuda.random.set_rng_state", lambda *_: None))
        for name, value in _SWITCHES.items():
            stack.enter_context(patch(name, value))
        # A fake tensor is asked for no kernel: `kernels_as_ruled` holds the rule by which this one is taken to torch's own.
        stack.enter_context(patch("torch.nn.functional.scaled_dot_product_attention", _attention))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def lowered(config: ModelConfig, checkpointing: Checkpointing, *, whole: bool) -> Lowered:
    """Lower a bf16 step's forward and backward pass: as proxies compile it, `whole`, or block by block, as full runs do."""
    torch._dynamo.reset()
    found = Lowered()
    with h100(), found.noting():
        model = _model(config, checkpointing)
        sequences = torch.zeros(8, config.context_length + 1, dtype=torch.int64, device=DEVICE)
        loss = training_loss
        if whole:
            loss = torch.compile(training_loss, backend=found.lower, dynamic=False, fullgraph=True)
        else:
            found.compile(model)
        loss(model, sequences).backward()  # type: ignore[no-untyped-call]
    return found


def lowered_loss() -> Lowered:
    """Lower what is computed from a chunk of bf16 logits, forward and backward."""
    torch._dynamo.reset()
    found, rows = Lowered(), CHUNK_ENTRIES // SHAPE.vocab_size
    with h100(), found.noting():
        logits = torch.empty(rows, SHAPE.vocab_size, dtype=torch.bfloat16, device=DEVICE)
        index = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
        normaliser, scale = (torch.ones(shape, device=DEVICE) for shape in ((rows, 1), ()))
        for function, rest in (
            (_statistics_of_chunk, (index, None, False)),
            (_gradient_of_chunk, (scale, normaliser, index, None, 0.0, 0.0, 0.0)),
        ):
            torch.compile(function, backend=found.lower, dynamic=False, fullgraph=True)(logits, *rest)
    return found


def lowered_share(share: Share, checkpointing: Checkpointing) -> tuple[Lowered, HostWaits]:
    """Take three steps in bf16 of a rank whose blocks are compiled, with AdamW; lower their forward and backward passes."""
    torch._dynamo.reset()
    config, found, noted = share.config, Lowered(), HostWaits(DEVICE.type)
    family, edges = family_of(config), edges_of(config, torch.bfloat16)
    with rank_of(share.stage * share.context, share.stages * share.context):
        mesh = init_device_mesh("cpu", (share.stages, share.context), mesh_dim_names=("stages", "context"))
        with h100(), found.noting(), patch.object(_PipelineSchedule, "_warmup_p2p", agree):
            model = _model(config, checkpointing)
            found.compile(model)
            if share.context > 1:
                family.share_sequences(model, mesh["context"])
            pipeline = None
            if share.stages > 1:
                stage = Stage(model, family, share.blocks, edges, device=DEVICE)
                stream = edges.stream[:, : config.context_length // share.context]
                stages, group = {share.stage: stage}, mesh["stages"].get_group()
                pipeline = Pipeline(stages, "1f1b", group=group, stream=stream, micro_batch=2)
            _take_steps(noted, model, config, pipeline=pipeline)
    return found, noted


def stepped(optimizer: OptimizerName, *, guarded: bool) -> HostWaits:
    """Take three steps of two passes in bf16: forward, backward, clipping and the optimizer; SOAP renews its eigenbases in each."""
    noted = HostWaits(DEVICE.type)
    with h100(), patch.object(soap, "_FREQUENCY", 1):
        _take_steps(noted, _model(SHAPE), SHAPE, optimizer, guarded=guarded)
    return noted


def _take_steps(
    noted: HostWaits, model: Decoder, config: ModelConfig, optimizer: OptimizerName = "adamw", *, guarded: bool = False,
    pipeline: Pipeline | None = None,
) -> None:  # fmt: skip
    batch = 8 * config.context_length
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=batch, optimizer=optimizer).resolve(100 * batch)
    numerics = Numerics(
        model=config, base=config, corpus_key="", seed=0, evaluation_tokens=64, precision="bf16",
        guard=GuardSettings(window=8) if guarded else None,
    )  # fmt: skip
    module = pipeline.module if pipeline else model
    made = make_optimizer(module, numerics.parametrization(recipe.optimizer), recipe)
    stepper = Stepper(module, made, numerics, recipe, micro_batch=4, pipeline=pipeline)
    sequences = torch.zeros(8, config.context_length + 1, dtype=torch.int64, device=DEVICE)
    with noted.copies(), noted:
        for number in range(3):
            noted.step = number + 1
            stepper.step(sequences, number=number, tokens=number * batch, rate_factor=1.0)


def _model(config: ModelConfig, checkpointing: Checkpointing = "none") -> Decoder:
    """A decoder on the device, in bf16, of values that nobody drew."""
    with torch.device(DEVICE), patch("torch.nn.init.kaiming_uniform_"), patch("torch.nn.init.normal_", _undrawn):
        model = Decoder(config)
    model.compute_dtype = torch.bfloat16
    for block in model.blocks:
        block.checkpointing = checkpointing  # type: ignore[assignment]
    return model


def _undrawn(tensor: Tensor, **_: Any) -> Tensor:
    return tensor


def kernels_as_ruled() -> list[str]:
    """Cases in which torch's own rules for an H100 and `cuda_kernel` differ on which fused kernels take them."""
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    wrong = []
    with h100():
        for dtype, head_dim, biased, grouped in product(
            (torch.float32, torch.bfloat16, torch.float16), (8, 12, 64, 128, 256, 512), (False, True), (False, True)
        ):
            query = torch.empty(2, 8, 64, head_dim, dtype=dtype, device=DEVICE)
            key = torch.empty(2, 4 if grouped else 8, 64, head_dim, dtype=dtype, device=DEVICE)
            bias = torch.empty(2, 8, 64, 64, dtype=dtype, device=DEVICE) if biased else None
            given = SDPAParams(query, key, key, bias, 0.0, not biased, grouped)
            found = (
                "flash"
                if can_use_flash_attention(given)
                else "efficient"
                if can_use_efficient_attention(given)
                else "math"
            )
            ruled = cuda_kernel(dtype, head_dim, biased=biased, grouped=grouped)
            if found != ruled:
                wrong.append(
                    f"{dtype}, heads of {head_dim}, biased={biased}, grouped={grouped}: torch {found}, ruled {ruled}"
                )
    return wrong


def main() -> int:
    """Lower every case and print a row for each."""
    failed = kernels_as_ruled()
    print("\n".join(failed) or "attention's kernels: as ruled", flush=True)
    print(
        "| model | checkpointing | compiled | graphs | kernels to cubin | attention |\n| --- | --- | --- | --- | --- | --- |"
    )
    for (name, (config, fused, kinds)), checkpointing, whole in product(
        MODELS.items(), get_args(Checkpointing), (True, False)
    ):
        found = lowered(config, checkpointing, whole=whole)
        print(
            f"| {name} | {checkpointing} | {'whole' if whole else 'blocks'} | {found.graphs} "
            f"| {found.kernels} | {', '.join(sorted(found.attention))} |",
            flush=True,
        )
        if found.graphs != (1 if whole else kinds) or found.attention != fused or found.refused or not found.kernels:
            failed.append(f"{name}, {checkpointing}, {'whole' if whole else 'blocks'}: {vars(found)}")
    print("| rank | checkpointing | graphs | kernels to cubin | attention | collectives | waits in three steps |")
    print(f"|{7 * ' --- |'}")
    for share, checkpointing in SHARES:
        found, noted = lowered_share(share, checkpointing)
        print(
            f"| {share} | {checkpointing} | {found.graphs} | {found.kernels} | {', '.join(sorted(found.attention))} "
            f"| {', '.join(sorted(found.collectives))} | {noted.waits.total()} |",
            flush=True,
        )
        as_wanted = (found.graphs, found.attention, found.collectives) == (
            share.kinds, share.attention, share.collectives
        )  # fmt: skip
        if not as_wanted or found.refused or not found.kernels or noted.waits:
            failed.append(f"{share}, {checkpointing}: {vars(found)}, {dict(noted.waits)}")
    loss = lowered_loss()
    print(f"the loss of a chunk: {loss.graphs} graphs, {loss.kernels} kernels to cubin", flush=True)
    if loss.graphs != 2 or loss.refused or not loss.kernels:
        failed.append(str(vars(loss)))
    print("| optimizer | waits in three steps |\n| --- | --- |")
    for optimizer, guarded in (("adamw", True), *((name, False) for name in get_args(OptimizerName))):
        waits = stepped(optimizer, guarded=guarded).waits
        print(f"| {optimizer}{', guarded' if guarded else ''} | {waits.total()} |", flush=True)
        if waits:
            failed.append(f"{optimizer}: {dict(waits)}")
    print("\n".join(failed), file=sys.stderr)
    return int(bool(failed))


def without_driver() -> None:
    """Start this module again, with the functions of torch's libraries replaced that would ask a driver."""
    if not torch.version.cuda:
        raise SystemExit("this torch has no CUDA; `make lowering` installs the build that has it")
    headers = Path(find_spec("triton").origin).parent / "backends/nvidia/include"  # type: ignore[union-attr, arg-type]
    library = Path(tempfile.mkdtemp(prefix="no-driver-")) / "libcuda.so.1"
    source = Path(__file__).with_name("no_driver.c")
    named = f"-Wl,-soname,{library.name}"
    subprocess.run(["gcc", "-shared", "-fPIC", named, f"-I{headers}", source, "-o", library], check=True)
    os.environ |= {"LD_PRELOAD": str(library), "TRITON_LIBCUDA_PATH": str(library.parent)}
    os.execv(sys.executable, [sys.executable, "-m", "tests.gpu_free.lowering"])


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        without_driver()
    sys.exit(main())
