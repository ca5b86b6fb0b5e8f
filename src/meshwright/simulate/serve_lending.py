"""Replicas that lend one another cache blocks: attention goes to where keys and values are, and these stay there.

DistAttention (Lin et al. 2024, 2401.02669, section 4): the queries of tokens whose past is partly elsewhere go there
in every layer, and come back as a partial result with the maximum and the sum of its softmax, by which the parts are
joined exactly. Both sides compute at the same time. Of several creditors each has the part of a request's tokens away
that it has of the blocks lent; new keys and values go there while the layers behind theirs are computed.

A creditor's device gives a debtor's attention precedence: its own iteration has the share of each second that this
attention, in the debtor's iterations as they follow one another, leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from meshwright.serving.batching import Iterate, Share
from meshwright.serving.borrowing import Borrow, Resized, spare_blocks
from meshwright.serving.lending import BlockReport, LendingManager, Loans, Reported
from meshwright.serving.routing import Router
from meshwright.simulate.iteration_time import Took
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.serve_plain import Clock
from meshwright.simulate.serve_pool import ReplicaPool, RolesAlike, shares_of
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.world.decider import LogEntry


class AwayPath(NamedTuple):
    """The way from a replica to another that keeps blocks for it: ``asks_s`` are the seconds in which the queries of so
    many tokens go there and their results come back, in all layers, and ``keeps_s`` those of so many tokens' keys and
    values."""

    asks_s: Callable[[int], float]
    keeps_s: Callable[[int], float]

    def slower(self, factor: float) -> AwayPath:
        """Return a way on which everything takes `factor` times as long."""
        return AwayPath(lambda tokens: factor * self.asks_s(tokens), lambda tokens: factor * self.keeps_s(tokens))


class Away(NamedTuple):
    """The part of an iteration that is away: of ``decoding`` requests ``context`` tokens, of ``prompts`` with
    ``queries`` new tokens ``past`` ones, and ``kept`` new tokens whose keys and values go there."""

    decoding: int
    context: int
    prompts: int
    queries: int
    past: int
    kept: int

    @classmethod
    def of(cls, run: Iterate) -> Away:
        """Count an iteration; its own new tokens are attended to at home."""
        away = dict(run.away)
        found = [(one, max(0, away[one.number] - one.new)) for one in run.shares if one.number in away]
        next_ones = [past for one, past in found if past and _decodes(one)]
        prompts = [(one.new, past) for one, past in found if past and not _decodes(one)]
        return cls(
            len(next_ones),
            sum(next_ones),
            len(prompts),
            sum(new for new, _ in prompts),
            sum(past for _, past in prompts),
            sum(min(one.new, away[one.number]) for one, _ in found),
        )

    def attention_s(self, costs: IterationCosts, part: float) -> float:
        """Return the attention over this part of the tokens that are away, where they are."""
        seconds = max(0.0, costs.decoding(self.decoding, self.context * part / self.decoding)) if self.decoding else 0.0
        if self.prompts:
            queries, past = self.queries / self.prompts, self.past * part / self.prompts
            seconds += costs.prefilling(self.prompts, queries, past) - costs.prefilling(self.prompts, queries, 0.0)
        return seconds


class Lending(RolesAlike):
    """The loans between the replicas of a simulation, and what they cost whose iterations; ``log`` is the manager's."""

    def __init__(self, pool: ReplicaPool, paths: dict[tuple[int, int], AwayPath]):
        self.pool, self.paths = pool, paths
        self.doors = range(len(pool.clocks))
        self.manager = LendingManager()
        self.loans: Loans = self.manager.begin()
        self.log: list[LogEntry] = []
        self.uses: dict[int, dict[int, float]] = {}
        for which, clock in enumerate(pool.clocks):
            clock.elsewhere = lambda run, took, which=which: self.took(which, run, took)

    def move(self, now: float) -> float:
        """Let the manager know what replicas ask for and give back, and let it lend until nothing more is to be lent;
        nothing happens later by itself."""
        while True:
            said = [(i, ask) for i, clock in enumerate(self.pool.clocks) for ask in clock.asks]
            if not said and not self.loans.wanted:
                return inf
            for clock in self.pool.clocks:
                clock.asks.clear()
            event = Reported(self._reports(said))
            self.loans, lent = self.manager.decide(self.loans, event)
            self.log.append(LogEntry(event, lent, now))
            more: dict[int, int] = {}
            for one in lent:
                self.pool.tell(one.creditor, Resized(one.blocks, lends=True), now)
                if one.blocks > 0:
                    more[one.debtor] = more.get(one.debtor, 0) + one.blocks
            for debtor, blocks in more.items():  # all of them at once: a part of them is given back
                self.pool.tell(debtor, Resized(blocks), now)
            if not lent:
                return inf

    def _reports(self, said: Sequence[tuple[int, Borrow]]) -> tuple[BlockReport, ...]:
        """Return what every replica reports: its wish of now or the one known before, and what it can spare."""
        out = []
        for which, clock in enumerate(self.pool.clocks):
            oldest, wanted = self.loans.wanted.get(which, (0, 0))
            returned = 0
            for ask in [ask for i, ask in said if i == which]:
                oldest, wanted, returned = ask.oldest, ask.wanted, returned + ask.returned
            out.append(BlockReport(which, wanted, oldest, spare_blocks(clock.state), returned))
        return tuple(out)

    def took(self, which: int, run: Iterate, took: Took) -> Took:
        """Return the times of an iteration with what it has elsewhere, and what others have here."""
        self.uses.pop(which, None)
        uses: dict[int, float] = {}
        if run.away:
            took, uses = self._borrowed(which, run, took)
        busy = sum(
            self.uses[debtor].get(which, 0.0)
            for debtor in self.loans.of_creditor(which)
            if debtor in self.uses and self.pool.clocks[debtor].iterate is not None
        )
        if busy:
            device = took.linear + took.sampled + took.decode + took.prefill
            took = took._replace(elsewhere=took.elsewhere + device * busy / (1.0 - busy), growth=0.0, slope=0.0, room=0)
        if uses:
            self.uses[which] = {creditor: seconds / took.seconds for creditor, seconds in uses.items()}
        return took

    def _borrowed(self, which: int, run: Iterate, took: Took) -> tuple[Took, dict[int, float]]:
        """The times of an iteration some of whose tokens are away, and the seconds of attention at every creditor."""
        replica, away, loans = self.pool.clocks[which].replica, Away.of(run), self.loans.of_debtor(which)
        costs, lent = replica.costs, sum(loans.values())
        decode, prefill = _at_home(costs, run, away)
        uses = {creditor: away.attention_s(costs, blocks / lent) for creditor, blocks in loans.items()}
        paths = {creditor: self.paths[which, creditor] for creditor in loans}
        asked = (away.decoding + away.queries) * len(loans)  # all of them leave by one port
        there = max(paths[creditor].asks_s(asked) + seconds for creditor, seconds in uses.items()) if asked else 0.0
        waits = max(0.0, there - decode - prefill)
        before = took.linear + took.sampled + took.decode + took.prefill
        after = took.linear + took.sampled + decode + prefill + waits
        if away.kept:
            sent = max(path.keeps_s(away.kept) for path in paths.values())
            waits, after = waits + max(0.0, sent - after), max(after, sent)
        eager = max(0.0, _eager_s(replica, run) - before), max(0.0, _eager_s(replica, run) - after)
        found = took._replace(
            decode=decode,
            prefill=prefill,
            elsewhere=waits,
            host=took.host - eager[0] + eager[1],
            growth=0.0,
            slope=0.0,
            room=0,
        )
        return found, uses if asked else {}


