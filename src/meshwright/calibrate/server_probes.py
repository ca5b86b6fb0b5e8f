"""Probes of a server: small workloads, each of which tells some of its times or limits from the others.

Single requests over lengths tell what a prompt and a next token take, a ladder of simultaneous ones how many are
computed at a time and what another sequence adds, prompts that come while others are answered how the two mix, repeated
beginnings whether prefixes are kept, and random traffic what all of it comes to.

The first round finds out what can be asked. The same probes are then made again, every other round in reverse, as often
as there is time: each round begins with the same single requests, and the last one ends with them, so that a server
whose pace changes, as where other work shares its machine, shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.traffic.handshake import ServerDialect
from meshwright.traffic.session import Session, new_salt, replayed
from meshwright.traffic.timeline import served

#: Tokens that a block of a probe's shared prefix has.
UNIT = 16
#: Requests at a time that the ladder goes up to.
LADDER = (2, 4, 8, 16, 32, 64)
#: The share of the time that the first round has, and the most rounds.
FIRST_ROUND, ROUNDS = 0.5, 4


class MadeProbe(NamedTuple):
    """A probe that was made: its ``name``, its ``requests`` at the times at which they were sent and as long as they
    were, and the seconds to the first token, a token after it, and to the last one of each [n]; ``tpot`` is NaN of
    answers of one token, and of those whose tokens came together. ``cached`` are the tokens that the server says it
    had, -1 where it does not say; ``at_s`` is the middle of the time that it took, on the prober's clock."""

    name: str
    requests: Requests
    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray
    cached: np.ndarray
    most_answered: int
    at_s: float = 0.0


