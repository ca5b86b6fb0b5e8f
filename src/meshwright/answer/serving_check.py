"""Checks of a serving question: words of a plan that serving has no use for, models of other kinds, requests that are
too long."""

from __future__ import annotations

import numpy as np

from meshwright import serving
from meshwright.cost.engine import engine_profile
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Experts, Layout, Memory, Pipeline, Plan, check
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests, numbered
from meshwright.spec.serve import Serve
from meshwright.spec.workload import Train


def refused(plan: Plan, model: Model, cluster: Cluster, serve: Serve) -> list[Diagnostic]:
    """Return everything that is wrong with a plan, a model, a cluster and an engine's words."""
    found: list[Diagnostic] = []
    words = serve.engine
    for axis, name in (("batching", words.policy), ("order", words.order), ("routing", words.routing)):
        found += _tried(lambda axis=axis, name=name: serving.get(axis, name))
    found += _tried(lambda: engine_profile(serve.engine.profile))
    if not model.is_decoder:
        what = "a decoder of attention and MLP or experts is served, and nothing else is yet"
        found.append(_bad(f"{model.name} is no plain decoder", f"model {model.name}", what))
    if len(cluster.islands) > 1:
        help = "say one of its islands: replicas of unlike devices are not served together yet"
        found.append(_bad(f"{cluster.name} has islands of unlike devices", f"--on {cluster.name}", help))
    words = _training_words(plan)
    if words:
        help = "tp, pp and dp (replicas) lay out serving, and a precision its weights"
        found.append(_bad(f"the plan says {', '.join(words)}", f"--plan {plan.text()}", help))
    if found or not model.is_decoder:
        return found
    layout = plan.layout
    train = Train(global_batch=max(1, layout.dp), seq_len=max(1, layout.tp), causal=True)
    wrong = check(plan, model, cluster, train)
    if layout.num_ranks <= cluster.num_devices:  # replicas need not fill a cluster
        wrong = [d for d in wrong if d.code != "P010"]
    return wrong


def _tried(get) -> list[Diagnostic]:
    try:
        get()
    except MeshwrightError as error:
        return list(error.diagnostics)
    return []


def _training_words(plan: Plan) -> list[str]:
    """The words of a plan that are of training alone."""
    usual, layout = Layout(), plan.layout
    said = [name for name in ("cp", "zero", "shard", "shares") if getattr(layout, name) != getattr(usual, name)]
    said += [name for name in ("vpp", "microbatch") if getattr(plan.pipeline, name) != getattr(Pipeline(), name)]
    said += [name for name in ("ep", "etp", "imbalance") if getattr(plan.experts, name) != getattr(Experts(), name)]
    said += [name for name in ("recompute", "attention") if getattr(plan.memory, name) != getattr(Memory(), name)]
    return said


def oversized(model: Model, requests: Requests) -> list[Diagnostic]:
    """Return W012 for requests that are longer than the model's context, by their lines."""
    longest = model.max_seq_len
    over = np.flatnonzero(requests.prompt + requests.output > longest) if longest else np.empty(0, np.int64)
    if not len(over):
        return []
    where = numbered(requests.line[over]) if len(requests.line) else f"{len(over):,} of {len(requests):,} requests"
    message = f"prompt and answer are longer than the {longest:,} tokens of {model.name}'s context: {where}"
    help = "leave them out, or take a model with a longer context"
    return [Diagnostic(code="W012", message=message, place=f"--serve {requests.source}".strip(), help=help)]


def _bad(message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="W014", message=message, place=place, help=help)
