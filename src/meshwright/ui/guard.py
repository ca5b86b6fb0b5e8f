"""Guard: requirements on every request and response of the page, whatever its route.

The ``Host`` must be an address or a name of this machine, which a page of another site that rebinds its name to this
address has not; a request that changes or costs something must come from the page itself and be JSON, which no form of
another site can send. Nothing inline runs, and nothing of this page can be framed or read elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.endpoint.hosts import is_own, of_origin, own_names
from meshwright.errors import Diagnostic

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
FORMAT_VERSION = 1


def refused(status: int, *wrong: Diagnostic) -> Response:
    """Errors as the product says them, as JSON."""
    table = {"format_version": FORMAT_VERSION, "errors": [msgspec.to_builtins(d) for d in wrong]}
    headers = {"Cache-Control": "no-store"}
    return Response(msgspec.json.encode(table), status, media_type="application/json", headers=headers)


class Guard:
    """ASGI middleware that refuses what does not come from the page, and puts the headers on every response."""

    def __init__(self, app: ASGIApp, host: str):
        self.app = app
        self.names = own_names(host)

    @classmethod
    def beside(cls, host: str) -> Middleware:
        """The middleware for a page that is served under `host`."""
        return Middleware(cls, host=host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = self._refusal(scope)
        await (answer or self.app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not is_own(host, self.names):
            message = f"the page is not served as {re.sub(r'[^ -~]', '?', host)[:80]!r}"
            help = "open it by its address, such as 127.0.0.1, or as localhost"
            return refused(421, Diagnostic(code="I004", message=message, place="Host", help=help))
        if scope["method"] in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if origin is not None and of_origin(origin) != host.lower():
            help = "the page's own requests come from where it is served"
            said = Diagnostic(code="I004", message="a request of another site", place="Origin", help=help)
            return refused(403, said)
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            help = "send application/json"
            said = Diagnostic(code="I001", message="a request is JSON", place="Content-Type", help=help)
            return refused(415, said)
        return None


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            known: list[Any] = list(message.get("headers", []))
            known += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": known}
        await send(message)

    return sending