class Prober:
    """Probes of one server, made one after the other while there is time: ``longest`` tokens of a prompt, and
    ``budget_s`` seconds in all. `say` is told what is being done. Where the traffic to be predicted is known
    (``like``), a part of it is among the probes, so that the server is measured as busy as it will be."""

    def __init__(
        self,
        session: Session,
        *,
        longest: int,
        budget_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float],
        like: Requests | None = None,
    ):
        self.session, self.say, self.clock, self.like = session, say, clock, like
        self.longest, self.ends_s = longest, clock() + FIRST_ROUND * budget_s
        self.all_ends_s = clock() + budget_s
        self.budget_s = budget_s
        self.errors: list[str] = []
        self.made: list[MadeProbe] = []
        self.asked: dict[str, tuple[Requests, float]] = {}

    @property
    def left_s(self) -> float:
        """Seconds that are left, in the first round of it."""
        return self.ends_s - self.clock()

    async def make(self) -> list[MadeProbe]:
        """Make the probes for which there is time; returns them."""
        await self._probe("warm-up", _loop([self.longest, UNIT], [4, 4]), kept=False)
        lengths = np.unique(np.geomspace(UNIT, self.longest, 5).astype(int)).tolist()
        prompts = [*lengths, lengths[1], lengths[-1], *lengths[::-1]]
        outputs = [*[12] * len(lengths), 64, 48, *[8] * len(lengths)]
        alone = await self._probe("single", _loop(prompts, outputs))
        if alone is None:
            return self.made
        each = float(np.median(alone.e2e[alone.requests.output == 12]))
        await self._ladder(each)  # of a slow server that is told which waits for which, if nothing else is
        await self._prefix()
        await self._room(each)
        await self._mix(alone)
        await self._alike()
        await self._random(each)
        await self._again()
        return self.made

    async def single(self) -> MadeProbe | None:
        """Make the single requests once more, whatever time is left: at what pace the server is now."""
        if "single" not in self.asked:
            return None
        requests, took = self.asked["single"]
        self.ends_s = self.clock() + 10.0 * took
        return await self._probe("single", requests)

    async def _again(self) -> None:
        """Make the probes again, round after round, as long as one takes no longer than there is time for."""
        self.ends_s = self.all_ends_s
        single, took = self.asked["single"]
        others = [(name, said) for name, said in self.asked.items() if name != "single"]
        for _ in range(1, ROUNDS):
            others.reverse()
            if self.left_s < 2 * took + min((each for _, (_, each) in others), default=0.0):
                break
            await self._probe("single", single)
            for name, (requests, each) in others:
                if self.left_s >= each + took:
                    await self._probe(name, requests)
        await self._probe("single", single)

    async def _ladder(self, each_s: float) -> None:
        """Ask ever more requests at once, as long as one rung takes no more than a sixth of the time."""
        short, rate = max(UNIT, self.longest // 16), 0.0
        for rung in LADDER:
            if rung * each_s * 3 > self.budget_s / 6 or rung * each_s * 3 > self.left_s / 2:
                break
            made = await self._probe(f"ladder {rung}", _at_once(np.full(rung, short), 24 + 4 * (np.arange(rung) % 4)))
            if made is None:
                break
            now = float(made.requests.output.sum() / made.e2e.max())
            if made.most_answered < rung / 2 and rung > 4:
                break  # more would wait as these do
            rate = max(rate, now)

    async def _prefix(self) -> None:
        """Ask for prompts with a beginning that was there before, at once and after another one."""
        blocks = max(self.longest * 3 // 4 // UNIT, 1)
        names = [0, 0, 1, 0, 1, 1, 2, 0]
        ptr = np.arange(len(names) + 1) * blocks
        hashes = np.concatenate([np.arange(blocks) + name * blocks for name in names])
        asked = _loop([blocks * UNIT + UNIT + 4] * len(names), [4] * len(names))
        await self._probe("prefix", msgspec.structs.replace(asked, hashes=hashes, hash_ptr=ptr, hash_block=UNIT))

    async def _room(self, each_s: float) -> None:
        """Ask for as many of the longest prompts at once as short ones were computed at a time."""
        most = max((p.most_answered for p in self.made), default=1)
        if most > 1 and most * each_s * 6 < self.left_s / 3:
            await self._probe("room", _at_once(np.full(most, self.longest), np.full(most, 64)))

    async def _mix(self, alone: MadeProbe) -> None:
        """Let long prompts come while others are answered."""
        steps = alone.tpot[~np.isnan(alone.tpot)]
        step_s = float(np.median(steps)) if len(steps) else 0.01
        span = 64 * step_s
        if span * 8 > self.left_s:
            return
        at = np.array([0.0, 0.0, 0.0, 0.3 * span, 0.6 * span, 0.6 * span, 1.0 * span])
        short = max(UNIT, self.longest // 16)
        prompt = np.array([short, short, short, self.longest, self.longest // 2, short, self.longest])
        output = np.array([64, 64, 48, 8, 8, 24, 16])
        await self._probe("mix", Requests(arrival_s=at, prompt=prompt, output=output))

    async def _alike(self) -> None:
        """Send the first of the requests that are to be predicted, as many as come in a third of the time that is
        left."""
        if self.like is None:
            return
        until = self.left_s / 3
        count = int((self.like.earliest_s() < until).sum()) if not self.like.concurrency else len(self.like)
        some = self.like.first(max(1, min(count, 200)))
        fits = some.prompt <= self.longest
        if not fits.all():
            some = some.chosen(np.flatnonzero(fits))
        if len(some):
            await self._probe("random asked", some)

    async def _random(self, each_s: float) -> None:
        """Send random traffic at half and at three quarters of what the ladder says that the server can do."""
        rates = [len(p.requests) / p.e2e.max() for p in self.made if p.name.startswith("ladder")]
        best, rng = max([*rates, 1 / (2 * each_s)]), np.random.default_rng(0)
        for share in (0.5, 0.75):
            count = int(min(60, max(12, self.left_s / 3 * share * best)))
            if self.left_s - 10 * each_s < count / (share * best):
                break
            gaps = rng.exponential(1 / (share * best), count)
            prompt = np.geomspace(UNIT, self.longest, 16).astype(np.int64)[rng.integers(0, 13, count)]
            output = rng.integers(8, 41, count)
            await self._probe(
                f"random {share:.0%}", Requests(arrival_s=np.cumsum(gaps) - gaps[0], prompt=prompt, output=output)
            )

    async def _probe(self, name: str, requests: Requests, *, kept: bool = True) -> MadeProbe | None:
        """Make a probe; None where none of its requests was answered, or it is not `kept`."""
        if self.left_s <= 0:
            self.say(f"{name}: no time is left")
            return None
        self.say(f"{name}: {len(requests)} requests, {self.left_s:.0f} s left")
        began_s, prompts = self.clock(), msgspec.structs.replace(self.session.prompts, salt=new_salt())
        session = msgspec.structs.replace(self.session, prompts=prompts)
        traffic, _ = await replayed(session, Serve(), requests, timeout_s=max(self.budget_s, 60.0))
        self.errors += [one.error for one in traffic.records.values() if one.error]
        found = traffic.answered
        if not kept or not found:
            return None
        seen, times = served(found)
        which = np.array([one.number for one in found])
        sent = msgspec.structs.replace(
            requests.chosen(which), concurrency=0, arrival_s=times.arrival_s - times.arrival_s.min(),
            prompt=seen.prompt, output=np.maximum(seen.output, 1),
        )  # fmt: skip
        made = MadeProbe(
            name=name,
            requests=sent,
            ttft=times.first_s - times.arrival_s,
            tpot=tpot_of(times.end_s - times.first_s, sent.output),
            e2e=times.end_s - times.arrival_s,
            cached=np.array([one.cached for one in found]),
            most_answered=times.peak_batch,
            at_s=(began_s + self.clock()) / 2,
        )
        self.asked.setdefault(name, (requests, self.clock() - began_s))
        self.made.append(made)
        return made


def tpot_of(span_s: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Return the seconds a token after the first [n] of answers whose tokens came over `span_s`; NaN where there is one
    token, or all came together and tell nothing."""
    more = np.maximum(output - 1, 1)
    return np.where((output > 1) & (span_s > 0), span_s / more, np.nan)


def longest_prompt(dialect: ServerDialect, wanted: int) -> int:
    """Return the tokens of the longest prompt of probes: as many as are wanted, with room for an answer."""
    return min(wanted, dialect.context - 80) if dialect.context else wanted


def _loop(prompts: list[int], outputs: list[int]) -> Requests:
    """Requests one after the other."""
    count = len(prompts)
    return Requests(arrival_s=np.zeros(count), prompt=np.array(prompts), output=np.array(outputs), concurrency=1)


def _at_once(prompts: np.ndarray, outputs: np.ndarray) -> Requests:
    return Requests(arrival_s=np.zeros(len(prompts)), prompt=prompts.astype(np.int64), output=outputs)
