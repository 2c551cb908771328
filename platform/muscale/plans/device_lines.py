"""Lines of the gate about a run's devices: memory, layout, cadence, communication and disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from muscale.formatting import counted
from muscale.plans.cadence import Cadence
from muscale.plans.gate import GateLine
from muscale.plans.layouts import Layout
from muscale.plans.step_time import LINKS, StepTime
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.memory import MEMORY_SHARE, MemoryEstimate
from proxy_models.architecture.pipeline_counts import bubble_share

if TYPE_CHECKING:
    from proxy_models.architecture.attention import Kernel

EXPOSED_SHARE = 0.25
"""Share of a step in exposed communication above which the gate gives advice (assumed)."""
PROPOSED_FROM = 1.1
"""Ratio to the best predicted step time above which another layout is proposed; the model's error is about as large."""
MOST_SHARE = 0.1
"""Share of a run that saves may take, and that evaluations may take (assumed)."""


def memory_line(
    estimate: MemoryEstimate | None,
    *,
    memory_bytes: float | None,
    device: str,
    workers_on_it: int = 1,
    at_least: int = 0,
    untraced: str = "",
    sharding: str = "full",
) -> GateLine:
    """Whether the estimate fits; without an estimate, whether at least weights, gradients and moments do.

    Args:
        estimate: Estimate for one worker; None if the model can't be traced.
        memory_bytes: Memory of the device; None if unknown.
        at_least: Bytes of one worker's weights, gradients and moments.
        untraced: Reason why there is no estimate.
        sharding: Setting of [promote].
    """
    if estimate is None:
        state = at_least * workers_on_it
        compared = f"weights, gradients and moments take {state / 2**30:.3g} GiB on {device}"
        if memory_bytes is not None and state > MEMORY_SHARE * memory_bytes:
            compared += f"; of its {memory_bytes / 2**30:.4g} GiB {MEMORY_SHARE:.0%} may be filled"
            advice = f"use {_smaller_state(sharding)}, or devices with more memory"
            return GateLine(name="memory", status="failed", compared=compared, advice=advice)
        advice = "try it with `muscale promote --smoke-test`"
        return GateLine(name="memory", status="unknown", compared=f"{compared}; {untraced}", advice=advice)
    needed = estimate.total * workers_on_it
    text = f"{needed / 2**30:.3g} GiB estimated" + (
        f" for {workers_on_it} workers" if workers_on_it > 1 else " a device"
    )
    if memory_bytes is None:
        return GateLine(
            name="memory",
            status="unknown",
            compared=f"{text}, {device} of unknown memory",
            advice="name the device, plan.accelerator, or try it with `muscale promote --smoke-test`",
        )
    compared = f"{text}, {memory_bytes / 2**30:.4g} GiB on {device}, of which {MEMORY_SHARE:.0%} may be filled"
    largest = max(
        ("parameters", "gradients", "optimizer", "activations", "gathered", "reduced"),
        key=lambda part: getattr(estimate, part),
    )
    remedy = {
        "activations": "a smaller micro-batch or activation checkpointing, or ",
        "gathered": 'promote.sharding = "full", or ' if sharding in ("none", "zero2") else "",
        "reduced": "",
    }.get(largest, f"{_smaller_state(sharding)}, or ")
    size = getattr(estimate, largest) / 2**30
    advice = f"the largest part is {largest}, {size:.3g} GiB: take {remedy}devices with more memory"
    return GateLine.judged("memory", needed <= MEMORY_SHARE * memory_bytes, compared, advice)


def _smaller_state(sharding: str) -> str:
    """Return what makes a worker's state smaller: more workers do only if all of them share it."""
    return "more workers to shard the state over" if sharding in ("zero2", "full") else 'promote.sharding = "full"'


