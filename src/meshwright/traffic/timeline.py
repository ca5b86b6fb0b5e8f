"""The timeline of a measured traffic, of the type that the serving simulator returns."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.answer.serving_why import over_time
from meshwright.simulate.served import GAP_EDGES, SPENT, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.timeline import Counter, Identity, RankClass, Timeline
from meshwright.traffic.record import RequestRecord, Traffic
from meshwright.version import VERSION


def served(found: list[RequestRecord]) -> tuple[Requests, ServedRequests]:
    """Return the requests that were answered, as they were sent and as long as they were, and their times. Nobody but
    the server knows when it began to compute a request: ``scheduled_s`` is when it was sent."""

    def column(name: str, kind: type = np.float64) -> np.ndarray:
        return np.array([getattr(one, name) for one in found], kind)

    count = len(found)
    sample_s, sample = open_over_time(column("sent_s"), column("first_s"), column("end_s"))
    gap = np.array([us for one in found for us in one.gaps_us], np.float64) * 1e-6
    place = np.maximum(np.searchsorted(GAP_EDGES, gap, side="right") - 1, 0)
    requests = Requests(
        arrival_s=column("sent_s"), prompt=column("prompt", np.int64), output=column("output", np.int64)
    )
    return requests, ServedRequests(
        arrival_s=column("sent_s"),
        scheduled_s=column("sent_s"),
        first_s=column("first_s"),
        end_s=column("end_s"),
        evicted=np.zeros(count, np.int64),
        gaps=np.bincount(place, minlength=len(GAP_EDGES)),
        spent_s=np.zeros(len(SPENT)),
        tokens_seen=np.zeros(1),
        iterations=0,
        runs=0,
        evictions=0,
        peak_blocks=0,
        peak_batch=int(sample[:, 0].max(initial=0)),
        sample_s=sample_s,
        sample=sample,
        cached=np.maximum(column("cached", np.int64), 0),
    )


def open_over_time(arrival_s: np.ndarray, first_s: np.ndarray, end_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when the state of requests changes as clients see it [s], and from then on how many are being answered,
    wait for their first token, and 0 [s, 3]."""
    at = np.concatenate([arrival_s, first_s, end_s])
    count = len(arrival_s)
    answering = np.repeat([0, 1, -1], count)
    waiting = np.repeat([1, -1, 0], count)
    order = np.argsort(at, kind="stable")
    states = np.stack([np.cumsum(answering[order]), np.cumsum(waiting[order]), np.zeros(3 * count, np.int64)], axis=1)
    at = at[order]
    last = np.append(np.diff(at) > 0, True)[: len(at)]  # of what happens at once the state behind all of it
    return at[last], states[last].astype(np.int64)


def _said(traffic: Traffic) -> list[Counter]:
    """Return what the server said of itself over time, as counters beside those of its clients."""
    found = []
    for field, name, unit in (
        ("running", "running, as the server says", "requests"),
        ("waiting", "waiting, as the server says", "requests"),
        ("cache", "cache in use, as the server says", "share"),
    ):
        some = [(one.at_s, value) for one in traffic.figures if (value := getattr(one, field)) is not None]
        if some:
            at, values = (np.array(column, np.float64) for column in zip(*some))
            found.append(Counter(name=name, unit=unit, time_s=at, value=values, rank=0))
    return found


def timeline(traffic: Traffic) -> Timeline:
    """Return what was measured as the simulator returns what it predicts: requests answered and waiting over time, a
    record of every request that was answered, how often each gap between tokens was, and what the server's own
    ``/metrics`` said meanwhile. What neither sees, as evictions, is 0."""
    requests, measured = served(traffic.answered)
    columns = {
        "replica": np.zeros(len(requests), np.int64),
        "prompt_tokens": requests.prompt,
        "output_tokens": requests.output,
        **{n: getattr(measured, n) for n in ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached")},
    }
    head = traffic.head
    who = Identity(code=VERSION, model=head.model, workload=head.serve, source="measured")
    found = over_time([RankClass(label="server")], [measured], columns, who)
    seen = (*(one for one in found.counters if one.name != "cache blocks"), *_said(traffic))
    errors = [one for one in traffic.records.values() if one.error]
    if not errors:
        return msgspec.structs.replace(found, counters=seen)
    columns = {"sent_s": np.array([one.sent_s for one in errors]), "status": np.array([one.status for one in errors])}
    return msgspec.structs.replace(found, counters=seen, records=found.records | {"errors": columns})
