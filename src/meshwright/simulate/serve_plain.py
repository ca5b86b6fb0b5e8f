"""The plain serving simulator: any batching decider on a virtual clock, one iteration at a time.

It is what :mod:`meshwright.simulate.serve_loop` computes, written to be read: the decider says what is computed, the
clock moves on by what that takes, and requests are told apart by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.serving.batching import Arrived, Batching, Computed, Evict, Iterate, Share
from meshwright.simulate.serve import GAP_EDGES, MOST_SAMPLES, SPENT, Replica, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.world.decider import LogEntry


class Took(NamedTuple):
    """Seconds of an iteration by part; ``tokens`` that a microbatch of it has."""

    linear: float
    sampled: float
    decode: float
    prefill: float
    host: float
    tokens: int


def iteration_seconds(replica: Replica, shares: Sequence[Share]) -> Took:
    """Return what an iteration takes: its tokens, those that decode with their contexts, and its prompts."""
    costs, host = replica.costs, replica.host
    decoding = [s.past + 1 for s in shares if s.new == 1 and s.past]
    prompts = [s for s in shares if not (s.new == 1 and s.past)]
    parts = min(replica.stages, len(shares))
    tokens, sampled = sum(s.new for s in shares), sum(s.samples for s in shares)
    at = min(-(-tokens // parts), costs.most_tokens)
    linear, head = float(costs.linear_s[at]), float(costs.sampled_s[-(-sampled // parts)])
    decode = prefill = 0.0
    if decoding:
        decode = costs.decoding(-(-len(decoding) // parts), sum(decoding) / len(decoding))
    if prompts:
        queries = sum(s.new for s in prompts)
        prefill = costs.prefilling(
            -(-len(prompts) // parts),
            queries / max(parts, len(prompts)),
            sum(s.past for s in prompts) / len(prompts),
        )
    device = linear + head + decode + prefill
    eager = host.eager_s if prompts or tokens > host.graph_tokens else 0.0
    added = host.step_s + host.request_s * len(shares) + max(0.0, eager - device)
    return Took(linear, head, decode, prefill, added, at)


class _Clock:
    """The driver of a served replica: requests on their way, and the times recorded of every request."""

    def __init__(self, replica: Replica, requests: Requests):
        self.replica, self.requests = replica, requests
        count = len(requests)
        self.now, self.coming, self.answered = 0.0, 0, 0
        self.known = min(requests.concurrency or count, count)
        self.following, self.asked = self.known, list[int]()
        self.arrival = np.array(requests.arrival_s, np.float64)
        self.scheduled, self.first, self.end, self.last = (np.full(count, -1.0) for _ in range(4))
        self.generated, self.evicted = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.gaps, self.spent = np.zeros(len(GAP_EDGES), np.int64), np.zeros(len(SPENT))
        self.seen = np.zeros(replica.costs.most_tokens + 1)
        self.iterations = self.peak_blocks = self.peak_batch = 0
        self.samples: list[tuple[float, int, int, int]] = []
        self.log: list[LogEntry] = []

    def arrived(self) -> list[tuple[int, int, int]]:
        """Requests that are there by now, and were not before."""
        found, self.asked = self.asked, []
        while self.coming < self.known and self.arrival[self.coming] <= self.now:
            found.append(self.coming)
            self.coming += 1
        return [(i, int(self.requests.prompt[i]), int(self.requests.output[i])) for i in found]

    def ask_next(self) -> None:
        """Let the next request of a closed loop arrive now, as one has been answered."""
        if self.following < len(self.requests):
            self.arrival[self.following] = self.now
            self.asked.append(self.following)
            self.following += 1


def simulate(replica: Replica, requests: Requests) -> ServedRequests:
    """Return what becomes of requests that one replica serves."""
    return simulate_logged(replica, requests)[0]


def simulate_logged(replica: Replica, requests: Requests) -> tuple[ServedRequests, list[LogEntry]]:
    """Return the same, with the decider's log, which replays."""
    clock = _Clock(replica, requests)
    decider = Batching(policy=replica.policy, limits=replica.limits)
    state, shares = decider.begin(), ()

    def tell(event: Arrived | Computed) -> tuple[Share, ...]:
        nonlocal state
        state, decisions = decider.decide(state, event)
        clock.log.append(LogEntry(event, decisions))
        for decision in decisions:
            if isinstance(decision, Evict):
                clock.evicted[decision.number] += 1
        started = next((d.shares for d in decisions if isinstance(d, Iterate)), ())
        for share in started:
            if clock.scheduled[share.number] < 0:
                clock.scheduled[share.number] = clock.now
        return started

    while clock.answered < len(requests):
        new = clock.arrived()
        if new:
            shares = tell(Arrived(tuple(new))) or shares
        if not shares:
            clock.spent[-1] += clock.arrival[clock.coming] - clock.now
            clock.now = clock.arrival[clock.coming]
            continue
        finished = _compute(clock, replica, shares, state)
        new = clock.arrived()
        if new:  # they came while it was computed, and are there when the next one is planned
            tell(Arrived(tuple(new)))
        shares = tell(Computed(tuple(finished)))
    sample = np.array(clock.samples[:MOST_SAMPLES])
    served = ServedRequests(
        arrival_s=clock.arrival,
        scheduled_s=clock.scheduled,
        first_s=clock.first,
        end_s=clock.end,
        evicted=clock.evicted,
        gaps=clock.gaps,
        spent_s=clock.spent,
        tokens_seen=clock.seen,
        iterations=clock.iterations,
        runs=clock.iterations,
        evictions=int(clock.evicted.sum()),
        peak_blocks=clock.peak_blocks,
        peak_batch=clock.peak_batch,
        sample_s=sample[:, 0],
        sample=sample[:, 1:].astype(np.int64),
    )
    return served, clock.log


def _compute(clock: _Clock, replica: Replica, shares: tuple[Share, ...], state) -> list[int]:
    """Let an iteration pass; returns who is answered by it."""
    took = iteration_seconds(replica, shares)
    used = replica.limits.blocks - state.free
    clock.peak_blocks = max(clock.peak_blocks, used)
    clock.peak_batch = max(clock.peak_batch, len(state.running))
    clock.samples.append((clock.now, len(state.running), len(state.waiting), used))
    clock.iterations += 1
    clock.now += sum(took[:5])
    clock.spent[:5] += took[:5]
    clock.seen[took.tokens] += 1
    finished = []
    for share in shares:
        i = share.number
        if not share.samples or clock.generated[i] >= clock.requests.output[i]:
            continue
        clock.generated[i] += 1
        if clock.generated[i] == 1:
            clock.first[i] = clock.now
        else:
            gap = clock.now - clock.last[i]
            clock.gaps[max(int(np.searchsorted(GAP_EDGES, gap, side="right")) - 1, 0)] += 1
        clock.last[i] = clock.now
        if clock.generated[i] == clock.requests.output[i]:
            clock.end[i] = clock.now
            clock.answered += 1
            finished.append(i)
            clock.ask_next()
    return finished