def evaluation_line(
    peak: float | None,
    *,
    sequences: int,
    memory_bytes: float | None,
    device: str,
    workers_on_it: int = 1,
    sharding: str = "full",
) -> GateLine:
    """Whether an evaluation fits into memory next to the training state.

    Args:
        peak: Estimated bytes of one worker; None without an estimate.
        memory_bytes: Memory of the device; None if unknown.
        sharding: Setting of [promote].
    """
    if peak is None:
        return GateLine(name="evaluation", status="unknown", compared="no estimate of the training")
    peak *= workers_on_it
    text = f"{peak / 2**30:.3g} GiB estimated for passes of {counted(sequences, 'sequence')}"
    if memory_bytes is None:
        return GateLine(name="evaluation", status="unknown", compared=f"{text}, {device} of unknown memory")
    compared = f"{text}, {memory_bytes / 2**30:.4g} GiB on {device}"
    advice = (
        f"take a smaller promote.micro_batch, which bounds the evaluation's passes too, or {_smaller_state(sharding)}"
    )
    return GateLine.judged("evaluation", peak <= MEMORY_SHARE * memory_bytes, compared, advice)


def attention_line(kernel: Kernel, *, n_heads: int, head_dim: int, weight_bytes: float) -> GateLine:
    """Whether a GPU computes attention with a fused kernel.

    Args:
        n_heads: Query heads of one worker.
        weight_bytes: Bytes of one block's attention weights on a worker, which only the math kernel stores.
    """
    fused = f"the {kernel} kernel, {n_heads} heads of {head_dim} on a worker"
    math = f"heads of {head_dim} need the math kernel, whose weights take {weight_bytes / 2**30:.3g} GiB a block"
    advice = (
        "use a model.head_dim that is a multiple of 8 and, with model.document_separator, model.attention_window or "
        "promote.context_parallel, at least 16"
    )
    return GateLine.judged("attention", kernel != "math", math if kernel == "math" else fused, advice)


def layout_line(
    shared: Mapping[str, int],
    *,
    sequences: int,
    workers: int,
    parallelism: Parallelism,
    errors: Sequence[str] = (),
    micro_batch: int = 1,
    doublings: int = 0,
) -> GateLine:
    """Whether the workers form the layout, the model can be laid out so, and each worker gets a sequence of every batch.

    Uneven shares are only reported: they do not change the loss, but ranks with fewer sequences wait.

    Args:
        shared: Sizes that `tensor_parallel` workers share, by name: heads, d_ff, ….
        sequences: Sequences of the smallest batch.
        errors: `Parallelism.layout_errors` of the model.
        micro_batch: Largest number of sequences of a micro-batch in a pipeline.
        doublings: Number of times that the batch doubles.
    """
    tensor, group, stages = parallelism.tensor_parallel, parallelism.sequence_ranks, parallelism.pipeline_parallel
    of_batches = partial(parallelism.unfit, sequences=sequences, doublings=doublings)
    problems, advice = list(of_batches(workers, micro_batch=micro_batch)), list[str]()
    if problems and not any(of_batches(workers)):
        advice.append("use another promote.micro_batch or another batch")
    divisors = [
        n * group * stages
        for n in range(1, sequences + 1)
        if sequences % n == 0 and not any(of_batches(n * group * stages, micro_batch=micro_batch))
    ]
    near = " or ".join(str(n) for n in sorted(sorted(divisors, key=lambda n: abs(n - workers))[:2]))
    if problems and not advice:
        advice.append(f"take {near} workers, or another batch" if near else "use another batch size or another layout")
    if errors:
        problems += errors
        advice.append("use another layout, or another model size, which plan.compute_flops determines")
    if problems:
        return GateLine(
            name="layout",
            status="failed",
            compared=f"can't be laid out: {'; '.join(problems)}",
            advice="; ".join(advice),
        )
    shares = parallelism.data_ranks(workers)
    least, more = divmod(sequences, shares)
    together = group * stages
    groups = "" if together == 1 else f"group{'s' if shares > 1 else ''} of {together} "
    in_stages = _in_stages(parallelism, least, micro_batch)
    text = f"{counted(sequences, 'sequence')} over {shares} {groups}worker{'s' * (shares * together > 1)}{in_stages}"
    parts = [f"{size} {what}" for what, size in shared.items()] if tensor > 1 else []
    if more:
        waits = 1 - sequences / (shares * (least + 1))
        text += f", {least + 1} for {more} of them and {least} for the others, which wait: {waits:.0%} of the speed"
        advice.append(f"{near} workers would share it evenly")
    return GateLine(name="layout", status="passed", compared=", ".join([text, *parts]), advice="; ".join(advice))


