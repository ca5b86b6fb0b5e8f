"""Requests in a serving engine: what is said of a request when it comes, and what the engine keeps of it.

A request is a sequence of tokens: its prompt, then what was generated. Those whose keys and values are in the cache are
``computed``; an iteration computes some that are not, and where it computes the last of them a token is generated.
Decoding is computing one token a time, and prefill is computing many, so that one rule holds for both (vLLM V1's
scheduler has the idea).
"""

from __future__ import annotations

import msgspec


class NewRequest(msgspec.Struct, frozen=True):
    """A request as it comes to an engine: tokens of its ``prompt`` and the most it may generate (``limit``).

    ``hashes`` name the blocks of its prompt (and answer, where it is known) by all that stands before them, so that two
    requests with the same name share a prefix. ``tenant`` is whose request it is, a higher ``priority`` is served
    first, ``adapter`` is its LoRA adapter (-1: none), ``program`` the query or the session that it belongs to (-1:
    none). Another engine may have ``computed`` tokens and ``generated`` some of the answer before: their keys and
    values come with it. ``deadline_s`` is when its first token is wanted, from the beginning of the clock.
    """

    number: int
    prompt: int
    limit: int
    tenant: int = 0
    priority: int = 0
    adapter: int = -1
    program: int = -1
    computed: int = 0
    generated: int = 0
    deadline_s: float = 0.0
    hashes: tuple[int, ...] = ()


class EngineRequest:
    """A request in the engine: tokens ``computed`` of its ``target`` (prompt and what was generated), and the cache
    ``blocks`` that it holds.

    ``pinned`` are the shared blocks among those, ``matched`` those that the cache had of it when it was last looked at.
    ``swapped``: its blocks lie in host memory. ``done``: it is answered, and its place still taken. ``order`` is when
    it came, among all requests of its engine. ``drafted`` are the tokens guessed for it in the iteration under way.
    """

    __slots__ = (
        "adapter",
        "blocks",
        "computed",
        "done",
        "drafted",
        "limit",
        "matched",
        "new",
        "number",
        "order",
        "pinned",
        "prompt",
        "running",
        "swapped",
        "target",
        "units",
    )

    def __init__(self, new: NewRequest, order: int = 0):
        self.new, self.order = new, order
        self.number, self.prompt, self.limit = new.number, new.prompt, new.limit
        self.adapter = new.adapter
        self.computed, self.target = new.computed, new.prompt + new.generated
        self.blocks = self.matched = self.units = self.drafted = 0
        self.pinned: list[int] = []
        self.done = self.swapped = self.running = False

    @property
    def generated(self) -> int:
        """Tokens of its answer that are there."""
        return self.target - self.prompt

    @property
    def need(self) -> int:
        """Tokens to be computed before the next one is generated."""
        return self.target - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its next iteration computes its last token alone."""
        return self.computed > 0 and self.target - self.computed == 1
