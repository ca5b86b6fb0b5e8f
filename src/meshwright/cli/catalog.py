"""``meshwright catalog``: what is known, and where each number comes from."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.cli import entries, options
from meshwright.cli.output import console, print_json
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import big

DESCRIPTION = """Models, devices, clusters and schedules that are known, with their sources.

meshwright catalog lists everything, meshwright catalog devices one kind, meshwright catalog devices h100 one
entry with the source of every number. meshwright catalog clusters 4x4xa100,25gbe --toml > mine.toml writes a
cluster as a file to change."""
FORMAT_VERSION = 1


class CatalogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright catalog``."""

    kind: options.positional(
        "KIND",
        "models, recommenders, graphs, devices, clusters, schedules, frameworks, links, presets, traces or samples.",
    ) = ""
    name: options.positional("NAME", "One entry in full; for clusters also a short name such as 64xh100.") = ""
    toml: options.switch("A cluster as a commented TOML file, to change and to give to --on.") = False
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; a kind or a name that does not exist is misuse."""
    given, wrong = options.read(CatalogOptions, argv, command="catalog", description=DESCRIPTION)
    given = msgspec.structs.replace(given, kind=entries.plural(given.kind))
    if (given.kind or given.name) and given.kind not in entries.KINDS:
        wrong.append(entries.no_kind(given.kind))
    if given.toml:
        wrong += _not_toml(given)
    if wrong:
        raise MeshwrightError(wrong)
    if given.toml:
        return _template(given.name)
    if given.name:
        return _entry(given)
    kinds = [given.kind] if given.kind else list(entries.KINDS)
    listed = {kind: entries.KINDS[kind].rows() for kind in kinds}
    if given.json:
        print_json({"format_version": FORMAT_VERSION, **listed})
        return 0
    out = console()
    for kind, rows in listed.items():
        out.print(f"[bold]{kind}[/bold] ({len(rows)})")
        for line in _aligned(rows):
            out.print("  " + line, markup=False, soft_wrap=True)
    return 0


def _not_toml(given: CatalogOptions) -> list[Diagnostic]:
    """X011 where --toml asks for something that is no cluster."""
    if given.kind == "clusters" and given.name and not given.json:
        return []
    message = "--toml and --json are two formats" if given.json else "--toml writes one cluster"
    help = f"meshwright catalog clusters {given.name or '4x4xa100,25gbe'} --toml > mine.toml"
    return [Diagnostic(code="X011", message=message, place="meshwright catalog", help=help)]


def _template(name: str) -> int:
    """The cluster's file on stdout, as it is read back."""
    from meshwright.spec.cluster import load, template

    print(template(load(name)), end="")
    return 0


def _entry(given: CatalogOptions) -> int:
    entry = entries.KINDS[given.kind].entry(given.name)
    if given.json:
        print_json({"format_version": FORMAT_VERSION, "kind": given.kind, **entry})
        return 0
    out = console()
    out.print(f"[bold]{given.kind}: {entry['name']}[/bold]")
    for line in entries.lines(entry):
        out.print("  " + line, markup=False, soft_wrap=True)
    return 0


def _aligned(rows: list[dict[str, Any]]) -> list[str]:
    """Rows under their headings, one line each, so that they can be searched; the last column is left free."""
    table = [list(rows[0]), *([_cell(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[-1]]) for line in table]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and value >= 10**6:
        return big(value)
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
