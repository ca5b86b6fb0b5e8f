"""A thin HTTP/1.1 client for many streams at a time: one callback for each piece of a body, with when it came.

A thousand answers that stream side by side are ten thousand pieces a second and more, each of which a client of general
use hands through several layers and tasks. Here a connection is an :class:`asyncio.Protocol`: what the socket delivers
is taken apart where it arrives, and a task wakes once, when the answer is over.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from meshwright.errors import MeshwrightError

#: Bytes of a head, and of the line that says how long a chunk is, beyond which an answer is none.
LONGEST_HEAD, LONGEST_CHUNK_LINE = 1 << 16, 1 << 10
#: Bytes of a body that no sink takes beyond which it is not read on.
LONGEST_BODY = 1 << 26
#: Seconds in which a connection has to be there.
CONNECT_S = 20.0

#: Called with each piece of a body and when it came, in seconds of the loop's clock.
Sink = Callable[[bytes, float], None]


class HttpFault(Exception):
    """A server that cannot be reached, breaks off or answers with something that is no HTTP/1.1."""


class ServerPlace(NamedTuple):
    """The place of a server: scheme, host, port, and the path that its endpoints are under, without ``/v1``."""

    secure: bool
    host: str
    port: int
    path: str

    @property
    def text(self) -> str:
        """The URL of the place."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.path}"


def origin(url: str, place: str = "URL") -> ServerPlace:
    """Parse the URL of a server: ``http://127.0.0.1:8000``, ``127.0.0.1:8000`` or with ``/v1`` behind it.

    Raises:
        MeshwrightError: T001 for what is no such URL.
    """
    said = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(said)
        port = parts.port
    except ValueError as error:
        parts, port, why = None, None, str(error)
    else:
        why = "" if parts.scheme in ("http", "https") and parts.hostname else "no http:// or https:// address"
        if parts.query or parts.fragment or parts.username or not url.isascii() or any(c.isspace() for c in url):
            why = "it has more than a scheme, a host, a port and a path"
    if parts is None or why:
        help = "http://127.0.0.1:8000, with a path in front of /v1 if need be"
        raise MeshwrightError.one("T001", f"{url!r} is no server's URL: {why}", place=place, help=help)
    secure = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return ServerPlace(secure, parts.hostname or "", port or (443 if secure else 80), path)


