"""What has to hold before a full run is paid for: a line each, with what was compared and, where it does not hold, what to do.

The checks take plain values; `muscale.full_runs.promote.dry_run` finds these for a study.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from muscale.errors import StageError
from muscale.plans.batch import FAR, BatchChoice
from muscale.plans.cadence import Cadence
from muscale.plans.layouts import NO_ESTIMATE, Layout
from muscale.plans.provenance import HyperparameterProvenance
from muscale.plans.step_time import LINKS, StepTime
from muscale.serialization import Recorded
from muscale.settings.parallelism import Parallelism
from muscale.store.ledger import Ledger, now
from muscale.store.tables import ResultKind
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import MEMORY_SHARE, MemoryEstimate, Precision
from search_spaces import TransferClass

if TYPE_CHECKING:
    from muscale.plans.by_law import Departure
    from proxy_models.architecture.attention import Kernel
    from proxy_models.architecture.member import Member
    from proxy_models.coordinates.check import CoordinateCheck

Status = Literal["passed", "failed", "unknown"]
_WIDTH = 132
EXPOSED_SHARE = 0.25
"""Of a step, in exposed communication, from which the gate gives advice (assumed)."""
PROPOSED_FROM = 1.1
"""Times the best predicted step that a run's own may be before another layout is proposed; the model's error is about as large."""
MOST_SHARE = 0.1
"""Of a run: saves, and evaluations, may each take so much (assumed)."""


@dataclass(frozen=True, kw_only=True)
class GateLine:
    """One condition.

    Attributes:
        name: Of the condition.
        status: "unknown" where it can't be evaluated here, which does not block.
        compared: What was held against what.
        advice: What to do; where it passed, empty or what would be better.
    """

    name: str
    status: Status
    compared: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Gate(Recorded):
    """All conditions of one launch."""

    DERIVED = ("passed",)

    plan: str
    lines: tuple[GateLine, ...]

    @property
    def passed(self) -> bool:
        """Whether no line failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the lines that did."""
        return tuple(line.name for line in self.lines if line.status == "failed")

    def require(self, *, force: bool) -> None:
        """Let the launch go on.

        Raises:
            StageError: If a line failed, and the promotion is not forced.
        """
        if force or self.passed:
            return
        failures = "\n".join(
            f"{line.name}: {line.compared}; {line.advice}" for line in self.lines if line.status == "failed"
        )
        raise StageError(
            f"promote: the gate is closed:\n{textwrap.indent(failures, '  ')}\nor go through with --force, which the ledger keeps"
        )

    def record(self, ledger: Ledger) -> None:
        """Keep it for ever."""
        ledger.record_result(ResultKind.GATE, f"{self.plan} {now()}", self.to_dict())

    def __str__(self) -> str:
        """A row for each line, and below a failed or unknown one what to do."""
        counts = [
            f"{sum(line.status == status for line in self.lines)} {status}"
            for status in ("passed", "failed", "unknown")
        ]
        rows = [f"gate {'open' if self.passed else 'CLOSED'}: {', '.join(counts)}"]
        for line in self.lines:
            status = "FAILED" if line.status == "failed" else line.status
            rows += _row(f"  {status:<9}{line.name:<18}", line.compared)
            if line.advice:
                rows += _row(f"  {'':<9}{'':<18}→ ", line.advice)
        return "\n".join(rows)


def forced_lines(ledger: Ledger, plan: str) -> tuple[str, ...]:
    """Names of the lines that any launch of a plan was forced past, in order."""
    rows = ledger.results(ResultKind.GATE)
    gates = [Gate.from_dict(row["payload"]) for row in rows if row["payload"]["plan"] == plan]
    return tuple(dict.fromkeys(name for gate in gates for name in gate.failed))


def transfer_line(verdict: str, reasons: Sequence[str], options: str = "") -> GateLine:
    """Whether the transfer check passed; `options` are what its verdict says to run."""
    text = f"the verdict is {verdict!r}" + (f" ({'; '.join(reasons)})" if verdict != "pass" else "")
    remedy = f": muscale transfer {options}" if options else " with more transfer.seeds or transfer.rates"
    advice = {
        "pass": "",
        "fail": "what was tuned small does not hold when large: mend the parametrization, or narrow what is carried",
    }.get(verdict, f"settle it{remedy}")
    return GateLine(name="transfer", status="passed" if verdict == "pass" else "failed", compared=text, advice=advice)


def check_line(check: CoordinateCheck | None) -> GateLine:
    """Whether the family passed its coordinate check; None: it was not made yet."""
    name = "coordinate check"
    if check is None:
        return GateLine(name=name, status="unknown", compared="not made yet", advice="run `muscale check`")
    compared = str(check).splitlines()[0].removeprefix("coordinate check ")
    if check.passed:
        return GateLine(name=name, status="passed", compared=compared)
    return GateLine(
        name=name,
        status="failed",
        compared=compared,
        advice="`muscale check` names the modules; nothing tuned small would hold at full size",
    )


def require_check(check: CoordinateCheck, *, force: bool) -> None:
    """Let a family pass whose coordinate check did, before there is a plan.

    Raises:
        StageError: If it failed, and the promotion is not forced.
    """
    Gate(plan="", lines=(check_line(check),)).require(force=force)


def data_line(
    planned: Mapping[str, str], found: Mapping[str, str], changed: Sequence[str] | None, n_bytes: int
) -> GateLine:
    """Whether the corpus is the one that the plan was made from.

    Args:
        planned: Hashes of "corpus" and "tokenizer" that the plan keeps.
        found: The same of the corpus that the run would read.
        changed: Its files that do not hold the hashes of its manifest; None where they were too large to be hashed.
        n_bytes: Of its files.
    """
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    differing = [
        f"{name} {planned[name]} planned, {found.get(name)} here"
        for name in planned
        if planned[name] != found.get(name)
    ]
    if differing:
        return GateLine(
            name="data",
            status="failed",
            compared="; ".join(differing),
            advice="put the planned corpus back in its place, or plan anew on this one: its law is another",
        )
    if changed:
        return GateLine(
            name="data",
            status="failed",
            compared=f"{', '.join(changed)} not as hashed when the corpus was written",
            advice="remove the corpus folder, so that it is written again from its source",
        )
    if changed is None:
        return GateLine(
            name="data",
            status="unknown",
            compared=f"{text} in the manifest as planned; {n_bytes / 1e9:.3g} GB of tokens were not hashed again",
            advice="hold sha256sum of the token files against the manifest where storage is in doubt",
        )
    return GateLine(name="data", status="passed", compared=f"{text}, {n_bytes / 1e9:.3g} GB hashed again")


def hyperparameters_line(carried: Iterable[HyperparameterProvenance]) -> GateLine:
    """Whether nothing came from a smaller model that no rule carries."""
    name, every = "hyperparameters", list(carried)
    silent = [one for one in every if one.is_silent]
    if silent:
        text = [f"{one.name} = {one.value} from {one.source}" for one in silent]
        first = silent[0].name
        return GateLine(
            name=name,
            status="failed",
            compared=f"{', '.join(text)}: no transfer rule covers {'it' if len(text) == 1 else 'them'}",
            advice=f"state it: muscale plan --set plan.explicit.{first}=VALUE",
        )
    stated = [f"{one.name} = {one.value}" for one in every if "explicit" in one.rules]
    same = [
        f"{one.name} = {one.value}"
        for one in every
        if one.transfer is TransferClass.NEVER and one.value and f"{one.name} = {one.value}" not in stated
    ]
    parts = [f"{len(every) - len(stated) - len(same)} by rule or fixed"]
    parts += [f"explicit: {', '.join(stated)}"] if stated else []
    parts += [f"the study file's at every size: {', '.join(same)}"] if same else []
    return GateLine(name=name, status="passed", compared="; ".join(parts))


def batch_line(batch: BatchChoice | None) -> GateLine:
    """Whether the batch is near the proxies', or near the best that a law has for the run."""
    if batch is None:
        return GateLine(name="batch", status="passed", compared="the proxies'")
    if batch.is_covered:
        return GateLine(name="batch", status="passed", compared=str(batch))
    return GateLine(
        name="batch",
        status="failed",
        compared=f"{batch}; more than {FAR:g}× apart",
        advice="take a batch nearer to either, or measure: transfer.batches, at least four around the proxies' batch",
    )


