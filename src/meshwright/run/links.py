"""Links between pools for real: activations to the pool with the layers after, gradients back.

Both ends know from the plan alone which tokens of which sequences each rank of the one sends to each rank of the other,
and in what order: that of the sender's own schedule. Pools may differ in replicas, microbatches and tensor-parallel
ranks; a rank sends its share of the tokens of a sequence, cut where the other pool's microbatches and shares are cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.lower.waves import rows
from meshwright.plan import Pool
from meshwright.run.collect import all_gather
from meshwright.run.connect import Edge
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.pipeline import Channel
from meshwright.run.record import recorder
from meshwright.schedules.actions import BW, Actions, B, F


class End(NamedTuple):
    """One end of a link: a pool, what its ranks do in a step, and the virtual stage there."""

    pool: Pool
    actions: Actions
    stage: int

    def rank(self, replica: int, shard: int) -> int:
        """The rank of the job with a tensor-parallel shard of a replica's stage."""
        layout = self.pool.plan.layout
        place = self.actions.stage_ranks[self.stage][0] * layout.stride("pp")
        return self.pool.devices[0] + place + replica * layout.stride("dp") + shard * layout.stride("tp")

    def turns(self, kinds: tuple[int, ...]) -> list[int]:
        """The microbatches of the stage in the order in which passes of these kinds are done."""
        actions, rank = self.actions, self.actions.stage_ranks[self.stage][0]
        part = slice(actions.rank_ptr[rank], actions.rank_ptr[rank + 1])
        columns = (actions.kind[part].tolist(), actions.stage[part].tolist(), actions.microbatch[part].tolist())
        return [m for kind, stage, m in zip(*columns) if kind in kinds and stage == self.stage]


class Cut(NamedTuple):
    """A part of a rank's microbatch that one rank of another pool has too: of that rank's microbatch ``other``, the
    ``rows`` and ``tokens`` of the own share."""

    other: int
    peer: int
    rows: slice
    tokens: slice


