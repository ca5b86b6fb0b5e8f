"""Who writes what several processes hold alike: all of them, each a share.

Replicas of a parameter would otherwise leave the writing, and the host memory for it, to one of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.run.pieces import Parameter, TensorPiece

#: A run is cut into shares of at least so many bytes.
SHARE_BYTES = 4 << 20


class Holding(NamedTuple):
    """A run of a parameter that a process holds, in whichever states, as it tells the others: a hash of what it is,
    and whether it owns it."""

    what: str
    owner: bool


def holdings(pieces: Sequence[TensorPiece]) -> list[Holding]:
    """Return the runs of parameters that a process holds, once for all states that it owns alike."""
    return list(dict.fromkeys(Holding(*said) for said in _said(pieces).values()))


def divide(pieces: Sequence[TensorPiece], everyone: Sequence[Sequence[Holding]], rank: int) -> list[TensorPiece]:
    """The pieces, or parts of them, that the process `rank` writes: what exactly one of several holders owns is cut
    among them, the rest is as its owner has it. `everyone`: :func:`holdings` of every process."""
    holders, owners = defaultdict(list), defaultdict(int)
    for other, held in enumerate(everyone):
        for what, owner in held:
            holders[what].append(other)
            owners[what] += owner
    said, out = _said(pieces), []
    for piece in pieces:
        what, _ = said[_run(piece)]
        among = holders[what]
        if owners[what] != 1 or len(among) == 1 or len(set(among)) < len(among):
            out += [piece] if piece.owner and piece.stop > piece.start else []
            continue
        length = piece.stop - piece.start
        count = max(1, min(len(among), length * piece.values.itemsize // SHARE_BYTES))
        # one after another from a place of the run's own, so that small ones are spread too
        share = (among.index(rank) - int(what[:8], 16)) % len(among)
        if share < count:
            a, b = length * share // count, length * (share + 1) // count
            if a < b:
                cut = {"start": piece.start + a, "stop": piece.start + b, "values": piece.values[a:b], "owner": True}
                out.append(piece._replace(**cut))
    return out


def _run(piece: TensorPiece) -> tuple[int, int, int]:
    return id(piece.parameter), piece.start, piece.stop


def _said(pieces: Sequence[TensorPiece]) -> dict[tuple, tuple[str, bool]]:
    """For every run that pieces are states of: its hash, and whether it is owned."""
    states = defaultdict(list)
    for piece in pieces:
        states[_run(piece)].append(piece)
    return {
        run: (
            _hash(same[0].parameter, same[0].start, same[0].stop, [(p.key, str(p.values.dtype)) for p in same]),
            any(p.owner for p in same),
        )
        for run, same in states.items()
    }


def _hash(parameter: Parameter, start: int, stop: int, states: list[tuple[str, str]]) -> str:
    parts = [(p.name, p.shape, p.offset, str(p.select), p.transposed) for p in parameter.parts]
    text = msgspec.json.encode((parameter.shape, parts, start, stop, sorted(states)))
    return hashlib.sha256(text).hexdigest()[:20]
