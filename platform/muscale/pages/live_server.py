"""The server of the live page, on this machine's loopback device alone.

The server is read-only by default. With actions it also accepts cancel requests for a trial or the study. They need an access
token in a header: a page of another site can't send the header, and no URL contains the token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from functools import cache
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from plotly.offline import get_plotlyjs
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from muscale.errors import StageError
from muscale.findings import StudyContents
from muscale.layout import GALLERY
from muscale.pages.live_page import LivePage, Snapshot
from muscale.pages.report import page, policy
from muscale.pages.sections import grouped, page_file, templates
from muscale.store.cancels import LONGEST_REASON

HOST = "127.0.0.1"


class Reason(BaseModel):
    """Reason of a cancellation."""

    reason: str = Field(default="", max_length=LONGEST_REASON)


def live_app(live: LivePage) -> FastAPI:
    """Return the server of a live page, without FastAPI's documentation pages, which load scripts from other sites."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # Refuse other host names that resolve to this machine (DNS rebinding).
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    @app.middleware("http")
    async def _harden(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.setdefault("Cache-Control", "no-cache")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
        return response

    _add_pages(app, live)
    _add_actions(app, live)
    return app


def _add_pages(app: FastAPI, live: LivePage) -> None:
    """Serve the page, the sections that its script replaces while it is open, the scripts and the gallery."""

    @app.get("/")
    def _page() -> Response:
        now, nonce = live.snapshot, secrets.token_urlsafe(16)
        text = page(
            list(now.sections),
            name=now.contents.name,
            written=_written(now),
            live=True,
            nonce=nonce,
            known=json.dumps(now.known),
            actions=live.token is not None,
        )
        rules = policy(f"'nonce-{nonce}'", connect="'self'") + "; frame-ancestors 'none'"
        text = live.study.commands.completed_markup(text)
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": rules})

    @app.get("/sections")
    def _sections(request: Request) -> Response:
        now = live.snapshot
        tag = f'"{now.tag}-{len(now.contents.runs)}"'
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        body = json.dumps({"sections": now.known, "written": _written(now)})
        return Response(body, media_type="application/json", headers={"ETag": tag})

    @app.get("/sections/{ident}")
    def _section(ident: str) -> Response:
        found = next((section for section in live.snapshot.sections if section.ident == ident), None)
        if found is None:
            raise HTTPException(404, f"no section is called {ident!r}")
        return Response(live.study.commands.completed_markup(found.markup), media_type="text/html")

    @app.get("/contents")
    def _contents() -> Response:
        groups = list(grouped(list(live.snapshot.sections)))
        text = templates().get_template("contents.html.jinja").render(groups=groups)
        return Response(text, media_type="text/html")

    @app.get("/plotly.js")
    def _plotly(request: Request) -> Response:
        return _script(request, _plotly_js())

    @app.get("/report.js")
    def _report(request: Request) -> Response:
        return _script(request, page_file("report.js"))

    @app.get(f"/{GALLERY}")
    def _gallery() -> Response:
        path = live.study.directory / GALLERY
        if not path.exists():
            raise HTTPException(404, "there is no gallery; run `muscale gallery`")
        # The file has its own policy; its origin is another one, so that its scripts do not reach this page.
        rules = "sandbox allow-scripts; frame-ancestors 'none'"
        return Response(path.read_bytes(), media_type="text/html", headers={"Content-Security-Policy": rules})


def _add_actions(app: FastAPI, live: LivePage) -> None:
    """Accept requests to cancel, which need the access token."""

    @app.post("/cancel/trial/{trial}")
    def _cancel_trial(request: Request, trial: int, why: Reason) -> dict[str, str]:
        _require_token(request, live.token)
        try:
            live.cancel_trial(trial, why.reason or "no reason given")
        except StageError as error:
            raise HTTPException(409, str(error)) from None
        return {"detail": f"trial {trial} was asked to end"}

    @app.post("/cancel/study")
    def _cancel_study(request: Request, why: Reason) -> dict[str, str]:
        _require_token(request, live.token)
        live.cancel_study(why.reason or "no reason given")
        return {"detail": "the study was asked to end"}


def _written(now: Snapshot) -> str:
    """Return the line below the heading."""
    return f"live from the ledger · {len(now.contents.runs)} runs in the ledger"


def serve(study: StudyContents, *, port: int, allow_actions: bool) -> None:
    """Serve the page until interrupted, and print its address and the token of actions; raise StageError if the port is taken."""
    try:
        bound = socket.create_server((HOST, port))
    except OSError as error:
        raise StageError(f"ui: --port {port}: {error.strerror}; give another port, or 0 for any free one") from None
    with bound:
        token = secrets.token_urlsafe(24) if allow_actions else None
        live = LivePage(study=study, token=token)
        print(f"{study.config.name}: http://{HOST}:{bound.getsockname()[1]}/", flush=True)  # noqa: T201
        mode = f"access token for actions: {token}" if token else "read-only; --allow-actions adds cancel buttons"
        print(f"{mode}. Ctrl-C stops the page, not the study.", flush=True)  # noqa: T201
        live.look()
        server = uvicorn.Server(
            uvicorn.Config(live_app(live), log_level="warning", lifespan="off", server_header=False)
        )
        with live.looking():
            server.run(sockets=[bound])


def _require_token(request: Request, token: str | None) -> None:
    if token is None:
        raise HTTPException(403, "this page is read-only: start it with `muscale ui --allow-actions`")
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
        raise HTTPException(
            401, "wrong access token; use the one that `muscale ui` printed", {"WWW-Authenticate": "Bearer"}
        )


def _script(request: Request, text: str) -> Response:
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(text, media_type="text/javascript", headers={"ETag": tag})


@cache
def _plotly_js() -> str:
    return str(get_plotlyjs())
