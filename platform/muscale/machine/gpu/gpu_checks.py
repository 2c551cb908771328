"""Checks of full runs on this machine's GPUs, against the same runs on the CPU, the memory estimate and the predicted step.

The checks run with one rank and with one rank per GPU. A small model runs in fp32 and bf16; its losses and collectives are compared
with those of CPU ranks over gloo. A compiled 350M model runs in bf16; its memory and speed are compared with what a plan assumes.
Bounds are stated with each check; those without a source are assumed. So far one H200 was tested (tests/benchmarks/RESULTS.md).
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from muscale.environment import device_name
from muscale.errors import StageError
from muscale.formatting import counted
from muscale.full_runs.train.rank_flags import MOST_SECONDS, MOST_STEPS
from muscale.layout import CORPUS
from muscale.machine.gpu.gpu_report import Check, GpuReport
from muscale.machine.gpu.training import Case, Device, Measurement, measure
from muscale.plans.step_time import StepTime
from muscale.secrets import redacted
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import MEMORY_SHARE, Precision, largest_micro_batch
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import EMBEDDED
from proxy_models.training.traced_memory import estimated_memory

LOSS_TOLERANCE: dict[Precision, float] = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of a step's loss from the CPU's in fp32: from the order of sums; in bf16 from the tests' runs."""
MEMORY_TOLERANCE = 0.1
"""Largest relative difference of peak memory from the estimate: traced peaks lie within .06 of it, and the allocator rounds up."""
MFU_TOLERANCE = 0.25
"""Largest relative difference of MFU from the prediction, whose errors at contexts to 4,096 are -14 to +12 %
(tests/benchmarks/RESULTS.md, The predicted step and published runs)."""

SMALL = ModelConfig(d_model=64, n_layers=2, head_dim=16, queries_per_kv=2, context_length=64)
GPT_125M = ModelConfig(d_model=768, n_layers=12, head_dim=64, context_length=2048, vocab_size=50_304, mlp_ratio=2.75)
GPT_350M = replace(GPT_125M, d_model=1024, n_layers=24)
"""Brown et al., arXiv 2005.14165, table 2.1."""
_SEQUENCES = 32  # per rank, for 350M
_KNOWN = {
    r"H100 80GB HBM3": "H100 SXM",
    r"G?H200": "H200",
    r"A100-SXM4-80GB": "A100 80GB",
    r"A100-SXM4-40GB": "A100 40GB",
}
"""Accelerators whose links are known, by a pattern of the name that the driver reports."""


