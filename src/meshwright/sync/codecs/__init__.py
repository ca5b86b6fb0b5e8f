"""Codecs: what values are on the wire, with the exact number of bytes and a reference in numpy.

One file a codec; each registers a :class:`Codec`. ``run/codecs.py`` has faster versions on tensors of some of them; any
other is run as it stands here, through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwright.errors import MeshwrightError, nearest
from meshwright.sync.options import RuleOption, read_options

if TYPE_CHECKING:
    import numpy as np

MODULES = [
    "meshwright.sync.codecs.stored",
    "meshwright.sync.codecs.bf16",
    "meshwright.sync.codecs.fp16",
    "meshwright.sync.codecs.fp8",
    "meshwright.sync.codecs.int8",
    "meshwright.sync.codecs.int4",
    "meshwright.sync.codecs.dynamic8",
    "meshwright.sync.codecs.sigma8",
    "meshwright.sync.codecs.fp4",
    "meshwright.sync.codecs.buckets",
    "meshwright.sync.codecs.terngrad",
    "meshwright.sync.codecs.sign",
    "meshwright.sync.codecs.bit",
    "meshwright.sync.codecs.topk",
    "meshwright.sync.codecs.randomk",
    "meshwright.sync.codecs.dgc",
    "meshwright.sync.codecs.powersgd",
    "meshwright.sync.codecs.lgreco",
    "meshwright.sync.codecs.mgard",
    "meshwright.sync.codecs.dct",
]
"""The files that define codecs, each as ``CODECS``: a new codec is a file and its name here."""


class Tensor(NamedTuple):
    """So many tensors of a shape, one after the other; a vector is one row. ``rank``: the one that they are cut to, 0
    for that of the code."""

    rows: int
    columns: int
    times: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        """Values of all of them."""
        return self.rows * self.columns * self.times


class Factors(NamedTuple):
    """So many matrices that lie one after the other from value ``start`` on, row by row, and the rank they are cut
    to."""

    start: int
    rows: int
    columns: int
    times: int
    rank: int

    @property
    def left(self) -> int:
        """Values of the left factors."""
        return self.times * self.rows * self.rank

    @property
    def right(self) -> int:
        """Values of the right factors."""
        return self.times * self.columns * self.rank

    @property
    def end(self) -> int:
        """The place behind the last value."""
        return self.start + self.times * self.rows * self.columns


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """A code for numbers by name.

    ``encode`` turns values [n] into uint8 [wire_bytes(n, element_bytes)], ``decode`` (bytes, n, type) back into values
    [n]; ``element_bytes`` is the size of a stored value. ``moved`` (n, element_bytes) gives the bytes of device memory
    that encoding and that decoding read and write. ``summed`` is the type in which encoded values may be added on their
    way ("stored": the values' own), so that an all-reduce carries them; "" where they may not, so that every rank
    gathers all. ``exact``: decoding gives back what was encoded. ``each``: a value's code depends on it alone.

    ``drawn``: encoding draws random numbers, each rank its "own" or all the same ("shared"); ``encode`` and ``decode``
    then take a seed besides. ``unbiased``: what is decoded has what was encoded as its mean. ``feedback``: what a code
    lost is added to the next values, so that in the end it arrives. ``correction``: the momentum that gathers in what
    waits to be sent. ``factors`` (n, tensors) gives the matrices among n values, which are those tensors or, without
    any, of no known shape: each is sent as the two factors of a power iteration, all left ones (and all values that are
    of none, as they are) in a first message, all right ones in a second, each summed on its way.

    ``decay``: the part of what was lost that is left at the next time. ``products`` (n): the matrix products [m, k] by
    [k, n] of one transform of n values, as (m, n, k); what is lost is known by a transform back.

    ``varies``: how many bytes there are is known once values are encoded, and ``wire_bytes`` is what to expect.

    ``adapts``: once in so many steps a run chooses the rank of each matrix anew, by what the ``usual`` rank of all
    loses; ``ranks`` gives those of a prediction, by rows and columns. Where it chooses among whole codes, one for the
    values of a layer, ``levels`` are these, from the fewest bytes on, and ``usual`` the place of the usual one.

    ``ring``: a sum is made hop by hop, each of which decodes what comes, adds to it and encodes it again, in place of a
    gather of all codes.

    ``options`` may stand behind the name; ``made`` gives the codec with their values.
    """

    name: str
    title: str
    paper: str
    exact: bool
    summed: str
    wire_bytes: Callable[[int, int], int]
    moved: Callable[[int, int], tuple[int, int]]
    encode: Callable[..., np.ndarray]
    decode: Callable[..., np.ndarray]
    each: bool = False
    drawn: str = ""
    unbiased: bool = False
    feedback: bool = False
    correction: float = 0.0
    decay: float = 1.0
    products: Callable[[int], tuple[tuple[int, int, int], ...]] | None = None
    factors: Callable[[int, tuple[Tensor, ...]], tuple[Factors, ...]] | None = None
    varies: bool = False
    adapts: int = 0
    usual: int = 0
    levels: tuple[str, ...] = ()
    ranks: Callable[[tuple[Tensor, ...]], dict[tuple[int, int], int]] | None = None
    ring: bool = False
    options: tuple[RuleOption, ...] = ()
    made: Callable[[dict[str, Any]], Codec] | None = None

    def messages(self, n: int, element_bytes: int, tensors: tuple[Tensor, ...] = ()) -> tuple[int, ...]:
        """The bytes of each message that carries n values, those of `tensors` where they are known, in their order."""
        if self.factors is None:
            return (self.wire_bytes(n, element_bytes),)
        found = self.factors(n, tensors)
        plain = n - sum(f.end - f.start for f in found) if tensors else 0
        sent = (plain + sum(f.left for f in found), sum(f.right for f in found))
        return tuple(one * element_bytes for one in sent if one)

    def encoded(self, x: np.ndarray, seed: int = 0) -> np.ndarray:
        """Encode values [n], with numbers drawn from a seed where the code draws any."""
        return self.encode(x, seed) if self.drawn else self.encode(x)

    def decoded(self, wire: np.ndarray, n: int, dtype: np.dtype, seed: int = 0) -> np.ndarray:
        """Decode n values that were encoded with a seed."""
        return self.decode(wire, n, dtype, seed) if self.drawn else self.decode(wire, n, dtype)

    def state_values(self, n: int) -> int:
        """Return how many values of n a rank keeps for the next time: what the code lost, and its momentum."""
        return n * (self.feedback + bool(self.correction))


#: The option of codecs whose sums may be made hop by hop.
RING, YES, NO = "ring", "yes", "no"
_RING = RuleOption(
    name=RING,
    what="whether codes are added hop by hop around a ring, decoded and encoded again, in place of a gather of all",
    default=NO,
    choices=lambda: (NO, YES),
)


@cache
def codecs() -> dict[str, Codec]:
    """Every codec by its name, with the usual values of its options."""
    found = [import_module(module).CODECS for module in MODULES]
    return {codec.name: _with_ring(codec) for group in found for codec in group}


def _with_ring(one: Codec) -> Codec:
    """A codec with the option of a ring, where a sum may be encoded as its parts are: codes are not added themselves,
    carry a scale, are as many bytes each time, and nothing is kept of what is lost or drawn."""
    kept = one.feedback or one.drawn or one.varies or one.levels or one.products or one.factors or one.options
    if one.summed or one.each or kept:
        return one
    made = lambda values: msgspec.structs.replace(_with_ring(one), ring=values[RING] == YES)  # noqa: E731
    return msgspec.structs.replace(one, options=(_RING,), made=made)


@lru_cache(maxsize=256)
def codec(text: str) -> Codec:
    """The codec of a name with options, such as ``int8`` or ``topk:share=0.01``.

    Raises:
        MeshwrightError: Y001 when none has the name; names the nearest. Y002 for an option that it has not.
    """
    name, _, rest = text.partition(":")
    known = codecs()
    if name not in known:
        raise MeshwrightError.one("Y001", f"no codec is called {name!r}", help=nearest(name, list(known)))
    found = known[name]
    if not rest:
        return found
    values = {option.name: option.default for option in found.options}
    return found.made(values | read_options(name, found.options, rest))
