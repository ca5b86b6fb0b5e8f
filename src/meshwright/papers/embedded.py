"""Figures about models of graphs: the questions and the quantities that are read off an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from meshwright.answer.graph_network import NetworkPrediction, predict_graph_network
from meshwright.answer.node_embedding import NodePrediction, predict_node_embedding
from meshwright.cost import load_framework, standard
from meshwright.papers.published import GraphQuestion
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.edge_samples import parse_edge_samples
from meshwright.spec.graph_epochs import parse_graph_epochs
from meshwright.spec.graphs import GraphNetwork, load_graph_model

#: A quantity of the training of a graph's vectors, or of a network that passes it: its unit, and how it is read.
EMBEDDED: Mapping[str, tuple[str, Callable[[NodePrediction | NetworkPrediction], float]]] = {
    "total time": ("s", lambda p: p.total_s),
    "epoch time": ("s", lambda p: p.epoch_s),
    "throughput": ("samples/s", lambda p: p.samples_per_s),
    "peak memory": ("bytes", lambda p: p.peak_memory_bytes),
    "fits": ("", lambda p: float(p.fits)),
    "bytes swapped": ("bytes", lambda p: p.swapped_bytes),
    "bytes exchanged": ("bytes", lambda p: p.exchanged_bytes),
    "time of exchanges": ("s", lambda p: p.exchange_s),
    "exposed share": ("", lambda p: 1.0 - p.times.places["training"] / p.times.pass_s),
}


@lru_cache(maxsize=64)
def embedded(question: GraphQuestion) -> NodePrediction | NetworkPrediction:
    """Return the predicted training of a question.

    Raises:
        MeshwrightError: all that is wrong with the question.
    """
    model, where, plan = load_graph_model(question.model), load_cluster(question.on), parse_plan(question.plan)
    costs = standard(load_framework(question.framework))
    if isinstance(model, GraphNetwork):
        return predict_graph_network(model, where, parse_graph_epochs(question.train), plan, costs=costs)
    return predict_node_embedding(model, where, parse_edge_samples(question.train), plan, costs=costs)
