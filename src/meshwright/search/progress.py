"""The progress of a search in one line: how much is done, how fast, the best so far, and how long it may take."""

from __future__ import annotations

from time import monotonic

import numpy as np

from meshwright.quantity import big, seconds, time_left
from meshwright.search.walk import Walk

#: Seconds and the share of the space after which the rate so far says how long the rest takes: the first tenth is
#: listing plans and looking at a few closely, after which most of the space goes at once.
SURE_S, SURE = 2.0, 0.1


def line(walk: Walk) -> str:
    """``12.3M of 50.5M plans, 240 evaluated (3.1M plans/s), best 4.969 s, about 8 s left``."""
    now = monotonic()
    elapsed = max(1e-9, now - walk.started)
    done = min(walk.rejected.total() + len(walk.tried), walk.covered)
    rate = done / elapsed
    parts = [f"{walk.what}{big(done)} of {big(walk.covered)} plans, {len(walk.tried)} evaluated ({big(rate)} plans/s)"]
    if np.isfinite(walk.best_s):
        parts.append(f"best {seconds(walk.best_s)}")
    elif walk.tried:
        parts.append("nothing fits yet")
    counted = now - walk.grown_s > SURE_S  # else more plans than those so far are to come
    if elapsed > SURE_S and counted and SURE * walk.covered < done < walk.covered:
        parts.append(f"about {time_left((walk.covered - done) / rate)} left")
    return ", ".join(parts)
