"""Ranks of an engine: tensor parallelism and pipeline stages over processes of one machine.

Rank 0 decides, and sends every iteration to the others as plain numbers; each computes its part of it. The tokens of an
iteration go through the stages in as many parts as there are stages, so that all of them compute at once.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.run.environment import keep_memory
from meshwright.run.launch import end_process, open_group, start_method
from meshwright.run.mesh import ProcessMesh
from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.packed import PackedTokens
from meshwright.run.serve.tables import BlockCopy, HostKey
from meshwright.run.world import World

#: An idle engine's ranks wait for orders as long as it takes; one that dies closes its connections.
PATIENCE_S = 1e7
#: Seconds that ranks have to end by themselves.
ENDS_S = 5.0


class RankOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """An order to all ranks: to make room for ``room`` (blocks, tokens of each, a budget's name and number), to copy
    blocks (key, blocks, out) and forget some, to compute the ``parts`` of an iteration, to have these ``adapters``
    on the device, to have blocks ``sent`` to the other half of a divided engine, ``awaited`` from there (request,
    blocks) or ``placed`` (request, its blocks), to have what is kept of sequences with these first blocks
    ``forgotten``, or to end."""

    room: tuple[int, int, tuple[str, float] | None] | None = None
    copies: tuple[tuple[str, tuple[int, ...], bool], ...] = ()
    dropped: tuple[str, ...] = ()
    parts: tuple[PackedTokens, ...] = ()
    ends: bool = False
    adapters: tuple[int, ...] | None = None
    sent: tuple[int, ...] = ()
    awaited: tuple[int, int] | None = None
    placed: tuple[int, tuple[int, ...]] | None = None
    forgotten: tuple[int, ...] = ()


class RankedExecutor:
    """The executor of an engine's first rank: its own part of the layers, and orders to the other ranks."""

    def __init__(self, layers: ServedLayers, processes: RankProcesses | None = None):
        self.layers, self.processes = layers, processes

    def room(self, blocks: int, block: int, budget: tuple[str, float] | None = None) -> None:
        """Have every rank make room for so many cache blocks, under a budget of that name and number where one is
        said."""
        self._order(RankOrder(room=(blocks, block, budget)))

    def forget(self, firsts: Sequence[int]) -> None:
        """Have every rank give back what it keeps beside blocks of sequences that left, by their first blocks."""
        self._order(RankOrder(forgotten=tuple(firsts)))

    def compute(self, packed: PackedTokens) -> torch.Tensor:
        """Return the scores [wanted, vocab] of an iteration's tokens."""
        found = self._order(RankOrder(parts=tuple(cut(packed, self.layers.mesh["pp"].size))))
        assert found is not None
        return found

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks between device and host, on every rank."""
        some = tuple((_text(one.key), one.blocks, one.out) for one in copies)
        self._order(RankOrder(copies=some, dropped=tuple(map(_text, dropped))))

    def hold(self, adapters: Sequence[int]) -> None:
        """Have these adapters on the devices of all ranks, and no others."""
        self._order(RankOrder(adapters=tuple(adapters)))

    def send(self, blocks: Sequence[int]) -> None:
        """Have every rank send what lies in these blocks now to the other half of a divided engine."""
        self._order(RankOrder(sent=tuple(blocks)))

    def expect(self, number: int, count: int) -> None:
        """Have every rank receive so many blocks of a request from the other half."""
        self._order(RankOrder(awaited=(number, count)))

    def here(self, number: int) -> bool:
        """Return whether the blocks of a request are here on this rank; the others wait for theirs when they place
        them."""
        return self.layers.port.here(number)

    def place(self, number: int, blocks: Sequence[int]) -> None:
        """Have every rank write what it received of a request to these blocks; none forgets it."""
        self._order(RankOrder(placed=(number, tuple(blocks))))

    def close(self) -> None:
        """Have every rank end."""
        if self.layers.kv is not None:
            self._order(RankOrder(ends=True))
            self.layers.kv = None
        if self.processes is not None:
            self.processes.close()

    def _order(self, order: RankOrder) -> torch.Tensor | None:
        told(order, self.layers.mesh)
        return obeyed(order, self.layers)


def told(order: RankOrder | None, mesh: ProcessMesh) -> RankOrder:
    """Return the first rank's order on every rank of its engine; collective."""
    data = b"" if order is None else msgspec.msgpack.encode(order)
    size = torch.tensor([len(data)], dtype=torch.int64, device=mesh.device)
    first, group = mesh["world"].ranks[0], mesh["world"].handle
    dist.broadcast(size, first, group=group)
    if order is None:
        body = torch.empty(int(size), dtype=torch.uint8, device=mesh.device)
        dist.broadcast(body, first, group=group)
        return msgspec.msgpack.decode(body.cpu().numpy().tobytes(), type=RankOrder)
    dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(mesh.device), first, group=group)
    return order


def follow(layers: ServedLayers) -> None:
    """Obey the orders of the first rank, on another one, until one says to end."""
    while True:
        order = told(None, layers.mesh)
        if order.ends:
            return
        obeyed(order, layers)


