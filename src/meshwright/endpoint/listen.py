"""Listening: uvicorn on a socket, whose refusals of what is no HTTP are OpenAI's errors too, and its end by signals.

The first SIGTERM or Ctrl-C drains: requests under way are finished, others refused, and the server ends with exit code
0. The second one ends it at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshwright.endpoint.app import App
from meshwright.endpoint.refusal import Refused

#: Bytes of a request's head, and seconds that it may take to come.
HEAD_BYTES, HEAD_S = 64 * 1024, 30.0
MOST_CONNECTIONS = 4096
#: Seconds that a connection may be idle between requests.
IDLE_S = 75
#: Statuses of a head that is none, in words.
BROKEN = {431: "the request's headers are too long", 400: "this is no HTTP/1.1 request"}
REASONS = {431: b"Request Header Fields Too Large", 400: b"Bad Request"}
#: Seconds that a client which still sends has to read why it was refused.
LINGERS_S = 1.0


class _Lingering:
    """A transport that closes slowly where its client still sends: a connection that is closed over unread bytes is
    reset, and with it the answer that says what was wrong with them."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol):
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        unread = self._protocol.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not unread or self._transport.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
        elif not self._protocol.lingers:
            self._protocol.lingers = True
            self._transport.write_eof()
            self._transport.resume_reading()
            self._protocol.loop.call_later(LINGERS_S, self._transport.abort)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP, with a limit on the time of a head and on connections, errors as JSON, and an ``abort`` of the
    connection among what a request knows."""

    head_timer: asyncio.TimerHandle | None = None
    lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Lingering(transport, self))
        self.app_state = {**self.app_state, "abort": transport.abort}
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._time_head()

    def data_received(self, data: bytes) -> None:
        if not self.lingers:
            super().data_received(data)
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.head_timer is not None:
            self.head_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with a head or a body, while the h11 error about it is being handled."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()  # whoever waits for the rest of the body learns that there is none
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        status = status if status in BROKEN else 400
        data = Refused(status, BROKEN[status], code="invalid_http").body()
        try:
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
            response = h11.Response(
                status_code=status, headers=[*head, (b"connection", b"close")], reason=REASONS[status]
            )
            parts = [self.conn.send(event) for event in (response, h11.Data(data=data), h11.EndOfMessage())]
            self.transport.write(b"".join(part for part in parts if part))
            self.transport.close()
        except h11.LocalProtocolError:  # an answer is on its way already
            self.transport.abort()

    def _time_head(self) -> None:
        """Let a head that has begun end in time; one that has ended needs no timer."""
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)
        elif not waiting and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None


class Listener(uvicorn.Server):
    """uvicorn, which drains before it ends, and says when it has started. ``abandoned``: it was ended before that."""

    def __init__(self, config: uvicorn.Config, app: App, ready: Callable[[], None], say: Callable[[str], None]):
        super().__init__(config)
        self.app, self._ready, self._say = app, ready, say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task | None = None
        self.abandoned = False

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way to say that the application did not start: ``App.failed`` says why
            self.should_exit = True
        if not self.should_exit:
            self._ready()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn does not end the application then, and an engine that hangs would stay
            await self.app.abandon()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self._loop is None or self._loop.is_closed():
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        if not self.started:
            self.abandoned = True
            self._draining = asyncio.create_task(self.app.abandon())
            return
        running = self.app.front.under_way
        self._say(f"finishing {running:,} requests; once more ends at once" if running else "closing")
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self.app.front.drained()
        await asyncio.sleep(0.05)  # the last bytes of the last answer
        self.should_exit = True


def listener(app: App, ready: Callable[[], None], say: Callable[[str], None]) -> Listener:
    """Return the server of an application. `ready` is called once requests are answered, `say` gets lines for whoever
    looks after it."""
    config = uvicorn.Config(
        app.asgi,
        http=BoundedProtocol,
        log_level="critical",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=5,
    )
    return Listener(config, app, ready, say)
