"""Models of graphs, from a small JSON file: vectors of nodes that are trained by edges, and their catalog.

Every node has a vector, and nodes that an edge joins should have near ones. ``"context": true`` gives every node a
second vector, of where it stands as the other end (LINE, Tang et al., 2015, arXiv 1503.03578); without it both ends of
an edge are rows of one table (PyTorch-BigGraph, Lerer et al., 2019, arXiv 1903.12287). Relations are kinds of edges,
each with a vector of its own that changes what an edge compares::

    {"architectures": ["NodeEmbedding"], "nodes": 1138499, "edges": 4945382, "dim": 128, "context": true}

A graph network has layers in place of one vector: each aggregates what the neighbours of every vertex have, a sparse
product, and multiplies it with weights that all vertices share::

    {"architectures": ["GraphNetwork"], "layer": "gcnii", "layers": 32, "hidden": 100, "vertices": 232965,
     "edges": 114615892, "features": 602, "classes": 41}
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.catalog_models import CatalogModels, ModelKind

#: The architecture that a file names.
NODES = "NodeEmbedding"
NETWORK = "GraphNetwork"
#: Kinds of layers: graph convolution (Kipf and Welling, 2016, arXiv 1609.02907), GraphSAGE (Hamilton et al., 2017,
#: arXiv 1706.02216), attention (Velickovic et al., 2017, arXiv 1710.10903), GCNII (Chen et al., 2020, arXiv
#: 2007.02133).
GCN, SAGE, GAT, GCNII = "gcn", "sage", "gat", "gcnii"
LAYERS = (GCN, SAGE, GAT, GCNII)
#: Bytes of a number of a vector.
NUMBER = 4.0
#: Largest number that a file says: above, a slip of the keyboard.
MOST = 10**13


class NodeEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors of ``dim`` numbers for ``nodes`` nodes that ``edges`` train; with a ``context`` there are two tables, of
    which an edge's head is in the first and its tail in the second. ``relations`` are kinds of edges."""

    name: str
    nodes: int
    edges: int
    dim: int
    context: bool = False
    relations: int = 0
    source: str = ""

    @property
    def tables(self) -> int:
        """Tables of as many rows as there are nodes."""
        return 1 + self.context

    @property
    def sides(self) -> int:
        """Ends of an edge that negatives take the place of: the context's, or both of one table."""
        return 1 if self.context else 2

    @property
    def num_params(self) -> int:
        """All numbers that are trained."""
        return (self.tables * self.nodes + self.relations) * self.dim


class GraphNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """``layers`` of one kind (:data:`LAYERS`) and ``hidden`` numbers a vertex, over ``vertices`` that ``edges`` join,
    each counted in both directions; a product makes ``features`` of a vertex as wide as a layer in front of them,
    another one ``classes`` behind. ``heads`` are of attention over neighbours."""

    name: str
    vertices: int
    edges: int
    features: int
    classes: int
    hidden: int
    layers: int
    layer: str = GCN
    heads: int = 1
    source: str = ""

    @property
    def layer_params(self) -> int:
        """Parameters of one layer: a product of what is aggregated, of it beside the vertex's own (SAGE), with two
        vectors of attention (GAT), and a bias, which GCNII has none of."""
        wide = 2 * self.hidden if self.layer == SAGE else self.hidden
        return wide * self.hidden + {GCNII: 0, GAT: 3 * self.hidden}.get(self.layer, self.hidden)

    @property
    def end_params(self) -> tuple[int, int]:
        """Parameters of the products in front of the layers and behind them."""
        return (self.features + 1) * self.hidden, (self.hidden + 1) * self.classes

    @property
    def num_params(self) -> int:
        """All parameters."""
        return self.layers * self.layer_params + sum(self.end_params)

    @property
    def streams(self) -> int:
        """Numbers of a vertex, in widths of a layer, that go from one layer to the next: GCNII's layers read what the
        first one did besides."""
        return 2 if self.layer == GCNII else 1


GraphModel = NodeEmbedding | GraphNetwork


def read_graph_model(config: Mapping[str, Any], *, name: str = "graph", place: str = "config") -> GraphModel:
    """Return the model of a parsed file; `name` and `place` appear in its errors.

    Raises:
        MeshwrightError: M011 for everything that is wrong, at once.
    """
    if not isinstance(config, Mapping) or config.get("architectures", [NODES]) not in ([n] for n in _readers()):
        help = f"say architectures = [{nearest('', list(_readers()))}]: meshwright explain graph_model"
        message = f"a model of a graph has an architecture of {', '.join(_readers())}"
        raise MeshwrightError.one("M011", message, place=place, help=help)
    keys, required, record = _readers()[config.get("architectures", [NODES])[0]]
    said = {key: value for key, value in config.items() if not key.startswith("_") and key != "architectures"}
    found: list[Diagnostic] = []

    def bad(message: str, where: str, help: str) -> None:
        found.append(Diagnostic(code="M011", message=message, place=f"{place}: {where}", help=help))

    for key in said.keys() - keys.keys():
        bad(f"unknown key {key!r}", key, nearest(key, list(keys)))
    for key in required:
        if key not in said:
            bad(f"{key} is not said", key, f"say {key} = {keys[key][1]}")
    for key, (right, wanted) in keys.items():
        if key in said and not right(said[key]):
            bad(f"{key} = {said[key]!r:.60} is not {wanted}", key, f"say {key} = {wanted}")
    if found:
        raise MeshwrightError(found)
    return record(name=name, source=str(config.get("_source", "")), **said)


def whole(value: Any) -> bool:
    """Whether a value is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


_COUNT = (whole, "a whole number from 1")
#: Layers of a network at most: each of them is a task of an epoch.
MOST_LAYERS = 4096
_LAYERS = (lambda value: whole(value) and value <= MOST_LAYERS, f"a whole number from 1 to {MOST_LAYERS:,}")
_NODE_KEYS = {
    "nodes": _COUNT,
    "edges": _COUNT,
    "dim": _COUNT,
    "context": (lambda value: isinstance(value, bool), "true or false"),
    "relations": (lambda value: value == 0 or whole(value), "a whole number"),
}


@cache
def _readers() -> dict[str, tuple[dict[str, Any], tuple[str, ...], Any]]:
    """By architecture: its keys with what their values are, those that have to be said, and its record."""
    wanted = ("vertices", "edges", "features", "classes", "hidden", "layers")
    layer = {"layer": (lambda value: value in LAYERS, f"one of {', '.join(LAYERS)}")}
    network = dict.fromkeys((*wanted, "heads"), _COUNT) | layer | {"layers": _LAYERS}
    return {NODES: (_NODE_KEYS, ("nodes", "edges", "dim"), NodeEmbedding), NETWORK: (network, wanted, GraphNetwork)}


_MODELS = CatalogModels(ModelKind("model of a graph", "graphs", (NODES, NETWORK), "M011", read_graph_model))


def is_graph_model(text: str) -> bool:
    """Whether a text names a model of a graph of the catalog, or a JSON file of one."""
    return _MODELS.named(text)


def known_graph_models() -> tuple[str, ...]:
    """Names and aliases of the catalog's models of graphs."""
    return tuple(_MODELS.names)


def load_graph_model(text: str) -> GraphModel:
    """Return a model of a graph by its catalog name or alias, or the path of its JSON file.

    Raises:
        MeshwrightError: M011 for a name that is none, an unreadable file, and everything wrong in one.
    """
    return _MODELS.load(text)
