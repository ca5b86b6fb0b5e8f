"""A peer: a process that holds a run of a model's layers with their keys and values, and computes what its client asks.

It knows no requests: its client says where in the blocks each sequence lies, sends hidden states, and gets those behind
the peer's layers. The first message is what it holds; it answers with the seconds of one of its layers for a token.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch

from meshwright.plan import Plan
from meshwright.run import mesh
from meshwright.run.environment import keep_memory
from meshwright.run.launch import end_process
from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.packed import PackedRow, PackedTokens
from meshwright.spec import model as models

#: Seconds between two looks at whether the client is still there.
LOOKS_S = 0.5
#: Times that a token is computed to learn what a layer takes.
TRIED = 3


class PeerRoom(msgspec.Struct, frozen=True):
    """The cache that a peer is to make room for: so many ``blocks`` of ``block`` tokens."""

    blocks: int
    block: int


class PeerOrder(msgspec.Struct, frozen=True, array_like=True):
    """An order to a peer: to compute its layers from ``first`` on, before ``end``, of tokens at ``positions`` in these
    ``rows``; their hidden states follow."""

    first: int
    end: int
    positions: list[int]
    rows: list[PackedRow]


class PeerProcess:
    """A peer's process as its client has it: a line to it, the layers that it holds before ``end`` from ``first`` on,
    and what a layer takes."""

    def __init__(self, number: int, span: tuple[int, int], said: PeerSaid):
        context = multiprocessing.get_context("forkserver")  # who has computed, or has CUDA, cannot be forked
        context.set_forkserver_preload([__name__])
        self.number, self.first, self.end, self.layer_s = number, *span, 0.0
        self.line, theirs = context.Pipe()
        words = (said, tuple(range(*span)), theirs)
        self.process = context.Process(target=_peer, args=words, name=f"peer {number}", daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        """End the process."""
        self.line.close()
        self.process.kill()
        self.process.join()


class PeerSaid(msgspec.Struct, frozen=True):
    """A peer as it is built: the folder of weights, the plan of its precision, the type it computes in by name, its
    device, the room it makes, and its part of the host's cores (``threads``)."""

    folder: str
    plan: Plan
    dtype: str
    device: str
    room: PeerRoom
    threads: int = 1


def _peer(said: PeerSaid, layers: tuple[int, ...], line: Connection) -> None:
    """A peer's whole life; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(said.threads)
    if said.device == "cpu":
        keep_memory()
    try:
        _serve(said, layers, line)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        end_process(0)  # the client is gone
    except BaseException as error:
        print(f"a peer ended: {type(error).__name__}: {error}", flush=True)
    end_process(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:  # the server of forks, which ends with the client
        time.sleep(LOOKS_S)
    os._exit(1)


def _serve(said: PeerSaid, layers: tuple[int, ...], line: Connection) -> None:
    """Load the layers, tell what one takes, and compute what is asked."""
    device, kind = torch.device(said.device), getattr(torch, said.dtype)
    place = mesh.alone(device=device)
    mine = ServedLayers(models.load(said.folder), said.plan, place, dtype=kind, layers=layers)
    mine.load(Path(said.folder))
    mine.cache(said.room.blocks, said.room.block)
    line.send_bytes(msgspec.msgpack.encode(_layer_s(mine)))
    while True:
        order = msgspec.msgpack.decode(line.recv_bytes(), type=PeerOrder)
        hidden = tensor_of(line.recv_bytes(), len(order.positions), mine)
        some = slice(order.first - layers[0], order.end - layers[0])
        packed = PackedTokens([0] * len(order.positions), order.positions, order.rows, [])
        line.send_bytes(bytes_of(mine.through(packed, hidden, some)))


def _layer_s(mine: ServedLayers) -> float:
    """Return the seconds of a layer for a token, the least of a few tries."""
    hidden = torch.zeros((1, 1, mine.model.hidden), dtype=mine.dtype, device=mine.mesh.device)
    packed, found = PackedTokens([0], [0], [PackedRow(1, 0, (0,))], []), []
    for _ in range(TRIED):
        began = time.perf_counter()
        bytes_of(mine.through(packed, hidden, slice(None)))
        found.append(time.perf_counter() - began)
    return min(found) / len(mine.stage.layers)


def bytes_of(x: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, in order."""
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def tensor_of(data: bytes, count: int, layers: ServedLayers) -> torch.Tensor:
    """Return hidden states [count, 1, hidden] of bytes."""
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(layers.dtype)
    return flat.view(count, 1, layers.model.hidden).to(layers.mesh.device)