class Reply(NamedTuple):
    """An answer: its status, its headers by lower-case name, and its body where no sink took it."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection, of one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._done: asyncio.Future[Reply] | None = None
        self._sink: Sink | None = None
        self._step: Callable[[float], bool] = self._head
        self._left = 0
        self._status, self._headers = 0, {}
        self._body = bytearray()
        self.alive, self.begun = False, False

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.alive = transport, True

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        self._buffer += data
        if self._done is None:
            self.close()  # nobody asked
            return
        self.begun = True
        try:
            while self._step(now):
                pass
        except (ValueError, IndexError) as error:
            self._fail(HttpFault(f"the answer is no HTTP/1.1: {error}"))
        except HttpFault as fault:
            self._fail(fault)

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if self._done is None:
            return
        if self._step == self._until_closed and error is None:
            self._over()
        else:
            where = "in the middle of the answer" if self.begun else "before it answered"
            self._fail(HttpFault(f"the server closed the connection {where}" + (f": {error}" if error else "")))

    # What a client calls.

    def send(self, message: bytes, sink: Sink | None) -> asyncio.Future[Reply]:
        """Send a request; the future is done when its answer is over."""
        assert self._transport is not None
        self._done = self._loop.create_future()
        self._sink, self._step, self.begun = sink, self._head, False
        self._body.clear()
        self._transport.write(message)
        return self._done

    def close(self) -> None:
        """Hang up."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    # Parts of an answer, each of which says whether it got on.

    def _head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > LONGEST_HEAD:
                raise HttpFault(f"the answer's head is longer than {LONGEST_HEAD:,} bytes")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise HttpFault(f"the answer begins with {lines[0][:40]!r}")
        self._status = int(rest[:3])
        if self._status < 200:
            return True  # an interim answer
        pairs = (line.partition(":") for line in lines[1:])
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._closes = version == "HTTP/1.0" or self._headers.get("connection", "").lower() == "close"
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            self._step = self._chunk_line
        elif "content-length" in self._headers:
            self._left = int(self._headers["content-length"])
            if self._left < 0:
                raise HttpFault("its content-length is negative")
            self._step = self._counted
        elif self._status in (204, 304):
            return self._over()
        else:
            self._step = self._until_closed
        return True

    def _take(self, piece: bytes, now: float) -> None:
        if self._sink is not None and self._status == 200:
            self._sink(piece, now)
        else:
            self._body += piece
            if len(self._body) > LONGEST_BODY:
                raise HttpFault(f"the answer's body is longer than {LONGEST_BODY:,} bytes")

    def _counted(self, now: float) -> bool:
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        if piece:
            self._take(piece, now)
        return self._over() if not self._left else False

    def _until_closed(self, now: float) -> bool:
        if self._buffer:
            self._take(bytes(self._buffer), now)
            self._buffer.clear()
        return False

    def _chunk_line(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > LONGEST_CHUNK_LINE:
                raise HttpFault("a chunk does not say how long it is")
            return False
        size = int(self._buffer[:end].partition(b";")[0], 16)
        if size < 0:
            raise HttpFault("a chunk's length is negative")
        del self._buffer[: end + 2]
        self._left = size
        self._step = self._chunk if size else self._trailer
        return True

    def _chunk(self, now: float) -> bool:
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        if piece:
            self._take(piece, now)
        if self._left:
            return False
        self._step = self._chunk_end
        return True

    def _chunk_end(self, now: float) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise HttpFault("a chunk is longer than it says")
        del self._buffer[:2]
        self._step = self._chunk_line
        return True

    def _trailer(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        del self._buffer[: end + 2]
        return self._over() if not end else True

    def _over(self) -> bool:
        done, self._done = self._done, None
        if self._closes or self._buffer:
            self.close()
        if done is not None and not done.done():
            done.set_result(Reply(self._status, self._headers, bytes(self._body)))
        return False

    def _fail(self, fault: HttpFault) -> None:
        done, self._done = self._done, None
        self.close()
        if done is not None and not done.done():
            done.set_exception(fault)


class HttpClient:
    """A client of one server, which keeps connections that are free for the next request."""

    def __init__(self, where: ServerPlace, headers: dict[str, str] | None = None):
        self.where = where
        self._free: list[_Connection] = []
        self._context = ssl.create_default_context() if where.secure else None
        host = f"[{where.host}]" if ":" in where.host else where.host
        usual = where.port == (443 if where.secure else 80)
        said = {"Host": host if usual else f"{host}:{where.port}", "User-Agent": "meshwright"} | (headers or {})
        self._common = "".join(f"{name}: {value}\r\n" for name, value in said.items())

    async def ask(
        self,
        path: str,
        body: bytes | None = None,
        sink: Sink | None = None,
        sent: Callable[[float], None] | None = None,
    ) -> Reply:
        """Return the answer to a GET, or to a POST of a JSON `body`. The body of an answer with status 200 goes to
        `sink` as it comes; `sent` is told when the request was handed to the system.

        Raises:
            HttpFault: the server cannot be reached, or breaks off.
        """
        message = self._message(path, body)
        while True:
            kept = self._kept()
            connection = kept or await self._connected()
            if sent is not None:
                sent(asyncio.get_running_loop().time())
            try:
                reply = await connection.send(message, sink)
            except HttpFault:
                if kept is not None and not connection.begun:
                    continue  # it had been closed while it was free
                raise
            except asyncio.CancelledError:
                connection.close()  # the server sees that nobody listens
                raise
            if connection.alive:
                self._free.append(connection)
            return reply

    def close(self) -> None:
        """Hang up all connections that are free."""
        while self._free:
            self._free.pop().close()

    def _kept(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.alive:
                return connection
        return None

    def _message(self, path: str, body: bytes | None) -> bytes:
        target = f"{self.where.path}{path}"
        if body is None:
            return f"GET {target} HTTP/1.1\r\n{self._common}\r\n".encode()
        head = f"POST {target} HTTP/1.1\r\n{self._common}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            making = loop.create_connection(
                lambda: _Connection(loop), self.where.host, self.where.port, ssl=self._context
            )
            _, connection = await asyncio.wait_for(making, CONNECT_S)
        except (OSError, TimeoutError) as error:
            said = getattr(error, "strerror", None) or str(error) or f"no connection within {CONNECT_S:g} s"
            raise HttpFault(f"cannot connect to {self.where.text}: {said}") from None
        return connection
