"""Overlap rewrites of the graph of a layer's pass: slice, hoist and relax, each proved to be legal.

A technique is a recipe over the three. ``tiles`` slices a product with its collective (Wang et al., ASPLOS 2023; Flux,
2406.06858; PyTorch's asynchronous tensor parallelism); ``triggered`` is the same where the device's memory starts each
part's exchange (T3, 2401.16677); ``domino`` hoists the last collective of a layer over its border and slices the batch,
and the columns of the products in front of collectives (Domino, 2409.15241); ``ladder`` relaxes what a block waits for
(Ladder Residual, 2501.06589), which changes what is computed.
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.lower.entry import Entry
from meshwright.lower.rewrites.hoist import hoisted
from meshwright.lower.rewrites.legality import Proof, proof
from meshwright.lower.rewrites.relax import relaxed
from meshwright.lower.rewrites.slice import by_columns, by_rows, tiled
from meshwright.plan import Overlap


def rewritten(entries: list[Entry], ends: tuple[int, ...], overlap: Overlap) -> list[Entry]:
    """Return the entries of a pass under the overlap of a plan; `ends` are those that the next layer waits for.

    Raises:
        MeshwrightError: G003 when the rewrite is not legal, or drops an edge though the plan's way is exact.
    """
    if not overlap.tp:
        return entries
    found = _recipe(entries, ends, overlap)
    if found != entries:
        verdict = proof(entries, ends, found)
        if overlap.exact and not verdict.exact:
            edge = " before ".join(verdict.dropped[0])
            raise MeshwrightError.one("G003", f"overlap=tp:{overlap.how or 'tiles'} does not keep {edge}")
    return found


def _recipe(entries: list[Entry], ends: tuple[int, ...], overlap: Overlap) -> list[Entry]:
    rows, columns = overlap.pieces
    if rows * columns > 1:
        return by_rows(by_columns(hoisted(entries, ends), columns), rows)
    if overlap.how == "ladder":
        return relaxed(entries, ends)
    return tiled(entries, triggered=overlap.how == "triggered")


__all__ = ["Proof", "by_columns", "by_rows", "hoisted", "proof", "relaxed", "rewritten", "tiled"]
