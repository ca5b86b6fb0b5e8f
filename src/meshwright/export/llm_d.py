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
#: Routing policy -> the router's plugins that do so, in the order of the profile; the producers have no part in that.
ROUTING = {
    "least-loaded": ("token-load-scorer",),
    "prefix-aware": ("prefix-cache-affinity-filter", "token-load-scorer"),
}
PRODUCERS = ("inflight-load-producer", "approx-prefix-cache-producer")


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and llm-d with vLLM cannot express."""
    yield from vllm.engine_limits(d)
    yield from shared.nodes(d, False, "a replica is one pod, and a pod lies on one node")
    yield from vendors(d)
    if d.replicas > 1:
        reason = "its router sends a request where fewest tokens are under way, or where its prefix is cached"
        yield from shared.one_of(d, "routing", dict.fromkeys(ROUTING, ""), reason, "least-loaded")


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
    files = {FILE: commented(head + dumps(manifest), comments), ROUTER: _router(d, labels)}
    return files, list(_notes(d))


def _router(d: Deployment, labels: dict[str, str]) -> str:
    """The values of the router's chart: whom it sends requests to, and by which rule."""
    name, chosen = "meshwright-plugins.yaml", ROUTING.get(d.engine.routing, ROUTING["least-loaded"])
    producers = PRODUCERS if len(chosen) > 1 else PRODUCERS[:1]
    plugins = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": one} for one in (*producers, *chosen)],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": one} for one in chosen]}],
    }
    values = {
        "router": {
            "modelServers": {"matchLabels": labels},
            "epp": {"pluginsConfigFile": name, "pluginsCustomConfig": {name: dumps(plugins)}},
        }
    }
    head = f"# Values of the router's chart for {load(NAME).label}, written by Meshwright.\n"
    return commented(head + dumps(values), load(NAME).comments)


def _notes(d: Deployment) -> Iterator[str]:
    yield f"start it: kubectl apply -f {FILE}, beside llm-d's router, whose chart is installed with -f {ROUTER}"
    yield f"fill in <MODEL>: the name on the Hugging Face hub; the secret {SECRET} holds HF_TOKEN where it is gated"
    yield from vllm.notes(d)
