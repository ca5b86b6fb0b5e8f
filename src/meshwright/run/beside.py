"""Work of several messages beside a backward: by a thread of this process, or on a stream of its own of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch


@cache
def _thread() -> ThreadPoolExecutor:
    """The thread in which this process takes its sums, one after the other, beside the backward."""
    return ThreadPoolExecutor(1, "meshwright-sums")


class Beside(NamedTuple):
    """Work that was begun: :meth:`wait` gives its result."""

    work: Future | None
    stream: torch.cuda.Stream | None
    found: torch.Tensor | None

    def wait(self) -> torch.Tensor:
        """The result, once it is there."""
        if self.work is not None:
            return self.work.result()
        torch.cuda.current_stream(self.found.device).wait_stream(self.stream)
        return self.found


#: Seconds that the thread has computed, waiting left out.
_computed = [0.0]


def computed_s() -> float:
    """Seconds that this process has computed beside its first thread."""
    return _computed[0]


def _timed(work: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    begun = time.thread_time()
    found = work(values)
    _computed[0] += time.thread_time() - begun
    return found


def begin(work: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, stream: torch.cuda.Stream | None):
    """Begin `work` on values, in order after what was begun before; on a GPU on `stream`."""
    if stream is None:
        return Beside(_thread().submit(_timed, work, values), None, None)
    stream.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(stream):
        return Beside(None, stream, work(values))


def stream_of(like: torch.Tensor) -> torch.cuda.Stream | None:
    """A stream of its own for work on such values; None where a thread does it."""
    return torch.cuda.Stream(like.device) if like.device.type == "cuda" else None
