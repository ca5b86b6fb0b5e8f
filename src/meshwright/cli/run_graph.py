"""``meshwright run`` of a model of a graph: vectors of its nodes are trained on processes, bucket by bucket."""

from __future__ import annotations

from math import ceil
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json
from meshwright.cli.question import asked, path_of
from meshwright.cli.run_network import folder, print_losses, run_network, runnable
from meshwright.cli.run_options import NUMBERS
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.cli.run_options import RunOptions

#: Options that such a run reads.
READ = ("plan_file", "model", "on", "train", "plan", "data", "lr", "seed", "dtype", "out", "drives", "device", "json")
#: Types of numbers of vectors.
DTYPES = {"": "float32", "fp32": "float32", "float64": "float64"}


def is_graph_run(given: RunOptions) -> bool:
    """Whether what is to be run is a model of a graph."""
    from meshwright.spec.graphs import is_graph_model

    try:
        question = _question(given)
    except MeshwrightError:  # a file that cannot be read is said so where it is read
        return False
    return is_graph_model(path_of(question.model, question.base))


def _question(given: RunOptions) -> Any:
    said = {field: getattr(given, field) for field in ("on", "train", "plan")}
    return asked({"model": given.model or given.plan_file, **said})


def run_graph(given: RunOptions, wrong: list[Diagnostic]) -> int:
    """Train the vectors of a graph's nodes and print what was trained; 0.

    Raises:
        MeshwrightError: everything that is wrong with the question, at once.
    """
    from meshwright.plan import parse
    from meshwright.plan.bucket_rules import bucket_violations, of_others, partition_violations
    from meshwright.spec.cluster import load
    from meshwright.spec.edge_samples import parse_edge_samples
    from meshwright.spec.graph_epochs import parse_graph_epochs
    from meshwright.spec.graphs import GraphNetwork, load_graph_model

    question = _question(given)

    def bad(code: str, message: str, place: str, help: str) -> None:
        wrong.append(Diagnostic(code=code, message=message, place=place, help=help))

    for field in given.__struct_fields__:
        if field not in READ and getattr(given, field):
            word = f"--{field.replace('_', '-')}"
            bad("X004", f"{word} says nothing of a model of a graph", "meshwright run", "drop it")
    for field, example in (("train", "batch=1000"), ("plan", '"dp2 partitions=4"'), ("data", "edges.tsv")):
        if not getattr(given, field):
            bad("X004", f"--{field} is needed to train a graph's vectors", "meshwright run", f"say --{field} {example}")
    if given.dtype not in DTYPES:
        bad("X003", f"{given.dtype!r} is no type of a vector's numbers", f"--dtype {given.dtype}", "fp32 or float64")
    if given.device not in ("", "auto", "cpu"):
        bad("X003", "vectors are trained on processors for now", f"--device {given.device}", "drop it")

    def read(text: str, reader: Any) -> Any:
        try:
            return reader() if text else None
        except MeshwrightError as error:
            wrong.extend(error.diagnostics)
            return None

    model = read(question.model, lambda: load_graph_model(path_of(question.model, question.base)))
    whole = isinstance(model, GraphNetwork)
    work = read(question.train, lambda: (parse_graph_epochs if whole else parse_edge_samples)(question.train))
    plan = read(question.plan, lambda: parse(path_of(question.plan, question.base)))
    cluster = read(question.on, lambda: load(path_of(question.on, question.base)))
    if isinstance(model, GraphNetwork):
        wrong += runnable(model, plan, cluster)
    elif model is not None and plan is not None and work is not None:
        plan = plan if plan.several else plan.on(cluster.num_devices if cluster is not None else plan.layout.dp or 1)
        if cluster is not None:
            wrong += bucket_violations(plan, model, cluster, work)
        else:
            others = of_others(plan, model.name, "buckets", "P084", "its vectors are trained in pairs of partitions")
            wrong += others or partition_violations(plan, model)
        if model.relations and work.walk:
            message = "walks go along edges of all relations, and say of none what relation its ends have"
            bad("M011", message, f"{model.name}: relations", "say relations = 0, or drop walk=")
    numbers = {"lr": 0.025, "seed": 0}
    numbers |= options.numbers(given, {field: NUMBERS[field] for field in numbers}, wrong, command="run")
    if wrong:
        raise MeshwrightError(wrong)
    if whole:
        return run_network(given, model, work, plan, numbers)
    return _trained(given, model, work, plan, cluster, numbers)


