"""Keys and values on their way: cache blocks of a request from the ranks that computed its prompt to those that go on.

Each rank of the one pool holds layers and heads by its place in that pool's plan, and so does each of the other: what a
pair has in common goes from the one to the other as one message. Blocks are read when they are asked for, and written
when they are wanted; in between a thread of each rank's sends or receives, while the rank computes. Messages of all
pairs are in one order on both ends, so that none waits for another that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.lower.partition import stage_layers
from meshwright.plan import Plan
from meshwright.run.mesh import coordinates
from meshwright.run.serve.paged import KvBlocks
from meshwright.spec.model import Model

#: Carries a tensor to a rank, or fills one from there; returns when that is done.
Carrier = Callable[[torch.Tensor, int], None]


class KvCut(NamedTuple):
    """A layer's part of a message: its place among the layers of the rank that sends and of the one that receives, and
    the first and the one after the last of its heads on each."""

    layers: tuple[int, int]
    sent: tuple[int, int]
    received: tuple[int, int]


class KvWay(NamedTuple):
    """The layers and heads that a rank of one pool sends to a rank of another, both by their places in their pools."""

    source: int
    target: int
    cuts: tuple[KvCut, ...]


def ways(source: Plan, target: Plan, model: Model) -> list[KvWay]:
    """Return what the ranks of a pool send to those of another, in order. Every rank of the target gets each of its
    heads once, from the first rank that has it."""
    givers = [_held(source, rank, model) for rank in range(source.layout.num_ranks)]
    found: dict[tuple[int, int], list[KvCut]] = {}
    for taker in range(target.layout.num_ranks):
        for mine, (layer, (begin, end)) in enumerate(_held(target, taker, model).items()):
            at = begin
            for giver, held in enumerate(givers):
                first, last = held.get(layer, (0, 0))
                until = min(last, end)
                if first <= at < until:
                    theirs = list(held).index(layer)
                    cut = KvCut((theirs, mine), (at - first, until - first), (at - begin, until - begin))
                    found.setdefault((giver, taker), []).append(cut)
                    at = until
            assert at == end
    return [KvWay(*pair, tuple(found[pair])) for pair in sorted(found)]


def _held(plan: Plan, rank: int, model: Model) -> dict[int, tuple[int, int]]:
    """Return the layers of a rank with the first and the one after the last of the heads whose keys it keeps."""
    place, size, found = coordinates(plan, rank), plan.layout.tp, {}
    for layer in stage_layers(plan, model)[place["pp"]]:
        spec = model.block(layer).attention
        heads = spec.heads if spec.kv_lora_rank else spec.kv_heads
        first = place["tp"] * heads // size
        found[layer] = (first, first + max(1, heads // size))
    return found


class KvPort:
    """A rank's end of the ways between two pools: `out` are those that it sends on, `into` those that it receives on,
    each with the rank at the other end as the carriers know it."""

    def __init__(
        self,
        out: Sequence[tuple[KvWay, int]],
        into: Sequence[tuple[KvWay, int]],
        *,
        give: Carrier,
        take: Carrier,
    ):
        self.out, self.into, self._give, self._take = out, into, give, take
        self._coming: dict[int, Future[list[torch.Tensor]]] = {}
        self._work: SimpleQueue[tuple[Future, Callable[[], object]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, kv: KvBlocks, blocks: Sequence[int]) -> None:
        """Send what lies in these blocks now, behind all that was sent before."""
        at = torch.tensor(blocks, device=kv.device)
        messages = [(_read(kv, at, way.cuts), rank) for way, rank in self.out]
        self._soon(lambda: [self._give(tensor, rank) for tensor, rank in messages])

    def expect(self, number: int, kv: KvBlocks, count: int) -> None:
        """Receive so many blocks of a request, which is sent next."""
        empty = [(_empty(kv, count, way.cuts), rank) for way, rank in self.into]

        def receive() -> list[torch.Tensor]:
            for tensor, rank in empty:
                self._take(tensor, rank)
            return [tensor for tensor, _ in empty]

        self._coming[number] = self._soon(receive)

    def here(self, number: int) -> bool:
        """Return whether all blocks of a request that are expected are here.

        Raises:
            Exception: they cannot come, as whoever sends them is gone.
        """
        coming = self._coming[number]
        return coming.done() and coming.result() is not None

    def place(self, number: int, kv: KvBlocks, blocks: Sequence[int]) -> None:
        """Write what was received of a request to these blocks, once it is here; none forgets it, whenever it comes."""
        coming = self._coming.pop(number)
        if not blocks:
            return
        at = torch.tensor(blocks, device=kv.device)
        for (way, _), tensor in zip(self.into, coming.result()):
            _write(kv, at, way.cuts, tensor)

    def _soon(self, work: Callable[[], object]) -> Future:
        """Let the thread do something behind all else."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._works, daemon=True)
            self._thread.start()
        future: Future = Future()
        self._work.put((future, work))
        return future

    def _works(self) -> None:
        while True:
            future, work = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


def joined(group: dist.ProcessGroup, source: Plan, target: Plan, model: Model, first: tuple[int, int]) -> KvPort:
    """Return this rank's end of the ways between two pools, whose first ranks those are, over a process group."""
    me = dist.get_rank()
    out, into = [], []
    for way in ways(source, target, model):
        if first[0] + way.source == me:
            out.append((way, first[1] + way.target))
        if first[1] + way.target == me:
            into.append((way, first[0] + way.source))

    def give(tensor: torch.Tensor, rank: int) -> None:
        dist.send(tensor, rank, group=group)

    def take(tensor: torch.Tensor, rank: int) -> None:
        dist.recv(tensor, rank, group=group)

    return KvPort(out, into, give=give, take=take)


def _read(kv: KvBlocks, at: torch.Tensor, cuts: Sequence[KvCut]) -> torch.Tensor:
    """The keys and values of layers and heads in blocks, one behind the other, in the memory of the host."""
    kept = ((store[cut.layers[0]], cut.sent) for cut in cuts for store in (kv.keys, kv.values))
    return torch.cat([x.index_select(0, at)[:, :, first:end].reshape(-1) for x, (first, end) in kept]).cpu()


def _empty(kv: KvBlocks, count: int, cuts: Sequence[KvCut]) -> torch.Tensor:
    """Room for a message of so many blocks."""
    width = sum(
        (cut.received[1] - cut.received[0]) * store[cut.layers[1]].shape[-1]
        for cut in cuts
        for store in (kv.keys, kv.values)
    )
    return torch.empty(count * kv.block * width, dtype=kv.keys[0].dtype)


def _write(kv: KvBlocks, at: torch.Tensor, cuts: Sequence[KvCut], message: torch.Tensor) -> None:
    """Write a message to blocks."""
    begin = 0
    for cut in cuts:
        first, end = cut.received
        for store in (kv.keys, kv.values):
            kept = store[cut.layers[1]]
            shape = (len(at), kv.block, end - first, kept.shape[-1])
            size = len(at) * kv.block * (end - first) * kept.shape[-1]
            kept[:, :, first:end].index_copy_(0, at, message[begin : begin + size].view(shape).to(kept.device))
            begin += size
