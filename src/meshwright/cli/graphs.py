"""``meshwright predict`` and ``search`` of a model of a graph: of vectors of its nodes, or of a network over it."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import GOAL, WANTED, WORLD, Question, beside, path_of
from meshwright.cli.sheets import show, unwritable_files
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.graph_epochs import GraphEpochs, parse_graph_epochs

#: What such a question needs, and how it is written.
NEEDED = {
    "model": WANTED["model"],
    "on": WANTED["on"],
    "train": "--train batch=1000,negatives=100,shared=50",
    "plan": '--plan "partitions=16"',
}
#: What of it is written otherwise for a network over a whole graph.
OF_NETWORKS = {"train": "--train epochs=100", "plan": '--plan "dp8"'}
#: Options of other questions, by command.
OTHERS = {
    "predict": ("job_trace", "records", "slo", "engine_profile"),
    "search": (
        *("slo", "day", "rates", "goodput", "for_", "headroom", "risk", "robust", "runnable", "strategy", "objective"),
        *("pareto", "variants", "pick", "report", "plot", "store"),
    ),
}


def is_of_graph(question: Question) -> bool:
    """Whether a question is about a model of a graph."""
    from meshwright.spec.graphs import is_graph_model

    return is_graph_model(path_of(question.model, question.base))


def predict_graph(question: Question, given: Any, wrong: list[Diagnostic]) -> int:
    """Answer a question and print it as the options say; 0 when it fits, 1 when not.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    wrong = [*wrong, *_of_others(question, given, "predict"), *unwritable_files(given)]
    model, cluster, work, costs, plan = _read(question, wrong, "predict")
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
    wrong = [*wrong, *_of_others(question, given, "search"), *unwritable(given.save, "--save")]
    if given.top and not (given.top.isdecimal() and int(given.top)):
        wrong.append(Diagnostic(code="R002", message=f"{given.top!r} is not a count", place=f"--top {given.top}"))
    model, cluster, work, costs, _ = _read(question, wrong, "search")
    from meshwright.search.graphs import find_graph

    limits = {name: getattr(given, name) for name in ("fix", "bound", "exclude", "allow")}
    found = find_graph(model, cluster, work, costs=costs, top=int(given.top or 5), **limits)
    if given.json:
        print_json(found.to_json())
    else:
        from meshwright.report.graphs_sheet import render_found

        render_found(found, console())
    if given.save:
        from meshwright.plan.toml import save

        said = {field: getattr(question, field) for field in ("model", "on", "framework") if getattr(question, field)}
        said = {field: beside(path_of(text, question.base), given.save) for field, text in said.items()}
        save(found.best[0].plan, given.save, said | {"train": work.text()})
        note(f"wrote {given.save}: meshwright predict {given.save} says more")
    return 0 if found.fits else 1


def _read(question: Question, wrong: list[Diagnostic], command: str) -> list[Any]:
    """Model, cluster, workload, costs (None where no framework is named) and plan."""
    from meshwright.plan import parse
    from meshwright.spec.cluster import load
    from meshwright.spec.cluster_range import is_range
    from meshwright.spec.edge_samples import parse_edge_samples
    from meshwright.spec.graphs import GraphNetwork, load_graph_model

    wrong = [*wrong]

    def read(text: str, reader: Any) -> Any:
        try:
            return reader() if text else None
        except MeshwrightError as error:
            wrong.extend(error.diagnostics)
            return None

    def costs() -> Any:
        from meshwright.cost import load_framework, standard

        return standard(load_framework(question.framework))

    if is_range(question.on):
        message = f"{question.on!r} is a range of clusters, and buckets are trained on one"
        wrong.append(Diagnostic(code="B005", message=message, place=f"--on {question.on}", help="say one cluster"))
    model = read(question.model, lambda: load_graph_model(path_of(question.model, question.base)))
    whole = isinstance(model, GraphNetwork)
    needed = NEEDED | (OF_NETWORKS if whole else {})
    needed = needed if command == "predict" else {name: needed[name] for name in ("model", "on", "train")}
    wrong += options.missing(msgspec.structs.asdict(question), needed, command=command)
    parts = [
        model,
        None if is_range(question.on) else read(question.on, lambda: load(path_of(question.on, question.base))),
        read(question.train, lambda: (parse_graph_epochs if whole else parse_edge_samples)(question.train)),
        read(question.framework, costs),
        read(question.plan, lambda: parse(path_of(question.plan, question.base))),
    ]
    if wrong:
        raise MeshwrightError(wrong)
    return parts


def _of_others(question: Question, given: Any, command: str) -> list[Diagnostic]:
    """X004 for what is of other questions."""
    said = [f"--{name}" for name in (*GOAL, *WORLD, "serve", "denoise", "rollout") if getattr(question, name)]
    said += [f"--{name.strip('_').replace('_', '-')}" for name in OTHERS[command] if getattr(given, name, "")]
    message = "says nothing of a model of a graph"
    place = f"meshwright {command}"
    return [Diagnostic(code="X004", message=f"{name} {message}", place=place, help="drop it") for name in said]
