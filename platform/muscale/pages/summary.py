"""The top of the report: the forecast, the measured loss, and the lineage of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muscale.formatting import counted, format_duration
from muscale.pages.sections import count
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus

if TYPE_CHECKING:
    from muscale.pages.contents import ReportContents

_OPEN = (None, None)
_ROOM = 0.35  # margin to the left and right of everything drawn, as a share of the interval


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A key number of the summary; `state` is "good", "bad" or empty."""

    label: str
    value: str
    note: str = ""
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage between the corpus and the bundle; `state` is "done", "failed" or "open"."""

    title: str
    value: str
    note: str
    state: str
    leads_to: str


def headline(contents: ReportContents) -> tuple[str, str]:
    """Return the forecast with the measured loss, and the state: inside, outside, waiting or none."""
    promotion, forecast = contents.promotion, contents.forecast
    if promotion:
        place = "inside" if promotion["inside"] else "outside"
        error = f"{100 * promotion['relative_error']:+.2f} %"
        return f"forecast {promotion['forecast']:.4f}, measured {promotion['loss']:.4f}: {place}, error {error}", place
    if forecast:
        return f"forecast {forecast['loss']:.4f}, not measured yet", "waiting"
    return "no forecast yet", "none"


def conclusion(contents: ReportContents) -> str:
    """Return a sentence on what to conclude from the forecast and the measured loss; empty without a forecast."""
    promotion, forecast = contents.promotion, contents.forecast
    untested = "the forecast lies outside the range in which such intervals were tested"
    supported = not (forecast and forecast["reasons"])
    if promotion and promotion["inside"]:
        return (
            "The forecast held: the measured loss is inside its interval."
            if supported
            else f"The measured loss is inside the interval. But do not rely on such intervals: {untested}."
        )
    if promotion:
        missed = "The forecast missed: the measured loss is outside its interval"
        chance = f"{1 - promotion['level']:.0%} of such forecasts miss by chance"
        return f"{missed}. {chance if supported else untested.capitalize()}."
    if forecast:
        return (
            f"Expect a loss from {forecast['low']:.4f} to {forecast['high']:.4f}: such intervals held when they were tested."
            if supported
            else f"Do not rely on the interval: {untested}."
        )
    return ""


def ruler(contents: ReportContents) -> dict[str, Any] | None:
    """Return positions of the interval, the forecast and the measured loss on one line, in per cent of its width."""
    shown = contents.promotion or contents.forecast
    if shown is None or (contents.forecast is None and contents.promotion is None):
        return None
    forecast = shown["forecast"] if contents.promotion else shown["loss"]
    measured = shown["loss"] if contents.promotion else None
    values = [shown["low"], shown["high"], *([measured] if measured is not None else [])]
    room = _ROOM * (shown["high"] - shown["low"]) or 1e-6
    low, high = min(values) - room, max(values) + room

    def place(value: float) -> float:
        return round(100 * float((value - low) / (high - low)), 2)

    return {
        "low": place(shown["low"]),
        "high": place(shown["high"]),
        "forecast": place(forecast),
        "measured": None if measured is None else place(measured),
        "losses": {"low": shown["low"], "high": shown["high"], "forecast": forecast, "measured": measured},
        "level": shown["level"],
    }


def tiles(contents: ReportContents) -> list[Tile]:
    """Return size, tokens, compute and cost, and the states of verdict and gate."""
    return [*_of_plan(contents), *_of_promotion(contents), *_of_transfer(contents), *_of_gate(contents)]


def _of_plan(contents: ReportContents) -> list[Tile]:
    plan = contents.plan
    if plan is None:
        return []
    n_params, n_tokens = plan["n_params"], plan["n_tokens"]
    found = [
        Tile(
            label="parameters N",
            value=count(n_params),
            note=f"{Member.from_dict(plan['model']).shown_params} without the embedding table",
        ),
        Tile(label="tokens D", value=count(n_tokens), note=f"{n_tokens:,}"),
        Tile(label="D/N", value=f"{n_tokens / n_params:.3g}", note="tokens per parameter"),
        Tile(label="compute C", value=f"{plan['compute_flops']:.3g}", note="FLOPs, 6·N·D"),
    ]
    decision = plan["decision"]
    if decision["dollars"] is not None:
        found.append(Tile(label="cost", value=f"${decision['dollars']:,.2f}", note="as planned"))
    elif decision["gpu_hours"] is not None:
        found.append(Tile(label="cost", value=f"{decision['gpu_hours']:.3g}", note="GPU-hours, as planned"))
    return found


def _of_promotion(contents: ReportContents) -> list[Tile]:
    promotion = contents.promotion
    if promotion is None or "seconds" not in promotion:
        return []
    workers = promotion["world_size"]
    note = f"wall time on {counted(workers, 'worker')}" if workers else "as reported by the user"
    return [Tile(label="trained in", value=format_duration(promotion["seconds"]), note=note)]


def _of_transfer(contents: ReportContents) -> list[Tile]:
    if contents.transfer is None:
        return []
    judged = contents.transfer.of_axes(())
    verdict, note = judged.verdict, "of the best rate across widths"
    if judged.is_of_one_size:
        note = "all runs have one size"
    state = {"pass": "good", "fail": "bad"}.get(verdict, "")
    return [
        Tile(label="transfer verdict", value=verdict, note=note, state=state),
        *(
            Tile(label=f"along {axis}", value=judged, note="for full runs of other experts")
            for axis, judged in contents.transfer.axis_verdicts.items()
        ),
    ]


def _of_gate(contents: ReportContents) -> list[Tile]:
    """Return the gate's state at the launch, and whether it was forced."""
    promotion, gate = contents.promotion or {}, contents.gate
    if promotion.get("forced"):
        past = ", ".join(promotion.get("forced_lines") or ()) or "a closed gate"
        return [Tile(label="gate", value="forced", note=f"despite {past}", state="bad")]
    if gate is None:
        return []
    passed = sum(line["status"] == "passed" for line in gate["lines"])
    state = "open" if gate["passed"] else "closed"
    note = f"{passed} of {len(gate['lines'])} conditions hold"
    return [Tile(label="gate", value=state, note=note, state="good" if gate["passed"] else "bad")]


