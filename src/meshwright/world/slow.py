"""Slow ranks and links of a training step, by number or drawn: what stragglers are made of.

``--world slow=3x1.5`` has rank 3 compute 1.5 times as long, ``slowlink=2-3x4`` messages between ranks 2 and 3 take four
times as long, ``slownic=5x3`` all of rank 5, and ``ranks=lognormal:0.05`` draws a factor for every rank. Several are
joined by ``/``: ``slow=3x1.5/7x2``.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.world.crowd import ALIKE, LEAST, MOST, WANTED, Slowness, factors

#: Words of slow ranks and links, each with an example.
WORDS = {"slow": "3x1.5", "slowlink": "2-3x4", "slownic": "5x3", "ranks": "lognormal:0.05"}
_ONE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?x(\d+(?:\.\d+)?)", re.IGNORECASE)


class SlowOne(msgspec.Struct, frozen=True):
    """One rank, or the pair of ranks at both ends of a link, and how many times as long it takes."""

    ranks: tuple[int, ...]
    factor: float


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """The slowness of a step: ranks that compute slowly, links and whole ports that are slow, and a distribution of the
    factors of all ranks, drawn from ``seed``."""

    slow: tuple[SlowOne, ...] = ()
    slowlink: tuple[SlowOne, ...] = ()
    slownic: tuple[SlowOne, ...] = ()
    ranks: Slowness = ALIKE
    seed: int = 0

    def computing(self, num_ranks: int) -> np.ndarray:
        """Times that the passes of each rank take [ranks].

        Raises:
            MeshwrightError: O006 for every rank that is named and is none of so many.
        """
        self._known(num_ranks)
        out = np.array([self.ranks.draw(np.random.default_rng((self.seed, 5, r)), r) for r in range(num_ranks)])
        for one in self.slow:
            out[one.ranks[0]] *= one.factor
        return out

    def varying(self, jitter: Slowness, num_ranks: int, num_steps: int) -> np.ndarray:
        """Times that the passes of each rank take in each step [steps, ranks], where they vary from step to step too;
        more steps leave the first as they are."""
        drawn = jitter.draws(np.random.default_rng((self.seed, 6)), num_steps, num_ranks)
        return drawn * self.computing(num_ranks)

    def sending(self, source: int, target: int) -> float:
        """Times that messages from one rank to another take: those of the slowest that they pass."""
        pair = {source, target}
        linked = [one.factor for one in self.slowlink if set(one.ranks) == pair]
        return max([1.0, *linked, *(one.factor for one in self.slownic if one.ranks[0] in pair)])

    def _known(self, num_ranks: int) -> None:
        wrong = [
            Diagnostic(
                code="O006",
                message=f"{word}={'-'.join(map(str, one.ranks))}x{one.factor:g} names rank {rank}, and the plan has "
                f"{num_ranks} ranks",
                place="--world",
                help=f"ranks are 0 to {num_ranks - 1}",
            )
            for word in ("slow", "slowlink", "slownic")
            for one in getattr(self, word)
            for rank in one.ranks
            if rank >= num_ranks
        ]
        if wrong:
            raise MeshwrightError(wrong)


def value_of(key: str, text: str) -> Slowness | tuple[SlowOne, ...] | str:
    """The value of a word; where it is none, what is wanted."""
    if key == "ranks":
        return factors(text) or WANTED
    found = [_ONE.fullmatch(part.strip()) for part in text.split("/")]
    wanted = f"{'two ranks' if key == 'slowlink' else 'a rank'} and a factor from {LEAST:g} to {MOST:g}"
    if not all(one and bool(one[2]) == (key == "slowlink") and LEAST <= float(one[3]) <= MOST for one in found):
        return wanted
    made = tuple(SlowOne(tuple(int(n) for n in (one[1], one[2]) if n), float(one[3])) for one in found)
    if any(len(set(one.ranks)) < len(one.ranks) for one in made):
        return "two different ranks and a factor"
    if len({frozenset(one.ranks) for one in made}) < len(made):
        return f"{wanted}, each once"
    return made
