"""A serving engine without a model, and what must hold of its blocks behind every event."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from fuzz.readers import Defect

from meshwright import serving
from meshwright.endpoint.seam import EngineFacts
from meshwright.run.serve.drafts import NgramDrafter
from meshwright.run.serve.engine import TorchEngine
from meshwright.run.serve.halves import PrefillEngine
from meshwright.run.serve.packed import PackedTokens
from meshwright.run.serve.tables import BlockCopy, HostKey
from meshwright.serving.adapters import AdapterRules
from meshwright.serving.batching import Batching
from meshwright.serving.cache import CacheRules, EngineLimits
from meshwright.serving.prefix_cache import PrefixCache
from meshwright.serving.speculative import Drafts

VOCAB, END = 23, 5


def follows(tokens: Sequence[int]) -> int:
    """Return the token behind a text: texts that end alike go on alike now and then, so that guesses come true."""
    kept = tokens if sum(tokens) % 2 else tokens[-3:]
    return crc32(bytes(kept)) % VOCAB


def expected(prompt: Sequence[int], limit: int) -> list[int]:
    """Return the answer that a prompt has, whatever else is served."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        tokens.append(follows(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class StubExecutor:
    """An executor without a model: ``slots`` [blocks, block] hold tokens, 255 where none was written."""

    def __init__(self, blocks: int, block: int):
        self.block, self.slots = block, np.full((blocks, block), 255, np.uint8)
        self.host: dict[HostKey, np.ndarray] = {}
        self.post: deque[np.ndarray] = deque()  # what is sent, for the other half to receive
        self.coming: dict[int, tuple[int, int]] = {}
        self.late = 0

    def compute(self, packed: PackedTokens) -> torch.Tensor:
        """Write the tokens, then let every text that is wanted go on as it is read."""
        first, ends = 0, []
        for row in packed.rows:
            for at in range(row.new):
                place = row.past + at
                self.slots[row.table[place // self.block], place % self.block] = packed.tokens[first + at]
                ends.append((row, place + 1))
            first += row.new
        scores = torch.zeros((len(packed.wanted), VOCAB))
        for i, token in enumerate(packed.wanted):
            row, end = ends[token]
            text = self.slots[list(row.table[: -(-end // self.block)])].reshape(-1)[:end]
            scores[i, follows(text.tolist())] = 1.0
        return scores

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey]) -> None:
        """Copy blocks between device and host."""
        for one in copies:
            if one.out:
                self.host[one.key] = self.slots[list(one.blocks)]
            else:
                self.slots[list(one.blocks)] = self.host.pop(one.key)
        for key in dropped:
            del self.host[key]

    def hold(self, adapters: Sequence[int]) -> None:
        """Adapters change nothing here."""

    def send(self, blocks: Sequence[int]) -> None:
        """Post what lies in these blocks."""
        self.post.append(self.slots[list(blocks)])

    def expect(self, number: int, count: int) -> None:
        """Wait for so many blocks."""
        self.coming[number] = count, self.late

    def here(self, number: int) -> bool:
        """Return whether they are here, which they are at the last of so many looks."""
        count, left = self.coming[number]
        self.coming[number] = count, left - 1
        return left <= 0

    def place(self, number: int, blocks: Sequence[int]) -> None:
        """Write the first of what was posted."""
        count, _ = self.coming.pop(number)
        found = self.post.popleft()
        if len(found) != count or (blocks and len(blocks) != count):
            raise Defect("another number of blocks was sent than there is room for")
        if blocks:
            self.slots[list(blocks)] = found

    def close(self) -> None:
        """Nothing is held."""


def engine_of(words: dict[str, Any], half: type[TorchEngine] = TorchEngine) -> TorchEngine:
    """Return the engine of an example, which computes nothing."""
    block, blocks = words["block"], words["blocks"]
    policy = serving.get("batching", words["policy"])
    limits = EngineLimits(max_batch=words["max_batch"], budget=words["budget"], block=block, blocks=blocks)
    rules = CacheRules(
        prefix=words["prefix"],
        unit=words["unit"],
        swap=words["swap"],
        host_blocks=words["host"],
        adapters=AdapterRules(blocks=words["adapters"]) if words["adapters"] else None,
    )
    drafts = Drafts(count=words["guesses"]) if words["guesses"] else None
    order = serving.get("order", words["order"])
    parks = issubclass(half, PrefillEngine)
    decider = Batching(
        policy=policy, limits=limits, order=order, rules=rules, drafts=drafts, parks=parks, together=False
    )
    facts = EngineFacts(
        context=0,
        vocabulary=VOCAB,
        room=blocks * block,
        block=block,
        end_ids=(END,),
        adapters=("a", "b", "c") if words["adapters"] else (),
    )
    return half(decider, StubExecutor(blocks, block), facts, drafter=NgramDrafter() if drafts else None)


def counted(engine: TorchEngine) -> None:
    """Check that blocks are where the decider counts them.

    Raises:
        Defect: they are not.
    """
    tables, cache = engine.tables, engine.state.cache
    if len(tables.free) != cache.bare:
        raise Defect("other blocks are free than are counted")
    named = [block for blocks in tables.names.values() for block in blocks]
    known = set(named)
    own = [block for one in tables.held.values() for block in one.table if block not in known]
    every = [*tables.free, *named, *own, *tables.adapters]
    if len(every) != len(set(every)) or set(every) != set(range(engine.decider.limits.blocks)):
        raise Defect("a block is lost, or given out twice")
    if any(len(one.table) != one.one.blocks for one in tables.held.values()):
        raise Defect("a request has another number of blocks than is counted")
    if isinstance(cache, PrefixCache) and tables.names.keys() != cache.refs.keys():
        raise Defect("other units are named than are counted")
    if engine.executor.host.keys() != tables.away:
        raise Defect("the host keeps what nobody wants, or lost what somebody does")


def empty(engine: TorchEngine) -> None:
    """Check that an idle engine holds nothing but what its prefix cache keeps.

    Raises:
        Defect: it does.
    """
    cache = engine.state.cache
    if cache.free != engine.decider.limits.blocks or engine.tables.held or engine.state.running:
        raise Defect("blocks are held when nobody is served")
    kept = len(cache.host) * cache.unit_blocks if isinstance(cache, PrefixCache) else 0
    if cache.host_free + kept != cache.rules.host_blocks:
        raise Defect("the host's blocks are held when nobody is served")
