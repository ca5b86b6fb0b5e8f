"""Gate: what every request has to be, whatever its route: of a caller who may ask, and with a body that ends.

A server of this machine alone is called by an address or a name of this machine; a request of another site's page is
refused. With API keys every route but ``/health`` and ``/metrics`` wants one. Bodies are JSON, bounded in bytes and
time, each by itself and all that are read at a time together.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.endpoint.front import Limits
from meshwright.endpoint.hosts import ONLY_HERE, is_own, of_origin, own_names
from meshwright.endpoint.refusal import Refused, shown

#: Routes that anyone may read: probes and scrapers have no key.
OPEN = ("/health", "/metrics")
#: Bodies of the longest length that may be read at the same time.
AT_A_TIME = 16


class SlowReader(Exception):
    """A reader takes nothing of its answer."""


class Gate:
    """ASGI middleware that refuses who may not ask, and ends connections whose body was not read to its end, or whose
    reader takes nothing for `slow_s`: what is held for them is free again."""

    def __init__(self, app: ASGIApp, host: str, keys: Sequence[str] = (), slow_s: float = 30.0):
        self.app, self.keys, self.slow_s = app, [key.encode() for key in keys], slow_s
        self.names = own_names(host) if host in ONLY_HERE else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        unread = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])

        async def receiving() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            try:
                async with asyncio.timeout(self.slow_s):
                    await send(message)
            except TimeoutError:
                raise SlowReader from None

        try:
            self._check(scope)
            await self.app(scope, receiving, sending)
        except Refused as refusal:
            await refusal.response()(scope, receiving, sending)
        except SlowReader:
            abort = scope.get("state", {}).get("abort")
            if abort is not None:
                abort()  # its buffers are full: it would never learn of an end
                await asyncio.sleep(0)

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self.names is not None and not is_own(host, self.names):
            message = f"this server is not called {shown(host)!r}: ask it by its address, or as localhost"
            raise Refused(421, message, param="Host", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD") and of_origin(origin) != host.lower():
            raise Refused(403, "a request of another site's page", param="Origin", code="wrong_origin")
        scope["state"] = {**scope.get("state", {}), "tenant": 0}
        if self.keys and scope["path"] not in OPEN:
            scope["state"]["tenant"] = self._tenant(headers.get("authorization", ""))

    def _tenant(self, said: str) -> int:
        """The place of the caller's key among those that are known; every key is compared in constant time."""
        scheme, _, key = said.partition(" ")
        found = [hmac.compare_digest(key.strip().encode("utf-8", "replace"), known) for known in self.keys]
        if scheme.lower() != "bearer" or not any(found):
            message = "this server wants an API key: Authorization: Bearer KEY"
            raise Refused(401, message, param="Authorization", code="invalid_api_key")
        return found.index(True)


class Intake:
    """The reader of bodies, which holds so many bytes of them at a time and no more."""

    def __init__(self, limits: Limits):
        self._limits, self._held = limits, 0

    async def body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            Refused: it is no JSON by its type, too long, too slow, or breaks off; or too much is being read.
        """
        most = self._limits.body_bytes
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = "a request is JSON: Content-Type: application/json"
            raise Refused(415, message, param="Content-Type", code="unsupported_media_type")
        said = request.headers.get("content-length", "0")
        if said.isdecimal() and int(said) > most:
            raise self._too_long()
        held, parts = 0, []
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.stream():
                    held += len(part)
                    self._held += len(part)
                    if held > most:
                        raise self._too_long()
                    if self._held > AT_A_TIME * most:
                        raise Refused(429, "too many long requests come at a time", code="overloaded", retry_s=1)
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, f"the body took longer than {self._limits.body_s:g} s", code="timeout") from None
        except ClientDisconnect:
            raise Refused(400, "the request broke off", code="broken_off") from None
        finally:
            self._held -= held
        return b"".join(parts)

    def _too_long(self) -> Refused:
        message = f"a request is at most {self._limits.body_bytes:,} bytes long here"
        return Refused(413, message, code="body_too_long")
