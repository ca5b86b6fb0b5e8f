"""``meshwright place``: a few tensors' placements of a model completed, or a computation's joins placed; both priced
and trained."""

from __future__ import annotations

from math import prod

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import console, note, print_json
from meshwright.cli.question import asked, read_parts
from meshwright.errors import Diagnostic, MeshwrightError

DESCRIPTION = """Complete the placements that a file gives a few tensors of a model on a mesh, and price a step of them.

The file has axes of a mesh and tensors with a placement on some: meshwright explain placements. What it leaves open is
chosen so that a step is shortest; exchanges follow from where tensors lie and where operators want them, forward and
backward, and are priced by the common costs, one after the other. --run N trains N steps of it in float64 on processes
of this machine, beside the same model on one process: for small models.

In place of MODEL, a COMPUTATION.toml of your own: tensors, which of them are trained or sparse, and steps in einsum
notation to a loss (meshwright explain computation). Its backward is derived, and for every join of both it is chosen
which side is copied or on which key both are cut, so that a step is shortest and fits; --backward shows derived steps.

Exit code 0; 1: with --run, losses, gradients or weights differ from one process's, or nothing fits;
2: misuse."""
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

    model: options.positional("MODEL", "Catalog name, Hugging Face config.json, or COMPUTATION.toml.") = ""
    on: options.text("CLUSTER", "8xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS: meshwright explain workload.") = ""
    placements: options.text("FILE", "A .toml file with [mesh], [weights] and [activations].") = ""
    run: options.text("N", "Train so many steps of it on processes of this machine.") = ""
    backward: options.switch("Show the steps that are derived of a computation.") = False
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the completion is shown, and trains as one process does; 1 when it does not."""
    given, wrong = options.read(PlaceOptions, argv, command="place", description=DESCRIPTION)
    if given.model.endswith(".toml"):
        return _joins(given, wrong)
    question = asked({"model": given.model, "on": given.on, "train": given.train})
    wrong += options.missing(msgspec.structs.asdict(given), WANTED, command="place")
    if given.backward:
        message, help = (
            "--backward is of a computation, whose backward is derived",
            "drop it, or give a COMPUTATION.toml",
        )
        wrong.append(Diagnostic(code="X003", message=message, place="meshwright place", help=help))
    steps = _steps(given, wrong)
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


def _steps(given: PlaceOptions, wrong: list[Diagnostic]) -> int:
    """The steps that are run; 0 where none are asked for, or where what is said is wrong."""
    steps = int(given.run) if given.run.isdecimal() else 0
    if given.run and steps < 1:
        message = f"run={given.run!r} is no whole number of 1 and more"
        wrong.append(Diagnostic(code="X023", message=message, place="--run", help="such as --run 3"))
    return steps


def _joins(given: PlaceOptions, wrong: list[Diagnostic]) -> int:
    """Place a computation of the user's own."""
    wrong += options.missing({"on": given.on}, {"on": WANTED["on"]}, command="place")
    for name in ("train", "placements"):
        if getattr(given, name):
            message = f"--{name} is of a model, and {given.model} says its own sizes"
            wrong.append(Diagnostic(code="X003", message=message, place="meshwright place", help=f"drop --{name}"))
    wrong += lacking("place of a computation", "highspy", extra="ilp")
    steps = _steps(given, wrong)
    from meshwright.spec.cluster import load as load_cluster
    from meshwright.spec.computation_file import load

    found = []
    for reader, text in ((load, given.model), (load_cluster, given.on)):
        try:
            found.append(reader(text) if text else None)
        except MeshwrightError as error:
            wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.answer.joined import LIMIT_S, placed_joins
    from meshwright.cost import standard
    from meshwright.report import joined_text

    computation, cluster = found
    numbers = sum(prod(computation.dims[key] for key in t.keys) for t in computation.tensors.values())
    if steps and numbers > MOST:
        message = f"{computation.name} has {numbers:,} numbers, and every process makes all of them in float64"
        help = f"give dims smaller lengths, {MOST:,} numbers at most, or drop --run"
        raise MeshwrightError.one("A003", message, place=given.model, help=help)
    if len(computation.mesh) > 1:
        note(f"solving all joins on {len(computation.mesh)} axes at once: {LIMIT_S:g} s at most")
    # each other way of a join is a program of its own, which takes seconds where there are two axes
    placed = placed_joins(computation, cluster, standard(), ways=len(computation.mesh) < 2)
    trained = None
    if steps:
        from meshwright.run.computed import start

        trained = start(placed, steps)
    if given.json:
        print_json(
            {"format_version": FORMAT_VERSION, "computation": computation.name} | joined_text.plain(placed, trained)
        )
    else:
        joined_text.print_joined(placed, trained, console(), backward=given.backward)
    return 1 if trained is not None and trained.worst > ROUNDING else 0