def _tokens(corpus: Corpus) -> str:
    return "the trainer's own" if corpus.is_own_data else f"{count(corpus.n_tokens)} tokens"


def lineage(contents: ReportContents) -> list[Step]:
    """Return the steps from the corpus to the bundle."""
    corpus, law, bundle = contents.corpus, contents.fit, contents.bundle
    verdict = contents.transfer and contents.transfer.of_axes(())
    plan, forecast, promotion = contents.plan, contents.forecast, contents.promotion
    return [
        _step("Corpus", "the-corpus", *((_tokens(corpus), f"key {corpus.key[:8]}") if corpus else _OPEN)),
        _searched(contents),
        _step(
            "Transfer",
            "does-it-transfer",
            *((verdict.verdict, "verdict") if verdict else _OPEN),
            failed=verdict is not None and verdict.verdict != "pass",
        ),
        _step(
            "Law",
            "the-law-and-its-data",
            *((f"{law.n_rows} runs", f"of {law.n_stems} stems, {law.status}") if law else _OPEN),
            failed=law is not None and law.status == "doubtful",
        ),
        _step(
            "Plan",
            "the-plan",
            *((f"{forecast['loss']:.4f}", f"forecast; key {plan.get('key', '')[:8]}") if forecast and plan else _OPEN),
        ),
        _step(
            "Full run",
            "the-full-run",
            *(
                (f"{promotion['loss']:.4f}", "inside" if promotion["inside"] else "outside")
                if promotion
                else _begun(contents)
            ),
            failed=promotion is not None and not promotion["inside"],
        ),
        _step("Bundle", "how-to-reproduce", *(("written", bundle[:8]) if bundle else _OPEN)),
    ]


def _begun(contents: ReportContents) -> tuple[str | None, str | None]:
    """Return value and note of a full run without a measured loss."""
    tokens = contents.trained_tokens
    return (None, f"{tokens / contents.plan['n_tokens']:.0%} trained") if contents.plan and tokens else _OPEN


def _searched(contents: ReportContents) -> Step:
    if sweep := contents.sweep:
        return _step("Search", "what-was-searched", f"trial {sweep.winner}", f"best of {len(sweep.trials)} trials")
    if so_far := contents.so_far:
        return _step("Search", "search-in-progress", None, f"{len(so_far.trials)} trials so far")
    return _step("Search", "what-was-searched", *_OPEN)


def _step(title: str, leads_to: str, value: str | None, note: str | None, *, failed: bool = False) -> Step:
    state = "failed" if failed else "done" if value else "open"
    return Step(title=title, value=value or "–", note=note or "not yet", state=state, leads_to=leads_to)
