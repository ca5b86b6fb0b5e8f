"""``meshwright whatif``: what a published technique does to a plan of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.feeding import read_feed, whatif_fed
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.progress import Progress
from meshwright.cli.question import FEED, OPTIONAL, SERVE, WANTED, Question, asked, read_parts, unserved
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.cost import Costs

DESCRIPTION = """Put the recipes of papers over a plan: what is gained, what it does to memory, whether it is exact.

Say MODEL, --on, --train and --plan (or name a question.toml) and --try with one or more ids of meshwright papers,
which are put over the plan together where no two set the same word of it to different values (diloco and terngrad both
say how gradients are exchanged: try one, then the other), or --try all: each alone, ranked by what it gains.

With --feed beside --train words of the feed, such as workers=16: the step with its data before and after.

With --serve in place of --train techniques of serving: --try all, or words of the engine and of the plan, such as
policy=sarathi,prefix_cache=yes. --records FILE adds the results to a file, which Ctrl-C keeps too, and --try learned
chooses one technique by such records (of FILE, else of the catalog) and simulates it alone.

Exit code 0: the changed plan (of all: one of them) fits; 1: it does not; 2: the question is wrong or the recipe illegal
on this plan."""
TRY = {"recipes": "--try ID[,ID...], such as zero-bubble (meshwright papers), or --try all"}
ALL = "all"


class WhatifOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright whatif``."""

    model: options.positional(
        "MODEL", "Catalog name, Hugging Face config.json, or a question.toml that says all four."
    ) = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    serve: options.text("REQUESTS", "rate=8,prompt=1024,output=256 or trace=FILE: meshwright explain serve.") = ""
    slo: options.text("BOUNDS", "With --serve: bounds to keep, ttft=500ms,tpot=50ms@p90.") = ""
    plan: options.text("PLAN", "Words such as 'tp8 pp4 vpp5 zero1', or a .toml file: meshwright explain plan.") = ""
    feed: options.text("FEED", "workers=8,read=2GB/s: where steps get their data: meshwright explain feed.") = ""
    recipes: options.text("ID[,ID...]", "Papers whose recipes are put over the plan, or all.", name="try") = ""
    records: options.text("FILE", "With --serve: what techniques gained, one line of JSON each.") = ""
    framework: options.text("NAME", "Whose host and memory costs: meshwright catalog frameworks.") = ""
    report: options.text("FILE", "Write it as one offline HTML file.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when the changed plan fits, 1 when it does not."""
    given, wrong = options.read(WhatifOptions, argv, command="whatif", description=DESCRIPTION)
    question = asked({field: getattr(given, field) for field in (*WANTED, *OPTIONAL, *SERVE, *FEED)})
    if question.serve:
        from meshwright.cli.whatif_serving import whatif_served

        wrong += options.missing({"recipes": given.recipes}, TRY, command="whatif")
        return whatif_served(question, given, wrong)
    wrong += unserved(given, ("slo", "records"), "whatif")
    wrong += options.missing(msgspec.structs.asdict(question), WANTED, command="whatif")
    wrong += options.missing({"recipes": given.recipes}, TRY, command="whatif")
    wrong += unwritable(given.report, "--report")
    if question.feed:
        return _fed(question, given, wrong)
    names = tuple(filter(None, given.recipes.split(",")))
    wrong += _unknown(names) if names != (ALL,) else []
    parts, found = read_parts(question)
    if wrong or found:
        raise MeshwrightError([*wrong, *found])
    from meshwright.cost import standard_on

    costs = standard_on(parts[1], question.framework, parts[2].dtype)
    return _ranked(parts, costs, given) if names == (ALL,) else _tried(names, parts, costs, given)


def _fed(question: Question, given: WhatifOptions, wrong: list[Diagnostic]) -> int:
    """The step with its data, and with other words of its feed."""
    parts, found = read_parts(question)
    feed, unread = read_feed(question.feed)
    if wrong or found or unread:
        raise MeshwrightError([*wrong, *found, *unread])
    from meshwright.cost import standard_on

    costs = standard_on(parts[1], question.framework, parts[2].dtype)
    before, after = whatif_fed(parts, feed, given.recipes, costs)
    if given.json:
        print_json({"before": before.to_json(), "after": after.to_json()})
    else:
        from meshwright.report.feed_text import changed

        changed(before, after, console())
    if given.report:
        from meshwright.report.html import write

        write(after, given.report)
        note(f"wrote {given.report}")
    return 0 if after.fits else 1


def _tried(names: tuple[str, ...], parts: list[Any], costs: Costs, given: WhatifOptions) -> int:
    """The recipes put over the plan together."""
    from meshwright.papers.whatif import what_if

    answer = what_if(names, *parts, costs=costs)
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


def _ranked(parts: list[Any], costs: Costs, given: WhatifOptions) -> int:
    """Every recipe over the plan, each alone."""
    from meshwright.papers.whatif import rank

    progress = Progress("recipes", least_s=1.0)
    ranking = rank(*parts, costs=costs, report=lambda done, total: progress("tried", done, total))
    if given.json:
        print_json(ranking.to_json())
    else:
        from meshwright.report.ranking_text import render

        render(ranking, console())
    if given.report:
        from meshwright.report.papers_html import write_ranking

        write_ranking(ranking, given.report)
        note(f"wrote {given.report}")
    return 0 if ranking.fits else 1


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
