"""Buckets: how vectors of a graph's nodes are cut into partitions, who trains which pair of them, and where the others
lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import EXCHANGE, KEYED, LAYER, Facet, Field, count, names, wrong

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: Who trains which bucket: nothing said, as a lock server hands them out, the diagonals of a grid, or the pairs of the
#: days of a tournament.
UNSAID, LOCK, GRID, TOURNAMENT = "unsaid", "lock", "grid", "tournament"
#: Where partitions lie that nobody trains: on the host, on its drives, or with the other machines.
HOST, NVME, PEERS = "host", "nvme", "peers"
#: Swapping: before a bucket is trained, or beside the one before it.
WAIT, BESIDE = "wait", "beside"


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """How the vectors of nodes are trained in pairs of partitions (PyTorch-BigGraph: Lerer et al., 2019, arXiv
    1903.12287; GraphVite: Zhu et al., 2019, arXiv 1903.00757).

    Attributes:
        partitions: into how many parts nodes are cut; edges from one to another are a bucket.
        buckets: ``lock``: every device takes a bucket whose partitions nobody else holds; ``grid``: devices train the
            diagonals of heads by tails, all of one before any of the next; ``tournament``: pairs of partitions of one
            table meet day by day, so that no device is ever left without.
        idle: where partitions lie that nobody trains: ``host``, ``nvme`` or ``peers``.
        swap: ``wait``: a bucket is trained once its partitions are there; ``beside``: those of the next one are brought
            while this one is trained, into room of their own.
        episode: samples of every bucket in a pass over all of them; 0: its edges.
        samplers: threads of each host's processors that make samples; 0: all cores but one for each device.
    """

    partitions: int = 1
    buckets: str = UNSAID
    idle: str = UNSAID
    swap: str = WAIT
    episode: int = 0
    samplers: int = 0

    @property
    def way(self) -> str:
        """Who trains which bucket: ``lock`` where nothing is said."""
        return LOCK if self.buckets == UNSAID else self.buckets


def _alone(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Words that have nothing to act on: a model that legality asks about has layers and no graph."""
    if plan.buckets != Buckets():
        said = " ".join(word for field in FACET.complete().fields for word in field.words(plan))
        help = f"drop {said}, or ask about a model of a graph such as youtube-line"
        yield wrong("P083", f"{said}: {model.name} has no vectors of nodes that edges train", "buckets", help)


FIELDS = (
    Field(
        name="partitions",
        help="parts that the nodes of a graph are cut into, two of which a device trains at a time",
        form=count(1, 4096),
        spelled=KEYED,
        place=360,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="buckets",
        help="who trains which pair of partitions: as a lock server says, by diagonals of a grid, or day by day",
        form=names(UNSAID, LOCK, GRID, TOURNAMENT),
        spelled=KEYED,
        place=361,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="idle",
        help="where partitions of a graph lie that nobody trains: on the host, on drives, with other machines",
        form=names(UNSAID, HOST, NVME, PEERS),
        spelled=KEYED,
        place=362,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="swap",
        help="partitions of a graph are brought before they are trained, or beside the training before",
        form=names(WAIT, BESIDE),
        spelled=KEYED,
        place=363,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="episode",
        help="samples of every pair of partitions in a pass over all of them (0: its edges)",
        form=count(0, 10**10),
        spelled=KEYED,
        place=364,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="samplers",
        help="threads of a host's processors that make samples of a graph (0: all cores but one a device)",
        form=count(0, 4096),
        spelled=KEYED,
        place=365,
        decides=(LAYER,),
    ),
)
FACET = Facet(
    name="buckets",
    help="how vectors of a graph's nodes are trained in pairs of partitions",
    record=Buckets,
    fields=FIELDS,
    rules=(_alone,),
)