def check_gpus(device: Device = "cuda", *, ranks: tuple[int, ...] = (), source: str = EMBEDDED) -> GpuReport:
    """Run all checks; on GPUs they take some minutes.

    Args:
        device: "cuda"; "cpu" runs the same code on CPU ranks, for the tests, without memory and speed.
        ranks: Numbers of ranks; by default one, and one for each GPU.

    Raises:
        StageError: If torch sees no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise StageError(
            f"doctor --gpu: torch must see a GPU; torch {torch.__version__}, {build}, sees none here; install the driver and "
            "a CUDA build of torch, or leave out --gpu"
        )
    ranks = ranks or tuple(sorted({1, max(1, torch.cuda.device_count())}))
    checks: list[Check] = []
    trainings: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="muscale-doctor-") as folder:
        corpus = write_corpus(Path(folder) / CORPUS, source).folder

        def trained(case: Case) -> Measurement:
            trainings.append(measure(case, corpus, Path(folder)))
            return trainings[-1]

        for n_ranks in ranks:
            golden = trained(small_case(f"golden-{n_ranks}", "cpu", n_ranks, "fp32"))
            for precision in LOSS_TOLERANCE:
                small = trained(small_case(f"{precision}-{n_ranks}", device, n_ranks, precision))
                checks += [*loss_checks(small, golden), *step_checks(small), *collective_checks(small, golden)]
            if device == "cuda":  # memory and speed are known for GPUs only
                large = trained(large_case(n_ranks))
                checks += [*speed_checks(large), *step_checks(large)]
        of_packing, workers = packing(device, Path(folder))
    return GpuReport(
        machine=_machine(device),
        checks=tuple(replace(c, found=_anonymous(c.found, folder)) for c in (*checks, *of_packing)),
        trainings=tuple(_anonymous(training.to_dict(), folder) for training in trainings),
        packing=tuple(workers),
    )


def small_case(name: str, device: Device, ranks: int, precision: Precision) -> Case:
    """A model whose losses a CPU computes in seconds, with two passes per step."""
    return Case(
        name=name,
        model=SMALL,
        device=device,
        ranks=ranks,
        precision=precision,
        sequences=4 * ranks,
        micro_batch=2,
        steps=10,
        profile=(5, 7),
    )


def large_case(ranks: int) -> Case:
    """350M parameters, with the largest micro-batch that the estimate allows."""
    memory = min(torch.cuda.get_device_properties(n).total_memory for n in range(ranks))
    estimate = partial(estimated_memory, GPT_350M, precision="bf16", sharding="full", world_size=ranks)
    fitting = largest_micro_batch(estimate, _SEQUENCES, limit=int(MEMORY_SHARE * memory))
    return Case(
        name=f"speed-{ranks}",
        model=GPT_350M,
        device="cuda",
        ranks=ranks,
        precision="bf16",
        sequences=_SEQUENCES * ranks,
        micro_batch=fitting,
        steps=24,
        profile=(9, 12),
        compile=True,
    )


def loss_checks(found: Measurement, golden: Measurement) -> Iterator[Check]:
    """Check that the losses match the CPU's."""
    what = f"{_where(found)}: losses"
    if failure := found.failure or golden.failure:
        yield Check(what=what, status="fail", found=failure, bound="trains to its end")
        return
    off = max(abs(one / other - 1) for one, other in zip(found.losses, golden.losses, strict=True))
    tolerance = LOSS_TOLERANCE[found.case.precision]
    yield _at_most(what, off, tolerance, f"{off:.1e} off", f"≤ {tolerance:g} of the CPU's in fp32, at every step")


