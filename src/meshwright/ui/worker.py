"""Worker: a process that answers one request after the other, so that none of them can hold up the page.

Frames go over stdin and stdout: four bytes of length, then JSON. A request is ``{"task", "body"}``; what comes back is
any number of ``{"event"}`` and one ``{"answer"}`` or ``{"errors"}``. The process ends with its stdin.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from io import RawIOBase
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.ui.frames import COLD, FRAME, pack

#: Least address space of a worker, in bytes; a machine with more memory gives half of it.
LEAST_BYTES = 8 * 2**30


def perform(
    task: str, body: dict[str, Any], send: Callable[[dict[str, Any]], None], stopped: Callable[[], bool]
) -> dict[str, Any]:
    """The answer to one request as ``{"answer": ...}``, or ``{"errors": [...]}`` whatever goes wrong."""
    try:
        return {"answer": TASKS[task](body, send, stopped)}
    except MeshwrightError as error:
        return {"errors": [msgspec.to_builtins(d) for d in error.diagnostics]}
    except msgspec.ValidationError as error:
        return _one("I001", f"not a request of this page: {error}", "reload the page")
    except (MemoryError, RecursionError):
        return _one("I005", "this question needs more memory than one of the page may take", "ask about a smaller one")
    except Exception as fault:
        help = "this is a fault of Meshwright, please report it with the question"
        return _one("I008", f"the answer failed: {type(fault).__name__}: {fault}"[:300], help)


def _one(code: str, message: str, help: str) -> dict[str, Any]:
    return {"errors": [msgspec.to_builtins(Diagnostic(code=code, message=message, place="the page", help=help))]}


def _answer(body: dict, send: Callable, stopped: Callable) -> dict[str, Any]:
    from meshwright.ui.answer import AnswerRequest, answer

    return answer(msgspec.convert(body, AnswerRequest))


def _panel(body: dict, send: Callable, stopped: Callable) -> dict[str, Any]:
    from meshwright.ui.answer import PanelRequest, panel

    return panel(msgspec.convert(body, PanelRequest))


def _recipes(body: dict, send: Callable, stopped: Callable) -> dict[str, Any]:
    from meshwright.ui.recipes import RecipesRequest, recipes

    return recipes(msgspec.convert(body, RecipesRequest))


def _search(body: dict, send: Callable, stopped: Callable) -> dict[str, Any]:
    from meshwright.ui.searching import SearchRequest, search

    return search(msgspec.convert(body, SearchRequest), send, stopped)


TASKS = {"answer": _answer, "panel": _panel, "recipes": _recipes, "search": _search}


def main() -> int:
    """Answer frames until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends its workers
    _bound_memory()
    incoming, outgoing = sys.stdin.buffer.raw, sys.stdout.buffer  # unbuffered: `select` has to see what waits
    sys.stdout = sys.stderr  # a stray print must not tear a frame

    def send(value: dict[str, Any]) -> None:
        outgoing.write(pack(value))
        outgoing.flush()

    if COLD not in sys.argv:
        from meshwright.ui.answer import warm_up

        warm_up()
    send({"answer": "ready"})
    while (frame := _read(incoming)) is not None:
        if "task" not in frame:  # a request to stop that came after the end
            continue
        stop = _Stop(incoming)
        send(perform(frame["task"], frame["body"], lambda event: send({"event": event}), stop))
    return 0


class _Stop:
    """Whether the server has sent a frame while a request runs, which asks for its end."""

    def __init__(self, incoming: RawIOBase):
        self.incoming, self.stopped = incoming, False

    def __call__(self) -> bool:
        if not self.stopped and select.select([self.incoming], [], [], 0)[0]:
            _read(self.incoming)
            self.stopped = True
        return self.stopped


def _read(incoming: RawIOBase) -> dict[str, Any] | None:
    """The next frame; None at the end."""
    head = _exactly(incoming, FRAME.size)
    return None if head is None else msgspec.json.decode(_exactly(incoming, FRAME.unpack(head)[0]) or b"{}")


def _exactly(incoming: RawIOBase, count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        more = incoming.read(count - len(found))
        if not more:
            return None
        found += more
    return found


def _bound_memory() -> None:
    """Limit the address space, so that a question too large is an error of its own and not the machine's end."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (max(LEAST_BYTES, physical // 2), resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
