"""Chains of shared blocks on a virtual clock (:mod:`meshwright.serving.blockllm` decides)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from meshwright.serving.blockllm import BlockBatch, BlockInstance, Queued, batched, chosen
from meshwright.simulate.serve_chains import ChainHop, ChainPart, ChainPlace, Chains
from meshwright.simulate.served import ServedRequests
from meshwright.spec.requests import Requests

#: The share of a place's room that prompts leave to those that decode, as vLLM's admission does.
SPARE = 0.01


class BlockPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks at places. ``chains`` are the parts of every model by its number from -1, ``where`` the places of each by
    name; ``send_s`` are seconds between two places of so many tokens' hidden states, ``move_s`` of so many tokens of a
    block's keys and values. A batch has at most ``most`` requests and ``budget`` tokens; the cache's blocks have
    ``block`` tokens."""

    places: tuple[ChainPlace, ...]
    chains: tuple[tuple[ChainPart, ...], ...]
    where: dict[object, tuple[int, ...]]
    send_s: Callable[[int, int, int], float]
    move_s: Callable[[int, int, int], float]
    most: int
    budget: int
    block: int


class BlockWay:
    """The way of requests through blocks."""

    def __init__(self, blocks: BlockPlaces, model: Sequence[int]):
        self.blocks, self.model = blocks, model

    def hop(self, chains: Chains, number: int) -> ChainHop:
        """Return the next hop of a request: to the instance where it can be computed first."""
        said, part = self.blocks, self.blocks.chains[self.model[number] + 1][chains.at[number]]
        holder, cached, _ = chains.held[number].get(part.name, (-1, 0, 0.0))
        before = chains.place[number]
        new = chains.target[number] - cached
        found = []
        for place in said.where[part.name]:
            wait = chains.wait_s(place)
            if before >= 0 and before != place:
                wait += said.send_s(before, place, new)
            if holder < 0 or place == holder:
                found.append(BlockInstance(place, wait, holds=place == holder))
            elif chains.free[place] >= -(-cached // said.block) * part.block_bytes:
                move = said.move_s(holder, place, cached)
                again = self._again_s(chains, place, chains.target[number])
                found.append(BlockInstance(place, wait, move_s=move, again_s=again))
        best = chosen(found)
        delay = said.send_s(before, best.place, new) if before >= 0 and before != best.place else 0.0
        if best.move:
            delay = max(delay, said.move_s(holder, best.place, cached))
        return ChainHop(best.place, part, delay, again=best.again)

    def _again_s(self, chains: Chains, place: int, tokens: int) -> float:
        """Seconds in which all parts of a chain compute so many tokens again."""
        costs = chains.places[place].costs
        return costs.linear_s.item(min(tokens, costs.most_tokens)) + costs.prefilling(1, tokens, 0)

    def batch(self, queue: Sequence[Queued], holders: dict[int, tuple[int, float]], free_bytes: float) -> BlockBatch:
        """Return what a place computes next."""
        spare = SPARE * min(place.room_bytes for place in self.blocks.places)
        return batched(queue, holders, free_bytes, self.blocks.most, self.blocks.budget, spare)

    def lost(self, chains: Chains, number: int) -> bool:
        """A request without keys and values of one block begins its chain again: nobody keeps the inputs of blocks."""
        return True


def served_blocks(blocks: BlockPlaces, model: Sequence[int], requests: Requests, block_bytes: float) -> ServedRequests:
    """Return what becomes of requests, each of a ``model`` by number [n] (-1: the base)."""
    chains = Chains(blocks.places, requests, BlockWay(blocks, model), blocks.block)
    chains.run()
    return chains.served(block_bytes)
