"""Conditions of a full run, checked before compute is spent: one line each, with the values compared and advice on failure.

The checks take plain values; `muscale.full_runs.promote.dry_run` collects them for a study.
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
from muscale.proxies.expert_axes import NO_LAWS, AxisChange, AxisLaws, laws_of
from muscale.serialization import Recorded
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from proxy_models.architecture.families import family_of
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import TIED_REACH
from scaling import Forecast, Verdict
from scaling.optima.tokens_law import plural
from search_spaces import TransferClass

if TYPE_CHECKING:
    from muscale.plans.by_law import Deviation
    from muscale.proxies.leak_check import LeakCheck
    from proxy_models.architecture.member import Member
    from proxy_models.coordinates.check import CoordinateCheck

WORST_LEAKS = 3
"""Passages that a failed line names."""
Status = Literal["passed", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True)
class GateLine:
    """One condition.

    Attributes:
        status: "unknown" if the condition can't be evaluated here, which does not block.
        advice: Action to take; empty for a passed line, or a possible improvement.
    """

    name: str
    status: Status
    compared: str
    advice: str = ""

    @classmethod
    def judged(cls, name: str, holds: bool, compared: str, advice: str) -> Self:
        """Return a line that passed or failed; a passed line drops the advice."""
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
        """Names of the failed lines."""
        return tuple(line.name for line in self.lines if line.status == "failed")

    def completed(self, commands: StudyCommands) -> Self:
        """Return the gate with the commands in its advice completed."""
        return replace(self, lines=tuple(replace(one, advice=commands.completed(one.advice)) for one in self.lines))

    def require(self, *, force: bool) -> None:
        """Return if the launch may proceed; raise StageError if a line failed and the promotion is not forced."""
        if force or self.passed:
            return
        failures = "\n".join(
            f"{line.name}: {line.compared}; {line.advice}" for line in self.lines if line.status == "failed"
        )
        raise StageError(
            f"promote: the gate is closed:\n{textwrap.indent(failures, '  ')}\nor continue with --force, which the ledger records"
        )

    def record(self, ledger: Ledger) -> None:
        """Write the gate to the ledger permanently."""
        ledger.record_result(ResultKind.GATE, f"{self.plan} {now()}", self.to_dict())

    def __str__(self) -> str:
        """Return a row for each line, with the advice below a failed or unknown one."""
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
    """Return the names of the failed lines in all forced launches of a plan, in order."""
    rows = ledger.results(ResultKind.GATE)
    gates = [Gate.from_dict(row["payload"]) for row in rows if row["payload"]["plan"] == plan]
    return tuple(dict.fromkeys(name for gate in gates for name in gate.failed))


def transfer_line(verdict: str, reasons: Sequence[str], options: str = "", *, tied_reach: float = 1.0) -> GateLine:
    """Whether the transfer check passed.

    Args:
        tied_reach: Width of the full run over that of the widest grid, if the tables are tied; 1 if not.
    """
    text = f"the verdict is {verdict!r}" + (f" ({'; '.join(reasons)})" if verdict != "pass" else "")
    remedy = f": muscale transfer {options}" if options else " with more transfer.seeds or transfer.rates"
    too_wide = (
        f"a tied table's rate can be trusted over {TIED_REACH:g}× in width, and the full run is {tied_reach:.3g}× as wide as "
        "the widest grid: add a wider one to transfer.widths, or untie"
    )
    advice = {
        "pass": too_wide if tied_reach > TIED_REACH else "",
        "fail": "tuned values do not transfer to full size: fix the parametrization, or search fewer hyperparameters",
    }.get(verdict, f"settle it{remedy}")
    return GateLine(name="transfer", status="passed" if verdict == "pass" else "failed", compared=text, advice=advice)


def one_size_line(initial_weights: str) -> GateLine:
    """The transfer of a study whose runs start from given weights: all have their shape, so muP carries nothing over widths."""
    text = f"nothing is carried over widths or depths: every run has the shape of initial_weights = {initial_weights!r}; the rate "
    return GateLine(name="transfer", status="passed", compared=f"{text}is carried over tokens by the horizon law")


def experts_line(
    changes: tuple[AxisChange, ...],
    verdict: Verdict,
    *,
    experts: str,
    rule: str,
    of_ladder: tuple[AxisChange, ...] = (),
    ladder_laws: AxisLaws = NO_LAWS,
) -> GateLine:
    """Whether the rates are those of the verdict along each changed axis: kept after a pass, moved by a law, or stated.

    Args:
        experts: The full run's experts and its proxies'.
        rule: The plan's rule of the learning rate, which has the laws that moved it.
        of_ladder: Changes from the base to runs of the ladder, whose rates are never stated.
        ladder_laws: Laws that moved the rates of these runs.
    """
    laws, stated = laws_of((*changes, *of_ladder), verdict.axis_laws), rule == "explicit"
    found, uncovered, outdated, unfollowed = (list[str]() for _ in range(4))
    followed = laws_of(of_ladder, ladder_laws)
    for change in of_ladder:
        law, judged = laws.get(change), verdict.axis_verdicts.get(change.axis, "no grids")
        basis = f"by law: {law}" if law else judged
        if str(law) != str(followed.get(change)):
            unfollowed.append(change.axis)
            basis += ", which the ladder's runs do not follow"
        elif not law and judged != "pass":
            uncovered.append(change.axis)
        found.append(f"ladder, {change}: {basis}")
    remedy = "" if uncovered else ", or set plan.explicit.learning_rate"
    for change in changes:
        law, judged = laws.get(change), verdict.axis_verdicts.get(change.axis, "no grids")
        basis = f"by law: {law}" if law else judged
        if not stated and (str(law) not in rule if law else f"∝ {change.axis}^" in rule):
            (unfollowed if of_ladder else outdated).append(change.axis)
            basis += ", which is not the plan's rule"
        elif not stated and not law and judged != "pass":
            uncovered.append(change.axis)
        found.append(f"{change}: {'rate stated' if stated else basis}")
    keys = " and ".join(f"transfer.{plural(axis)}" for axis in dict.fromkeys(uncovered))
    larger = " and ".join(f"transfer.{plural(axis)}" for axis in dict.fromkeys(unfollowed))
    advice = [
        *(
            [f"write the larger grids of {larger} into the study file: the ladder's rates then follow them"]
            * bool(larger)
        ),
        *([f"measure it: {keys}, several sizes around the proxies'{remedy}"] * bool(uncovered)),
        *(
            [f"make a new plan, whose rate follows the grids along {' and '.join(outdated)}: `muscale plan`"]
            * bool(outdated)
        ),
    ]
    return GateLine.judged("experts", not advice, "; ".join((experts, *found)), "; ".join(advice))


def check_line(check: CoordinateCheck | None) -> GateLine:
    """Whether the family passed its coordinate check; None if there was no check yet."""
    name = "coordinate check"
    if check is None:
        return GateLine(name=name, status="unknown", compared="not made yet", advice="run `muscale check`")
    compared = str(check).splitlines()[0].removeprefix("coordinate check ")
    advice = "`muscale check` names the modules; tuned values would not transfer to full size"
    return GateLine.judged(name, check.passed, compared, advice)


def require_check(check: CoordinateCheck, *, force: bool) -> None:
    """Raise StageError if the coordinate check failed, before there is a plan, unless the promotion is forced."""
    Gate(plan="", lines=(check_line(check),)).require(force=force)


def data_line(
    planned: Mapping[str, str], found: Mapping[str, str], changed: Sequence[str] | None, n_bytes: int
) -> GateLine:
    """Whether the corpus is the one from which the plan was made.

    Args:
        planned: Hashes of "corpus" and "tokenizer" in the plan.
        found: Hashes of the corpus that the run would read.
        changed: Files of the corpus whose hashes differ from its manifest; None if they were too large to hash.
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
            advice="restore the plan's corpus, or make a new plan for this one, which has a different law",
        )
    if changed:
        return GateLine(
            name="data",
            status="failed",
            compared=f"{', '.join(changed)} changed since the corpus was written and hashed",
            advice="remove the corpus folder, so that it is written again from its source",
        )
    if changed is None:
        return GateLine(
            name="data",
            status="unknown",
            compared=f"{text} in the manifest as planned; {n_bytes / 1e9:.3g} GB of tokens were not hashed again",
            advice="if you do not trust the storage, compare sha256sum of the token files with the manifest",
        )
    return GateLine(name="data", status="passed", compared=f"{text}, {n_bytes / 1e9:.3g} GB hashed again")


