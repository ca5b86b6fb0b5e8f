"""Launch scripts: bash that starts an exported configuration on every node, under Slurm or by hand.

One script serves both. ``sbatch run.sh`` reads the ``#SBATCH`` lines and starts itself once a node; ``bash run.sh`` on
each node does the same by hand. What a plan does not say is asked of the environment before anything starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.export.request import ExportRequest

if TYPE_CHECKING:
    from meshwright.export.deployment import Deployment

#: The name of a launch script that lies beside its configuration.
FILE = "run.sh"
#: Who made a file: only such a launch script is written over.
WRITTEN_BY = "written by Meshwright"
PORT = 29500
#: What the environment says where there are several nodes.
HEAD_NODE = "host:port of the first node, the same on every node (under Slurm it is found)"
TORCHRUN = "torchrun"


def head(r: ExportRequest | Deployment, title: str, file: str = FILE) -> list[str]:
    """The lines above everything: what the script is, how it is started, and what Slurm is to give it."""
    several = r.num_nodes > 1
    by_hand = (
        f"bash {file} on each of the {r.num_nodes} nodes, HEAD_NODE set" if several else f"bash {file} on the node"
    )
    return [
        "#!/bin/bash",
        f"# {title}, {WRITTEN_BY}.",
        f"# {r.name}",
        f"# Slurm: sbatch {file}. By hand: {by_hand}.",
        f"#SBATCH --nodes={r.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={r.processes_per_node}",
        "#SBATCH --exclusive",
        "set -euo pipefail",
    ]


def asked(wanted: Mapping[str, str]) -> list[str]:
    """Lines that end the script with the reason where the environment lacks a variable: name -> what it is."""
    return [f': "${{{name}:?{what}}}"' for name, what in wanted.items()]


def nodes(r: ExportRequest) -> list[str]:
    """Lines that start this once a node under Slurm, and find the node where all meet."""
    if r.num_nodes == 1:
        return []
    return [
        "each_node=()",
        'if [[ -n "${SLURM_JOB_ID:-}" && -z "${SLURM_STEP_ID:-}" ]]; then',
        "  each_node=(srun --ntasks-per-node=1 --kill-on-bad-exit=1)",
        f'  : "${{HEAD_NODE:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}}}"',
        "fi",
        f': "${{HEAD_NODE:?{HEAD_NODE}}}"',
    ]


def each(r: ExportRequest) -> str:
    """Return the bash prefix that starts a command once a node, "" for one node; bash before 4.4 takes an empty list
    for unset."""
    return '${each_node[@]+"${each_node[@]}"} ' if r.num_nodes > 1 else ""


def torchrun(r: ExportRequest) -> str:
    """The start of a command that runs a process a device."""
    where = ' --rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE"' if r.num_nodes > 1 else ""
    return f"{each(r)}{TORCHRUN} --nnodes={r.num_nodes} --nproc-per-node={r.processes_per_node}{where}"


def script(r: ExportRequest, title: str, config: str, command: str, wanted: Mapping[str, str]) -> str:
    """The launch script that lies beside `config`: ``command`` finds its name in ``$CONFIG``."""
    lines = [
        *head(r, title),
        *asked(wanted),
        *nodes(r),
        named(config),
        # sbatch runs a copy of the script, which lies elsewhere
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        '[[ -e $CONFIG ]] || cd "${SLURM_SUBMIT_DIR:-.}"',
        "",
        f'{command} "$@"',
    ]
    return "\n".join(lines) + "\n"


def named(config: str) -> str:
    """The line that says which configuration is started."""
    return f"CONFIG={shlex.quote(config)}"


def note(r: ExportRequest, command: str) -> str:
    """Return the note on how to start the launch script."""
    plain = command.removeprefix(each(r)).replace('"$HEAD_NODE"', "<HOST:PORT>")
    every = " on every node" if r.num_nodes > 1 else ""
    return f"start it{every}: {plain}"