def _unused(drives: str) -> Diagnostic:
    message = "partitions that nobody trains lie on drives with idle=nvme alone"
    return Diagnostic(code="X004", message=message, place=f"--drives {drives}", help="say idle=nvme, or drop it")


def _trained(given: RunOptions, model: Any, work: Any, plan: Any, cluster: Any, numbers: dict[str, Any]) -> int:
    from meshwright.assign.buckets import moved, stays
    from meshwright.lower.bucket_training import partition_bytes, rounds_of
    from meshwright.plan.facets.buckets import BESIDE, NVME
    from meshwright.run import launch
    from meshwright.run.nodes.job import VECTORS, train_nodes
    from meshwright.run.nodes.train import Hyper
    from meshwright.spec.edge_files import read_edges

    edges = read_edges(given.data, model.nodes, model.relations)
    said, rounds = plan.buckets, rounds_of(model, plan)
    samples = said.episode * said.partitions**2 or len(edges.heads)
    passes = max(1, ceil(work.epochs * len(edges.heads) / samples))
    hyper = Hyper(lr=numbers["lr"], seed=numbers["seed"], episode=said.episode, dtype=DTYPES[given.dtype])
    words = (model, work, hyper, rounds, said.partitions, given.data, passes, given.out)
    if given.drives and said.idle != NVME:
        raise MeshwrightError([_unused(given.drives)])
    folder(given.out, "--out", [VECTORS])
    folder(given.drives, "--drives")
    note(f"training {model.name} on {plan.layout.dp} processes: {passes} passes of {len(rounds)} rounds")
    with TemporaryDirectory(prefix="meshwright-") as temporary:
        drives = (given.drives or temporary) if said.idle == NVME else ""
        more = (drives, said.swap == BESIDE)
        found = launch.start(train_nodes, *words, *more, num_ranks=plan.layout.dp, device="cpu", stops=True)
    if found is None:
        return 0
    done = len(found["losses"])
    if done < passes:
        note(f"stopped behind {done} of {passes} passes: what is written is of these")
    machines = stays(rounds * done, said.partitions, model.context)
    each = (2 if hyper.dtype == "float64" else 1) * partition_bytes(model, work, said.partitions)
    found["predicted_moved_bytes"] = int(moved(machines, peers=True) * each)
    found["predicted_swapped_bytes"] = int(moved(machines) * each) if drives else 0
    if cluster is not None:
        from meshwright.answer.node_embedding import predict_node_embedding

        found["predicted_s"] = predict_node_embedding(model, cluster, work, plan).total_s
    if given.json:
        print_json({"model": model.name, "train": work.text(), "plan": plan.text(), **found})
        return 0 if None not in found["losses"] else 1
    out = console()
    sound = print_losses(found["losses"], "pass", " a sample")
    rate = found["samples"] / found["seconds"] if found["seconds"] else 0.0
    out.print(f"{found['samples']:,} samples in {found['seconds']:.3g} s: {rate:,.0f} samples/s")
    out.print(f"moved {found['moved_bytes']:,} bytes of partitions, predicted {found['predicted_moved_bytes']:,}")
    if said.idle == NVME:
        line = f"read and written on drives: {found['swapped_bytes']:,} bytes"
        out.print(f"{line}, predicted {found['predicted_swapped_bytes']:,}")
    if "predicted_s" in found:
        out.print(f"predicted {found['predicted_s']:.3g} s on {cluster.name}")
    if given.out:
        note(f"wrote {given.out}/{VECTORS}")
    return 0 if sound else 1
