"""Conditions of a full run, checked before it is paid for: a line each, with what was compared and, where it fails, what to do.

The checks take plain values; `muscale.full_runs.promote.dry_run` finds these for a study.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from muscale.commands import StudyCommands
from muscale.errors import StageError
from muscale.formatting import fold
from muscale.plans.batch import FAR, BatchChoice
from muscale.plans.provenance import HyperparameterProvenance
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger, now
from muscale.store.tables import ResultKind
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import TIED_REACH
from scaling import Forecast
from search_spaces import TransferClass

if TYPE_CHECKING:
    from muscale.plans.by_law import Departure
    from proxy_models.architecture.member import Member
    from proxy_models.coordinates.check import CoordinateCheck

Status = Literal["passed", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True)
class GateLine:
    """One condition.

    Attributes:
        status: "unknown" where it can't be evaluated here, which does not block.
        compared: What was held against what.
        advice: What to do; where it passed, empty or what would be better.
    """

    name: str
    status: Status
    compared: str
    advice: str = ""

    @classmethod
    def judged(cls, name: str, holds: bool, compared: str, advice: str) -> Self:
        """A line that passed or failed; the advice is for where it failed."""
        return cls(name=name, status="passed" if holds else "failed", compared=compared, advice="" if holds else advice)


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

    def completed(self, commands: StudyCommands) -> Self:
        """The gate, with the commands of its advice completed."""
        return replace(self, lines=tuple(replace(one, advice=commands.completed(one.advice)) for one in self.lines))

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


def transfer_line(verdict: str, reasons: Sequence[str], options: str = "", *, tied_reach: float = 1.0) -> GateLine:
    """Whether the transfer check passed.

    Args:
        tied_reach: Width of the full run over that of the widest grid, where a table is tied; 1 where none is.
    """
    text = f"the verdict is {verdict!r}" + (f" ({'; '.join(reasons)})" if verdict != "pass" else "")
    remedy = f": muscale transfer {options}" if options else " with more transfer.seeds or transfer.rates"
    too_wide = (
        f"a tied table's rate is to be trusted over {TIED_REACH:g}× in width, and the full run is {tied_reach:.3g}× as wide as "
        "the widest grid: add a wider one to transfer.widths, or untie"
    )
    advice = {
        "pass": too_wide if tied_reach > TIED_REACH else "",
        "fail": "tuned values do not transfer to full size: mend the parametrization, or search less",
    }.get(verdict, f"settle it{remedy}")
    return GateLine(name="transfer", status="passed" if verdict == "pass" else "failed", compared=text, advice=advice)


def check_line(check: CoordinateCheck | None) -> GateLine:
    """Whether the family passed its coordinate check; None: it was not made yet."""
    name = "coordinate check"
    if check is None:
        return GateLine(name=name, status="unknown", compared="not made yet", advice="run `muscale check`")
    compared = str(check).splitlines()[0].removeprefix("coordinate check ")
    advice = "`muscale check` names the modules; tuned values would not transfer to full size"
    return GateLine.judged(name, check.passed, compared, advice)


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


def hyperparameters_line(provenance: Iterable[HyperparameterProvenance]) -> GateLine:
    """Whether a transfer rule covers everything that came from a smaller model."""
    name, every = "hyperparameters", list(provenance)
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


def forecast_line(forecast: Forecast) -> GateLine:
    """Whether the forecast lies inside what its interval was tested for; one that doesn't is reported and does not block."""
    if forecast.supported:
        return GateLine(name="forecast", status="passed", compared="inside declared support")
    return GateLine(
        name="forecast",
        status="passed",
        compared=f"outside declared support: {'; '.join(forecast.reasons)}",
        advice="its interval may be too narrow: `study.next_runs(plan)` proposes runs that would support it",
    )


def batch_line(batch: BatchChoice | None) -> GateLine:
    """Whether the batch is near the proxies', or near the best that a law has for the run."""
    covered = batch is None or batch.is_covered
    compared = "the proxies'" if batch is None else f"{batch}" if covered else f"{batch}; more than {FAR:g}× apart"
    advice = "take a batch nearer to either, or measure: transfer.batches, at least four around the proxies' batch"
    return GateLine.judged("batch", covered, compared, advice)


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


def precision_line(proxies: Precision, full: Precision, *, device: str, has_bf16: bool | None) -> GateLine:
    """Whether the device computes in the run's precision, and what it means where proxies computed in another.

    Args:
        proxies, full: Of the fitted runs and of the full run.
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


def _row(head: str, text: str) -> list[str]:
    """A text beside its head, folded."""
    return fold(head + text, 29)
