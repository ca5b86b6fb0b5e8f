"""Serving the page: a socket on this machine, uvicorn on it, a browser in front of it."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

import uvicorn

from meshwright.endpoint.hosts import address
from meshwright.ui.pool import Workers
from meshwright.ui.server import build

#: The port when none is said; another one is taken when it is not free.
PORT = 7860
MOST_CONNECTIONS = 100


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