def by_law_line(departures: Sequence[Departure]) -> GateLine:
    """Whether each value that depends on tokens, batch or tokens per parameter is covered at the full run's."""
    beyond = [one for one in departures if not one.is_covered]
    if not beyond:
        return GateLine(name="by law", status="passed", compared=", ".join(map(str, departures)))
    advice = {
        "batch_tokens": "measure: transfer.batches, at least four around the proxies' batch",
        "beta1": "state plan.explicit.beta1",
        "beta2": "state plan.explicit.beta2",
        "weight_decay_tau": "search at a sweep.n_tokens nearer to the run's tokens per parameter, or state "
        "plan.explicit.weight_decay_tau",
    }
    return GateLine(
        name="by law",
        status="failed",
        compared=f"{', '.join(map(str, beyond))}, and no law covers {'it' if len(beyond) == 1 else 'them'}",
        advice="; ".join(advice[one.cover.name] for one in beyond),
    )


def memory_line(
    estimate: MemoryEstimate | None, *, memory_bytes: float | None, device: str, workers_on_it: int = 1
) -> GateLine:
    """Whether the estimate fits.

    Args:
        estimate: Of one worker; None for a family without one.
        memory_bytes: Of the device; None where it is not known.
        device: Its name.
        workers_on_it: That share it.
    """
    if estimate is None:
        advice = "try it with `muscale promote --smoke-test`"
        return GateLine(name="memory", status="unknown", compared=NO_ESTIMATE, advice=advice)
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
    if needed <= MEMORY_SHARE * memory_bytes:
        return GateLine(name="memory", status="passed", compared=compared)
    largest = max(
        ("parameters", "gradients", "optimizer", "activations", "gathered", "reduced"),
        key=lambda part: getattr(estimate, part),
    )
    remedy = {
        "activations": "a smaller micro-batch or activation checkpointing",
        "gathered": "devices with more memory",
        "reduced": "devices with more memory",
    }.get(largest, "more workers to cut the state over")
    return GateLine(
        name="memory",
        status="failed",
        compared=compared,
        advice=f"most of it are {largest}, {getattr(estimate, largest) / 2**30:.3g} GiB: take {remedy}, or devices with more memory",
    )


