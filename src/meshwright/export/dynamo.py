"""A Kubernetes manifest for NVIDIA Dynamo: a DynamoGraphDeployment of a frontend and vLLM workers, one a replica.

Written for Dynamo 1.6.1 (``nvidia.com/v1beta1``; ``dynamo/common/configuration/groups/router_args.py`` for routing);
the flags of the workers are those of :mod:`meshwright.export.vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import llm_d, vllm
from meshwright.export import serving_limits as shared
from meshwright.export.comments import commented
from meshwright.export.deployment import Deployment
from meshwright.export.gap import Gap
from meshwright.export.target import load
from meshwright.export.yaml_text import dumps

NAME, FILE, SECRET = "dynamo", "dynamo.yaml", "hf-token-secret"
#: Routing policy -> the frontend's mode of that name.
ROUTING = {
    "round-robin": "round-robin",
    "least-loaded": "least-loaded",
    "power-of-two": "power-of-two",
    "prefix-aware": "kv",
}


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and Dynamo with vLLM cannot express."""
    yield from vllm.engine_limits(d)
    yield from shared.nodes(d, several=True)
    yield from llm_d.vendors(d)
    if d.replicas > 1:
        yield from shared.one_of(d, "routing", ROUTING, f"its frontend routes as {', '.join(ROUTING)}", "least-loaded")


def write(d: Deployment) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    about = load(NAME)
    image = f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{about.version}"
    command = ["python3", "-m", "dynamo.vllm"]
    worker = llm_d.container(d, "main", image, command, ["--model=<MODEL>", *llm_d.arguments(d)], SECRET)
    if d.nodes_per_replica > 1:  # the devices of one of its nodes
        count = {name: str(d.devices_per_node) for name in worker["resources"]["limits"]}
        worker["resources"] = {"limits": count, "requests": count}
    mode = [{"name": "DYN_ROUTER_MODE", "value": ROUTING[d.engine.routing] if d.replicas > 1 else "round-robin"}]
    workers: dict[str, object] = {
        "name": "worker",
        "type": "worker",
        "replicas": d.replicas,
    }
    if d.nodes_per_replica > 1:
        workers["multinode"] = {"nodeCount": d.nodes_per_replica}
    workers["podTemplate"] = {"spec": {"containers": [worker], "volumes": [llm_d.SHARED_MEMORY]}}
    front = {"name": "main", "image": image, "env": mode}
    manifest = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": d.label},
        "spec": {
            "backendFramework": "vllm",
            "components": [
                {
                    "name": "frontend",
                    "type": "frontend",
                    "replicas": 1,
                    "podTemplate": {"spec": {"containers": [front]}},
                },
                workers,
            ],
        },
    }
    comments = {**llm_d.about_flags(), **about.comments}
    head = f"# Manifest for {about.label}, written by Meshwright: kubectl apply -f {FILE}\n# {d.name}\n"
    return {FILE: commented(head + dumps(manifest), comments)}, list(_notes(d))


def _notes(d: Deployment) -> Iterator[str]:
    yield f"start it: kubectl apply -f {FILE}, where Dynamo's operator runs"
    yield f"fill in <MODEL>: the name on the Hugging Face hub; the secret {SECRET} holds HF_TOKEN where it is gated"
    yield from vllm.notes(d)
