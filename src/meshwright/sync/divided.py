"""Divided sums: every copy sends each part of its values to the one that sums that part, and gets the sum of it back.

Copies need not sum equal parts (Diskin et al. 2106.10207): with equal ones the messages are those of an all-reduce,
with one part those of a parameter server, and a copy without a part only brings values and takes sums. A part is cut
into pieces, so that sums of one piece go out while values of the next come in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil, gcd
from typing import NamedTuple

#: Bytes of a piece of all parts together, and the pieces of an exchange at most.
PIECE_BYTES, MOST_PIECES = 2**20, 8
#: Parts are rounded to such a part of an equal one.
FINEST = 1000
#: Copies at most.
MOST_COPIES = 99999


def read(text: str) -> tuple[int, ...] | None:
    """The parts of a text such as ``3/1x2/0x4``, as whole numbers of which each copy has its share; None where it has
    another form, is of too many copies, or nobody has a part."""
    if not re.fullmatch(r"\d{1,9}(x[1-9]\d{0,4})?(/\d{1,9}(x[1-9]\d{0,4})?)*", text, re.ASCII):
        return None
    found: list[int] = []
    for word in text.split("/"):
        part, _, times = word.partition("x")
        found += [int(part)] * int(times or 1)
    return tuple(found) if sum(found) and len(found) <= MOST_COPIES else None


def written(parts: Sequence[int]) -> str:
    """The shortest text of parts that :func:`read` reads back."""
    runs: list[list[int]] = []
    for part in parts:
        if runs and runs[-1][0] == part:
            runs[-1][1] += 1
        else:
            runs.append([part, 1])
    return "/".join(f"{part}x{times}" if times > 1 else str(part) for part, times in runs)


def rounded(shares: Sequence[float]) -> tuple[int, ...]:
    """Shares that sum to 1 as the smallest whole numbers, to a thousandth of an equal share."""
    near = [round(share * FINEST * len(shares)) for share in shares]
    common = gcd(*near)
    return tuple(one // common for one in near)


class SumMessages(NamedTuple):
    """The messages of divided sums: the ``parts`` that copies make; ``there`` values go to those who sum them, ``back``
    sums to all. The last ``helpers`` copies bring no values."""

    parts: tuple[int, ...]
    helpers: int = 0
    there: bool = True
    back: bool = True

    def messages(self) -> Iterator[tuple[int, int, float]]:
        """Messages between copies, as (from, to, share of all values)."""
        total, n = sum(self.parts), len(self.parts)
        for i in range(n):
            for j in range(n):
                brings = self.there and i < n - self.helpers
                sent = brings * self.parts[j] + self.back * self.parts[i]
                if i != j and sent:
                    yield i, j, sent / total


def rounds(num_bytes: float, parts: tuple[int, ...], helpers: int = 0) -> Iterator[tuple[float, SumMessages]]:
    """The messages of an exchange of so many bytes and the bytes that they are shares of: the first piece goes there,
    then sums of each go back beside the values of the next, and those of the last."""
    count = pieces(num_bytes)
    for piece in range(count + 1):
        yield num_bytes / count, SumMessages(parts, helpers, there=piece < count, back=piece > 0)


def bounds(length: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Where the parts of so many values begin and end [copies + 1]."""
    total = sum(parts)
    return (0, *(length * done // total for done in accumulate(parts)))


def pieces(num_bytes: float) -> int:
    """Pieces that an exchange of so many bytes is cut into."""
    return max(1, min(MOST_PIECES, ceil(num_bytes / PIECE_BYTES)))
