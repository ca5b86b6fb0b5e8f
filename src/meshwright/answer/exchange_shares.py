"""Shares of the bandwidth between nodes that exchanges of sharded state are priced at, as assumptions of an answer."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.answer.prediction import Assumption
from meshwright.cost import Framework
from meshwright.lower import Lowered

#: What an exchange of sharded state is called, by how it is done (:class:`meshwright.work.Move`).
SHARDED = {
    "layers": "exchanges of each layer",
    "late": "gather after the update",
}


def exchange_shares(lowered: Lowered, framework: Framework) -> Iterator[Assumption]:
    """Yield the share of the bandwidth between nodes that each kind of exchange of the plan reaches under a framework,
    where it is not all of it."""
    met = {
        move.sharded
        for program in lowered.programs
        if program.kind == "exchange"
        for move in program.moves
        if any(hop.scale_out for hop in move.group.hops)
    }
    for kind, share in (("layers", framework.exchange_share), ("late", framework.gather_share)):
        if kind in met and share != 1.0:
            value = f"{share:.0%} of the bandwidth between nodes"
            yield Assumption(SHARDED[kind], value, framework.source, framework.flagged)
