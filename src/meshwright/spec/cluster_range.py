"""Several clusters in a word: ``8..512xh100`` is every doubling from 8 to 512 devices, ``8,16,64xh100`` those three.

What is behind the number stays as it is for every one of them, so that everything a cluster can be called works:
``2..16x8xa100`` counts nodes, ``1..64xp5`` machines, ``8..64xh100+8xa100`` lets one island grow.
"""

from __future__ import annotations

import re

from meshwright.errors import MeshwrightError, remark
from meshwright.spec.cluster import Cluster, load, read

#: Clusters in one question.
MOST = 64
_DOUBLING = re.compile(r"(?P<first>\d+)\s*\.\.\s*(?P<last>\d+)\s*x\s*(?P<rest>.+)", re.IGNORECASE)
_LISTED = re.compile(r"(?P<counts>\d+(?:\s*,\s*\d+)+)\s*x\s*(?P<rest>.+)", re.IGNORECASE)


def is_range(text: str) -> bool:
    """Whether a text is meant as several clusters."""
    return bool(_LISTED.fullmatch(text.strip())) or re.match(r"\s*\d+\s*\.\.", text) is not None


def load_all(text: str) -> tuple[tuple[str, Cluster], ...]:
    """The clusters a text names, each with its own name, the smallest first; one where it is no range.

    Between the ends, a number that fills no node gives way to the largest below it that does.

    Raises:
        MeshwrightError: B005 for a range that cannot be read, else as :func:`meshwright.spec.cluster.load`.
    """
    text = text.strip()
    if not is_range(text):
        return ((text, load(text)),)
    listed = _LISTED.fullmatch(text)
    if listed:
        counts = sorted({int(count) for count in listed["counts"].split(",")})
        if counts[0] < 1 or len(counts) > MOST:
            raise _unreadable(text)
        return _remarked(_each(counts, listed["rest"]))
    match = _DOUBLING.fullmatch(text)
    if match is None or not 0 < int(match["first"]) < int(match["last"]):
        raise _unreadable(text)
    first, last, rest = int(match["first"]), int(match["last"]), match["rest"]
    ends = _each([first, last], rest)
    between: list[tuple[str, Cluster]] = []
    count, before = 2 * first, first
    while count < last:
        found = _whole(count, before, rest)
        if found is not None:
            before, cluster = found
            between.append((f"{before}x{rest}", cluster))
        count *= 2
        if len(between) + 2 > MOST:
            raise _unreadable(text)
    return _remarked((ends[0], *between, ends[1]))


def _remarked(clusters: tuple[tuple[str, Cluster], ...]) -> tuple[tuple[str, Cluster], ...]:
    """The same clusters; words that change nothing are remarked where they do so in every one of them."""
    if all(cluster.notes for _, cluster in clusters):
        for note in clusters[0][1].notes:
            remark(note)
    return clusters


def _each(counts: list[int], rest: str) -> tuple[tuple[str, Cluster], ...]:
    """Every one of them; what is wrong with any, once."""
    found, wrong = [], []
    for count in counts:
        try:
            found.append((f"{count}x{rest}", read(f"{count}x{rest}")))
        except MeshwrightError as error:
            wrong += [d for d in error.diagnostics if (d.code, d.message) not in [(w.code, w.message) for w in wrong]]
    if wrong:
        raise MeshwrightError(wrong)
    return tuple(found)


def _whole(count: int, above: int, rest: str) -> tuple[int, Cluster] | None:
    """The largest cluster of at most `count` and more than `above` that fills whole nodes."""
    for fewer in range(count, above, -1):
        try:
            return fewer, read(f"{fewer}x{rest}")
        except MeshwrightError:
            continue
    return None


def _unreadable(text: str) -> MeshwrightError:
    return MeshwrightError.one(
        "B005",
        f"{text!r} is not a range of clusters",
        place=f"--on {text}",
        help="from few to many devices, at most 64 clusters: --on 8..512xh100, or --on 8,16,64xh100",
    )