def leak_line(leaks: LeakCheck | None) -> GateLine:
    """Whether the training text holds little of the held-out text; None if the corpus is a program's own or was not checked."""
    if leaks is None:
        return GateLine(name="leaks", status="unknown", compared="held-out and training text were not compared")
    worst = "".join(f"\n{leak}" for leak in leaks.report.leaks[:WORST_LEAKS] if not leaks.passed)
    advice = (
        "losses on text seen in training are too low: `muscale data check` lists the passages; corpus.clean.leaks removes them from "
        "text; remove them yourself from tokens and from text with prompts"
    )
    return GateLine.judged("leaks", leaks.passed, leaks.compared + worst, advice)


def hyperparameters_line(provenance: Iterable[HyperparameterProvenance]) -> GateLine:
    """Whether a transfer rule covers every value that came from a smaller model."""
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
    parts += [f"from the study file at every size: {', '.join(same)}"] if same else []
    return GateLine(name=name, status="passed", compared="; ".join(parts))


def forecast_line(forecast: Forecast) -> GateLine:
    """Whether the forecast lies in the range in which its interval was tested; outside is reported and does not block."""
    if forecast.supported:
        return GateLine(name="forecast", status="passed", compared="inside declared support")
    return GateLine(
        name="forecast",
        status="passed",
        compared=f"outside declared support: {'; '.join(forecast.reasons)}",
        advice="its interval may be too narrow: `study.next_runs(plan)` proposes runs that would support it",
    )


