"""Embeddings: where the tables of a recommendation model are, and how what is looked up in them travels."""

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

#: How tables are placed: nothing said, whole, by rows, by columns, or each as takes least time.
UNSAID, TABLE, ROW, COLUMN, AUTO = "unsaid", "table", "row", "column", "auto"
#: Towers: none, or one for every node.
NO_TOWERS, NODE = "none", "node"


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """How embedding tables are spread over devices (4D parallelism: Mudigere et al., 2022, arXiv 2104.05158).

    Attributes:
        embeddings: every ``table`` whole on a rank; by ``row``, a share of its rows on every rank; by ``column``, cut
            into some slices of its columns, each whole on a rank; ``auto``: each table as a walk over single changes
            finds the step shortest.
        columns: slices of a table that is cut by columns.
        small: tables of at most so many rows are replicated, and their gradients summed like a dense layer's.
        spread: the method that assigns tables and slices to ranks (``assign/``).
        towers: ``node``: the tables of every node are a tower, whose vectors are exchanged inside the node first and
            between ranks of equal place in their nodes then (DMT, Luo et al., 2024, arXiv 2403.00877).
        compress: how many times fewer vectors leave a tower than go in: a linear tower module (changes the model).
        pooled: the format in which pooled vectors and their gradients travel.
    """

    embeddings: str = UNSAID
    columns: int = 2
    small: int = 0
    spread: str = "heaviest-first"
    towers: str = NO_TOWERS
    compress: int = 1
    pooled: str = "fp32"

    @property
    def way(self) -> str:
        """How tables are placed: ``auto`` where nothing is said."""
        return AUTO if self.embeddings == UNSAID else self.embeddings

    @property
    def exact(self) -> bool:
        """Whether the model and its numbers are those of one device."""
        return self.compress == 1 and self.pooled == "fp32"


def _alone(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Words that have nothing to act on: a model that legality asks about has layers and no tables."""
    if plan.embeddings != Embeddings():
        said = " ".join(word for field in FACET.complete().fields for word in field.words(plan))
        help = f"drop {said}, or ask about a recommendation model such as dlrm-dcnv2"
        message = f"{said}: {model.name} has no embedding tables that sparse features look up"
        yield wrong("P081", message, "embeddings", help)


FIELDS = (
    Field(
        name="embeddings",
        help="embedding tables of a recommendation model: whole, by row, by column, or each as takes least time",
        form=names(UNSAID, TABLE, ROW, COLUMN, AUTO),
        spelled=KEYED,
        place=350,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="columns",
        help="slices of an embedding table that is cut by columns",
        form=count(2, 1024),
        spelled=KEYED,
        place=351,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="small",
        help="embedding tables of at most so many rows are replicated (0: none)",
        form=count(0),
        spelled=KEYED,
        place=352,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="spread",
        help="how embedding tables are assigned to ranks",
        form=names("heaviest-first", "local-search", "ilp"),
        spelled=KEYED,
        place=353,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="towers",
        help="embedding tables of a node as a tower: exchanged inside it first, then between nodes",
        form=names(NO_TOWERS, NODE),
        spelled=KEYED,
        place=354,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="compress",
        help="how many times fewer vectors leave a tower than its tables give (1: all of them)",
        form=count(1, 1024),
        spelled=KEYED,
        place=355,
        decides=(LAYER, EXCHANGE),
    ),
    Field(
        name="pooled",
        help="format in which pooled embeddings and their gradients travel",
        form=names("fp32", "bf16", "fp16"),
        spelled=KEYED,
        place=356,
        decides=(EXCHANGE,),
    ),
)
FACET = Facet(
    name="embeddings",
    help="where embedding tables are, and how what is looked up travels",
    record=Embeddings,
    fields=FIELDS,
    rules=(_alone,),
)
