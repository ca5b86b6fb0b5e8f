"""``meshwright whatif``: what a published technique does to a plan of one's own."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import OPTIONAL, WANTED, asked, read_parts
from meshwright.errors import MeshwrightError

DESCRIPTION = """Put the recipes of papers over a plan: what is gained, what it does to memory, whether it is exact.

Say MODEL, --on, --train and --plan (or name a question.toml) and --try with one or more ids of meshwright papers.

Exit code 0: the changed plan fits; 1: it does not; 2: the question is wrong or the recipe illegal on this plan."""
TRY = {"recipes": "--try ID[,ID...], such as zero-bubble (meshwright papers)"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``meshwright whatif`` takes."""

    model: options.positional(
        "MODEL", "Catalog name, Hugging Face config.json, or a question.toml that says all four."
    ) = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp8 pp4 vpp5 zero1', or a .toml file: meshwright explain plan.") = ""
    recipes: options.text("ID[,ID...]", "Papers whose recipes are put over the plan.", name="try") = ""
    framework: options.text("NAME", "Whose host and memory costs: meshwright catalog frameworks.") = ""
    report: options.text("FILE", "Write it as one offline HTML file.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the changed plan fits, 1 when it does not."""
    given, wrong = options.read(Options, argv, command="whatif", description=DESCRIPTION)
    question = asked({field: getattr(given, field) for field in (*WANTED, *OPTIONAL)})
    wrong += options.missing(msgspec.structs.asdict(question), WANTED, command="whatif")
    wrong += options.missing({"recipes": given.recipes}, TRY, command="whatif")
    wrong += unwritable(given.report, "--report")
    names = tuple(filter(None, given.recipes.split(",")))
    wrong += _unknown(names)
    parts, found = read_parts(question)
    if wrong or found:
        raise MeshwrightError([*wrong, *found])
    from meshwright.cost import load_framework, standard
    from meshwright.papers.whatif import what_if

    answer = what_if(names, *parts, costs=standard(load_framework(question.framework or "default")))
    if given.json:
        print_json(answer.to_json())
    else:
        from meshwright.report.papers_text import tried

        tried(answer, console())
    if given.report:
        from meshwright.report.papers_html import write_what_if

        write_what_if(answer, given.report)
        note(f"wrote {given.report}")
    return 0 if answer.after.fits else 1


def _unknown(names: tuple[str, ...]) -> list:
    """J001 for every id that is none, before anything is predicted."""
    from meshwright.papers.record import paper

    wrong = []
    for name in names:
        try:
            paper(name)
        except MeshwrightError as error:
            wrong += error.diagnostics
    return wrong
