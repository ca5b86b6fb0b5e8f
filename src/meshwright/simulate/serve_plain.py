"""The plain serving simulator: any batching decider on a virtual clock, one iteration at a time.

It is what :mod:`meshwright.simulate.serve_loop` computes, written to be read: the decider says what is computed, the
clock moves on by what that takes, and requests are told apart by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.serving.batching import Arrived, Batching, Computed, Evict, Iterate, Share
from meshwright.simulate.served import GAP_EDGES, MOST_SAMPLES, SPENT, Replica, ServedRequests
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


class Clock:
    """One replica on a virtual clock: its decider, the iteration under way, and the times recorded of every request."""

    def __init__(self, replica: Replica, requests: Requests):
        self.replica, self.requests = replica, requests
        self.decider = Batching(policy=replica.policy, limits=replica.limits)
        self.state, self.shares = self.decider.begin(), ()
        count = len(requests)
        self.now, self.answered = 0.0, 0
        self.arrival = np.array(requests.arrival_s, np.float64)
        self.scheduled, self.first, self.end, self.last = (np.full(count, -1.0) for _ in range(4))
        self.generated, self.evicted = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.gaps, self.spent = np.zeros(len(GAP_EDGES), np.int64), np.zeros(len(SPENT))
        self.seen = np.zeros(replica.costs.most_tokens + 1)
        self.iterations = self.peak_blocks = self.peak_batch = 0
        self.samples: list[tuple[float, int, int, int]] = []
        self.log: list[LogEntry] = []

    def ask(self, numbers: Sequence[int]) -> None:
        """Tell the decider that requests came."""
        prompt, output = self.requests.prompt, self.requests.output
        self.tell(Arrived(tuple((i, int(prompt[i]), int(output[i])) for i in numbers)))

    def tell(self, event: Arrived | Computed) -> None:
        """Tell the decider what happened, and note what it decides."""
        self.state, decisions = self.decider.decide(self.state, event)
        self.log.append(LogEntry(event, decisions))
        for decision in decisions:
            if isinstance(decision, Evict):
                self.evicted[decision.number] += 1
        started = next((d.shares for d in decisions if isinstance(d, Iterate)), ())
        if started or isinstance(event, Computed):
            self.shares = started
        for share in started:
            if self.scheduled[share.number] < 0:
                self.scheduled[share.number] = self.now

    def idle_until(self, at_s: float) -> None:
        """Let time pass in which nobody is served."""
        self.spent[-1] += at_s - self.now
        self.now = at_s

    def compute(self) -> list[int]:
        """Let the iteration pass; returns the requests that it answers."""
        took = iteration_seconds(self.replica, self.shares)
        used = self.replica.limits.blocks - self.state.free
        running, waiting = len(self.state.running), len(self.state.waiting)
        self.peak_blocks, self.peak_batch = max(self.peak_blocks, used), max(self.peak_batch, running)
        self.samples.append((self.now, running, waiting, used))
        self.iterations += 1
        self.now += sum(took[:5])
        self.spent[:5] += took[:5]
        self.seen[took.tokens] += 1
        return [share.number for share in self.shares if share.samples and self._token(share.number)]

    def _token(self, i: int) -> bool:
        """Note the next token of a request; returns whether it is the last one."""
        if self.generated[i] >= self.requests.output[i]:
            return False  # it keeps its place in a static batch
        self.generated[i] += 1
        if self.generated[i] == 1:
            self.first[i] = self.now
        else:
            gap = self.now - self.last[i]
            self.gaps[max(int(np.searchsorted(GAP_EDGES, gap, side="right")) - 1, 0)] += 1
        self.last[i] = self.now
        if self.generated[i] < self.requests.output[i]:
            return False
        self.end[i] = self.now
        self.answered += 1
        return True

    def served(self) -> ServedRequests:
        """Return the records of all requests; -1 of those that were not served."""
        sample = np.array(self.samples[:MOST_SAMPLES]).reshape(-1, 4)
        return ServedRequests(
            arrival_s=self.arrival,
            scheduled_s=self.scheduled,
            first_s=self.first,
            end_s=self.end,
            evicted=self.evicted,
            gaps=self.gaps,
            spent_s=self.spent,
            tokens_seen=self.seen,
            iterations=self.iterations,
            runs=self.iterations,
            evictions=int(self.evicted.sum()),
            peak_blocks=self.peak_blocks,
            peak_batch=self.peak_batch,
            sample_s=sample[:, 0],
            sample=sample[:, 1:].astype(np.int64),
        )


def simulate(replica: Replica, requests: Requests) -> ServedRequests:
    """Return what becomes of requests that one replica serves."""
    return simulate_logged(replica, requests)[0]


def simulate_logged(replica: Replica, requests: Requests) -> tuple[ServedRequests, list[LogEntry]]:
    """Return the same, with the decider's log, which replays."""
    clock = Clock(replica, requests)
    known = following = min(requests.concurrency or len(requests), len(requests))
    coming = 0

    def arrive() -> None:
        nonlocal coming
        first = coming
        while coming < known and clock.arrival[coming] <= clock.now:
            coming += 1
        if coming > first:
            clock.ask(range(first, coming))

    while clock.answered < len(requests):
        if not clock.shares:
            clock.idle_until(max(clock.now, float(clock.arrival[coming])))
            arrive()
            continue
        finished = clock.compute()
        arrive()  # they came while it was computed, and are there when the next one is planned
        last = min(following + len(finished), len(requests))
        if last > following:  # in a closed loop the next ones come when others are answered
            clock.arrival[following:last] = clock.now
            clock.ask(range(following, last))
            following = last
        clock.tell(Computed(tuple(finished)))
    return clock.served(), clock.log