def batch_line(batch: BatchChoice | None) -> GateLine:
    """Whether the batch is near the proxies' batch, or near the best batch that a law gives for the run."""
    covered = batch is None or batch.is_covered
    compared = "the proxies'" if batch is None else f"{batch}" if covered else f"{batch}; more than {FAR:g}× apart"
    advice = "use a batch closer to one of them, or measure: transfer.batches, at least four around the proxies' batch"
    return GateLine.judged("batch", covered, compared, advice)


def by_law_line(deviations: Sequence[Deviation]) -> GateLine:
    """Whether each value that depends on tokens, batch or tokens per parameter is covered at the full run's value of that axis."""
    beyond = [one for one in deviations if not one.is_covered]
    if not beyond:
        return GateLine(name="by law", status="passed", compared=", ".join(map(str, deviations)))
    advice = {
        "batch_tokens": "measure: transfer.batches, at least four around the proxies' batch",
        "beta1": "set plan.explicit.beta1",
        "beta2": "set plan.explicit.beta2",
        "batch_ramp_tokens": "set plan.explicit.batch_ramp_tokens",
        "warmup_floor_tokens": "set plan.explicit.warmup_floor_tokens",
        "weight_decay_tau": "search at a sweep.n_tokens nearer to the run's tokens per parameter, or state "
        "plan.explicit.weight_decay_tau",
    }
    return GateLine(
        name="by law",
        status="failed",
        compared=f"{', '.join(map(str, beyond))}, and no law covers {'it' if len(beyond) == 1 else 'them'}",
        advice="; ".join(advice[one.coverage.name] for one in beyond),
    )


def precision_line(proxies: Precision, full: Precision, *, device: str, has_bf16: bool | None) -> GateLine:
    """Whether the device computes in the run's precision, and the consequences if the proxies used another one.

    Args:
        proxies, full: Precision of the fitted runs and of the full run.
        has_bf16: Whether the device computes bf16 products natively; None if unknown, or on a CPU.
    """
    compared = f"full run in {full}, proxies in {proxies}"
    if full == "bf16" and has_bf16 is False:
        return GateLine(
            name="precision",
            status="failed",
            compared=f"{compared}; {device} has no bf16 matrix products",
            advice='use another device, or promote.precision = "fp32"',
        )
    advice = ""
    if full != proxies:
        advice = f"the forecast is for losses in {proxies}: train one proxy in {full} as well and compare the two"
    elif full == "fp32" and has_bf16:
        advice = 'promote.precision = "bf16" multiplies several times as fast on this device'
    return GateLine(name="precision", status="passed", compared=compared, advice=advice)


def context_line(full: Member, proxies: Member, *, too_short: str = "") -> GateLine:
    """Whether the full run reads sequences like its proxies; a declared difference is reported and does not block.

    Args:
        full, proxies: Shape of the full run and the study's base shape.
        too_short: Problem of the held-out split with evaluations at that context, if any.
    """
    same = f"{full.context_length:,} tokens a sequence"
    compared = (
        same if full.context_length == proxies.context_length else f"{same}, {proxies.context_length:,} in proxies"
    )
    bases = [base for model in (full, proxies) if (base := family_of(model).position_base) is not None]
    if len(set(bases)) > 1:
        compared += "; rope_theta {:,g}, {:,g} in proxies".format(*bases)
    windows = [window for model in (full, proxies) if (window := family_of(model).attention_window) is not None]
    is_new = bool(windows) and windows[0] < full.context_length and proxies.context_length <= windows[-1]
    if len(set(windows)) > 1 or is_new:
        compared += f"; attention_window {windows[0]:,}, {windows[-1]:,} in proxies"
    if too_short:
        advice = "more held-out text, or fewer corpus.evaluation_tokens"
        return GateLine(name="context", status="failed", compared=f"{compared}; {too_short}", advice=advice)
    advice = ""
    if compared != same:
        advice = (
            "forecast and band are for losses at the proxies' context and do not cover this: a token's loss depends on how much "
            "text precedes it; train a proxy in both ways and compare the two"
        )
    if is_new:
        advice += (
            "; no sequence of the proxies is longer than their attention window, so no fitted run was trained with one"
        )
    return GateLine(name="context", status="passed", compared=compared, advice=advice)


def _row(head: str, text: str) -> list[str]:
    """A folded text next to its head."""
    return fold(head + text, 29)