def _decodes(one: Share) -> bool:
    return one.new == 1 and one.past > 0


def _eager_s(replica: Replica, run: Iterate) -> float:
    """The seconds that an iteration's host takes at least without a CUDA graph; 0 with one."""
    host = replica.host
    alike = all(map(_decodes, run.shares)) and len(run.shares) <= host.graph_tokens
    return 0.0 if alike else host.eager_s


def _at_home(costs: IterationCosts, run: Iterate, away: Away) -> tuple[float, float]:
    """The attention of next tokens and of prompts over what is at home."""
    next_ones = [one.past + 1 for one in run.shares if _decodes(one)]
    prompts = [one for one in run.shares if not _decodes(one)]
    decode = prefill = 0.0
    if next_ones:
        mean = (sum(next_ones) - away.context) / len(next_ones)
        decode = max(0.0, costs.decoding(len(next_ones), mean))
    if prompts:
        past = sum(one.past for one in prompts) - away.past
        decode_queries = sum(one.new for one in prompts) / len(prompts)
        prefill = costs.prefilling(len(prompts), decode_queries, past / len(prompts))
    return decode, prefill


class LentPool:
    """A simulation of replicas that lend one another blocks."""

    def __init__(
        self,
        replica: Replica,
        replicas: int,
        requests: Requests,
        router: Router,
        paths: dict[tuple[int, int], AwayPath],
        *,
        skips: bool = True,
        logs: bool = False,
    ):
        clocks = [Clock(replica, requests, skips=skips, logs=logs) for _ in range(replicas)]
        self.pool = ReplicaPool(clocks, requests, router)
        self.lending = Lending(self.pool, paths)

    def served(self) -> tuple[list[Requests], list[ServedRequests]]:
        """Simulate; return the requests of every replica that served any, and what became of them, without those that
        nobody needed any more."""
        self.pool.run(self.lending)
        shares, served = shares_of(self.pool)
        host = self.pool.clocks[0].replica.host
        return shares, [one.seen(share, host) for one, share in zip(served, shares, strict=True)]
