"""The progress of a search in one line: how much is done, how fast, the best so far, and how long it may take."""

from __future__ import annotations

from time import monotonic

import numpy as np

from meshwright.quantity import big, seconds
from meshwright.search.walk import Walk


def line(walk: Walk) -> str:
    """``12.3M of 50.5M plans, 240 evaluated (3.1M plans/s), best 4.969 s, 8.2 s left``."""
    elapsed = max(1e-9, monotonic() - walk.started)
    done = min(walk.rejected.total() + len(walk.tried), walk.covered)
    rate = done / elapsed
    best = "nothing fits yet" if not np.isfinite(walk.best_s) else f"best {seconds(walk.best_s)}"
    left = f", {seconds((walk.covered - done) / rate)} left" if done and done < walk.covered else ""
    return f"{big(done)} of {big(walk.covered)} plans, {len(walk.tried)} evaluated ({big(rate)} plans/s), {best}{left}"
