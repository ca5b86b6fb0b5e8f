"""A loop on a virtual clock: while nothing happens on its sockets it jumps to the next timer, so that a server and a
client in it take seconds of its clock and none of the machine's, and every time is exact.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Waits for sockets that are ready now; time that would be waited passes on the loop's clock."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list:
        found = super().select(0 if timeout is not None else 1.0)
        if not found and timeout:
            found = super().select(0.0003)  # what this process sent itself may be a moment on its way
            if not found:
                self.loop.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; ``now`` is its clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a virtual clock."""

    async def and_hang_up() -> Any:
        try:
            return await work
        finally:
            await asyncio.sleep(1.0)  # connections that were closed are seen to be

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(and_hang_up())
