"""The live page's server: what it hands out, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from muscale import StageError, Study
from muscale.pages.live_page import LivePage
from muscale.pages.live_server import live_app
from muscale.search.record import Record, RungResult
from muscale.store.cancels import cancelled_trials
from muscale.store.ledger_tables import ResultKind, metadata
from search_spaces import LogUniform, Space

MakeStudy = Callable[..., Path]
SPACE = Space({"learning_rate": LogUniform(low=0.001, high=0.1)})
TOKEN = "the-token"


def begun(path: Path, *, trials: int = 3, settings: Sequence[str] = ()) -> tuple[Study, Record]:
    """A study whose search has begun so many trials, of which the first has come to its first rung."""
    study = Study.open(path, settings, quiet=True)
    record = Record(study.ledger, "sweep")
    record.begin_round("random", SPACE)
    for trial in range(trials):
        record.start({"learning_rate": 0.01 * (trial + 1)}, 1)
    add_result(record, 0)
    return study, record


def add_result(record: Record, trial: int, rung: int = 0) -> None:
    record.add_result(RungResult(trial=trial, rung=rung, loss=2.5 + trial / 10, segment="s", tokens=100, seconds=1.0))


def client(live: LivePage) -> TestClient:
    return TestClient(live_app(live), base_url="http://127.0.0.1")


def test_only_what_changed_has_another_hash(make_study: MakeStudy) -> None:
    study, record = begun(make_study())
    live = LivePage(study=study.contents)
    page = client(live)
    first = page.get("/sections")
    before = dict(first.json()["sections"])
    again = page.get("/sections", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert not live.look()
    add_result(record, 1)
    assert live.look()
    second = page.get("/sections", headers={"If-None-Match": first.headers["ETag"]})
    after = dict(second.json()["sections"])
    assert {ident for ident in after if after[ident] != before[ident]} == {"search-in-progress"}
    assert "2.6" in page.get("/sections/search-in-progress").text
    assert page.get("/sections/nothing").status_code == 404


ROWS: dict[str, dict[str, object]] = {
    "segments": {"key": "k", "line": "l", "trained_from": 0, "tokens": 1, "seconds": 1.0}
    | {name: {} for name in ("numerics", "segment", "source_losses", "environment")},
    "runs": {"purpose": "ladder", "key": "k", "stem": "s", "hyperparameters": {}, "label": "", "learning_rate": 1.0}
    | dict.fromkeys(("d_model", "n_layers", "n_params", "n_tokens", "seed"), 1),
    "rounds": {"sweep": "another", "round": 0, "first_trial": 0, "searcher": "random", "space": {}},
    "trials": {"sweep": "sweep", "number": 3, "config": {}, "until": 1},
    "rungs": {"sweep": "sweep", "trial": 1, "rung": 0, "sequence": 2, "segment": "s", "tokens": 1, "seconds": 1.0},
    "decisions": {"sweep": "sweep", "trial": 0, "rung": 0, "sequence": 2, "until": 1, "path": []},
    "results": {"kind": "check", "key": "k", "payload": {}},
    "forecasts": {"plan": "p", "loss": 1.0, "low": 1.0, "high": 1.0, "level": 0.9, "payload": {}},
}


@pytest.mark.parametrize("table", ROWS)
@pytest.mark.parametrize("storage", ["sqlite", "postgresql"])
def test_a_row_is_noticed_in_every_table_that_the_page_shows(
    make_study: MakeStudy, request: pytest.FixtureRequest, storage: str, table: str
) -> None:
    settings = []
    if storage == "postgresql":
        request.getfixturevalue("postgres")
        settings = ["storage.ledger=postgresql"]
    study, _ = begun(make_study(), settings=settings)
    live = LivePage(study=study.contents)
    before = live._read_state()
    assert live._read_state() == before
    study.ledger.insert(metadata.tables[table], **ROWS[table])
    assert live._read_state() != before
    study.ledger.close()


def test_a_search_that_has_begun_no_trial_yet_is_no_error(make_study: MakeStudy) -> None:
    study = Study.open(make_study(), quiet=True)
    Record(study.ledger, "sweep").begin_round("random", SPACE)
    assert "No data yet" in client(LivePage(study=study.contents)).get("/sections/what-was-searched").text


def test_a_policy_lets_only_the_page_s_own_scripts_run(make_study: MakeStudy) -> None:
    study, _ = begun(make_study())
    page = client(LivePage(study=study.contents))
    one, two = page.get("/"), page.get("/")
    policies = [answer.headers["Content-Security-Policy"] for answer in (one, two)]
    assert policies[0] != policies[1], "a nonce is used once"
    nonce = policies[0].partition("'nonce-")[2].partition("'")[0]
    assert one.text.count(f'nonce="{nonce}"') == one.text.count("<script src=") == 2
    assert "script-src 'unsafe-eval' 'nonce-" in policies[0]
    assert "default-src 'none'" in policies[0]
    for answer in (one, page.get("/sections"), page.get("/plotly.js")):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_another_host_s_name_is_refused(make_study: MakeStudy) -> None:
    study, _ = begun(make_study())
    page = client(LivePage(study=study.contents))
    assert page.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
    assert page.get("/", headers={"Host": "localhost:8719"}).status_code == 200


def test_names_that_a_user_chose_are_text_on_every_part_of_the_page(make_study: MakeStudy) -> None:
    evil = "<script>alert(1)</script>"
    path = make_study()
    path.write_text(path.read_text().replace('name = "micro"', f'name = "{evil}"'))
    study, _ = begun(path)
    live = LivePage(study=study.contents, token=TOKEN)
    live.cancel_study(f"{evil}<img src=x onerror=alert(1)>")
    live.look()
    page = client(live)
    parts = [f"/sections/{ident}" for ident, _ in page.get("/sections").json()["sections"]]
    for part in ("/", "/contents", *parts):
        text = page.get(part).text
        assert evil not in text, part
        assert "<img src=x" not in text, part
    assert "&lt;script&gt;alert(1)" in page.get("/").text


def test_a_page_of_elsewhere_can_t_send_an_action(make_study: MakeStudy) -> None:
    study, _ = begun(make_study())
    acting = client(LivePage(study=study.contents, token=TOKEN))
    elsewhere = {"Origin": "https://elsewhere.example", "Cookie": f"token={TOKEN}"}
    # What a form of another page can send without asking: no header of its own, and one of three kinds of text.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        sent = acting.post("/cancel/study", content=b'{"reason": ""}', headers={**elsewhere, "Content-Type": kind})
        assert sent.status_code in (401, 422)
    asked = {**elsewhere, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = acting.options("/cancel/study", headers=asked)
    assert allowed.status_code == 405
    assert not [name for name in allowed.headers if name.lower().startswith("access-control")]
    assert study.ledger.latest_result(ResultKind.CANCEL_STUDY) is None
    for host in ("127.0.0.1.elsewhere.example", "[::1]:1", "", "127.0.0.2"):
        assert acting.get("/", headers={"Host": host}).status_code == 400, host


@pytest.mark.parametrize("path", ["/cancel/study", "/cancel/trial/1"])
def test_actions_take_the_token_and_nothing_else(make_study: MakeStudy, path: str) -> None:
    study, record = begun(make_study())
    read_only = client(LivePage(study=study.contents))
    given = {"Authorization": f"Bearer {TOKEN}"}
    refused = read_only.post(path, json={}, headers=given)
    assert refused.status_code == 403
    assert "--allow-actions" in refused.json()["detail"]
    assert "Cancel" not in read_only.get("/").text.partition("</style>")[2]
    acting = client(LivePage(study=study.contents, token=TOKEN))
    wrong: tuple[dict[bytes, bytes], ...] = (
        {},
        {b"Authorization": TOKEN.encode()},
        {b"Authorization": f"Bearer {TOKEN}x".encode()},
        {b"Authorization": "Bearer ü".encode()},
    )
    for headers in wrong:
        assert acting.post(path, json={}, headers=headers).status_code == 401, headers
    assert acting.post(f"{path}?token={TOKEN}", json={}).status_code == 401
    assert acting.get(path, headers=given).status_code == 405
    assert cancelled_trials(study.ledger, record.sweep) == {}
    assert study.ledger.latest_result(ResultKind.CANCEL_STUDY) is None
    assert acting.post(path, json={"reason": "x" * 201}, headers=given).status_code == 422
    assert acting.post(path, json={"reason": "<b>"}, headers=given).status_code == 200
    assert TOKEN not in acting.get("/").text


def test_a_trial_that_is_not_at_work_can_t_be_cancelled(make_study: MakeStudy) -> None:
    study, _ = begun(make_study())
    live = LivePage(study=study.contents, token=TOKEN)
    with pytest.raises(StageError, match="trial 9"):
        live.cancel_trial(9, "")
    live.cancel_trial(2, "too slow, <b>")
    with pytest.raises(StageError, match="trial 2"):
        live.cancel_trial(2, "again")
    page = client(live)
    live.look()
    now = page.get("/sections/running-now").text
    assert "trial 2 was asked to end: too slow, &lt;b&gt;" in now
    assert "trial 1 <button" in now
    assert "trial 2 <button" not in now
    sections = json.loads(page.get("/sections").text)["sections"]
    assert "1 cancelled" in page.get("/sections/search-in-progress").text, sections
