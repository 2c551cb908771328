"""A run trained elsewhere: the study copies its losses, monitors it like a promoted run, and marks it as asserted.

The user's report can't be verified: neither that the held-out text is the study's, nor that the run began after the forecast.
External runs are therefore separate from promoted runs in the study's directory, in the ledger and in the calibration.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from functools import cached_property
from typing import Any

import numpy as np

from muscale.errors import StageError
from muscale.full_runs.promote.promotion import Promotion
from muscale.layout import EXTERNAL_RUNS, FAILURE, METRICS
from muscale.monitoring.losses import LossSource, Row
from muscale.plans.band import registered_band
from muscale.plans.plan import Plan
from muscale.store.ledger import Ledger, now
from muscale.store.ledger_tables import ResultKind
from muscale.store.statements import find
from proxy_models.files import write_text

TOLERANCE = 1e-3  # as a share of D: other frameworks may end on another whole batch (assumed)
_MOST_LOG = 700.0  # largest loss, so that exp(loss) is finite
_LOSSES = ("train_loss", "val_loss")


class ExternalRun:
    """A run trained elsewhere from a registered plan; can be updated repeatedly, and records its residual once, at the end.

    Args:
        plan: Key of the plan that the run follows; default: the only registered plan.

    Raises:
        StageError: If no forecast is registered, several are and no plan is given, or the plan was promoted in this study.
    """

    def __init__(self, ledger: Ledger, source: LossSource, plan: str | None = None) -> None:
        registered = ledger.read(find, "forecasts", order=("registered_at",))
        if plan is None and len(registered) > 1:
            raise StageError(
                f"watch: {source.name}: several plans are registered; name the run's plan with --plan, one of "
                f"{', '.join(row['plan'] for row in registered)}"
            )
        row = ledger.forecast(plan) if plan else next(iter(registered), None)
        if row is None:
            which = f" for plan {plan}" if plan else ""
            raise StageError(
                f"watch: {source.name}: no forecast is registered{which} to compare it with; run `muscale plan` first"
            )
        self.ledger, self.source, self.plan = ledger, source, Plan.from_dict(row["payload"])
        if ledger.result(ResultKind.PROMOTION_STARTED, self.plan.key):
            raise StageError(
                f"watch: {source.name}: plan {self.plan.key} was promoted in this study; leave out the losses to watch its run"
            )
        self.directory = ledger.directory / EXTERNAL_RUNS / self.plan.key
        self._band = registered_band(self.plan.key, ledger)

    def update(self) -> None:
        """Copy all losses so far, and record the residual if the run has ended; raise StageError if the source can't be read."""
        rows = self.source.read()
        if self.ledger.result(ResultKind.EXTERNAL_RUN, self.plan.key):
            return  # final
        records = self.records(rows)
        last = max((record["tokens"] for record in records), default=0)
        if not self.ledger.result(ResultKind.EXTERNAL_RUN_STARTED, self.plan.key):
            started = {"at": now(), "source": self.source.name, "tokens": last, "share": last / self.plan.n_tokens}
            self.ledger.record_result(ResultKind.EXTERNAL_RUN_STARTED, self.plan.key, started)
        self.directory.mkdir(parents=True, exist_ok=True)
        diverged = next((r for r in records if not all(math.isfinite(r.get(name, 0)) for name in _LOSSES)), None)
        failure = self.directory / FAILURE
        if diverged:
            write_text(failure, f"the loss is not finite after {diverged['tokens']:,} tokens")
            records = [record for record in records if record["tokens"] < diverged["tokens"]]
        else:
            failure.unlink(missing_ok=True)
        self._write(records)
        end = next((r for r in records if r["tokens"] == self.plan.n_tokens and "val_loss" in r), None)
        if end:
            self._record_residual(end["val_loss"])

    def records(self, rows: list[Row]) -> list[dict[str, Any]]:
        """One record per number of tokens, ascending; raises StageError if they exceed the plan's tokens.

        A loss after fewer tokens than the one before it in its column is that of a run that was set back: later losses replace all
        after it. A table whose tokens only fall is in reverse order, unless it is still being written.
        """
        n_tokens = self.plan.n_tokens
        seen = [row["tokens"] if "tokens" in row else self._tokens_at(min(row["step"], n_tokens + 1)) for row in rows]
        if (most := max(seen, default=0)) > n_tokens * (1 + TOLERANCE):
            raise StageError(
                f"watch: {self.source.name}: must be a run of the {n_tokens:,} tokens of plan {self.plan.key}, "
                f"got a loss after {most:,.0f} tokens"
            )
        read = list(zip(seen, rows, strict=True))
        if not self.source.growing and len(set(seen)) > 2 and seen == sorted(seen, reverse=True):
            read.reverse()
        ends, losses, last = list[int](), dict[int, Row](), dict[str, int]()
        for tokens, row in read:
            at = n_tokens if tokens >= n_tokens * (1 - TOLERANCE) else int(tokens)
            logged = {name: row[name] for name in _LOSSES if name in row}
            if any(last.get(name, 0) > at for name in logged):
                kept_ends = bisect_right(ends, at)
                for end in ends[kept_ends:]:
                    del losses[end]
                del ends[kept_ends:]
                last = {name: min(end, at) for name, end in last.items()}
            last |= dict.fromkeys(logged, at)
            if at not in losses:
                insort(ends, at)
            losses[at] = losses.get(at, {}) | logged
        kept: list[dict[str, Any]] = [{**losses[end], "tokens": end} for end in ends]
        if kept and not any("val_loss" in record for record in kept):
            kept = self._with_estimates(kept)
        return kept

    def _tokens_at(self, step: float) -> int:
        """Tokens seen after this many of the plan's steps."""
        ramp = self.plan.segments[0].recipe.ramp
        if not ramp.doublings:
            return round(step) * ramp.batch_tokens
        return self._ends[min(round(step), len(self._ends) - 1)]

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens seen after each of the plan's steps, and 0 before the first."""
        ramp = self.plan.segments[0].recipe.ramp
        return [0, *(before + batch for before, batch in ramp.steps(0, self.plan.n_tokens + ramp.batch_tokens))]

    def _with_estimates(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add estimated held-out losses to records of training losses: means over whole windows plus the ladder's offset."""
        band, n_tokens = self._band, self.plan.n_tokens
        if band is None or band.reason:
            return records
        share = np.array([record["tokens"] for record in records]) / n_tokens
        logs = np.log([record["train_loss"] for record in records])
        estimates = []
        for number in range(1, math.floor(share[-1] / band.window - 0.5) + 1):
            centre = number * band.window
            within = np.abs(share - centre) <= band.window / 2
            if within.any():
                loss = float(np.exp(min(float(logs[within].mean()) + band.offset, _MOST_LOG)))
                estimates.append({"tokens": int(centre * n_tokens), "val_loss": loss})
        return sorted([*records, *estimates], key=lambda record: record["tokens"])

    def _write(self, records: list[dict[str, Any]]) -> None:
        """Write the records if they differ from the last update."""
        path = self.directory / METRICS
        text = "".join(json.dumps(record) + "\n" for record in records)
        if path.exists() and path.read_text() == text:
            return
        write_text(path, text)

    def _record_residual(self, loss: float) -> None:
        forecast = self.ledger.forecast(self.plan.key) or {}
        started = self.ledger.result(ResultKind.EXTERNAL_RUN_STARTED, self.plan.key) or {}
        promotion = Promotion(
            plan=self.plan.key,
            loss=loss,
            source_losses={},
            loss_unit=self.plan.forecast.loss_unit,
            forecast=forecast["loss"],
            **{name: forecast[name] for name in ("low", "high", "level", "registered_at")},
            started_at=started["at"],
            finished_at=now(),
            verdict="",
            forced=False,
            world_size=0,
            seconds=0.0,
            asserted=True,
        )
        self.ledger.record_result(ResultKind.EXTERNAL_RUN, self.plan.key, promotion.to_dict())
