"""The open end of a part of a model: what it passes on is the link's affair, so that there is nothing to do."""

from __future__ import annotations

from meshwright.layers.kind import Kind
from meshwright.layers.pieces import Context, Piece
from meshwright.spec.ends import Boundary


def pieces(c: Context, spec: Boundary) -> list[Piece]:
    """Return no pieces."""
    return []


KINDS = (Kind(name="boundary", record=Boundary, pieces=pieces),)