def evaluation_line(
    peak: float | None, *, sequences: int, memory_bytes: float | None, device: str, workers_on_it: int = 1
) -> GateLine:
    """Whether an evaluation fits beside the state of the training.

    Args:
        peak: Estimated bytes of one worker; None for a family without an estimate.
        sequences: Of one pass.
        memory_bytes: Of the device; None where it is not known.
        device: Its name.
        workers_on_it: That share it.
    """
    if peak is None:
        return GateLine(name="evaluation", status="unknown", compared=NO_ESTIMATE)
    peak *= workers_on_it
    text = f"{peak / 2**30:.3g} GiB estimated for passes of {sequences} sequences"
    if memory_bytes is None:
        return GateLine(name="evaluation", status="unknown", compared=f"{text}, {device} of unknown memory")
    compared = f"{text}, {memory_bytes / 2**30:.4g} GiB on {device}"
    if peak <= MEMORY_SHARE * memory_bytes:
        return GateLine(name="evaluation", status="passed", compared=compared)
    return GateLine(
        name="evaluation",
        status="failed",
        compared=compared,
        advice="a smaller promote.micro_batch bounds the evaluation's passes too, or more workers to cut the state over",
    )


def attention_line(kernel: Kernel, *, head_dim: int, weight_bytes: float) -> GateLine:
    """Whether a GPU computes attention by a fused kernel.

    Args:
        kernel: That torch takes.
        head_dim: Of a head.
        weight_bytes: Of the attention weights of one block, which only the math kernel keeps.
    """
    if kernel != "math":
        return GateLine(name="attention", status="passed", compared=f"the {kernel} kernel, heads of {head_dim}")
    return GateLine(
        name="attention",
        status="failed",
        compared=f"heads of {head_dim} need the math kernel, whose weights take {weight_bytes / 2**30:.3g} GiB a block",
        advice="take a model.head_dim that is a multiple of 8, and with model.document_separator at least 16",
    )


def layout_line(
    shared: Mapping[str, int],
    *,
    sequences: int,
    workers: int,
    parallelism: Parallelism,
) -> GateLine:
    """Whether the workers form the layout, its products can be shared, and every share of a batch has a sequence.

    Shares that differ by a sequence are only reported: they change no loss, but the ranks of the smaller ones wait.

    Args:
        shared: Sizes that `tensor_parallel` workers share, by what they are: heads, d_ff, ….
        sequences: Of the smallest batch.
        workers: In all.
        parallelism: How they are laid out.
    """
    tensor = parallelism.tensor_parallel
    problems, advice = list(parallelism.unfit(workers, sequences=sequences)), []
    divisors = [
        n * tensor for n in range(1, sequences + 1) if sequences % n == 0 and not any(parallelism.unfit(n * tensor))
    ]
    near = " or ".join(str(n) for n in sorted(sorted(divisors, key=lambda n: abs(n - workers))[:2]))
    if problems:
        advice.append(f"take {near} workers, or another batch" if near else "take another batch, or another layout")
    odd = [f"{size} {what} over {tensor}" for what, size in shared.items() if size % tensor]
    if odd:
        problems += odd
        advice.append("take a tensor_parallel that divides them, or another size: plan.compute_flops decides it")
    if problems:
        return GateLine(
            name="layout",
            status="failed",
            compared=f"can't be laid out: {'; '.join(problems)}",
            advice="; ".join(advice),
        )
    shares = workers // tensor
    least, more = divmod(sequences, shares)
    text = f"{sequences} sequences over {shares} workers" + (f" × {tensor}" if tensor > 1 else "")
    parts = [f"{size} {what}" for what, size in shared.items()] if tensor > 1 else []
    if more:
        waits = 1 - sequences / (shares * (least + 1))
        text += f", {least + 1} for {more} of them and {least} for the others, which wait: {waits:.0%} of the speed"
        advice.append(f"{near} workers would share it evenly")
    return GateLine(name="layout", status="passed", compared=", ".join([text, *parts]), advice="; ".join(advice))


