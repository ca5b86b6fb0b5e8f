"""Ctrl-C during a walk: the first one ends the walk at its next look, the second ends the command.

Python raises KeyboardInterrupt between any two instructions, inside compiled functions too, which then fail with a
SystemError. So while a walk lasts the signal only leaves a mark, which the walk looks at where it is safe to end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.search.walk import StopFlag


@contextmanager
def stopping(stop: StopFlag) -> Iterator[None]:
    """SIGINT asks for the end while this lasts; a second one, or one when all walks are over, is a KeyboardInterrupt.
    Only the main thread may say what signals do, and only where nobody else has said it before."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def interrupted(_number: int, _frame: Any) -> None:
        if stop.asked or stop.over:
            raise KeyboardInterrupt
        stop.asked = True

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