def cuts(own: End, other: End, replica: int, shard: int, number: int, length: int) -> Iterator[Cut]:
    """Yield the parts of a replica's microbatch, on the tensor-parallel rank `shard`, that ranks of the other pool have
    too, of sequences of `length` tokens: in order of the other's microbatches, replicas and shards."""
    plan, theirs = own.pool.plan, other.pool.plan
    mine = rows(plan.layout.dp, plan.pipeline.microbatch, replica, number)
    tokens = _share(length, plan.layout.tp, shard)
    size, replicas = theirs.pipeline.microbatch, theirs.layout.dp
    for block in range(mine.start // size, (mine.stop - 1) // size + 1):
        found = _meet(mine, range(block * size, (block + 1) * size))
        for there in range(theirs.layout.tp):
            both = _meet(tokens, _share(length, theirs.layout.tp, there))
            if both.stop > both.start:
                peer = other.rank(block % replicas, there)
                yield Cut(block // replicas, peer, found, both)


def _share(length: int, size: int, index: int) -> range:
    return range(index * length // size, (index + 1) * length // size)


def _meet(mine: range, theirs: range) -> slice:
    """Return the intersection of two ranges, counted from the start of the first."""
    first, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
    return slice(first - mine.start, stop - mine.start)


class Link:
    """This rank's side of a link. ``sends`` and ``receives`` are the kinds of passes whose results leave and arrive:
    a source sends after its forwards and receives before its backwards, a target the other way round."""

    def __init__(
        self,
        own: End,
        other: End,
        mesh: ProcessMesh,
        groups: tuple[AxisGroup, AxisGroup],
        *,
        source: bool,
        back: bool,
        length: int,
        hidden: int,
        dtype: torch.dtype,
    ):
        """`groups` are those of forward and backward messages; `length` tokens of a sequence, `hidden` their width."""
        self.own, self.other, self.mesh = own, other, mesh
        self.out, self.back_in = groups if source else groups[::-1]
        self.source, self.back, self.length, self.hidden, self.dtype = source, back, length, hidden, dtype
        self.tp = mesh["tp"]
        self.whole = not (own.pool.plan.layout.sp and not self.tp.alone)
        self.works: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.channels = self._channels() if back or not source else {}

    def _cuts(self, number: int) -> list[Cut]:
        replica, shard = self.mesh["dp"].index, self.tp.index
        return list(cuts(self.own, self.other, replica, shard, number, self.length))

    def _channels(self) -> dict[int, Channel]:
        """Messages from every rank of the other pool that sends to this one, in the order in which it does."""
        kinds = (B, BW) if self.source else (F,)
        mine = {cut.peer for number in self.own.turns((F,)) for cut in self._cuts(number)}
        out = {}
        for peer in sorted(mine):
            order, shapes = [], {}
            replica, shard = self._place(peer)
            for number in self.other.turns(kinds):
                for cut in cuts(self.other, self.own, replica, shard, number, self.length):
                    if cut.peer == self.mesh.rank:
                        key = (cut.other, number)
                        order.append(key)
                        shapes[key] = _size(cut.tokens), _size(cut.rows), self.hidden
            make = lambda key, shapes=shapes: torch.empty(shapes[key], dtype=self.dtype, device=self.mesh.device)  # noqa: E731
            out[peer] = Channel(order, peer, self.back_in.handle, make)
        return out

    def _place(self, rank: int) -> tuple[int, int]:
        """Replica and tensor-parallel shard of a rank of the other pool."""
        layout, at = self.other.pool.plan.layout, rank - self.other.pool.devices[0]
        return at // layout.stride("dp") % layout.dp, at // layout.stride("tp") % layout.tp

    def edges(self) -> list[Edge]:
        """List the connections that this rank's messages go over."""
        me = self.mesh.rank
        found = [Edge(self.back_in.name, peer, me, self.back_in.handle) for peer in self.channels]
        if self.source or self.back:
            peers = {cut.peer for number in self.own.turns((F,)) for cut in self._cuts(number)}
            found += [Edge(self.out.name, me, peer, self.out.handle) for peer in peers]
        return found

    def begin(self, ahead: int) -> None:
        """Post the first receives of a step, so far ahead."""
        for channel in self.channels.values():
            channel.begin(ahead)

    def finish(self) -> None:
        """Wait until all of a step is sent."""
        for work, _ in self.works:
            work.wait()
        self.works.clear()

    def send(self, number: int, made: torch.Tensor) -> None:
        """Send what a pass of a microbatch made: hidden states [tokens, sequences, width] or their gradient."""
        share = made.detach()
        if self.whole:
            share = share[slice(*_bounds(self.length, self.tp))]
        queue = "link_forward" if self.source else "link_backward"
        for cut in self._cuts(number):
            part = share[cut.tokens, cut.rows].contiguous()
            token = recorder().start("send", queue, stage=self.own.stage, microbatch=number)
            work = dist.isend(part, dst=cut.peer, group=self.out.handle)
            recorder().watch(work, token)
            self.works.append((work, part))  # gloo cancels a message whose work or buffer is dropped
        while self.works and self.works[0][0].is_completed():
            self.works.popleft()[0].wait()

    def receive(self, number: int) -> torch.Tensor:
        """Receive the input of a pass of a microbatch, put together from all ranks that have a part of it."""
        first, stop = _bounds(self.length, self.tp)
        count = self.own.pool.plan.pipeline.microbatch
        out = torch.empty((stop - first, count, self.hidden), dtype=self.dtype, device=self.mesh.device)
        for cut in self._cuts(number):
            out[cut.tokens, cut.rows] = self.channels[cut.peer].receive((number, cut.other))
        return all_gather(out, self.tp, queue="tp") if self.whole else out


def _bounds(length: int, tp: AxisGroup) -> tuple[int, int]:
    share = _share(length, tp.size, tp.index)
    return share.start, share.stop


def _size(some: slice) -> int:
    return some.stop - some.start