def cadence_line(cadence: Cadence, *, run_seconds: float | None) -> GateLine:
    """Whether saves and evaluations each take at most a tenth of the run.

    Args:
        cadence: The run's intervals.
        run_seconds: Duration of its steps; None where it is unknown, and then only minutes bound the saves.
    """
    saving, evaluating = cadence.save_share(run_seconds), cadence.evaluation_share
    saves = (
        "of unknown share of the time"
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
    return GateLine(
        name="cadence",
        status="failed" if over else "passed",
        compared=compared,
        advice=f"raise or leave out {' and '.join(over)}; by default they follow the run" if over else "",
    )


def precision_line(proxies: Precision, full: Precision, *, device: str, has_bf16: bool | None) -> GateLine:
    """Whether the device computes in the run's precision, and what it means where proxies computed in another.

    Args:
        proxies, full: Of the fitted runs and of the full run.
        device: Its name.
        has_bf16: Whether its products in bf16 are the device's own; None where that is unknown, or it is a CPU.
    """
    compared = f"full run in {full}, proxies in {proxies}"
    if full == "bf16" and has_bf16 is False:
        return GateLine(
            name="precision",
            status="failed",
            compared=f"{compared}; {device} has no products in bf16",
            advice='take another device, or promote.precision = "fp32"',
        )
    advice = ""
    if full != proxies:
        advice = f"the forecast is of losses in {proxies}: train one proxy in {full} too and compare the two"
    elif full == "fp32" and has_bf16:
        advice = 'promote.precision = "bf16" multiplies several times as fast on this device'
    return GateLine(name="precision", status="passed", compared=compared, advice=advice)


def context_line(full: Member, proxies: Member, *, too_short: str = "") -> GateLine:
    """Whether the full run reads sequences as its proxies did; a declared difference is reported and does not block.

    Args:
        full, proxies: Shapes of the full run and of the study's base.
        too_short: What the held-out split lacks for evaluations at that context, if anything.
    """
    same = f"{full.context_length:,} tokens a sequence"
    compared = (
        same if full.context_length == proxies.context_length else f"{same}, {proxies.context_length:,} in proxies"
    )
    bases = [model.rope_theta for model in (full, proxies) if isinstance(model, ModelConfig)]
    if len(set(bases)) > 1:
        compared += "; rope_theta {:,g}, {:,g} in proxies".format(*bases)
    if too_short:
        advice = "more held-out text, or fewer corpus.evaluation_tokens"
        return GateLine(name="context", status="failed", compared=f"{compared}; {too_short}", advice=advice)
    advice = ""
    if compared != same:
        advice = (
            "forecast and band are of losses at the proxies' context and do not cover this: a token's loss depends on how much "
            "stands before it; train a proxy in both ways and compare the two"
        )
    return GateLine(name="context", status="passed", compared=compared, advice=advice)


def communication_line(step: StepTime | None, proposed: Layout | None) -> GateLine:
    """Share of the predicted step in which devices wait for one another; reported, and never a reason against the run.

    Args:
        step: Predicted for the run's layout; None where nothing is known of the devices' links.
        proposed: The layout with the best prediction among those that fit; None where none does.
    """
    name = "communication"
    if step is None:
        return GateLine(
            name=name,
            status="unknown",
            compared="no prediction: plan.accelerator names no device whose links are known, or the layout does not stand",
            advice=f"name one of {', '.join(LINKS)}",
        )
    slower = proposed is not None and step.total > PROPOSED_FROM * proposed.step.total
    waits = step.exposed_share > EXPOSED_SHARE
    advice = (
        f"predicted to be faster: {proposed}" if slower else "take fewer workers or a larger batch" if waits else ""
    )
    return GateLine(
        name=name, status="passed", compared=f"predicted {step}; more than {EXPOSED_SHARE:.0%} is much", advice=advice
    )


def disk_line(needed: int, free: int, *, kept: int, place: str) -> GateLine:
    """Whether checkpoints fit: `needed` bytes for `kept` of them, the one that is being written among them."""
    compared = f"{needed / 2**30:.3g} GiB for {kept} checkpoints, {free / 2**30:.4g} GiB free in {place}"
    if needed <= free:
        return GateLine(name="disk", status="passed", compared=compared)
    return GateLine(
        name="disk",
        status="failed",
        compared=compared,
        advice="make room there, or keep the study on a larger disk; `muscale gc` removes states that nothing goes on from",
    )


def _row(head: str, text: str) -> list[str]:
    """A text beside its head, folded."""
    return textwrap.wrap(head + text, _WIDTH, subsequent_indent=" " * 29, drop_whitespace=True, break_long_words=False)
