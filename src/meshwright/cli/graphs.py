"""``meshwright predict`` and ``search`` of a model of a graph: of vectors of its nodes, or of a network over it."""

from __future__ import annotations

from typing import Any

from meshwright.cli.question import WANTED, Question, path_of
from meshwright.cli.sheets import PartsRead, limits, of_others, show, show_found, unsearchable, unwritable_files
from meshwright.errors import Diagnostic
from meshwright.spec.graph_epochs import GraphEpochs, parse_graph_epochs

#: What such a question needs, and how it is written; a prediction needs a plan besides.
NEEDED = {"model": WANTED["model"], "on": WANTED["on"], "train": "--train batch=1000,negatives=100,shared=50"}
PLANNED = {"plan": '--plan "partitions=16"'}
#: What of it is written otherwise for a network over a whole graph.
OF_NETWORKS = {"train": "--train epochs=100", "plan": '--plan "dp8"'}
NOUN = "a model of a graph"


def is_of_graph(question: Question) -> bool:
    """Whether a question is about a model of a graph."""
    from meshwright.spec.graphs import is_graph_model

    return is_graph_model(path_of(question.model, question.base))


def predict_graph(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer a question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *of_others(question, given, "predict", NOUN), *unwritable_files(given)]
    reading = PartsRead(question, wrong)
    parts = _read(reading, NEEDED | PLANNED, "predict")
    model, cluster, work, costs, plan = reading.done(*parts, reading.plan())
    if isinstance(work, GraphEpochs):
        from meshwright.answer.graph_network import predict_graph_network as predict
        from meshwright.report.graph_network_sheet import sheet
    else:
        from meshwright.answer.node_embedding import predict_node_embedding as predict
        from meshwright.report.node_embedding_sheet import sheet
    return show(predict(model, cluster, work, plan, costs=costs), sheet, given)


def search_graph(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Search the ways of training a model of a graph and print the best; 0 when a plan fits, 1 when none does.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    reading = PartsRead(question, [*wrong, *of_others(question, given, "search", NOUN), *unsearchable(given)])
    model, cluster, work, costs = reading.done(*_read(reading, NEEDED, "search"))
    from meshwright.report.graphs_sheet import render_best
    from meshwright.search.graphs import find_graph

    found = find_graph(model, cluster, work, costs=costs, **limits(given))
    return show_found(found, render_best, question, given, work.text())


def _read(reading: PartsRead, needed: dict[str, str], command: str) -> tuple[Any, ...]:
    """Model, cluster, workload and costs (None where no framework is named); what is `needed` and not said is noted."""
    from meshwright.spec.edge_samples import parse_edge_samples
    from meshwright.spec.graphs import GraphNetwork, load_graph_model

    asked = reading.question
    model = reading.part(asked.model, lambda: load_graph_model(reading.path(asked.model)))
    whole = isinstance(model, GraphNetwork)
    reading.missing({name: OF_NETWORKS.get(name, how) if whole else how for name, how in needed.items()}, command)
    parse = parse_graph_epochs if whole else parse_edge_samples
    return (
        model,
        reading.cluster("models of graphs are trained"),
        reading.part(asked.train, lambda: parse(asked.train)),
        reading.costs(),
    )
