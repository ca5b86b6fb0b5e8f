"""``meshwright run`` of a graph network: its vertices are divided over processes, or chunks of them pass its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.cli.run_options import RunOptions
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.graph_epochs import GraphEpochs
    from meshwright.spec.graphs import GraphNetwork


def runnable(model: GraphNetwork, plan: Plan | None, cluster: Cluster | None) -> list[Diagnostic]:
    """Return why a plan is not trained on processes here; nothing where it is, or where there is none."""
    from meshwright.plan.vertex_rules import layout_violations, vertex_violations

    if plan is None:
        return []
    if cluster is not None:
        found = vertex_violations(plan.on(cluster.num_devices), model, cluster)
    else:
        found = layout_violations(plan if plan.several else plan.on(max(1, plan.layout.pp * plan.layout.dp)), model)
    if found:
        return found
    help = "say dp alone, or pp and vertex_chunks="
    if plan.layout.pp > 1 and plan.layout.dp > 1:
        message = "a pipeline whose stages divide vertices is predicted and not trained"
        return [Diagnostic(code="P085", message=message, place="plan.layout", help=help)]
    if model.hidden % model.heads:
        message, help = f"{model.heads} heads do not divide {model.hidden} numbers", "say other heads in the model"
        return [Diagnostic(code="M011", message=message, place=f"{model.name}: heads", help=help)]
    return []


def folder(path: str, option: str, names: Iterable[str] = ()) -> None:
    """Make a folder that a run will write into, files of some `names` among others, before it is trained; nothing where
    `path` is "".

    Raises:
        MeshwrightError: X104 where there can be none.
    """
    from pathlib import Path

    if not path:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message, help = f"cannot write into {path}: {error.strerror}", "name a folder that may be made and written to"
        raise MeshwrightError.one("X104", message, place=f"{option} {path}", help=help) from None
    wrong = [one for name in names for one in unwritable(str(Path(path) / name), option)]
    if wrong:
        raise MeshwrightError(wrong)


def print_losses(losses: list[float | None], each: str, of: str = "") -> bool:
    """Print the losses of epochs or passes; False, with a word of what to do, where one is no number (None)."""
    for number, loss in enumerate(losses):
        console().print(f"{each} {number + 1}: loss {'is no number' if loss is None else f'{loss:.6g}{of}'}")
    if None in losses:
        note("the loss is no number any more: a smaller --lr may keep it one")
    return None not in losses


def run_network(given: RunOptions, model: GraphNetwork, work: GraphEpochs, plan: Plan, numbers: dict[str, Any]) -> int:
    """Train a graph network and print what was trained; 0, or 1 where its loss became no number.

    Raises:
        MeshwrightError: D010 for a graph that cannot be read, X104 for a folder that cannot be made, L001
            for a process that ends before its time.
    """
    from meshwright.assign.cuts import blocks, copies_of
    from meshwright.lower.graph_network import sent_bytes
    from meshwright.run import launch
    from meshwright.run.networks.job import read_graph, train_network, weights_file

    stages, double = plan.layout.pp, given.dtype == "float64"
    ranks = stages if stages > 1 else max(1, plan.layout.dp)
    edges = read_graph(given.data, model, double).edges
    words = (model, numbers["lr"], numbers["seed"], given.data, work.epochs, stages)
    files = [weights_file(rank) for rank in range(stages)]
    folder(given.out, "--out", files)
    note(f"training {model.name} on {ranks} processes for {work.epochs} epochs")
    more = (plan.vertices.vertex_chunks, plan.pipeline.schedule, double, given.out)
    found = launch.start(train_network, *words, *more, num_ranks=ranks, device="cpu", stops=True)
    if found is None:
        return 0
    done = len(found["losses"])
    if done < work.epochs:
        note(f"stopped behind {done} of {work.epochs} epochs: what is written is of these")
    parts = blocks(model.vertices, ranks if stages == 1 else 1)
    boundary, between = sent_bytes(model, copies_of(edges.heads, edges.tails, parts), stages)
    found["predicted_sent_bytes"] = round(done * (boundary + between)) * (2 if double else 1)
    if given.json:
        print_json({"model": model.name, "train": work.text(), "plan": plan.text(), **found})
        return 0 if None not in found["losses"] else 1
    out = console()
    sound = print_losses(found["losses"], "epoch")
    each = found["seconds"] / done
    out.print(f"{done} epochs in {found['seconds']:.3g} s: {each:.3g} s each")
    out.print(f"sent {found['sent_bytes']:,} bytes of vertices, predicted {found['predicted_sent_bytes']:,}")
    if given.out:
        note(f"wrote {', '.join(f'{given.out}/{file}' for file in files)}")
    return 0 if sound else 1
