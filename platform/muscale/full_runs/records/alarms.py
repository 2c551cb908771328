"""Alarms of a run outside its band: found in its evaluations, recorded once in the ledger, and posted to a webhook."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pandas as pd

from muscale.serialization import Recorded
from muscale.store.ledger import Ledger, stamped
from muscale.store.ledger_tables import ResultKind, results
from muscale.store.statements import insert_once

OUTSIDE = ("above", "below")
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Alarm(Recorded):
    """Consecutive evaluations outside the band; losses in nats per token.

    Attributes:
        plan: Key of the plan.
        first_tokens: Tokens of the first evaluation outside, which together with the plan identifies the alarm.
        tokens: Tokens of the evaluation that raised the alarm.
        loss, low, high: Measured loss and the band at these tokens.
        place: "above" or "below" the band.
        evaluations: Number of consecutive evaluations outside.
        asserted: Whether the run is trained elsewhere and its losses are reported by the user, not verified.
    """

    DERIVED = ("text",)

    plan: str
    first_tokens: int
    tokens: int
    loss: float
    low: float
    high: float
    place: str
    evaluations: int
    asserted: bool = False

    @property
    def key(self) -> str:
        """Key in the ledger; stays the same if a resumed run measures the same losses again."""
        return f"{self.plan}{' external' if self.asserted else ''} {self.first_tokens}"

    @property
    def text(self) -> str:
        """The message of the alarm."""
        return (
            f"alarm: the loss of plan {self.plan} is {self.loss:.4f} after {self.tokens:,} tokens, {self.place} the band "
            f"[{self.low:.4f}, {self.high:.4f}], and was outside in {self.evaluations} evaluations in a row"
        )

    def __str__(self) -> str:
        return self.text


def find_alarms(evaluations: pd.DataFrame, *, plan: str, alarm_after: int, asserted: bool) -> tuple[Alarm, ...]:
    """One alarm for each `alarm_after` or more consecutive evaluations outside the band.

    Args:
        evaluations: Columns tokens, loss, low, high, place, in order; evaluations before the band are ignored.
    """
    found, outside = [], list[dict[str, Any]]()
    for row in evaluations.to_dict("records"):
        outside = [*outside, row] if row["place"] in OUTSIDE else []
        if len(outside) == alarm_after:
            values = {name: float(row[name]) for name in ("loss", "low", "high")}
            found.append(
                Alarm(
                    plan=plan,
                    first_tokens=int(outside[0]["tokens"]),
                    tokens=int(row["tokens"]),
                    place=str(row["place"]),
                    evaluations=alarm_after,
                    asserted=asserted,
                    **values,
                )
            )
    return tuple(found)


def known_alarms(ledger: Ledger, alarms: Sequence[Alarm]) -> set[str]:
    """Keys of those alarms that are in the ledger."""
    return {alarm.key for alarm in alarms if ledger.result(ResultKind.ALARM, alarm.key)}


def raise_alarms(ledger: Ledger, alarms: Sequence[Alarm], *, webhook: str | None) -> list[str]:
    """Record new alarms and post each to the webhook; of several processes only one does.

    Args:
        webhook: Name of the environment variable with the URL; None: no webhook.

    Returns:
        Lines to print, without the URL, which is a secret.
    """
    lines = []
    for alarm in alarms:
        row = stamped(results, {"kind": ResultKind.ALARM.value, "key": alarm.key, "payload": alarm.to_dict()})
        if not ledger.write(insert_once, results.name, [row]):
            continue
        lines.append(str(alarm))
        if webhook:
            failure = post(webhook, alarm.to_dict())
            ledger.record_result(ResultKind.ALARM_WEBHOOK, alarm.key, {"webhook": webhook, "failure": failure})
            lines.append(
                f"notified webhook {webhook}" if failure is None else f"webhook {webhook} can't be notified: {failure}"
            )
    return lines


def post(variable: str, payload: dict[str, Any]) -> str | None:
    """POST the payload as JSON to the URL in an environment variable; return the failure, without the URL, or None."""
    url = os.environ.get(variable, "")
    if not url:
        return "the variable is not set"
    body = json.dumps(payload).encode()
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            return "its value is not an http or https URL"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"status {error.code}"
    except urllib.error.URLError as error:  # its reason comes from the socket, without the URL's path
        return type(error.reason).__name__ if isinstance(error.reason, Exception) else "no connection"
    except (OSError, ValueError, http.client.HTTPException) as error:  # their messages may hold the URL
        return type(error).__name__
