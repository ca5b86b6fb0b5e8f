"""A layer that asks peers for its experts, on a virtual clock (``passes=dmoe``; Ryabinin and Gusev 2020, arXiv
2002.04013, section 3).

One rank trains, peers have the experts. At a mixture the rank sends each peer the rows of its experts, one message
after the other through its port; a peer passes what it is asked in the order in which it arrives; answers come back
through the rank's port, and the layer goes on when all are there or lost, or the time is up. A backward sends rows and
gradients, and its peer passes the rows again, answers, and lets its experts take a step. Who owes a late answer is not
asked until it is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

import msgspec
import numpy as np

from meshwright.simulate.swarm import PeerShare, PeerSpan, SwarmRun, SwarmWorld
from meshwright.world.crowd import ALIKE
from meshwright.world.trace import WorldEvent


class AskedSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a rank and of the peers that it asks: seconds of the rank's forward and backward of a microbatch without
    experts, and of its update; of every peer [peers] those that a message of rows of one of the ``layers`` takes, with
    its ``message_bytes`` (of all peers together: [layers]), and those of the experts' forward, backward (with the
    forward again) and update there [peers][layers]; and those that a peer's state takes to come."""

    microbatches: int
    forward_s: float
    backward_s: float
    update_s: float
    message_bytes: tuple[float, ...]
    message_s: tuple[tuple[float, ...], ...]
    experts_forward_s: tuple[tuple[float, ...], ...]
    experts_backward_s: tuple[tuple[float, ...], ...]
    experts_update_s: tuple[tuple[float, ...], ...]
    state_s: tuple[float, ...]


def simulate_asked(sizes: AskedSizes, wait_s: float, world: SwarmWorld, num_steps: int) -> SwarmRun:
    """So many steps, whose answers are waited for so long. The world's ranks are 0, which trains, and the peers."""
    return _Clock(sizes, wait_s, world).run(num_steps)


