"""Vertices: how the graph that a graph network passes is cut into chunks that stream through a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import KEYED, LAYER, STRUCTURE, Facet, Field, count, wrong

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


class Vertices(msgspec.Struct, frozen=True, kw_only=True):
    """How a graph passes a pipeline of layers (GNNPipe: Chen et al., 2023, arXiv 2308.10087).

    Attributes:
        vertex_chunks: parts of the graph that pass the stages one after the other. A vertex whose neighbour is in a
            chunk that comes later reads what that had in the epoch before.
    """

    vertex_chunks: int = 1


def _alone(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """A word that has nothing to act on: a model that legality asks about passes sequences and no graph."""
    if plan.vertices != Vertices():
        said = f"vertex_chunks={plan.vertices.vertex_chunks}"
        help = f"drop {said}, or ask about a graph network such as reddit-gcnii"
        yield wrong("P083", f"{said}: {model.name} passes no graph", "vertices", help)


FIELDS = (
    Field(
        name="vertex_chunks",
        help="parts of a graph that pass the stages of a graph network one after the other",
        form=count(1, 65536),
        spelled=KEYED,
        place=370,
        decides=(STRUCTURE, LAYER),
    ),
)
FACET = Facet(
    name="vertices",
    help="how a graph passes a pipeline of a graph network",
    record=Vertices,
    fields=FIELDS,
    rules=(_alone,),
)
