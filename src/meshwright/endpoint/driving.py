"""Driving: the loop of an engine's process, which takes orders, computes iterations and reports their pieces."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable

from meshwright.endpoint.seam import EngineSpec, ServingEngine
from meshwright.endpoint.wire import Built, EngineSide, Iterated, Orders, Start, Unbuilt
from meshwright.errors import MeshwrightError

#: Seconds between two reports of figures while the engine computes.
FIGURES_S = 0.1
#: How a socket says that the other end of it is gone.
GONE = (EOFError, BrokenPipeError, ConnectionResetError)
#: Exit code of a process whose engine has a fault, EX_SOFTWARE of sysexits.h.
FAULT = 70


def work(descriptor: int, build: Callable[[EngineSpec], ServingEngine]) -> int:
    """Serve one front over the socket of that file descriptor until it is gone; the exit code of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's, which drains
    side = EngineSide(socket.socket(fileno=descriptor))
    try:
        (start,) = side.received(wait=True)
        assert isinstance(start, Start)
        try:
            engine = build(start.spec)
        except MeshwrightError as error:
            side.send(Unbuilt(error.diagnostics))
            return error.exit_code
        try:
            side.send(Built(engine.facts))
            drive(engine, side)
        except GONE:
            engine.close()
            raise
        except Exception:  # other ranks may wait for this one: it ends without a word to them, as if it were killed
            traceback.print_exc()
            os._exit(FAULT)
    except GONE:
        return 0  # the front is gone, and nobody waits for anything
    return 0


def drive(engine: ServingEngine, side: EngineSide) -> None:
    """Compute iterations as long as there is work, and wait for orders where there is none.

    Raises:
        EOFError: the front is gone.
    """
    told_s = -FIGURES_S
    while True:
        for message in side.received(wait=engine.idle):
            if isinstance(message, Orders):
                for number in message.cancelled:
                    engine.cancel(number)
                for asked in message.asked:
                    engine.submit(asked)
        pieces = engine.step()
        now_s = time.monotonic()
        if due := now_s - told_s >= FIGURES_S or engine.idle:
            told_s = now_s
        if pieces or due:
            side.send(Iterated(pieces, engine.figures() if due else None))
