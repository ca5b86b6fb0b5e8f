"""History: a decider's log as a timeline, so that what happened to a job over days is seen as its steps are.

Every event is an instant and a row of the table ``event``; what events count (steps in checkpoints) are counters. The
log of a simulated job and that of a real one, and of any decider, make the same kind of timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.timeline import UNKNOWN, Counter, Identity, Instants, Timeline
from meshwright.world.decider import LogEntry


def history(log: Sequence[LogEntry], identity: Identity = UNKNOWN) -> Timeline:
    """The timeline of a log: no spans, times in seconds from the beginning of the job."""
    counted: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in log:
        for name, value in msgspec.structs.asdict(entry.event).items():
            if isinstance(value, int | float):
                counted[name].append((entry.at_s, float(value)))
    counters = tuple(
        Counter(name=name.replace("_", " "), unit="", time_s=np.array(times), value=np.array(values))
        for name, (times, values) in ((name, zip(*pairs)) for name, pairs in counted.items())
    )
    table = {
        "at_s": np.array([entry.at_s for entry in log], np.float64),
        "event": np.array([in_words(entry.event) for entry in log], object),
        "decision": np.array([", ".join(map(in_words, entry.decisions)) for entry in log], object),
    }
    return Timeline.bare(
        instants=Instants.of([(entry.at_s, _named(entry.event)) for entry in log]),
        counters=counters,
        records={"event": table},
        identity=identity,
    )


def _named(said: msgspec.Struct) -> str:
    return type(said).__name__.lower()


def in_words(said: msgspec.Struct) -> str:
    """The name of an event or a decision, and its fields: ``failed saved_steps=40``."""
    return " ".join([_named(said), *(f"{name}={value}" for name, value in msgspec.structs.asdict(said).items())])
