"""Hosts: addresses that a server of this machine listens at, and the names by which requests may call it.

A page of another site can make its own name point to this machine and have a browser ask here. The ``Host`` of such a
request is that name, and neither an address nor a name of this machine.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Container
from urllib.parse import urlsplit

from meshwright.errors import MeshwrightError

LOOPBACK = "127.0.0.1"
#: Addresses that only this machine reaches.
ONLY_HERE = (LOOPBACK, "localhost", "::1")


def own_names(host: str) -> set[str]:
    """Names of this machine that a server under `host` may be called by, besides its addresses."""
    return {"localhost", host.lower(), socket.gethostname().lower()}


def is_own(host: str, names: Container[str]) -> bool:
    """Whether a ``Host`` header is one of these names, or an address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def of_origin(origin: str) -> str:
    """The host and port of an ``Origin``, in lower case; "" for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def bind(host: str, port: int | None, usual: int) -> socket.socket:
    """A listening socket. `port` 0 is any free one; None is `usual`, or a free one when it is taken.

    Raises:
        MeshwrightError: I010 when the address cannot be had.
    """
    try:
        return _bound(host, usual if port is None else port)
    except (OSError, OverflowError) as error:
        if port is not None or isinstance(error, socket.gaierror):
            reason = getattr(error, "strerror", None) or str(error)
            help = "--port 0 takes one that is free; without --host it is on this machine only"
            place = f"--host {host} --port {usual if port is None else port}"
            raise MeshwrightError.one("I010", f"cannot listen there: {reason}", place=place, help=help) from None
    return bind(host, 0, usual)


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family, kind)
    try:
        # asyncio sets it on sockets that name their protocol alone; without it each piece of an answer waits until
        # the one before was acknowledged, so that a first token comes with the second (Nagle, RFC 896)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def address(made: socket.socket, host: str) -> str:
    """The URL under which the socket is reached from this machine."""
    port = made.getsockname()[1]
    shown = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"
