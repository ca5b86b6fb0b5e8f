"""``meshwright export``: the plan as a working configuration of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import options
from meshwright.cli.output import note, print_json, unwritable
from meshwright.cli.question import WANTED
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.export import Exported

DESCRIPTION = """The plan as a configuration of another engine: torchtitan, torchtitan-toml, megatron, deepspeed or
accelerate.

The configuration goes to stdout or --out, notes to stderr: how to start it, what is still to be filled in (<...>).

Exit code 0: it is written; 1: the engine cannot express the plan, with everything that is in the way and the
nearest plan; 2: the question is wrong."""
FORMAT_VERSION = 1
TO = {"to": "--to torchtitan (or torchtitan-toml, megatron, deepspeed, accelerate)"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``meshwright export`` takes."""

    model: options.positional("MODEL", "Catalog name or Hugging Face config.json.") = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp8 pp4 vpp5 zero1', or a .toml file: meshwright explain plan.") = ""
    to: options.text("TARGET", "torchtitan, torchtitan-toml, megatron, deepspeed or accelerate.") = ""
    out: options.text("FILE", "Write the configuration there, and what belongs to it beside it.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the configuration is written; what the target cannot express is raised."""
    given, wrong = options.read(Options, argv, command="export", description=DESCRIPTION)
    wrong += options.missing(msgspec.structs.asdict(given), WANTED | TO, command="export")
    wrong += unwritable(given.out, "--out")
    nouns = _read(given, wrong)
    from meshwright.export import export, target

    if given.to:
        try:
            target(given.to)
        except MeshwrightError as error:
            wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    exported = export(given.to, *nouns)
    if given.out:
        exported = _written(exported, given.out)
    _show(exported, given)
    return 0


def _read(given: Options, wrong: list) -> list:
    """Model, cluster, workload and plan as far as they could be read; what was wrong with the others is added."""
    from meshwright.plan import parse as read_plan
    from meshwright.spec.cluster import load as read_cluster
    from meshwright.spec.model import load as read_model
    from meshwright.spec.workload import parse as read_train

    readers = {"model": read_model, "on": read_cluster, "train": read_train, "plan": read_plan}
    nouns = []
    for field, reader in readers.items():
        text = getattr(given, field)
        try:
            nouns += [reader(text)] if text else []
        except MeshwrightError as error:
            wrong += error.diagnostics
    return nouns


def _show(exported: Exported, given: Options) -> None:
    if given.json:
        print_json({"format_version": FORMAT_VERSION, **msgspec.to_builtins(exported)})
        return
    if not given.out:
        for name, text in exported.files.items():
            if len(exported.files) > 1:
                note(f"{name}:")
            print(text, end="", flush=True)
    for line in exported.notes:
        note(f"note: {line}")


def _written(exported: Exported, out: str) -> Exported:
    """Write the main file to `out` and the others beside it, the main one last: where it is, the others are.

    Raises:
        MeshwrightError: X104 for a place that cannot be written or cannot hold a configuration of several files: a
            pipe, or the name of one of the others.
    """
    from meshwright.atomic import is_stream, write_bytes

    (first, *others), path, stream = exported.files, Path(out), is_stream(out)
    if others and (stream or path.name in others):
        reason = "it takes one file" if stream else "another file of this configuration has that name"
        belong = f"{', '.join(others)} {'belongs' if len(others) == 1 else 'belong'} to it"
        raise MeshwrightError.one(
            "X104",
            f"cannot write {out}: {reason}, and {belong}",
            place=f"--out {out}",
            help="name another file, or leave out --out: all of them go to stdout then",
        )
    if not stream:
        exported = exported.renamed(path.name)
        first = path.name
    for name, text in reversed(exported.files.items()):
        file = path if name == first else path.parent / name
        write_bytes(file, text.encode())
        note(f"wrote {file}")
    return exported
