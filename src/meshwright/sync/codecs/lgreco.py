"""L-GreCo (Alimohammadi et al. 2210.17357): a code whose strength is each layer's own, chosen so that all together send
the fewest bytes while they lose no more than with one strength for all: ranks of PowerSGD's factors by matrix, shares
of the largest values or bits of quantised levels by layer.

A run measures what every candidate would lose, once in so many steps, and all copies choose alike. A prediction, which
has no gradients, goes by declared ones: numbers of equal variance in every matrix, whose singular values fall as a
power of their place. Of equal numbers every layer has the usual share or bits, so that a prediction counts those: as
many bytes as the first steps of a run send, and at least as many as later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.sync.codecs import Tensor, buckets, powersgd, topk
from meshwright.sync.options import RuleOption, bad

EVERY = RuleOption(name="every", what="steps between two choices of ranks", default=100)
DECAY = RuleOption(
    name="decay", what="the power by which singular values fall, for predictions", default=1.0, share=True, most=8.0
)
#: Codes whose strength is chosen: ranks of factors, shares of values, bits of levels; and the option of each.
RANKS, SHARES, BITS = "powersgd", "topk", "qsgd"
OF = RuleOption(
    name="of",
    what="the code whose strength each layer has its own of",
    default=RANKS,
    choices=lambda: (RANKS, SHARES, BITS),
)
OWN = {RANKS: powersgd.RANK, SHARES: topk.SHARE, BITS: msgspec.structs.replace(buckets.BITS, default="4")}
#: Parts that the error which may be made is counted in (2210.17357, section 4.2, counts in ten times as many).
PARTS = 1000


def candidates(one: Tensor, rank: int) -> tuple[int, ...]:
    """Return the ranks that a matrix may be cut to: up to twice the usual one, as far as factors are smaller than the
    matrix; () where those of the usual rank are not."""
    most = min(2 * rank, one.rows, one.columns)
    smaller = [r for r in range(1, most + 1) if sent(one, r) < one.rows * one.columns]
    return tuple(smaller) if rank in smaller else ()


def sent(one: Tensor, rank: int) -> int:
    """Return the numbers of both factors of one such matrix."""
    return (one.rows + one.columns) * rank


def chosen(sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], usual: Sequence[int]) -> list[int]:
    """Choose a candidate of each matrix: the least total of `sizes` whose total of `errors` is at most that of the
    `usual` candidates. Errors are counted in parts of it, rounded up, so that the bound holds."""
    bound = sum(row[i] for row, i in zip(errors, usual))
    if bound <= 0:
        return list(usual)
    least = np.full(PARTS + 1, np.inf)
    least[0] = 0.0
    taken = []
    for size, error in zip(sizes, errors):
        ways = np.full((len(size), PARTS + 1), np.inf)
        for i, (bytes_, lost) in enumerate(zip(size, error)):
            part = int(np.ceil(min(lost / bound, 2.0) * PARTS - 1e-9))
            if part <= PARTS:
                ways[i, part:] = least[: PARTS + 1 - part] + bytes_
        taken.append(ways.argmin(axis=0))
        least = ways.min(axis=0)
    at = int(least.argmin())
    if least[at] >= sum(row[i] for row, i in zip(sizes, usual)):
        return list(usual)  # what rounding took away is more than there was to win
    out = []
    for number in range(len(sizes) - 1, -1, -1):
        out.append(int(taken[number][at]))
        at -= int(np.ceil(min(errors[number][out[-1]] / bound, 2.0) * PARTS - 1e-9))
    return out[::-1]


def declared(one: Tensor, ranks: Sequence[int], decay: float) -> list[float]:
    """Return the squared error of each rank of a matrix of numbers of variance one, whose singular values fall with
    their place to the power of `decay`."""
    falling = np.arange(1, min(one.rows, one.columns) + 1) ** (-2.0 * decay)
    return [float(one.rows * one.columns * falling[r:].sum() / falling.sum()) for r in ranks]


def predicted(tensors: Sequence[Tensor], rank: int, decay: float) -> dict[tuple[int, int], int]:
    """Return the rank of every shape of matrix, of all those that a rank holds."""
    counts: dict[tuple[int, int], int] = {}
    for one in tensors:
        counts[one.rows, one.columns] = counts.get((one.rows, one.columns), 0) + one.times
    shapes = {shape: candidates(Tensor(*shape), rank) for shape in counts}
    shapes = {shape: ranks for shape, ranks in shapes.items() if ranks}
    sizes = [[counts[shape] * sent(Tensor(*shape), r) for r in ranks] for shape, ranks in shapes.items()]
    errors = [
        [counts[shape] * error for error in declared(Tensor(*shape), ranks, decay)] for shape, ranks in shapes.items()
    ]
    picks = chosen(sizes, errors, [ranks.index(rank) for ranks in shapes.values()])
    return {shape: ranks[i] for (shape, ranks), i in zip(shapes.items(), picks)}


def shares(usual: float) -> tuple[float, ...]:
    """Return the shares that a layer may send: from a quarter of the usual one to twice it, an eighth of it apart, and
    rounded to texts that a codec reads."""
    some = {eighths: float(f"{usual * eighths / 8:.9g}") for eighths in range(2, 17)} | {8: usual}
    return tuple(dict.fromkeys(min(1.0, some[eighths]) for eighths in sorted(some)))


def made(values: dict[str, Any]) -> Any:
    """Return the codec whose ranks, shares or levels are chosen anew once in so many steps.

    Raises:
        MeshwrightError: Y002 for the rank, share or bits of another code than the one whose are chosen.
    """
    of, every, decay = values["of"], values["every"], values["decay"]
    wrong = [option for kind, option in OWN.items() if kind != of and values[option.name] != option.default]
    if wrong:
        raise MeshwrightError(
            [bad(f"l-greco of {of} has no {o.name}", f"say of={k}, or drop it") for k, o in OWN.items() if o in wrong]
        )
    about = {
        "name": "l-greco",
        "paper": "Alimohammadi et al., 2022, arXiv 2210.17357",
        "adapts": every,
        "options": (OF, *OWN.values(), EVERY, DECAY),
        "made": made,
    }
    if of == RANKS:
        rank = values["rank"]
        return msgspec.structs.replace(
            powersgd.made({"rank": rank}),
            title="two thin factors of a rank for each matrix",
            usual=rank,
            ranks=lambda tensors: predicted(tensors, rank, decay),
            **about,
        )
    if of == SHARES:
        some = shares(values["share"])
        usual, words = topk.made({"share": values["share"]}), tuple(f"topk:share={one}" for one in some)
        place, title = (
            some.index(values["share"]),
            "the largest values and their places, as many of each layer as it needs",
        )
    else:
        usual, words = (
            buckets.made({"bits": values["bits"]}, shifted=False),
            tuple(f"qsgd:bits={n}" for n in range(2, 9)),
        )
        place, title = int(values["bits"]) - 2, "levels drawn, of as many bits in each layer as it needs"
    return msgspec.structs.replace(usual, title=title, usual=place, levels=words, **about)


CODECS = (made({option.name: option.default for option in (OF, *OWN.values(), EVERY, DECAY)}),)