def _in_stages(parallelism: Parallelism, sequences: int, micro_batch: int) -> str:
    """Text about a pipeline that gets so many sequences; "" without a pipeline."""
    if (pipeline := parallelism.pipeline(sequences)) is None:
        return ""
    number = pipeline.micro_batches(micro_batch)
    bubble = bubble_share(pipeline.schedule, pipeline.ranks, number)
    return (
        f", {pipeline.n_stages} stages under {pipeline.schedule}: {number} micro-batches of "
        f"{sequences // number}, bubble {bubble:.0%} of a step"
    )


def cadence_line(cadence: Cadence, *, run_seconds: float | None) -> GateLine:
    """Whether saves and evaluations each take at most a tenth of the run.

    Args:
        run_seconds: Duration of the run's steps; None if unknown, and then only minutes bound the saves.
    """
    saving, evaluating = cadence.save_share(run_seconds), cadence.evaluation_share
    saves = (
        "an unknown share of the time"
        if saving is None
        else f"{saving:.2%} of the time at {cadence.save_seconds:.3g} s"
    )
    compared = (
        f"{cadence.checkpoints} checkpoints by tokens, {saves}; {cadence.evaluations} evaluations, {evaluating:.2%} of the "
        f"FLOPs; at most {MOST_SHARE:.0%} each"
    )
    shares = {
        "checkpoint_every_tokens and checkpoint_every_minutes": saving or 0.0,
        "evaluate_every_tokens": evaluating,
    }
    over = [f"promote.{key}" for key, share in shares.items() if share > MOST_SHARE]
    advice = f"raise or leave out {' and '.join(over)}; by default they depend on the run's length"
    return GateLine.judged("cadence", not over, compared, advice)


def communication_line(step: StepTime | None, proposed: Layout | None) -> GateLine:
    """Share of the predicted step in which devices wait for one another; it is reported and never blocks the run.

    Args:
        step: Prediction for the run's layout; None if the bandwidths of the devices' links are unknown.
        proposed: Layout with the best prediction among those that fit; None if none fits.
    """
    name = "communication"
    if step is None:
        return GateLine(
            name=name,
            status="unknown",
            compared="no prediction: the links of plan.accelerator are not known, or the layout is not possible",
            advice=f"name one of {', '.join(LINKS)}",
        )
    slower = proposed is not None and step.total > PROPOSED_FROM * proposed.step.total
    waits = step.exposed_share > EXPOSED_SHARE
    advice = f"predicted to be faster: {proposed}" if slower else "use fewer workers or a larger batch" if waits else ""
    return GateLine(
        name=name, status="passed", compared=f"predicted {step}; more than {EXPOSED_SHARE:.0%} is much", advice=advice
    )


def disk_line(needed: int, free: int, *, kept: int, place: str) -> GateLine:
    """Whether checkpoints fit: `needed` bytes for `kept` of them, including the one being written."""
    compared = f"{needed / 2**30:.3g} GiB for {kept} checkpoints, {free / 2**30:.4g} GiB free in {place}"
    advice = (
        "free some space, or move the study to a larger disk; `muscale gc` removes states that are no longer needed"
    )
    return GateLine.judged("disk", needed <= free, compared, advice)