def obeyed(order: RankOrder, layers: ServedLayers) -> torch.Tensor | None:
    """Carry out an order on this rank; returns the scores of its tokens on the first."""
    if order.room is not None:
        layers.cache(*order.room)
    if order.forgotten:
        layers.kv.forget(order.forgotten)
    if order.copies or order.dropped:
        layers.kv.copy([BlockCopy(key, blocks, out) for key, blocks, out in order.copies], order.dropped)
    if order.adapters is not None:
        layers.adapters.hold(order.adapters)
    if order.sent:
        layers.port.send(layers.kv, order.sent)
    if order.awaited is not None:
        layers.port.expect(order.awaited[0], layers.kv, order.awaited[1])
    if order.placed is not None:
        layers.port.place(order.placed[0], layers.kv, order.placed[1])
    return _computed(order.parts, layers) if order.parts else None


def _computed(parts: Sequence[PackedTokens], layers: ServedLayers) -> torch.Tensor | None:
    """Compute this rank's stage of all parts; returns the scores on the first."""
    mesh, stages, hidden = layers.mesh, layers.mesh["pp"], layers.model.hidden
    engine = mesh["world"]
    sends, scores = [], []
    for part in parts:
        x = None
        if not layers.first:
            x = torch.empty((len(part.tokens), 1, hidden), dtype=layers.dtype, device=mesh.device)
            dist.recv(x, stages.ranks[stages.index - 1])
        out = layers(part, x)
        if layers.last:
            scores.append(out)
        else:
            out = out.contiguous()
            sends.append((dist.isend(out, stages.ranks[stages.index + 1]), out))
    for work, _ in sends:
        work.wait()
    if engine.index == 0 and layers.last:
        return torch.cat(scores)
    wanted, source = sum(len(part.wanted) for part in parts), stages.ranks[-1]
    if engine.index == 0:
        found = torch.empty((wanted, layers.model.vocab), dtype=layers.dtype, device=mesh.device)
        if wanted:
            dist.recv(found, source)
        return found
    if layers.last and mesh["tp"].index == 0 and wanted:
        dist.send(torch.cat(scores).to(layers.dtype).contiguous(), engine.ranks[0])
    return None


def cut(packed: PackedTokens, count: int) -> list[PackedTokens]:
    """Return an iteration in at most so many parts of whole sequences, in order, of about as many tokens."""
    total, parts = len(packed.tokens), min(count, len(packed.rows))
    if parts < 2:
        return [packed]
    found, first, row = [], 0, 0
    for part in range(parts):
        edge, begin, at = total * (part + 1) / parts, row, first
        while row < len(packed.rows) - (parts - 1 - part) and (row == begin or at < edge):
            at += packed.rows[row].new
            row += 1
        if part == parts - 1:
            row, at = len(packed.rows), total
        wanted = [token - first for token in packed.wanted if first <= token < at]
        some = slice(first, at)
        rows, adapters = packed.rows[begin:row], packed.adapters[begin:row]
        found.append(PackedTokens(packed.tokens[some], packed.positions[some], rows, wanted, adapters))
        first = at
    return found


def _text(key: HostKey) -> str:
    return f"{key[0]} {key[1]:x}"


class RankProcesses:
    """The processes of all ranks but the first, which is this one; they end with it.

    ``work`` is called in each with its :class:`~meshwright.run.world.World`. On a GPU it has to be importable."""

    def __init__(self, size: int, kind: str, work: Callable[..., None], *args: Any):
        context = multiprocessing.get_context(start_method(kind))
        self.folder = tempfile.mkdtemp(prefix="meshwright-")
        reading, self.writing = context.Pipe(duplex=False)
        forked = context.get_start_method() == "fork"
        worlds = [World(r, size, r, size, socket.gethostname(), torch.device(kind, r)) for r in range(size)]
        self.children = []
        for world in worlds[1:]:
            words = (world, self.folder, reading, self.writing if forked else None, work, args)
            self.children.append(context.Process(target=_rank, args=words, name=f"rank {world.rank}", daemon=True))
        try:
            for child in self.children:
                child.start()
            reading.close()
            open_group(worlds[0], PATIENCE_S, init_method=f"file://{self.folder}/store")
        except BaseException:
            self.close()
            raise
        self.world = worlds[0]

    def close(self) -> None:
        """End the processes, in order where they do so by themselves."""
        for child in self.children:
            if child.pid is not None:
                child.join(ENDS_S)
                if child.is_alive():
                    child.kill()
                    child.join()
        self.writing.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self.folder, ignore_errors=True)


def _rank(
    world: World,
    folder: str,
    parent: Connection,
    inherited: Connection | None,
    work: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """A rank's whole life; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if inherited is not None:
        inherited.close()  # else the parent's end of the pipe stays open in its children
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    if world.device.type == "cpu":
        keep_memory()
    try:
        open_group(world, PATIENCE_S, init_method=f"file://{folder}/store")
        work(world, *args)
    except BaseException as error:
        print(f"rank {world.rank} of the engine ended: {type(error).__name__}: {error}", flush=True)
        end_process(1)
    end_process(0)


def _die_with(parent: Connection) -> None:
    try:
        parent.recv_bytes()  # nothing is ever sent: it returns when the other end is closed
    except (EOFError, OSError):
        os._exit(1)
