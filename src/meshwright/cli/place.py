"""``meshwright place``: a few tensors' placements completed, priced and trained."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, print_json
from meshwright.cli.question import asked, read_parts
from meshwright.errors import Diagnostic, MeshwrightError

DESCRIPTION = """Complete the placements that a file gives a few tensors of a model on a mesh, and price a step of them.

The file has axes of a mesh and tensors with a placement on some: meshwright explain placements. What it leaves open is
chosen so that a step is shortest; exchanges follow from where tensors lie and where operators want them, forward and
backward, and are priced by the common costs, one after the other. --run N trains N steps of it in float64 on processes
of this machine, beside the same model on one process: for small models.

Exit code 0; 1: with --run, losses, gradients or weights differ from one process's; 2: misuse."""
FORMAT_VERSION = 1
WANTED = {
    "model": "MODEL, a catalog name or a config.json (meshwright catalog models)",
    "on": "--on CLUSTER, such as 8xh100, of as many devices as the mesh has ranks",
    "train": "--train batch=8,seq=4096",
    "placements": "--placements FILE, such as placements.toml",
}
#: Differences to one process that the order of float64 sums explains.
ROUNDING = 1e-9
#: Weights that --run makes whole on every process, at most.
MOST = 50_000_000


class PlaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright place``."""

    model: options.positional("MODEL", "Catalog name, or Hugging Face config.json.") = ""
    on: options.text("CLUSTER", "8xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS: meshwright explain workload.") = ""
    placements: options.text("FILE", "A .toml file with [mesh], [weights] and [activations].") = ""
    run: options.text("N", "Train so many steps of it on processes of this machine.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the completion is shown, and trains as one process does; 1 when it does not."""
    given, wrong = options.read(PlaceOptions, argv, command="place", description=DESCRIPTION)
    question = asked({"model": given.model, "on": given.on, "train": given.train})
    wrong += options.missing(msgspec.structs.asdict(given), WANTED, command="place")
    steps = int(given.run) if given.run.isdecimal() else 0
    if given.run and steps < 1:
        message = f"run={given.run!r} is no whole number of 1 and more"
        wrong.append(Diagnostic(code="X023", message=message, place="--run", help="such as --run 3"))
    parts, unread = read_parts(question)
    wrong += unread
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.answer.completion import complete
    from meshwright.cost import standard
    from meshwright.plan import placements
    from meshwright.plan.tensors import network
    from meshwright.report import placed_text

    model, cluster, train = parts[:3]
    if steps and model.num_params > MOST:
        message = f"{model.name} has {model.num_params:,} parameters, and every process makes all of them in float64"
        help = "run a small config.json of the same family, or drop --run"
        raise MeshwrightError.one("A003", message, place="--run", help=help)
    known = network(model, train.global_batch, train.seq_len)
    said = placements.load(given.placements, known, cluster.num_devices)
    whole = network(model, train.global_batch, train.seq_len, relayed=said.said)
    found = complete(whole, said, cluster, train, standard())
    trained = None
    if steps:
        from meshwright.run.annotated import start

        trained = start(found.program, model, train, steps)
    if given.json:
        print_json({"format_version": FORMAT_VERSION, "model": model.name} | placed_text.plain(found, trained))
    else:
        placed_text.print_placed(found, said, trained, console())
    return 1 if trained is not None and trained.worst > ROUNDING else 0
