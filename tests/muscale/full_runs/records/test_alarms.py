"""Alarms: found after so many evaluations in a row, kept once, sent to a real server, and silent about its URL."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pandas as pd
import pytest

from muscale import StudyConfig, StudyFileError
from muscale.full_runs.records.alarms import (
    Alarm,
    find_alarms,
    known_alarms,
    post,
    raise_alarms,
)
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind

SECRET = "s3cret-path"


class Hook(HTTPServer):
    """Keeps what it is sent, and answers with the status that it is given."""

    status = 200

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append({"path": self.path, "type": self.headers["Content-Type"], **json.loads(body)})
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("WATCH_HOOK", server.url)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def evaluations(*places: str) -> pd.DataFrame:
    rows = [{"tokens": 1000 * (n + 1), "loss": 3.0, "low": 2.0, "high": 2.5, "place": p} for n, p in enumerate(places)]
    return pd.DataFrame(rows)


def alarms(*places: str, asserted: bool = False) -> tuple[Alarm, ...]:
    return find_alarms(evaluations(*places), plan="p", alarm_after=3, asserted=asserted)


def test_an_alarm_needs_so_many_in_a_row() -> None:
    assert alarms("above", "above", "inside", "above", "above") == ()
    (alarm,) = alarms("inside", "above", "below", "above", "above", "above")
    assert (alarm.first_tokens, alarm.tokens, alarm.evaluations) == (2000, 4000, 3)
    assert len(alarms(*["above"] * 3, "inside", *["below"] * 3)) == 2


def test_what_lies_before_the_band_is_no_alarm() -> None:
    assert alarms(*["before the band"] * 5, "above", "above") == ()


def test_an_alarm_is_stored_and_sent_once(ledger: Ledger, hook: Hook) -> None:
    found = alarms("above", "above", "above")
    assert known_alarms(ledger, found) == set()
    lines = raise_alarms(ledger, found, webhook="WATCH_HOOK")
    assert lines == [str(found[0]), "notified webhook WATCH_HOOK"]
    assert raise_alarms(ledger, found, webhook="WATCH_HOOK") == []
    assert known_alarms(ledger, found) == {found[0].key}
    (received,) = hook.received
    assert (received["path"], received["type"]) == (f"/{SECRET}", "application/json")
    assert Alarm.from_dict(received) == found[0]
    assert received["text"] == str(found[0])
    assert raise_alarms(ledger, alarms("above", "above", "above", asserted=True), webhook=None), "another run's"


@pytest.mark.parametrize("kind", ["status", "nobody", "no url", "malformed", "no address", "unset"])
def test_a_failing_webhook_is_reported_without_its_url(
    ledger: Ledger, hook: Hook, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hook.status = 500
    urls = {
        "status": hook.url,
        "nobody": f"http://127.0.0.1:{port}/{SECRET}",
        "no url": f"file:///{SECRET}",
        "malformed": f"http://127.0.0.1:{SECRET}/ x",
        "no address": f"http://[::1/{SECRET}",
        "unset": "",
    }
    monkeypatch.setenv("WATCH_HOOK", urls[kind])
    failure = post("WATCH_HOOK", {})
    assert failure
    lines = raise_alarms(ledger, alarms("above", "above", "above"), webhook="WATCH_HOOK")
    assert lines[1].startswith("webhook WATCH_HOOK can't be notified: ")
    kept = json.dumps([row["payload"] for row in ledger.results(ResultKind.ALARM_WEBHOOK)])
    assert SECRET not in f"{lines}{kept}{failure}"


def test_a_url_in_the_study_file_is_refused_and_not_echoed(make_study: Any) -> None:
    path = make_study()
    with pytest.raises(StudyFileError, match="webhook must be the name of an environment variable") as refused:
        StudyConfig.read(path, [f'promote.webhook="https://example.org/{SECRET}"'])
    assert SECRET not in str(refused.value)
    assert StudyConfig.read(path, ["promote.webhook=WATCH_HOOK"]).to_dict()["promote"]["webhook"] == "WATCH_HOOK"
