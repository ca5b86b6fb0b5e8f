"""Legality: a rewritten pass against the plain one, by its data flow.

Several layers are laid out in a row. Exact is a rewrite whose parts are each entry once, and in which everything still
comes after all that it reads, by edges or by the order of a queue. An approximate one drops some of these edges, and
says which; anything else is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.lower.entry import MOVES, Entry, Origin

#: Layers in a row: what one reads of the one before, and a rewrite lets lie over two borders.
LAYERS = 5
#: Of each entry its queue, what it waits for, of this layer and of the one before, and what it does.
Flow = tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Origin, ...]], ...]
Cuts = tuple[tuple[str, int, int], ...]


class Proof(NamedTuple):
    """The verdict over a rewrite: the edges (names of entries of the plain pass) that it ``dropped``."""

    dropped: tuple[tuple[str, str], ...]

    @property
    def exact(self) -> bool:
        """Whether it computes what the plain pass does."""
        return not self.dropped


def proof(plain: Sequence[Entry], ends: tuple[int, ...], rewritten: Sequence[Entry]) -> Proof:
    """Return the proof that a rewrite is legal; `ends` are the plain entries that the next layer waits for. Entries
    that no rewrite made stand for those of their number.

    Raises:
        MeshwrightError: G003 for work that is lost, done twice or has another size, or a wait for what comes later.
    """
    before, after = _flow(plain), _flow(rewritten)
    wrong = [f"{share} of {plain[i].name} is done" for i, share in _uncovered(len(before), after)]
    wrong += [f"{rewritten[i].name} waits for what comes after it" for i in _backwards(after)]
    asked, done = (sum(getattr(e.work, "flops", 0.0) for e in some) for some in (plain, rewritten))
    if asked > done * (1 + 1e-9):
        wrong.append(f"{done:.6g} of {asked:.6g} operations are done")
    if wrong:
        raise MeshwrightError.one(
            "G003",
            f"the rewrite is not legal: {'; '.join(wrong[:4])}",
            help="every entry of the plain pass is covered by its parts, and waits for what is above it",
        )
    return Proof(tuple((plain[a].name, plain[i].name) for a, i in _dropped(before, ends, after)))


def _flow(entries: Sequence[Entry]) -> Flow:
    return tuple([(e.queue, e.after, e.late, _origins(i, e)) for i, e in enumerate(entries)])


def _origins(i: int, entry: Entry) -> tuple[Origin, ...]:
    return () if entry.role == MOVES else entry.origins or (Origin(i),)


@lru_cache(maxsize=256)
def _uncovered(count: int, after: Flow) -> tuple[tuple[int, Fraction], ...]:
    """Return each of so many plain entries whose parts are not all of it, once, with the share that is done."""
    done: dict[int, list[Cuts]] = defaultdict(list)
    for *_, origins in after:
        for origin in origins:
            done[origin.entry].append(origin.cuts)
    found = []
    for i in range(count):
        total = Fraction(0)
        for cuts in done[i]:
            share = Fraction(1)
            for _, _, parts in cuts:
                share /= parts
            total += share
        if total != 1 or len(set(done[i])) < len(done[i]):
            found.append((i, total))
    return tuple(found)


def _backwards(after: Flow) -> Iterator[int]:
    return (i for i, (_, waits, _, _) in enumerate(after) if any(a >= i for a in waits))


@lru_cache(maxsize=256)
def _dropped(before: Flow, ends: tuple[int, ...], after: Flow) -> tuple[tuple[int, int], ...]:
    """Return the edges of the plain pass that the rewritten one does not keep."""
    ancestors, done = _ancestors(after), _done(after)
    dropped = {}
    for layer in range(2, LAYERS - 1):
        for i, (_, waits, _, _) in enumerate(before):
            for at, a in [(layer, a) for a in waits] or [(layer - 1, a) for a in ends]:
                if not all(
                    ancestors[late] >> early & 1 or early == late
                    for late, reads in done[layer, i]
                    for early, cuts in done[at, a]
                    if _meet(cuts, reads)
                ):
                    dropped[a, i] = None
    return tuple(dropped)


def _ancestors(after: Flow) -> list[int]:
    """Return for each entry of each layer in a row the set of those that end before it begins, as bits."""
    size, last, out = len(after), dict[str, int](), list[int]()
    apart = not any(late for _, _, late, _ in after)  # a layer begins when all of the one before is over
    for layer in range(LAYERS):
        for i, (queue, waits, late, _) in enumerate(after):
            direct = [layer * size + a for a in waits]
            direct += [(layer - 1) * size + a for a in late] if layer else []
            direct += [last[queue]] if queue in last else []
            direct += range((layer - 1) * size, layer * size) if apart and layer and not waits else ()
            found = 0
            for a in direct:
                found |= out[a] | 1 << a
            out.append(found)
            last[queue] = layer * size + i
    return out


def _done(after: Flow) -> dict[tuple[int, int], list[tuple[int, Cuts]]]:
    """Return the entries that do the work of each plain entry of each layer, with the parts that they do."""
    found: dict[tuple[int, int], list[tuple[int, Cuts]]] = defaultdict(list)
    for layer in range(LAYERS):
        for i, (*_, origins) in enumerate(after):
            for origin in origins:
                found[layer - origin.behind, origin.entry].append((layer * len(after) + i, origin.cuts))
    return found


def _meet(early: Cuts, late: Cuts) -> bool:
    """Whether the late part reads anything of the early one: parts along the same dimension that overlap."""
    cut = {name: (part, parts) for name, part, parts in early}
    for name, part, parts in late:
        if name in cut:
            other, others = cut[name]
            if part * others >= (other + 1) * parts or (part + 1) * others <= other * parts:
                return False
    return True
