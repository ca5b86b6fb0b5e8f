"""Progress of a training that counts passes or epochs: a line now and then, from its first process."""

from __future__ import annotations

import math
import sys
import time

#: Seconds between two lines.
OFTEN_S = 5.0


class PassProgress:
    """Says how far a training of so many passes is, its loss and the seconds that are left, where it is the first
    process; ``each`` is what a pass is called."""

    def __init__(self, first: bool, total: int, each: str = "pass"):
        self.first, self.total, self.each = first, total, each
        self.begun = self.said = time.perf_counter()

    def __call__(self, number: int, loss: float) -> None:
        """Pass `number` (the first is 0) has ended with a loss."""
        now, done = time.perf_counter(), number + 1
        if not self.first or done >= self.total or now - self.said < OFTEN_S:
            return
        self.said = now
        left = (now - self.begun) / done * (self.total - done)
        told = f"loss {loss:.6g}" if loss is not None and math.isfinite(loss) else "its loss is no number"
        print(f"{self.each} {done:,} of {self.total:,}: {told}, {left:,.0f} s left", file=sys.stderr, flush=True)
