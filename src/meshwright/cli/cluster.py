"""``meshwright cluster``: the cluster of the machine this runs on, as a file."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import note, print_json, unwritable
from meshwright.errors import Diagnostic, MeshwrightError

DESCRIPTION = """Describe the machine this runs on as a cluster file in which every number says where it comes from.

nvidia-smi, rocm-smi, ibstat, lspci, /sys and /proc are asked; what they do not tell is the catalog's figure for the
device, marked as assumed. The file is TOML with a comment on every key: change what differs, and say --on FILE.

Exit code 0: written; 2: no accelerator was found, with everything that was asked."""
FORMAT_VERSION = 1
#: Machines that --nodes takes at most.
MOST_NODES = 1_000_000


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright cluster``."""

    detect: options.switch("Ask this machine what it is.") = False
    nodes: options.text("COUNT", "So many machines of this kind; 1 if left out.") = ""
    device: options.text("NAME", "The catalog's device, where a driver's name for it is not known.") = ""
    out: options.text("FILE", "Write the file there instead of to stdout.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; a machine without accelerators is misuse (C016)."""
    given, wrong = options.read(ClusterOptions, argv, command="cluster", description=DESCRIPTION)
    help = "add --detect; clusters of the catalog and short names: meshwright catalog clusters 4x4xa100,25gbe --toml"
    if not given.detect:
        message = "nothing is asked for"
        wrong.append(Diagnostic(code="X004", message=message, place="meshwright cluster", help=help))
    nodes = int(given.nodes) if given.nodes.isascii() and given.nodes.isdigit() and len(given.nodes) < 10 else 0
    if given.nodes and not 1 <= nodes <= MOST_NODES:
        message = f"--nodes {given.nodes[:40]!r} is not a count from 1 to {MOST_NODES:,}"
        wrong.append(Diagnostic(code="X004", message=message, place="meshwright cluster", help="such as --nodes 4"))
    wrong += unwritable(given.out, "--out")
    if wrong:
        raise MeshwrightError(wrong)
    return _write(given, nodes or 1)


def _write(given: ClusterOptions, nodes: int) -> int:
    from meshwright.detect import Here, detect
    from meshwright.spec.cluster import template

    found = detect(Here(), nodes=nodes, device=given.device)
    asked = [{"asked": answer.asked, "told": not answer.missing, "missing": answer.missing} for answer in found.asked]
    text = template(found.cluster)
    heard = "".join(f"# asked {row['asked']}: {row['missing'] or 'told'}\n" for row in asked)
    if given.out:
        from meshwright.atomic import write_bytes

        write_bytes(given.out, f"{heard}{text}".encode())
        note(f"wrote {given.out}: {found.cluster.title}")
    if given.json:
        cluster = msgspec.to_builtins(found.cluster)
        print_json({"format_version": FORMAT_VERSION, "name": found.cluster.name, "cluster": cluster, "asked": asked})
    elif not given.out:
        print(f"{heard}{text}", end="")
    return 0
