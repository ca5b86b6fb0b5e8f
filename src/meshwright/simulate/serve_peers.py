"""Chains of peers on a virtual clock (:mod:`meshwright.serving.petals` decides)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from meshwright.serving.blockllm import BlockBatch, Queued, batched
from meshwright.serving.petals import ChainLink, Peer, found, mended, no_peer
from meshwright.simulate.serve_chains import LEAVES, ChainHop, ChainPart, ChainPlace, Chains
from meshwright.simulate.served import ServedRequests
from meshwright.spec.requests import Requests


class PeerPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """Peers at places, each with layers of ``layers``. ``send_s`` are seconds between two places of so many tokens'
    hidden states (-1: the client), ``block_bytes`` the keys and values of a block of tokens in one layer. ``lost``
    peers leave at those seconds."""

    places: tuple[ChainPlace, ...]
    peers: tuple[Peer, ...]
    layers: int
    send_s: Callable[[int, int, int], float]
    block_bytes: float
    find: str
    lost: tuple[tuple[int, float], ...]
    most: int
    budget: int
    block: int


class PeerWay:
    """The way of requests through peers: each has a chain of its own, as its client found it."""

    def __init__(self, said: PeerPlaces):
        self.said = said
        self.chains: dict[int, tuple[ChainLink, ...]] = {}

    def hop(self, chains: Chains, number: int) -> ChainHop:
        """Return the next hop of a request: to its chain's next peer, or to others in the place of one that is gone.
        These get the client's copy of all tokens' inputs, as they hold nothing of the request yet."""
        said, at = self.said, chains.at[number]
        chain = self.chains.get(number)
        if chain is None:
            chain = found(said.peers, chains.wait_s, self._hop_s, **self._whole(chains))
            if not chain:
                raise no_peer(0, said.layers)
        elif chain[at].peer in chains.gone:
            behind = mended(chain[at:], said.peers, chains.wait_s, self._hop_s, gone=chains.gone, find=said.find)
            chain = (*chain[:at], *behind)
        self.chains[number] = chain
        link = chain[at]
        part = self._part(link)
        tokens = chains.target[number] - chains.held[number].get(part.name, (0, 0, 0.0))[1]
        before = chain[at - 1].peer if at else -1
        delay = said.send_s(before, link.peer, tokens)
        if not at and chains.generated[number]:  # the token came back to the client first
            delay += said.send_s(chains.place[number], -1, 1)
        return ChainHop(link.peer, part, delay)

    def _whole(self, chains: Chains) -> dict[str, object]:
        return {"first": 0, "end": self.said.layers, "find": self.said.find, "gone": chains.gone}

    def _hop_s(self, first: int, second: int) -> float:
        return self.said.send_s(first, second, 1)

    def _part(self, link: ChainLink) -> ChainPart:
        count, last = link.end - link.first, link.end == self.said.layers
        return ChainPart((link.first, link.end), count / self.said.layers, self.said.block_bytes * count, last)

    def batch(self, queue: Sequence[Queued], holders: dict[int, tuple[int, float]], free_bytes: float) -> BlockBatch:
        """Return what a peer computes next."""
        return batched(queue, holders, free_bytes, self.said.most, self.said.budget)

    def lost(self, chains: Chains, number: int) -> bool:
        """A request whose keys and values are taken has them computed again there, from the client's copy."""
        chains.evicted[number] += 1
        return False


def served_peers(said: PeerPlaces, requests: Requests) -> ServedRequests:
    """Return what becomes of requests that peers serve.

    Raises:
        MeshwrightError: W012 where no peer that is left holds some layer.
    """
    chains = Chains(said.places, requests, PeerWay(said), said.block)
    for peer, at_s in said.lost:
        chains.push(at_s, LEAVES, peer)
    chains.run()
    return chains.served(said.block_bytes * said.layers)
