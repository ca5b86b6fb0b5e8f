"""Launch scripts of servers: one server a replica, each on devices of its own, and the balancer in front of them.

``bash run.sh`` on every node starts its replicas; under Slurm ``sbatch run.sh`` does so on all. Where there are
several, ``nginx.conf`` spreads requests over them as the routing policy says: nginx has the three rules by their names.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import launch
from meshwright.export.deployment import Deployment
from meshwright.export.gap import Gap

BALANCER = "nginx.conf"
#: Port of the first server of a node, of the balancer, and where the nodes of a replica meet.
PORT, FRONT, MEETING = 8000, 8080, 29500
#: Routing policy -> the line of nginx's upstream block that says it ("": it is what nginx does by itself).
ROUTING = {"round-robin": "", "least-loaded": "least_conn;", "power-of-two": "random two least_conn;"}
MODEL = "the name on the Hugging Face hub or the folder of the weights"


def routing(d: Deployment) -> Iterator[Gap]:
    """Yield the gap of a routing policy that nginx does not have."""
    if d.replicas > 1 and d.engine.routing not in ROUTING:
        yield Gap(
            facet=f"--serve routing={d.engine.routing}",
            value=f"routing={d.engine.routing}",
            reason=f"the balancer in front of its servers (nginx) routes as {', '.join(ROUTING)}",
            help="say routing=least-loaded",
            mend={"engine.routing": "least-loaded"},
        )


def script(d: Deployment, title: str, config: str, command: str, parts: str = "") -> str:
    """Return the launch script beside `config`: `command` serves ``$MODEL`` with ``$CONFIG`` on ``$PORT``, `parts` are
    its flags where a replica has several nodes."""
    lines = [
        *launch.head(d, title),
        *launch.asked({"MODEL": MODEL}),
        launch.named(config),
        'SELF=$(realpath "${BASH_SOURCE[0]:-run.sh}")',
        'cd "$(dirname "$SELF")"',
        '[[ -e $CONFIG ]] || cd "${SLURM_SUBMIT_DIR:-.}"',
    ]
    if d.num_nodes > 1:
        lines += [
            "# sbatch starts this on the first node alone; from there it starts itself on every one",
            'if [[ -n "${SLURM_JOB_ID:-}" && -z "${SLURM_STEP_ID:-}" ]]; then',
            '  exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c "$(cat "$SELF")" run.sh "$@"',
            "fi",
            ': "${NODE_RANK:=${SLURM_NODEID:?number of this node, from 0}}"',
        ]
    lines += [""]
    lines += _over_nodes(d, command, parts) if d.nodes_per_replica > 1 else _in_node(d, command)
    return "\n".join(lines) + "\n"


def _in_node(d: Deployment, command: str) -> list[str]:
    each, last = d.replicas_per_node, d.replicas - (d.num_nodes - 1) * d.replicas_per_node
    if d.replicas == 1:
        return [f"PORT=${{PORT:-{PORT}}}", f'exec {command} "$@"']
    here = str(each)
    if last != each:
        here = f"$(( NODE_RANK == {d.num_nodes - 1} ? {last} : {each} ))"
    return [
        f"# a server for every replica, with {d.devices} of the devices each; one that ends takes the others along",
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        f"for (( replica = 0; replica < {here}; replica++ )); do",
        f"  PORT=$(( {PORT} + replica ))",
        f"  first=$(( replica * {d.devices} ))",
        f'  CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $(( first + {d.devices - 1} ))) \\',
        f'    {command} "$@" &',
        "done",
        "wait -n",
    ]


def _over_nodes(d: Deployment, command: str, parts: str) -> list[str]:
    k = d.nodes_per_replica
    return [
        f"# a replica has {k} nodes, which meet at the first of them",
        f"PART=$(( NODE_RANK % {k} ))",
        'if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then',
        '  : "${HEAD_NODE:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$(( NODE_RANK - PART + 1 ))p")}"',
        "fi",
        ': "${HEAD_NODE:?host of the first node of the replica (under Slurm it is found)}"',
        f"PORT=${{PORT:-{PORT}}}",
        f'exec {command} {parts} "$@"',
    ]


def balancer(d: Deployment) -> dict[str, str]:
    """Return the balancer's file by its name; none for one replica."""
    if d.replicas == 1:
        return {}
    rule = ROUTING[d.engine.routing]
    lines = [
        "# Spreads requests over the replicas, written by Meshwright: nginx -c \"$PWD/nginx.conf\" -g 'daemon off;'",
        f"# {d.name}",
        "events {}",
        "http {",
        "  upstream replicas {",
        f"    {rule}  # routing={d.engine.routing}" if rule else "    # routing=round-robin, as nginx does by itself",
    ]
    lines += [f"    server {host}:{port};" for host, port in servers(d)]
    lines += [
        "  }",
        "  server {",
        f"    listen {FRONT};",
        "    location / {",
        "      proxy_pass http://replicas;",
        "      proxy_http_version 1.1;",
        "      proxy_buffering off;  # tokens are passed on as they come",
        "      proxy_read_timeout 1h;  # the longest silence within an answer",
        "    }",
        "  }",
        "}",
    ]
    return {BALANCER: "\n".join(lines) + "\n"}


def servers(d: Deployment) -> list[tuple[str, int]]:
    """Return host and port of every replica's server; hosts are placeholders where there are several nodes."""
    if d.num_nodes == 1:
        return [("127.0.0.1", PORT + i) for i in range(d.replicas)]
    if d.nodes_per_replica > 1:
        return [(f"<NODE_{i * d.nodes_per_replica}>", PORT) for i in range(d.replicas)]
    each = d.replicas_per_node
    return [(f"<NODE_{i // each}>", PORT + i % each) for i in range(d.replicas)]


def notes(d: Deployment) -> Iterator[str]:
    """Yield what is to be said of every launch script: how it starts, and what is to be filled in."""
    where = " on every node, NODE_RANK=0, 1, ..." if d.num_nodes > 1 else ""
    yield f"start it: MODEL=... bash run.sh{where}, or sbatch run.sh"
    yield f"MODEL: {MODEL}"
    if d.replicas > 1:
        yield f"requests go to port {FRONT}, where {BALANCER} routes them to {d.replicas} replicas"
        if d.num_nodes > 1:
            yield f"fill in <NODE_0>, <NODE_1> ... of {BALANCER}: the nodes' addresses"
