"""Refusals: errors of the HTTP front in the shape of OpenAI's, which its clients make typed exceptions of."""

from __future__ import annotations

import re

import msgspec
from starlette.responses import Response

#: What kind of error a status is, where the refusal does not say.
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_UNSHOWN = re.compile(r"[^\x20-\x7e]")


class Refused(Exception):
    """A request that is not answered: its HTTP ``status``, a message, the field it is about (``param``), a ``code``
    for programs, and the seconds after which it may be tried again."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_s: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    def body(self) -> bytes:
        """Return ``{"error": {...}}`` as JSON."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self, headers: dict[str, str] | None = None) -> Response:
        """Return the refusal as a whole response."""
        more = {"Retry-After": str(self.retry_s)} if self.retry_s else {}
        more |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return Response(self.body(), self.status, {**(headers or {}), **more}, media_type="application/json")


def shown(text: str, most: int = 80) -> str:
    """Return a stranger's text for a message: short, and in printable ASCII."""
    plain = _UNSHOWN.sub("?", text[: most + 1])
    return plain if len(plain) <= most else plain[:most] + "..."
