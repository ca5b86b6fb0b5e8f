"""Crowd: clients of one training job that are not alike: how fast each computes and sends, how its speed wavers,
how often it drops out, and how uneven their data is.

``--world speeds=lognormal:0.5,jitter=slow:0.1x6,links=uniform:1-4,drop=0.05,skew=0.3`` says one. Every number is a
factor on the time that a client's own device and links are predicted to take: 1 is as predicted. All is drawn from the
seed and the numbers of the client and its task, so that a simulation and a run meet the same world.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import msgspec
import numpy as np

#: A spread of factors: its kind and numbers, as ``lognormal:0.5`` or ``1/1/2.5``.
_LIST = re.compile(r"\d+(?:\.\d+)?(?:/\d+(?:\.\d+)?)*")
_KIND = re.compile(
    r"(lognormal|normal|exp):(\d+(?:\.\d+)?)|uniform:(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)|"
    r"slow:(0?\.\d+|1|0)x(\d+(?:\.\d+)?)"
)
#: The least and the largest factor: what is drawn beyond is cut.
LEAST, MOST = 0.05, 1e4
WANTED = "lognormal:0.5, normal:0.2, exp:0.5, uniform:1-4, slow:0.1x6 or factors such as 1/1/2.5"


class Slowness(NamedTuple):
    """A distribution of factors. ``listed``: one after the other, from the first again; ``lognormal``: median 1 and
    this sigma of the logarithm; ``normal``: mean 1 and this standard deviation; ``exp``: 1 and an exponential of this
    mean; ``uniform``: between two; ``slow``: 1, and a share of them a second number."""

    kind: str
    numbers: tuple[float, ...]

    def draw(self, rng: np.random.Generator | None, place: int) -> float:
        """The factor of a place; listed ones need no generator."""
        a, b = (*self.numbers, 0.0)[:2]
        match self.kind:
            case "listed":
                value = self.numbers[place % len(self.numbers)]
            case "lognormal":
                value = math.exp(rng.normal(0.0, a))
            case "normal":
                value = rng.normal(1.0, a)
            case "exp":
                value = 1.0 + rng.exponential(a)
            case "uniform":
                value = rng.uniform(a, b)
            case _:
                value = b if rng.random() < a else 1.0
        return min(MOST, max(LEAST, value))

    def draws(self, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
        """Factors [rows, columns], row by row from one generator: more rows leave the first as they are. Listed factors
        are those of a row, one after the other."""
        a, b = (*self.numbers, 0.0)[:2]
        size = (rows, columns)
        match self.kind:
            case "listed":
                found = np.resize(self.numbers, rows)[:, None] * np.ones(size)
            case "lognormal":
                found = np.exp(rng.normal(0.0, a, size))
            case "normal":
                found = rng.normal(1.0, a, size)
            case "exp":
                found = 1.0 + rng.exponential(a, size)
            case "uniform":
                found = rng.uniform(a, b, size)
            case _:
                found = np.where(rng.random(size) < a, b, 1.0)
        return np.clip(found, LEAST, MOST)

    @property
    def text(self) -> str:
        """The words that :func:`factors` reads."""
        said = [f"{number:g}" for number in self.numbers]
        if self.kind == "listed":
            return "/".join(said)
        return f"{self.kind}:{('-' if self.kind == 'uniform' else 'x').join(said)}"


#: All alike.
ALIKE = Slowness("listed", (1.0,))


def factors(text: str) -> Slowness | None:
    """The distribution that a text says, None where it says none."""
    text = text.strip().lower()
    if _LIST.fullmatch(text):
        numbers = tuple(float(part) for part in text.split("/"))
        return Slowness("listed", numbers) if all(LEAST <= n <= MOST for n in numbers) else None
    found = _KIND.fullmatch(text)
    if found is None:
        return None
    if found[1]:
        return Slowness(found[1], (float(found[2]),)) if float(found[2]) <= 10 else None
    kind, numbers = ("uniform", found.groups()[2:4]) if found[3] else ("slow", found.groups()[4:6])
    a, b = (float(n) for n in numbers)
    least = (LEAST, a) if kind == "uniform" else (0.0, LEAST)
    return Slowness(kind, (a, b)) if least[0] <= a <= MOST and least[1] <= b <= MOST else None


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that are not alike. ``speeds``: times that a step of a client takes, over its device's own; ``jitter``:
    likewise, drawn anew for each of its tasks; ``links``: times that its messages take; ``drop``: the chance that it
    drops out of a task; ``skew``: the concentration of a Dirichlet distribution over parts of the text that it has,
    or over classes of labelled samples, small for uneven; 0: every client draws from all of it. ``seed``: of all that
    is drawn."""

    speeds: Slowness = ALIKE
    jitter: Slowness = ALIKE
    links: Slowness = ALIKE
    drop: float = 0.0
    skew: float = 0.0
    seed: int = 0

    @property
    def wavers_alone(self) -> bool:
        """Whether nothing but the jitter of steps is said, which replicas without a server have too."""
        return self.jitter != ALIKE and (self.speeds, self.links, self.drop, self.skew) == (ALIKE, ALIKE, 0.0, 0.0)

    def slowdown(self, client: int, task: int) -> float:
        """Times that a step of a client's task takes, over its device's own."""
        return self._factor(self.speeds, client, 0, client) * self._factor(self.jitter, task, 1, client, task)

    def sending(self, client: int) -> float:
        """Times that messages of a client take, over those of its link."""
        return self._factor(self.links, client, 2, client)

    def drops(self, client: int, task: int) -> bool:
        """Whether a client drops out of a task."""
        return self.drop > 0 and self._rng(3, client, task).random() < self.drop

    def shares(self, client: int, parts: int) -> np.ndarray:
        """The shares [parts] of a client's data that come from each part of the text."""
        if not self.skew:
            return np.full(parts, 1 / parts)
        return self._rng(4, client).dirichlet(np.full(parts, self.skew))

    def _factor(self, of: Slowness, place: int, *key: int) -> float:
        """The factor of a place, drawn by a generator of its own; making one takes longer than all else that happens to
        a task, so that listed factors have none."""
        return of.draw(None if of.kind == "listed" else self._rng(*key), place)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *key))
