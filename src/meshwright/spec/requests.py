"""Requests as columns: when each arrives, how long it is, and whose it is.

:mod:`meshwright.spec.request_draws` draws them from distributions, :mod:`meshwright.spec.request_files` reads those of
recorded traces.
"""

from __future__ import annotations

import msgspec
import numpy as np


def nobody() -> np.ndarray:
    """Return an empty column: what no one said of any request."""
    return np.empty(0, np.int64)


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a workload [n], in order of arrival: seconds from the first one, tokens of prompt and answer.

    ``concurrency`` > 0: a closed loop, in which so many requests are open at a time, the first so many arrive by
    themselves, and the next one when one is answered.

    A column of the following, each int64, is [n], or empty where nobody said anything. ``tenant`` counts who asks from
    0, ``priority`` is higher for what goes first, ``adapter`` counts the low-rank adapter that a request needs from 0
    (-1: none), ``program`` the query or session that it is a part of (-1: none). ``after`` is the earlier request whose
    end starts this one's clock: ``arrival_s`` is then the time from there (-1: it arrives at ``arrival_s``). Requests
    with such a one stand where they would if nothing took any time, and there is no ``concurrency`` beside it. ``slo``
    counts the class of objectives that a request is held to. ``needed`` are the answers of a request's program after
    which nobody wants the others (0: all are wanted).

    ``hashes[hash_ptr[i]:hash_ptr[i + 1]]`` name the blocks of ``hash_block`` tokens of request i's prompt, equal names
    for equal prefixes, where they are known; the last of them may stand for fewer tokens. Of ``chunked`` requests they
    name the texts themselves, whatever stands before them. ``line`` [n] is where a
    request stands in its file, 0 where it was drawn.
    """

    arrival_s: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    concurrency: int = 0
    tenant: np.ndarray = msgspec.field(default_factory=nobody)
    priority: np.ndarray = msgspec.field(default_factory=nobody)
    adapter: np.ndarray = msgspec.field(default_factory=nobody)
    program: np.ndarray = msgspec.field(default_factory=nobody)
    after: np.ndarray = msgspec.field(default_factory=nobody)
    slo: np.ndarray = msgspec.field(default_factory=nobody)
    needed: np.ndarray = msgspec.field(default_factory=nobody)
    hashes: np.ndarray = msgspec.field(default_factory=nobody)
    hash_ptr: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(1, np.int64))
    hash_block: int = 16
    chunked: bool = False
    line: np.ndarray = msgspec.field(default_factory=nobody)
    source: str = ""

    def __len__(self) -> int:
        return len(self.prompt)

    def first(self, count: int) -> Requests:
        """Return the first `count` of them."""
        return self if count >= len(self) else self.chosen(np.arange(count))

    def chosen(self, which: np.ndarray) -> Requests:
        """Return those of the given indices, in that order. One that waits for another that is not among them waits for
        the nearest that is, or arrives by itself, as if the others between took no time."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        columns["arrival_s"], columns["after"] = _waiting(self, which)
        kept = {n: np.ascontiguousarray(c[which]) for n, c in columns.items() if len(c) == len(self)}
        hashes, hash_ptr = _ragged(self.hashes, self.hash_ptr, which)
        return msgspec.structs.replace(self, **kept, hashes=hashes, hash_ptr=hash_ptr)

    def earliest_s(self) -> np.ndarray:
        """Return when each request would arrive [n] if no answer took any time."""
        return _waiting(self, np.empty(0, np.int64))[0]

    def from_first(self) -> Requests:
        """Return them with the first one at 0."""
        shift = self.earliest_s().min(initial=np.inf)
        alone = self.after < 0 if len(self.after) else True
        return msgspec.structs.replace(self, arrival_s=np.where(alone, self.arrival_s - shift, self.arrival_s))

    def faster(self, speed: float) -> Requests:
        """Return them with gaps between arrivals divided by `speed`; who waits for another waits as long after it."""
        if speed == 1.0:
            return self
        alone = self.after < 0 if len(self.after) else True
        return msgspec.structs.replace(self, arrival_s=np.where(alone, self.arrival_s / speed, self.arrival_s))


#: Names of the columns [n].
COLUMNS = (
    "arrival_s",
    "prompt",
    "output",
    "tenant",
    "priority",
    "adapter",
    "program",
    "after",
    "slo",
    "needed",
    "line",
)


def _waiting(requests: Requests, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return arrivals and ``after`` of all requests [n] where only some are kept, by their new indices."""
    at, after = requests.arrival_s, requests.after
    if not len(after):
        return at, after
    place = np.full(len(requests), -1, np.int64)
    place[which] = np.arange(len(which))
    at, after = at.copy(), after.copy()
    while True:
        gone = np.flatnonzero((after >= 0) & (place[after] < 0))
        if not len(gone):
            return at, np.where(after >= 0, place[after], -1)
        # all steps of a round look at the links as they were before it, so that each is taken once
        at[gone], after[gone] = at[gone] + at[after[gone]], after[after[gone]]


def _ragged(values: np.ndarray, ptr: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces `which` of values that lie one behind the other, and where each begins."""
    if len(ptr) == 1:
        return values, ptr
    begins, lengths = ptr[:-1][which], np.diff(ptr)[which]
    new = np.concatenate([[0], np.cumsum(lengths)])
    return values[np.repeat(begins - new[:-1], lengths) + np.arange(new[-1])], new


def common_prefix(requests: Requests) -> int:
    """Return the tokens that all prompts begin with alike, as far as the names of their blocks say."""
    begins = requests.hash_ptr[:-1]
    if len(begins) < 2 or not len(requests.hashes):
        return 0
    blocks = int(np.diff(requests.hash_ptr).min())
    same = [np.ptp(requests.hashes[begins + i]) == 0 for i in range(blocks)]
    alike = same.index(False) if False in same else blocks
    return min(alike * requests.hash_block, int(requests.prompt.min()))


def numbered(lines: np.ndarray, what: str = "line") -> str:
    """Return line numbers as text, neighbours as a range: ``lines 3, 7-9``; or those of entries."""
    values = np.unique(lines)
    cuts = np.flatnonzero(np.diff(values) > 1) + 1
    runs = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in np.split(values, cuts)]
    return (what if len(values) == 1 else {"line": "lines", "entry": "entries"}[what]) + " " + ", ".join(runs)
