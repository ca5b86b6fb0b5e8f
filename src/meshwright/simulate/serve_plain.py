"""One replica on a virtual clock: its decider says what is computed, and the clock moves on by what that takes.

It is what :mod:`meshwright.simulate.serve_loop` computes, for every policy and written to be read. A run of iterations
that the decider would repeat is one: each context grows by a token, so that their times are an arithmetic series
(:mod:`meshwright.simulate.iterations` says why), and whoever comes meanwhile cuts the run behind the iteration under
way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

import numpy as np

from meshwright.serving.batching import Admit, Arrived, Computed, Evict, Iterate, Share, Withdrawn
from meshwright.serving.borrowing import Borrow, Resized
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.pulling import Offered, Pull
from meshwright.simulate.front_line import streamed
from meshwright.simulate.iteration_time import Took, iteration_seconds
from meshwright.simulate.serve_together import DecodingTogether
from meshwright.simulate.served import GAP_EDGES, MOST_SAMPLES, SPENT, Replica, ServedRequests, thinned
from meshwright.spec.requests import Requests
from meshwright.world.decider import LogEntry

#: Places of where time goes.
IDLE, MOVES, ADAPTERS, ELSEWHERE, SLOWER = (
    SPENT.index(name) for name in ("idle", "moves", "adapters", "elsewhere", "slower")
)
_EDGES = GAP_EDGES.tolist()


def _bin(gap: float) -> int:
    """The place of a gap between tokens in the histogram."""
    return max(bisect_right(_EDGES, gap) - 1, 0)


class Clock:
    """One replica on a virtual clock: its decider, the iterations under way, and the times recorded of every request.

    Without ``skips`` every iteration is simulated by itself, and every sequence in it. One that ``logs`` keeps what it
    tells its decider; one that ``reloads`` has new parameters behind the iteration under way. An engine that ``parks``
    is the first half of a divided one: its requests end with their first token and keep their cache until they are
    withdrawn."""

    def __init__(
        self, replica: Replica, requests: Requests, *, skips: bool = True, parks: bool = False, logs: bool = False
    ):
        self.replica, self.requests, self.skips, self.logs = replica, requests, skips, logs
        self.decider = replica.decider(parks=parks, together=skips)
        self.state, self.iterate = self.decider.begin(), None
        count = len(requests)
        self.now, self.answered = 0.0, 0
        self.output = [1] * count if parks else requests.output.tolist()
        self.arrival = np.array(requests.arrival_s, np.float64)
        self.scheduled, self.first, self.end = (np.full(count, -1.0) for _ in range(3))
        self.evicted, self.cached = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.last, self.generated = [-1.0] * count, [0] * count
        self.together = DecodingTogether(self.output, self.generated, self.last)
        self.gaps, self.spent = [0] * len(GAP_EDGES), [0.0] * len(SPENT)
        self.seen = np.zeros(replica.costs.most_tokens + 1)
        self.iterations = self.runs = self.peak_blocks = self.peak_batch = self.swaps = 0
        self.samples: list[tuple[float, int, int, int]] = []
        self.log: list[LogEntry] = []
        self.took: Took | None = None
        self.before = 0.0
        self.times, self.one = 0, 0.0
        self.out_s = 0.0
        self.accepted: tuple[tuple[int, int], ...] = ()
        self.adapter = requests.adapter.tolist() if len(requests.adapter) else [-1] * count
        self.pulls: list[int] = []
        self.asks: list[Borrow] = []
        self.elsewhere: Callable[[Iterate, Took], Took] | None = None
        self.reloads = False
        self.void: list[int] = []

    def tell(self, event: Arrived | Computed | Withdrawn | Offered | Resized) -> None:
        """Tell the decider what happened, and note what it decides."""
        self.state, decisions = self.decider.decide(self.state, event)
        if self.logs:
            self.log.append(LogEntry(event, decisions))
        if isinstance(event, Computed):
            self.iterate = None
        for decision in decisions:
            if isinstance(decision, Iterate):
                self.iterate = decision
            elif isinstance(decision, Evict):
                self.evicted[decision.number] += 1
                self.together.leave(decision.number)
                self.swaps += decision.swapped
                if decision.void:
                    self.void.append(decision.void)
            elif isinstance(decision, Admit) and self.scheduled[decision.number] < 0:
                self.scheduled[decision.number] = self.now
                self.cached[decision.number] = decision.cached
            elif isinstance(decision, Pull):
                self.pulls.append(decision.number)
            elif isinstance(decision, Borrow):
                self.asks.append(decision)

    def joins(self, number: int, generated: int, last_s: float) -> None:
        """Note that a request comes with a part of its answer, the last token of which was there at that time."""
        self.generated[number], self.last[number] = generated, last_s

    def withdraw(self, number: int, at_s: float, *, came: bool) -> None:
        """Note that nobody waits for a request any more: what it had not reached by that time, it reaches then."""
        self.end[number] = at_s
        for times in (self.scheduled, self.first):
            if not 0 <= times[number] <= at_s:
                times[number] = at_s
        if not came:
            self.arrival[number] = at_s

    def idle_until(self, at_s: float) -> None:
        """Let time pass in which nobody is served."""
        self.spent[IDLE] += at_s - self.now
        self.now = at_s

    def begin(self) -> float:
        """Begin the iteration that was decided, and as many as are the same; returns when they end."""
        assert self.iterate is not None
        run = self.iterate
        for share in run.shares:
            self.together.leave(share.number)
        if run.decoding:
            self.together.follow(run.decoding)
        took = iteration_seconds(self.replica, run)
        times = 1
        self.accepted = self._accepted(run.shares)
        if self.accepted:
            took = self._guessed(run.shares, took)
        if self.replica.lora is not None:
            took = self._adapted(run, took)
        if self.elsewhere is not None:
            took = self.elsewhere(run, took)
        if self.skips and run.repeat > 1:
            made, output = self.generated, self.output
            rest = (output[s.number] - made[s.number] for s in run.shares)
            first = self.together.left() if run.decoding else inf
            first = min(first, *(left for left in rest if left > 0), inf)
            first = first if first < inf else 1
            times = max(1, int(min(first, run.repeat, took.room + 1 if took.room < first else first)))
        self.took, self.times, self.one = took, times, took.seconds
        return self.ends(times)

    def ends(self, times: int) -> float:
        """Return when so many of the iterations under way are over."""
        assert self.took is not None
        return self.now + times * self.one + self.took.growth * times * (times - 1) / 2.0

    def cut(self, at_s: float) -> float:
        """End the run behind the iteration under way at that time, as somebody comes; returns when."""
        low, high = 1, self.times  # the fewest iterations that are not over before
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.ends(middle) >= at_s else (middle + 1, high)
        self.times = low
        return self.ends(low)

    def compute(self) -> list[int]:
        """Let the iterations under way pass; returns the requests that they answer."""
        took, times, run = self.took, self.times, self.iterate
        assert took is not None and run is not None
        state, cache = self.state, self.state.cache
        total, running = cache.total, len(state.running)
        used = total - cache.free
        self.peak_batch = max(self.peak_batch, running)
        self.samples.append((self.now, running, len(state.waiting), used))
        if len(self.samples) > 2 * MOST_SAMPLES:
            del self.samples[1::2]
        end, series = self.ends(times), times * (times - 1) / 2.0
        spent = self.spent
        for part, seconds in enumerate(took[:5]):
            spent[part] += times * seconds
        spent[2] += took.slope * series
        spent[SLOWER if took.slower else 4] -= (took.slope - took.growth) * series
        spent[MOVES] += took.moves
        spent[ADAPTERS] += took.adapters * times
        spent[ELSEWHERE] += took.elsewhere * times
        spent[SLOWER] += took.slower * times
        self.seen[took.tokens] += times
        self.iterations += times
        self.runs += 1
        one = self.one
        self.before = one + took.growth * (times - 1)
        counted, finished = len(run.decoding), []
        guessed = dict(self.accepted) if self.accepted else {}
        first_at, end_at = self.now + one, end
        if self.replica.host.stream_s > 0:
            first_at, end_at = self._out(run, times, first_at, end_at)
        self.out_s = end_at
        gap_of: dict[float, int] = {}
        if run.decoding:
            gap_of, finished = self.together.tick(times, first_at, end_at)
            for i in finished:
                self.end[i] = end_at
            self.answered += len(finished)
        made, output, last = self.generated, self.output, self.last
        for share in run.shares:
            if not share.samples:
                continue
            i = share.number
            was = made[i]
            if was >= output[i]:
                continue  # it keeps its place in a static batch
            new = min(times if not share.drafted else 1 + guessed.get(i, 0), output[i] - was)
            made[i] = was + new
            if was == 0:
                self.first[i] = first_at
            elif last[i] >= 0:
                gap = first_at - last[i]
                gap_of[gap] = gap_of.get(gap, 0) + 1
            last[i] = end_at
            counted += 1
            if share.drafted:
                self.gaps[0] += new - 1  # tokens of one iteration come together
            if made[i] >= output[i]:
                self.end[i] = end_at
                self.answered += 1
                finished.append(i)
        for gap, count in gap_of.items():
            self.gaps[_bin(gap)] += count
        if times > 1:
            gap = one + took.growth * times / 2.0
            if self.replica.host.stream_s > 0:
                gap = (end_at - first_at) / (times - 1)
            self.gaps[_bin(gap)] += counted * (times - 1)
            if not self.replica.policy.reserves:
                if run.shares:
                    blocks_for = self.replica.limits.blocks_for
                    used += sum(blocks_for(s.past + times) - blocks_for(s.past + 1) for s in run.shares)
                used += state.cohort.growth(times - 1)
        self.peak_blocks = max(self.peak_blocks, min(used, total))
        self.now = end
        return finished

    def _out(self, run: Iterate, times: int, first_s: float, end_s: float) -> tuple[float, float]:
        """Return when the tokens of the first and the last of the iterations under way are out, one after the other."""
        guessed, made = dict(self.accepted), self.generated
        alone = (s.number for s in run.shares if s.samples and made[s.number] < self.output[s.number])
        tokens = len(run.decoding) + sum(1 + guessed.get(number, 0) for number in alone)
        return streamed(times, tokens, first_s, end_s, self.replica.host.stream_s, self.out_s)

    def _adapted(self, run: Iterate, took: Took) -> Took:
        """Return the times of an iteration with LoRA adapters: those that are loaded for it, and their products."""
        lora, used, tokens = self.replica.lora, set(), 0
        assert lora is not None
        for number, new in (*((n, 1) for n in run.decoding), *((s.number, s.new) for s in run.shares)):
            adapter = self.adapter[number]
            if adapter >= 0:
                used.add(adapter)
                tokens += new
        waited = lora.loading(run.loads, self.before) if run.loads else 0.0
        return took._replace(adapters=lora.seconds(tokens, len(used)), moves=took.moves + waited)

    def _guessed(self, shares: Sequence[Share], took: Took) -> Took:
        """Return the times of an iteration with guesses: the rest of a round is the host's; where the round is shorter
        than its verification, which then runs beside others, its parts are."""
        guessing = self.replica.guessing
        assert guessing is not None
        device = took.linear + took.sampled + took.decode + took.prefill
        seconds = guessing.round_s(shares, [count for _, count in self.accepted], device)
        if seconds >= device:
            return took._replace(host=took.host + seconds - device)
        share = seconds / device
        parts = {name: getattr(took, name) * share for name in ("linear", "sampled", "decode", "prefill")}
        return took._replace(**parts)

    def _accepted(self, shares: Sequence[Share]) -> tuple[tuple[int, int], ...]:
        """The guessed tokens of an iteration that come true."""
        guessing = self.replica.guessing
        if guessing is None:
            return ()
        return tuple(
            (s.number, guessing.come_true(s.number, self.generated[s.number], s.drafted)) for s in shares if s.drafted
        )

    def computed(self, finished: Sequence[int], withdrawn: Sequence[int] = ()) -> None:
        """Tell the decider that the iterations are over, which requests are answered, and which nobody needs."""
        reloaded, self.reloads = self.reloads, False
        self.tell(Computed(tuple(finished), self.times, self.accepted, tuple(withdrawn), reloaded))

    def served(self) -> ServedRequests:
        """Return the records of all requests; -1 of those that were not served."""
        sample = thinned(np.array(self.samples).reshape(-1, 4))
        return ServedRequests(
            arrival_s=self.arrival,
            scheduled_s=self.scheduled,
            first_s=self.first,
            end_s=self.end,
            evicted=self.evicted,
            gaps=np.array(self.gaps),
            spent_s=np.array(self.spent),
            tokens_seen=self.seen,
            iterations=self.iterations,
            runs=self.runs,
            evictions=int(self.evicted.sum()),
            peak_blocks=self.peak_blocks,
            peak_batch=self.peak_batch,
            sample_s=sample[:, 0],
            sample=sample[:, 1:].astype(np.int64),
            cached=self.cached,
            swaps=self.swaps,
        )


def said_of(requests: Requests, *, chunks: bool = False) -> list[NewRequest]:
    """Return the requests as they are told to an engine, which knows names of prefixes, or of `chunks`."""
    n = len(requests)

    def column(values: np.ndarray, usual: int) -> list[int]:
        return values.tolist() if len(values) else [usual] * n

    columns = zip(
        range(n),
        requests.prompt.tolist(),
        requests.output.tolist(),
        column(requests.tenant, 0),
        column(requests.priority, 0),
        column(requests.adapter, -1),
        column(requests.program, -1),
    )
    if len(requests.hash_ptr) == 1:
        return [NewRequest(*row) for row in columns]
    hashes, ptr = requests.hashes.tolist(), requests.hash_ptr.tolist()
    if requests.chunked and not chunks:
        hashes = prefixes_of(hashes, ptr)
    return [NewRequest(*row, hashes=tuple(hashes[ptr[i] : ptr[i + 1]])) for i, row in enumerate(columns)]


def prefixes_of(names: list[int], ptr: list[int]) -> list[int]:
    """Return names of prefixes for names of texts: equal ones for equal texts behind equal prefixes."""
    known: dict[tuple[int, int], int] = {}
    found = []
    for first, last in pairwise(ptr):
        before = -1
        for name in names[first:last]:
            before = known.setdefault((before, name), len(known))
            found.append(before)
    return found
