"""Requests in a serving engine: what is said of a request when it comes, and what the engine keeps of it.

A request is a sequence of tokens: its prompt, then what was generated. Those whose keys and values are in the cache are
``computed``; an iteration computes some that are not, and where it computes the last of them a token is generated.
Decoding is computing one token a time, and prefill is computing many, so that one rule holds for both (vLLM V1's
scheduler has the idea).
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Pace:
    """The iterations that sequences have been through together (``ticks``): of each a token computed and generated."""

    __slots__ = ("ticks",)

    def __init__(self) -> None:
        self.ticks = 0


#: The pace of sequences that go on by themselves.
STILL = Pace()


class EngineRequest:
    """A request in the engine: tokens ``computed`` of its ``target`` (prompt and what was generated), and the cache
    ``blocks`` that it holds. Both counts grow with the ``pace`` that it follows, its blocks do when it leaves that.

    ``pinned`` are the shared blocks among those, ``matched`` those that the cache had of it when it was last looked at,
    and so many are ``away``, in another replica. ``swapped``: its blocks lie in host memory. ``done``: it is answered,
    and its place still taken. ``order`` is when it came, among all requests of its engine. ``drafted`` are the tokens
    guessed for it in the iteration under way. ``group`` is the attention group that it belongs to, -1 where that makes
    no difference.
    """

    __slots__ = (
        "_computed",
        "_target",
        "adapter",
        "away",
        "blocks",
        "done",
        "drafted",
        "group",
        "limit",
        "matched",
        "new",
        "number",
        "order",
        "pace",
        "pinned",
        "prompt",
        "running",
        "swapped",
        "units",
    )

    def __init__(self, new: NewRequest, order: int = 0):
        self.new, self.order, self.pace = new, order, STILL
        self.number, self.prompt, self.limit = new.number, new.prompt, new.limit
        self.adapter = new.adapter
        self._computed, self._target = new.computed, new.prompt + new.generated
        self.blocks = self.away = self.matched = self.units = self.drafted = 0
        self.group = -1
        self.pinned: list[int] = []
        self.done = self.swapped = self.running = False

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self._computed + self.pace.ticks

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._computed = tokens - self.pace.ticks

    @property
    def target(self) -> int:
        """Tokens of the prompt and of what was generated."""
        return self._target + self.pace.ticks

    @target.setter
    def target(self, tokens: int) -> None:
        self._target = tokens - self.pace.ticks

    def follow(self, pace: Pace) -> None:
        """Go on at another pace, from where it stands."""
        shift = self.pace.ticks - pace.ticks
        self._computed += shift
        self._target += shift
        self.pace = pace

    @property
    def generated(self) -> int:
        """Tokens of its answer that are there."""
        return self.target - self.prompt

    @property
    def need(self) -> int:
        """Tokens to be computed before the next one is generated."""
        return self._target - self._computed

    @property
    def decodes(self) -> bool:
        """Whether its next iteration computes its last token alone."""
        return self._target - self._computed == 1 and self.computed > 0


def nearest_end(running: Sequence[EngineRequest]) -> int:
    """Return the tokens that the one nearest to its end may still say, of those that decode; at least 1."""
    left = (one.limit - one.generated for one in running if one.decodes and not one.done)
    return max(min(left, default=1), 1)
