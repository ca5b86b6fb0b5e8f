"""Kubernetes manifests for llm-d: a Deployment of vLLM servers, a pod a replica, and the values of its router's chart.

Written for llm-d 0.8 (the guide "optimized-baseline": its model server's Deployment, its router's values); the flags of
the servers are those of :mod:`meshwright.export.vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import serving_limits as shared
from meshwright.export import vllm
from meshwright.export.comments import commented
from meshwright.export.deployment import Deployment
from meshwright.export.gap import Gap
from meshwright.export.target import load
from meshwright.export.yaml_text import dumps

NAME, FILE, ROUTER = "llm-d", "llm-d.yaml", "router.values.yaml"
PORT = 8000
#: The secret that holds the token of the Hugging Face hub.
SECRET = "llm-d-hf-token"
#: The resource that a vendor's device plugin counts.
RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
#: The router's plugins that send a request where fewest tokens are under way.
PLUGINS = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: inflight-load-producer
- type: token-load-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: token-load-scorer
"""


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and llm-d with vLLM cannot express."""
    yield from vllm.engine_limits(d)
    yield from shared.nodes(d, False, "a replica is one pod, and a pod lies on one node")
    yield from vendors(d)
    if d.replicas > 1 and d.engine.routing != "least-loaded":
        yield Gap(
            facet=f"--serve routing={d.engine.routing}",
            value=f"routing={d.engine.routing}",
            reason="its router sends a request where fewest tokens are under way",
            help="say routing=least-loaded",
            mend={"engine.routing": "least-loaded"},
        )


def vendors(d: Deployment) -> Iterator[Gap]:
    """Yield the gap of devices that no device plugin here counts."""
    device = d.cluster.islands[0].device
    if device.vendor not in RESOURCES:
        yield Gap(
            facet="cluster",
            value=device.name,
            reason=f"pods ask for devices of {' or '.join(RESOURCES)}",
            help="export a launch script instead: --to vllm",
        )


def arguments(d: Deployment) -> list[str]:
    """Return the flags of a replica's engine."""
    return shared.flagged("vllm", vllm.settings(d))


def about_flags() -> dict[str, str]:
    """Return the comments of vLLM's flags, by the flag as it is written."""
    return {f"--{form}{key}": text for key, text in load("vllm").comments.items() for form in ("", "no-")}


def container(
    d: Deployment, name: str, image: str, command: list[str], arguments: list[str], secret: str = SECRET
) -> dict[str, object]:
    """Return a container that has a replica's devices, the shared memory of its ranks and the hub's token."""
    devices = {RESOURCES[d.cluster.islands[0].device.vendor]: str(d.devices)}
    return {
        "name": name,
        "image": image,
        "command": command,
        "args": arguments,
        "env": [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": secret, "key": "HF_TOKEN", "optional": True}},
            }
        ],
        "resources": {"limits": devices, "requests": devices},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


#: Memory that the ranks of a pod share.
SHARED_MEMORY = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "20Gi"}}


def write(d: Deployment) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    labels = {"llm-d.ai/model": d.label, "llm-d.ai/guide": f"meshwright-{d.label}"}
    image = f"vllm/vllm-openai:v{load('vllm').version}"
    server = container(d, "modelserver", image, ["vllm", "serve"], ["<MODEL>", f"--port={PORT}", *arguments(d)])
    server["ports"] = [{"name": "http", "containerPort": PORT, "protocol": "TCP"}]
    alive = {"httpGet": {"path": "/health", "port": "http"}}
    server |= {
        "startupProbe": alive | {"periodSeconds": 30, "failureThreshold": 120},
        "livenessProbe": alive | {"periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {"httpGet": {"path": "/v1/models", "port": "http"}, "periodSeconds": 5},
    }
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": d.label, "labels": labels},
        "spec": {
            "replicas": d.replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [server], "volumes": [SHARED_MEMORY]},
            },
        },
    }
    about = load(NAME)
    comments = {**about_flags(), **about.comments}
    head = f"# Servers for {about.label}, written by Meshwright: kubectl apply -f {FILE}\n# {d.name}\n"
    files = {FILE: commented(head + dumps(manifest), comments), ROUTER: _router(labels)}
    return files, list(_notes(d))


def _router(labels: dict[str, str]) -> str:
    """The values of the router's chart: whom it sends requests to, and by which rule."""
    name = "meshwright-plugins.yaml"
    values = {
        "router": {
            "modelServers": {"matchLabels": labels},
            "epp": {"pluginsConfigFile": name, "pluginsCustomConfig": {name: PLUGINS}},
        }
    }
    head = f"# Values of the router's chart for {load(NAME).label}, written by Meshwright.\n"
    return commented(head + dumps(values), load(NAME).comments)


def _notes(d: Deployment) -> Iterator[str]:
    yield f"start it: kubectl apply -f {FILE}, beside llm-d's router, whose chart is installed with -f {ROUTER}"
    yield f"fill in <MODEL>: the name on the Hugging Face hub; the secret {SECRET} holds HF_TOKEN where it is gated"
    yield from vllm.notes(d)