def step_checks(found: Measurement) -> Iterator[Check]:
    """Check in the trace that FSDP2 is active, attention is fused, and the host does not wait."""
    if found.trace is None:
        return
    trace, where = found.trace, _where(found)
    units = found.case.model.n_layers + 3
    yield Check.judged(
        f"{where}: units of FSDP2",
        len(trace.units) == units,
        str(len(trace.units)),
        f"{units}: blocks, embedding, readout, the rest",
        len(trace.units),
    )
    kernels = ", ".join(f"{calls:g} {name}" for name, calls in sorted(trace.attention.items()))
    yield Check.judged(
        f"{where}: attention",
        bool(trace.attention) and "math" not in trace.attention,
        f"{kernels or 'none'} a step",
        "no math kernel",
        trace.attention.get("math", 0.0),
    )
    what = f"{where}: waits of the host"
    if trace.host_waits is None:
        why = "a CPU does not run ahead" if found.case.device == "cpu" else "the profiler could not see CUDA's runtime"
        yield Check(what=what, status="skipped", found=why)
        return
    between = max(1, min(MOST_STEPS, int(MOST_SECONDS / found.median_seconds)))
    waiting = sum(waits > 0 for waits in trace.host_waits)
    stated = f"≤ {trace.steps // between + 1}: figures are read every {between} steps"
    yield _at_most(what, waiting, trace.steps // between + 1, f"in {waiting} of {trace.steps} steps", stated)


def collective_checks(found: Measurement, golden: Measurement) -> Iterator[Check]:
    """Check that weights and gradients travel as between CPU ranks: as often, in as many bytes; weights in half as many in bf16."""
    if not found.trace or not golden.trace or found.case.ranks == 1:
        return
    for kind in ("all-gather", "reduce-scatter"):
        share = 0.5 if kind == "all-gather" and found.case.precision == "bf16" else 1.0
        here, expected = (
            {size * scale: calls for (name, size), calls in trace.collectives.items() if name == kind}
            for trace, scale in ((found.trace, 1.0), (golden.trace, share))
        )
        n_bytes, wanted = (sum(size * calls for size, calls in sizes.items()) for sizes in (here, expected))
        yield Check.judged(
            f"{_where(found)}: {kind}s",
            bool(here) and here == expected,
            f"{sum(here.values()):g} of {n_bytes:,.0f} bytes a step",
            f"{sum(expected.values()):g} of {wanted:,.0f} bytes, size by size",
            n_bytes,
        )


def speed_checks(found: Measurement) -> Iterator[Check]:
    """Compare memory with the estimate, and MFU with the predicted step."""
    memory = f"{_where(found)}: peak memory"
    if found.failure:
        yield Check(what=memory, status="fail", found=found.failure, bound="trains to its end")
        return
    estimate = found.case.estimate.total
    peak = found.peak_bytes or 0
    off = peak / estimate - 1
    stated = f"within {MEMORY_TOLERANCE:.0%} of the estimate, {estimate / 2**30:.2f} GiB"
    yield _at_most(memory, abs(off), MEMORY_TOLERANCE, f"{peak / 2**30:.2f} GiB ({off:+.1%})", stated)
    yield mfu_check(f"{_where(found)}: MFU", found, device_name(torch.device("cuda", 0)))


def predicted_mfu(found: Measurement, name: str) -> float | None:
    """MFU that a plan predicts for this training on an accelerator of this name; None if its links are not known."""
    known = next((known for part, known in _KNOWN.items() if re.search(rf"\b{part}\b", name)), None)
    if known is None:
        return None
    case = found.case
    return StepTime(
        case.model,
        case.parallelism,
        workers=case.ranks,
        micro_batch=case.micro_batch,
        batch_tokens=case.batch_tokens,
        device=known,
        precision=case.precision,
        compiled=found.compiled,
    ).mfu


def mfu_check(what: str, found: Measurement, name: str) -> Check:
    """Compare the MFU of a device of this name with the prediction."""
    mfu, predicted = found.median_mfu, predicted_mfu(found, name)
    if mfu is None or predicted is None:
        return Check(what=what, status="skipped", found=f"no prediction for {name}", value=mfu)
    off, how = mfu / predicted - 1, "compiled" if found.compiled else "eager"
    stated = f"within {MFU_TOLERANCE:.0%} of the predicted {predicted:.1%} ({name}, {how})"
    return _at_most(what, abs(off), MFU_TOLERANCE, f"{mfu:.1%} ({off:+.0%})", stated)


def _at_most(what: str, value: float, bound: float, found: str, stated: str) -> Check:
    return Check.judged(what, value <= bound, found, stated, value)


def _where(found: Measurement) -> str:
    case = found.case
    size = "350M" if case.model == GPT_350M else "small"
    return f"{counted(case.ranks, 'rank')}, {size}, {case.precision}"


def packing(device: Device, directory: Path) -> tuple[list[Check], list[dict[str, Any]]]:
    """Check workers that share devices; also return each worker's report. Skipped without Ray, which starts the workers.

    Args:
        directory: Folder for their ledger, with the corpus.
    """
    if find_spec("ray") is None:
        return [Check(what="packing", status="skipped", found="Ray is not installed")], []
    from muscale.machine.gpu.packing import packed

    return packed(device, directory, GPT_125M if device == "cuda" else SMALL)


def _machine(device: Device) -> dict[str, Any]:
    """Versions and devices, without the machine's name."""
    facts: dict[str, Any] = {name: _version(name) for name in ("muscale", "lightning", "ray")}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if device == "cpu":
        return facts | {"devices": [device_name(torch.device("cpu"))]}
    properties = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return facts | {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "devices": [
            {"name": each.name, "bytes": each.total_memory, "capability": [each.major, each.minor]}
            for each in properties
        ],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _anonymous(value: Any, folder: str) -> Any:
    """Plain values without secrets, the machine's name and folders of the user."""
    if isinstance(value, str):
        for known, instead in ((folder, "FOLDER"), (str(Path.home()), "~"), (platform.node(), "HOST")):
            value = value.replace(known, instead) if known else value
        return redacted(value)
    if isinstance(value, dict):
        return {key: _anonymous(item, folder) for key, item in value.items()}
    return [_anonymous(item, folder) for item in value] if isinstance(value, list | tuple) else value
