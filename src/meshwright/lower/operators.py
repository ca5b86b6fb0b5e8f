"""Recompute by operators: the outputs of a layer that are saved, and the operators recomputed before its backward.

The policy that TorchTitan calls selective with the option "op" (``distributed/activation_checkpoint.py``): the outputs
of every second matrix product, of the attention core, of reduce-scatters and of all-to-alls stay, everything else is
repeated from the layer's input, and repeating stops at the last tensor that the backward reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.layers.pieces import Piece
from meshwright.work import AttentionCore, Collective, Gemm, GroupedGemm

#: Collectives whose results stay.
KEPT = ("reduce_scatter", "all_to_all")


def kept_bytes(pieces: list[Piece]) -> float:
    """Return the bytes of the outputs that a layer's forward saves for its backward, its input not among them."""
    return sum(kept for _, kept, _ in _shares(pieces))


def repeated(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces whose forward is recomputed, products cut down to the columns that were not saved."""
    needed = [i for i, p in enumerate(pieces) if p.saved or p.held or p.core_saved]
    last = needed[-1] if needed else 0
    out = []
    for piece, _, share in list(_shares(pieces))[:last]:
        if share == 1.0:
            out.append(piece)
        elif share > 0.0:
            work = piece.forward
            out.append(msgspec.structs.replace(piece, forward=msgspec.structs.replace(work, n=round(work.n * share))))
    return out


def _shares(pieces: list[Piece]) -> Iterator[tuple[Piece, float, float]]:
    """Yield each piece with the bytes of its output that are saved and the share of its forward that is recomputed."""
    seen = 0
    for piece in pieces:
        match piece.forward:
            case Gemm() | GroupedGemm() if piece.outputs:
                kept = sum(piece.outputs[seen % 2 :: 2])
                seen += len(piece.outputs)
                yield piece, kept, 1.0 - kept / sum(piece.outputs)
            case AttentionCore():
                yield piece, sum(piece.outputs), 0.0
            case Collective(op=op) if op in KEPT:
                size = piece.forward.num_bytes
                yield piece, size / piece.forward.group.size if op == "reduce_scatter" else size, 0.0
            case _:
                yield piece, 0.0, 1.0
