"""A serving simulation as a timeline: a row for each request, and what ran, waited and was cached over time."""

from __future__ import annotations

import numpy as np

from meshwright.simulate.served import ServedRequests
from meshwright.timeline import UNKNOWN, Counter, Identity, Timeline

#: The samples of a simulation, column by column, and their units.
SAMPLED = (("running", "requests"), ("waiting", "requests"), ("cache", "blocks"))


def served_timeline(served: ServedRequests, identity: Identity = UNKNOWN) -> Timeline:
    """Return the records of a simulation's requests, in order of number, and its samples as counters; no spans.

    Times are seconds of the virtual clock, nothing (nan) where a request did not come so far.
    """
    table = {
        "request": np.arange(len(served.arrival_s)),
        "arrival_s": served.arrival_s,
        "scheduled_s": served.scheduled_s,
        "first_s": served.first_s,
        "end_s": served.end_s,
        "evicted": served.evicted,
    }
    counters = tuple(
        Counter(name=name, unit=unit, time_s=served.sample_s, value=np.asarray(served.sample[:, i], np.float64))
        for i, (name, unit) in enumerate(SAMPLED)
    )
    return Timeline.bare(records={"request": table}, counters=counters, identity=identity)
