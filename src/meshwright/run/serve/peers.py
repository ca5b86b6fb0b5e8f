"""Chains of peers in the engine: stages that are replaced one by one, with their keys and values.

The engine is the client of peers (:mod:`meshwright.run.serve.peer`): it embeds tokens, sends hidden states through the
chain that :mod:`meshwright.serving.petals` finds, and scores what comes out of it. Of all that it sends it keeps a copy
in blocks, as keys and values lie in blocks at the peers (Petals, Borzunov et al., 2312.08361, section 3). A peer that
dies or says nothing is lost: others take its layers, or a new process where nobody holds these, and get the copies of
whoever goes on; no request begins again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import numpy as np
import torch

from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.run.serve.forward import ServedLayers
from meshwright.run.serve.packed import PackedRow, PackedTokens
from meshwright.run.serve.paged import zeros
from meshwright.run.serve.peer import PeerOrder, PeerProcess, PeerRoom, PeerSaid, bytes_of, tensor_of
from meshwright.run.serve.tables import BlockCopy, HostKey
from meshwright.serving.petals import ChainLink, Peer, found, mended, no_peer, spans
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.model import Model
from meshwright.spec.peer_chains import PeerChains

#: Seconds that a peer may compute without a word before it is lost.
SILENT_S = 120.0
#: What a peer says that it cannot go on.
GONE = (EOFError, OSError)


class _PeerLost(Exception):
    """A peer does not answer."""


class PeerExecutor:
    """The executor of a client: the model's ends in ``layers``, and peers with these ``spans`` of its layers.

    ``reached`` are, for each link of a chain, the tokens of every sequence that its peer has computed, by the
    sequence's first block."""

    def __init__(
        self, layers: ServedLayers, spans: Sequence[tuple[int, int]], said: PeerSaid, words: PeerChains,
        *, silent_s: float = SILENT_S,
    ):  # fmt: skip
        self.layers, self.spans, self.said, self.words, self.silent_s = layers, tuple(spans), said, words, silent_s
        size = said.room.blocks * said.room.block
        self._shape = size, layers.model.hidden
        self.inputs: dict[int, torch.Tensor] = {}
        self.reached: dict[ChainLink, dict[int, int]] = {}
        self.gone: set[int] = set()
        self.replayed = self.replaced = 0
        self._new: list[PeerProcess] = []
        self._lock, self._over = threading.Lock(), False
        self.peers: list[PeerProcess] = []
        try:
            for number, span in enumerate(self.spans):
                self.peers.append(PeerProcess(number, span, said))
            for peer in self.peers:
                peer.layer_s = msgspec.msgpack.decode(self._heard(peer, self.silent_s * 10), type=float)
        except BaseException as error:
            self.close()
            if isinstance(error, _PeerLost):
                message, help = "a peer's process ended before it held its layers", "what it said is above"
                raise MeshwrightError.one("L007", message, place="meshwright serve", help=help) from None
            raise
        self.chain = self._found()

    # -- an executor

    def compute(self, packed: PackedTokens) -> torch.Tensor:
        """Return the scores [wanted, vocab] of an iteration's tokens."""
        self._joined()
        slots, at = self._slots(packed.rows), 0
        x = self.layers.embedded(packed)
        while at < len(self.chain):
            link = self.chain[at]
            if link.peer in self.gone:
                self.chain = (*self.chain[:at], *self._others(self.chain[at:]))
                continue
            self._copies(link.first)[slots] = x[:, 0].cpu()
            try:
                self._caught_up(at, packed.rows)
                x = self._asked(link, packed.rows, packed.positions, x)
            except _PeerLost:
                self._lose(link.peer)
                x = self._copies(link.first)[slots].unsqueeze(1).to(self.layers.mesh.device)
                continue
            reached = self.reached[link]
            for row in packed.rows:
                reached[row.table[0]] = row.past + row.new
            at += 1
        return self.layers.scores(packed, x)

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Nothing lies on the host: words that would have it are refused."""

    def forget(self, firsts: Sequence[int]) -> None:
        """Nothing is kept beside blocks."""

    def close(self) -> None:
        """End all peers."""
        with self._lock:
            self._over = True
            for peer in (*self.peers, *self._new):
                peer.close()
            self.inputs.clear()

    # -- chains

    def _said(self) -> list[Peer]:
        return [Peer(peer.first, peer.end, peer.layer_s) for peer in self.peers]

    def _found(self) -> tuple[ChainLink, ...]:
        chain = found(self._said(), _free, _free, first=0, end=self.layers.model.num_layers, find=self.words.find)
        if not chain:
            raise no_peer(0, self.layers.model.num_layers)
        return chain

    def _others(self, chain: Sequence[ChainLink]) -> tuple[ChainLink, ...]:
        """Return a chain without peers that are gone; where nobody else holds their layers it waits for new ones."""
        while True:
            try:
                made = mended(chain, self._said(), _free, _free, gone=self.gone, find=self.words.find)
                for link in made:
                    if link not in chain:
                        self.reached[link] = {}
                return made
            except MeshwrightError:
                time.sleep(0.05)
                self._joined()

    def _lose(self, number: int) -> None:
        """Give a peer up, and have another process started in its place."""
        if number in self.gone:
            return
        self.gone.add(number)
        peer = self.peers[number]
        peer.close()
        for link in [link for link in self.reached if link.peer == number]:
            del self.reached[link]
        print(f"peer {number}, layers {peer.first} to {peer.end - 1}, is lost", file=sys.stderr, flush=True)
        threading.Thread(target=self._start, args=(number,), daemon=True).start()

    def _start(self, number: int) -> None:
        """Start a process in the place of a peer, and note it once it holds its layers."""
        while not self._over:
            made = PeerProcess(number, self.spans[number], self.said)
            try:
                made.layer_s = msgspec.msgpack.decode(self._heard(made, self.silent_s * 10), type=float)
            except _PeerLost:
                made.close()
                time.sleep(1.0)
                continue
            with self._lock:
                if self._over:
                    made.close()
                else:
                    self._new.append(made)
            return

    def _joined(self) -> None:
        """Take in the peers that have come."""
        with self._lock:
            new, self._new = self._new, []
        for peer in new:
            self.peers[peer.number] = peer
            self.gone.discard(peer.number)
            self.replaced += 1

    # -- what is sent

    def _copies(self, first: int) -> torch.Tensor:
        """Return the client's copy of what goes into a layer [slots, hidden], in the blocks of sequences."""
        if first not in self.inputs:
            self.inputs[first] = zeros(self._shape, self.layers.dtype, torch.device("cpu"))
        return self.inputs[first]

    def _caught_up(self, at: int, rows: Sequence[PackedRow]) -> None:
        """Have a link's peer compute what it has not of sequences that go on; what comes out goes into the next link's
        copies."""
        link = self.chain[at]
        reached = self.reached.setdefault(link, {})
        after = self.chain[at + 1].first if at + 1 < len(self.chain) else None
        for row in rows:
            if reached.get(row.table[0], 0) >= row.past:
                continue
            before = PackedRow(row.past, 0, row.table)
            slots = self._slots([before])
            x = self._copies(link.first)[slots].unsqueeze(1)
            out = self._asked(link, [before], list(range(row.past)), x)
            if after is not None:
                self._copies(after)[slots] = out[:, 0].cpu()
            reached[row.table[0]] = row.past
            self.replayed += row.past

    def _asked(self, link: ChainLink, rows: Sequence[PackedRow], positions: list[int], x: torch.Tensor) -> torch.Tensor:
        """Return what a peer makes of hidden states [tokens, 1, hidden]."""
        peer = self.peers[link.peer]
        order = PeerOrder(link.first, link.end, positions, list(rows))
        try:
            peer.line.send_bytes(msgspec.msgpack.encode(order))
            peer.line.send_bytes(bytes_of(x))
        except GONE:
            raise _PeerLost from None
        return tensor_of(self._heard(peer, self.silent_s), len(positions), self.layers)

    def _heard(self, peer: PeerProcess, most_s: float) -> bytes:
        """Return what a peer says next; one that ends, or says nothing for so long, is lost."""
        try:
            ready = wait([peer.line, peer.process.sentinel], most_s)
            if peer.line not in ready and not peer.line.poll():
                raise _PeerLost
            return peer.line.recv_bytes()
        except GONE:
            raise _PeerLost from None

    def _slots(self, rows: Sequence[PackedRow]) -> torch.Tensor:
        """Return the place of every token among all tokens of all blocks."""
        size, found = self.said.room.block, []
        for row in rows:
            at = np.arange(row.past, row.past + row.new)
            found.append(np.asarray(row.table)[at // size] * size + at % size)
        return torch.from_numpy(np.concatenate(found))


def _free(*_: int) -> float:
    """Links and queues of one machine's peers take nothing beside what their layers do."""
    return 0.0


def peers_of(
    layers: ServedLayers, folder: Path, plan: Plan, words: EngineWords, num_peers: int, free: float
) -> PeerExecutor:
    """Return the executor of so many peers of a model in a folder, whose ends are in `layers`: each holds as many
    layers as the words say. The cache has the blocks that were said, else as many as fit into `free` bytes with the
    client's copies, and not more than a full batch of the longest requests could want.

    Raises:
        MeshwrightError: W012 where some layer is nobody's or no block has room, L007 where a peer cannot be had.
    """
    said, model = words.peers, layers.model
    assert said is not None
    total = model.num_layers
    held = spans([said.most(peer, total) for peer in range(num_peers)], [1.0] * num_peers, total)
    missing = [layer for layer in range(total) if not any(first <= layer < end for first, end in held)]
    if missing:
        raise no_peer(missing[0], missing[-1] + 1)
    each = sum(_kept(model, layer) for first, end in held for layer in range(first, end))
    each = (each + model.hidden * len({first for first, _ in held})) * layers.dtype.itemsize * words.block
    wanted = words.max_batch * -(-(model.max_seq_len or 4096) // words.block)
    blocks = words.kv_blocks or min(wanted, int(free / each))
    if blocks < 1:
        help = "say kv_blocks=, fewer layers of each peer, or a smaller model"
        raise MeshwrightError.one("W012", "no cache block has room beside the weights", place="--serve", help=help)
    kind, device = str(layers.dtype).removeprefix("torch."), layers.mesh.device.type
    threads = max(1, torch.get_num_threads() // num_peers)
    built_of = PeerSaid(str(folder), plan, kind, device, PeerRoom(blocks, words.block), threads)
    return PeerExecutor(layers, held, built_of, said)


def _kept(model: Model, layer: int) -> int:
    """Numbers that a token leaves in a layer's cache."""
    return sum(
        (one.heads if one.kv_lora_rank else one.kv_heads) * (one.head_dim + one.v_head_dim)
        for one in model.block(layer).attentions
    )