class _Clock:
    def __init__(self, sizes: AskedSizes, wait_s: float, world: SwarmWorld):
        self.sizes, self.wait_s, self.world = sizes, wait_s, world
        self.peers = range(1, len(sizes.message_s) + 1)
        self.now_s = 0.0
        ranks = len(sizes.message_s) + 1
        self.there = [True] * ranks
        self.free, self.owes, self.busy_s, self.passes = ([0.0] * ranks for _ in range(4))
        self.heap: list[tuple[float, int, WorldEvent | int]] = []
        self.order = count()
        self.failures = iter(world.failures)
        self.left = world.spares
        self.lost = self.joined = self.left_out = self.asked = 0
        self.sent_bytes = self.waited_s = 0.0
        self.rng = np.random.default_rng((world.seed, 7))
        self.begun_s, self.microbatch = 0.0, -1
        self.spans: list[PeerSpan] = []
        self._next_failure()

    def run(self, num_steps: int) -> SwarmRun:
        sizes, layers, ended = self.sizes, len(self.sizes.message_bytes), []
        for _ in range(num_steps):
            self.spans, self.begun_s = [], self.now_s
            for self.microbatch in range(sizes.microbatches):
                who = []
                for layer in range(layers):
                    self._computes("F", sizes.forward_s / (layers + 1))
                    who.append(self._asks(layer, self.peers, backward=False))
                self._computes("F", sizes.forward_s / (layers + 1))
                for layer in reversed(range(layers)):
                    self._computes("BW", sizes.backward_s / (layers + 1))
                    self._asks(layer, who[layer], backward=True)
                self._computes("BW", sizes.backward_s / (layers + 1))
            self.microbatch = -1
            self._computes("optimizer", sizes.update_s)
            ended.append(self.now_s)
        total, seconds = self.now_s or 1.0, np.diff([0.0, *ended])
        return SwarmRun(
            step_s=tuple(seconds.tolist()),
            peers=tuple(PeerShare(int(self.passes[p]), self.busy_s[p] / total, self.there[p] - 1) for p in self.peers),
            moved=0,
            lost=self.lost,
            joined=self.joined,
            again=0,
            sum_s=0.0,
            update_s=self.sizes.update_s * self.world.computing[0],
            computing_s=sum(self.busy_s[1:]) / len(self.peers) / num_steps,
            sent_bytes=self.sent_bytes / num_steps,
            waited_s=self.waited_s / num_steps,
            left_out=self.left_out / max(1, self.asked),
            spans=tuple(sorted(self.spans, key=lambda one: (one.start_s, one.peer))),
        )

    def _span(self, rank: int, queue: str, kind: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            begun = self.begun_s
            self.spans.append(PeerSpan(rank, queue, kind, 0, self.microbatch, start_s - begun, end_s - begun))

    def _jitter(self, rank: int) -> float:
        varies = self.world.jitter
        return self.world.computing[rank] * (1.0 if varies == ALIKE else varies.draw(self.rng, rank))

    def _computes(self, kind: str, seconds: float) -> None:
        """The rank that trains computes."""
        ends = self.now_s + seconds * self._jitter(0)
        self._span(0, "compute", kind, self.now_s, ends)
        self.now_s = ends
        self._world(ends)

    def _asks(self, layer: int, among: Iterable[int], backward: bool) -> list[int]:
        """Peers that answer in time."""
        sizes, world, begun = self.sizes, self.world, self.now_s
        asked = [peer for peer in among if self.there[peer] and self.owes[peer] <= begun]
        messages, sent, done = 1 + backward, begun, []
        for peer in asked:
            at = peer - 1
            sent += messages * sizes.message_s[at][layer] * world.sending[peer]
            work = (sizes.experts_backward_s if backward else sizes.experts_forward_s)[at][layer] * self._jitter(peer)
            starts = max(sent, self.free[peer])
            update = sizes.experts_update_s[at][layer] * world.computing[peer] if backward else 0.0
            self.free[peer] = starts + work + update
            self.busy_s[peer] += work + update
            self.passes[peer] += 1
            self._span(peer, "compute", "BW" if backward else "F", starts, starts + work)
            self._span(peer, "compute", "optimizer", starts + work, starts + work + update)
            done.append((starts + work, peer))
        answers, port_s = {}, begun  # of this layer: late ones of others are taken to be in nobody's way
        for ready, peer in sorted(done):
            took = sizes.message_s[peer - 1][layer] * world.sending[peer]
            port_s = answers[peer] = max(ready, port_s) + took
        self.sent_bytes += (messages + 1) * sizes.message_bytes[layer] * len(asked) / len(self.peers)
        self.now_s, there = self._waited(begun + self.wait_s, answers)
        for peer, at_s in answers.items():
            self.owes[peer] = at_s if peer not in there and self.there[peer] else 0.0
        self.asked += len(self.peers)
        self.left_out += len(self.peers) - len(there)
        self.waited_s += self.now_s - begun
        self._span(0, "ep", "all_to_all", begun, self.now_s)
        return there

    def _waited(self, until_s: float, answers: dict[int, float]) -> tuple[float, list[int]]:
        """When all have answered or are lost, or the time is up, and who has answered by then."""
        lost: dict[int, float] = {}
        while True:
            waits = [lost.get(peer, at_s) for peer, at_s in answers.items()]
            ends = min(until_s, max(waits, default=self.now_s))
            if not self.heap or self.heap[0][0] >= ends:
                break
            at_s, gone = self._happens()
            if gone in answers and gone not in lost and at_s < answers[gone]:
                lost[gone] = at_s
        return ends, sorted(peer for peer, at_s in answers.items() if peer not in lost and at_s <= until_s)

    # -- the world

    def _next_failure(self) -> None:
        one = next(self.failures, None)
        if one is not None:
            heapq.heappush(self.heap, (one.at_s, next(self.order), one))

    def _world(self, until_s: float) -> None:
        while self.heap and self.heap[0][0] <= until_s:
            self._happens()

    def _happens(self) -> tuple[float, int]:
        """The next thing that the world does: when, and the peer that it loses, -1 for none."""
        at_s, _, one = heapq.heappop(self.heap)
        if not isinstance(one, WorldEvent):
            self.there[one] = True
            self.joined += 1
            self.free[one], self.owes[one] = at_s, 0.0
            return at_s, -1
        self._next_failure()
        there = [peer for peer in self.peers if self.there[peer]]
        peer = one.node if one.node >= 0 or not there else there[self.lost % len(there)]
        if peer not in there:
            return at_s, -1
        self.there[peer] = False
        self.lost += 1
        back_s = one.back_s
        if back_s is None and (self.left is None or self.left > 0):
            self.left = None if self.left is None else self.left - 1
            back_s = at_s + self.world.restart_s
        elif back_s is None:
            back_s = at_s + self.world.repair_s
        back_s += self.sizes.state_s[peer - 1] * self.world.sending[peer]
        heapq.heappush(self.heap, (back_s, next(self.order), peer))
        return at_s, peer
