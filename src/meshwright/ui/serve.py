"""Serving the page: a socket on this machine, uvicorn on it, a browser in front of it."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

import uvicorn

from meshwright.errors import MeshwrightError
from meshwright.ui.pool import Workers
from meshwright.ui.server import build

LOOPBACK = "127.0.0.1"
#: The port when none is said; another one is taken when it is not free.
PORT = 7860
MOST_CONNECTIONS = 100


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket. `port` 0 is any free one; None is :data:`PORT`, or a free one when it is taken.

    Raises:
        MeshwrightError: I010 when the address cannot be had.
    """
    try:
        return _bound(host, PORT if port is None else port)
    except (OSError, OverflowError) as error:
        if port is not None or isinstance(error, socket.gaierror):
            reason = getattr(error, "strerror", None) or str(error)
            help = "--port 0 takes one that is free; without --host the page is on this machine only"
            place = f"--host {host} --port {PORT if port is None else port}"
            raise MeshwrightError.one("I010", f"cannot listen there: {reason}", place=place, help=help) from None
    return bind(host, 0)


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def address(made: socket.socket, host: str) -> str:
    """The URL under which the socket's page opens."""
    port = made.getsockname()[1]
    shown = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


def serve(made: socket.socket, host: str, start: dict[str, Any], ready: Callable[[], None], *, browse: bool) -> None:
    """Serve until Ctrl-C. `ready` is called once requests are answered, `browse` opens a browser then."""

    class Server(uvicorn.Server):
        """uvicorn, which says when it has started."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()
            if browse:
                threading.Thread(target=webbrowser.open, args=(address(made, host),), daemon=True).start()

    config = uvicorn.Config(
        build(Workers(), start, host),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=64 * 1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    try:
        Server(config).run(sockets=[made])
    except KeyboardInterrupt:  # uvicorn hands it on once everything is closed
        return
