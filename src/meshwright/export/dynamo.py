"""A Kubernetes manifest for NVIDIA Dynamo: a DynamoGraphDeployment of a frontend and vLLM workers, one a
replica, of which some may compute prompts and others go on with them.

Written for Dynamo 1.6.1 (``nvidia.com/v1beta1``; ``dynamo/common/configuration/groups/router_args.py`` for routing);
the flags of the workers are those of :mod:`meshwright.export.vllm`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from meshwright.export import llm_d, vllm
from meshwright.export import serving_limits as shared
from meshwright.export.comments import commented
from meshwright.export.deployment import Deployment, ServedPart
from meshwright.export.gap import Gap
from meshwright.export.target import load
from meshwright.export.yaml_text import dumps
from meshwright.plan.serving_roles import DECODE, PREFILL

NAME, FILE, SECRET = "dynamo", "dynamo.yaml", "hf-token-secret"
#: Routing policy -> the frontend's mode of that name.
ROUTING = {
    "round-robin": "round-robin",
    "least-loaded": "least-loaded",
    "power-of-two": "power-of-two",
    "prefix-aware": "kv",
}

#: Role of a pool -> the component of that kind, and how it is called as a flag.
TYPES = {PREFILL: "prefill", DECODE: "decode"}
#: How caches go from pool to pool: every worker sends and receives.
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and Dynamo with vLLM cannot express."""
    yield from vllm.engine_limits(d)
    yield from shared.nodes(d, several=True)
    yield from llm_d.vendors(d)
    if d.replicas > 1:
        yield from shared.one_of(d, "routing", ROUTING, f"its frontend routes as {', '.join(ROUTING)}", "least-loaded")


def limits_apart(pools: Sequence[ServedPart]) -> Iterator[Gap]:
    """Yield what Dynamo with vLLM cannot express of pools that compute prompts, or go on with them."""
    for one in pools:
        if one.role not in TYPES:
            yield Gap(
                facet=f"plan.{one.name}",
                value=f"a pool that serves from end to end ({one.name}) beside others",
                reason="its workers compute prompts or go on with them, or all of them do both",
                help="link every pool, or say a plan of one",
            )


def write(d: Deployment) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    return _manifest(d, [_worker(d, "worker", "worker", d.replicas)], d.replicas, d.name), list(_notes(d))


def write_apart(pools: Sequence[ServedPart], name: str) -> tuple[dict[str, str], list[str]]:
    """(files, notes) of pools that compute prompts, or go on with them; `name` is the question in a line."""
    workers = []
    for one in pools:
        kind = TYPES[one.role]
        extra = [f"--disaggregation-mode={kind}", f"--kv-transfer-config={json.dumps(TRANSFER)}"]
        workers.append(_worker(one.deployment, one.name, kind, one.deployment.replicas, extra))
    first = pools[0].deployment
    return _manifest(first, workers, 2, name), [
        *_notes(first),
        "caches go from worker to worker over NIXL: RDMA or TCP",
    ]


def _worker(d: Deployment, name: str, kind: str, replicas: int, extra: Sequence[str] = ()) -> dict[str, object]:
    """A component of replicas."""
    command = ["python3", "-m", "dynamo.vllm"]
    one = llm_d.container(d, "main", _image(), command, ["--model=<MODEL>", *llm_d.arguments(d), *extra], SECRET)
    found: dict[str, object] = {"name": name, "type": kind, "replicas": replicas}
    if d.nodes_per_replica > 1:  # the devices of one of its nodes
        count = {resource: str(d.devices_per_node) for resource in one["resources"]["limits"]}
        one["resources"] = {"limits": count, "requests": count}
        found["multinode"] = {"nodeCount": d.nodes_per_replica}
    return found | {"podTemplate": {"spec": {"containers": [one], "volumes": [llm_d.SHARED_MEMORY]}}}


def _image() -> str:
    return f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{load(NAME).version}"


def _manifest(d: Deployment, workers: list[dict[str, object]], replicas: int, name: str) -> dict[str, str]:
    """The file of a frontend and workers."""
    about = load(NAME)
    mode = ROUTING[d.engine.routing] if replicas > 1 else "round-robin"
    front = {"name": "main", "image": _image(), "env": [{"name": "DYN_ROUTER_MODE", "value": mode}]}
    frontend = {"name": "frontend", "type": "frontend", "replicas": 1, "podTemplate": {"spec": {"containers": [front]}}}
    manifest = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": d.label},
        "spec": {"backendFramework": "vllm", "components": [frontend, *workers]},
    }
    own = {"--disaggregation-mode": "this pool's role", "--kv-transfer-config": "how caches go from pool to pool"}
    comments = {**llm_d.about_flags(), **own, **about.comments}
    head = f"# Manifest for {about.label}, written by Meshwright: kubectl apply -f {FILE}\n# {name}\n"
    return {FILE: commented(head + dumps(manifest), comments)}


def _notes(d: Deployment) -> Iterator[str]:
    yield f"start it: kubectl apply -f {FILE}, where Dynamo's operator runs"
    yield f"fill in <MODEL>: the name on the Hugging Face hub; the secret {SECRET} holds HF_TOKEN where it is gated"
    yield from vllm.notes(d)
