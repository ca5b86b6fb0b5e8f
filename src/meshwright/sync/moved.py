"""Device memory of exchanges: the bytes that a rank reads and writes to encode, decode and apply what is exchanged, and
the values that it keeps for it."""

from __future__ import annotations

from meshwright.sync import ballots
from meshwright.sync.codecs import codec
from meshwright.sync.fragments import GATHERED, LION, REFERENCE, Fragment, coded_length, combining
from meshwright.sync.groups import most_heard
from meshwright.sync.record import Outer


def recoded_bytes(f: Fragment) -> float:
    """Return the bytes of device memory that a rank reads and writes to encode and decode what is exchanged inside a
    shard's group: a gather encodes its own shard and decodes all, a scatter encodes all and decodes its own of each."""
    encoded, decoded = codec(f.within).moved(coded_length(f), f.element_bytes)
    return encoded * (1 if f.what == GATHERED else f.shard.size) + decoded * f.shard.size


def coded_bytes(f: Fragment) -> tuple[float, float]:
    """Return the bytes of device memory that a rank reads and writes to encode its values, and to decode and combine
    those it receives."""
    code, length, copies = codec(f.codec), coded_length(f), f.replica.size
    if f.update == LION:
        return ballots.moved(length, f.element_bytes, copies, f.combine)
    encoded, decoded = code.moved(length, f.element_bytes)
    change, stepped = (values * length * f.element_bytes for values in _stepped_values(f))
    encoded += change
    if f.update == REFERENCE:  # a gradient and that at the reference read, their difference written; its sum added
        encoded, stepped = encoded + 3 * length * f.element_bytes, stepped + 3 * length * f.element_bytes
    if f.mix is not None:
        heard = 0 if code.exact else 1 + most_heard(f.mix.graph, f.replica.size)
        return encoded, decoded * heard + stepped
    if code.ring:  # a copy encodes each part once, adds what came to all but one, and decodes all sums
        added = length * (copies - 1) / copies * (code.wire_bytes(length, 0) / max(1, length) + 2 * f.element_bytes)
        return encoded, decoded + added + stepped
    if not f.collected:
        return encoded, decoded + stepped
    if code.products is not None:  # what all sent is added up before it is transformed back
        return encoded, decoded + (copies - 1) * code.wire_bytes(length, f.element_bytes) + stepped
    made = combining(f).moved(copies, length, f.element_bytes)
    return encoded, decoded * copies + made + stepped


def _stepped_values(f: Fragment) -> tuple[int, int]:
    """Return how many values of device memory are read and written for each value of a fragment to take the change of
    a round, and to apply its mean: what it was at the last exchange is there, and the outer momentum."""
    if f.mix is not None and f.mix.clocks is not None:
        # six values mixed, two read and the message written; own and heard read, two values both ways
        return 12 + 3, 6
    if f.mix is not None and f.mix.priced:
        # message: parameter read, written. Own and others read, the dual both ways, the middle written
        return 2, 1 + most_heard(f.mix.graph, f.replica.size) + 3
    if f.mix is not None:
        # message: parameter read, written. Mixed: own and others read, parameter read and written
        sent, mixed = 2, 1 + most_heard(f.mix.graph, f.replica.size) + 2
        # in a code what is known is read before, and known and heard are read and written after
        return (sent, mixed) if codec(f.codec).exact else (sent + 1, mixed + 4)
    if f.outer is None and not f.lag:
        return 0, 0
    outer = f.outer or Outer()
    # change: parameter, what it was, written. Applied: mean and what it was read, both written; momentum both ways
    return 3, 4 + 2 * bool(outer.momentum) + bool(outer.mix) + 2 * outer.eager


def kept_values(f: Fragment) -> int:
    """Return how many copies of its values a rank keeps for a fragment that is due once in several steps: what it was
    at the last exchange, the outer momentum, and what is on its way or has arrived."""
    outer = f.outer or Outer()
    measured = f.outer is not None or f.lag > 0 or not codec(f.codec).exact
    if f.mix is not None and f.mix.clocks is not None:  # momenta and duals; the message, and the one that is heard
        return 5 + 2
    if f.mix is not None and f.mix.priced:  # the dual, and the middle between neighbours
        return 2
    if f.mix is not None:  # what neighbours know and what they said, in a code; the message, and those that arrive
        return 2 * (not codec(f.codec).exact) + (f.lag > 0) * (2 + most_heard(f.mix.graph, f.replica.size))
    return measured + bool(outer.momentum) + (f.lag > 0) * (2 + outer.eager)
