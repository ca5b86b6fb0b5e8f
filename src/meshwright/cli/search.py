"""``meshwright search``: the fastest plan that fits, out of the whole space."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options
from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import WANTED, beside
from meshwright.errors import Diagnostic, MeshwrightError

if TYPE_CHECKING:
    from meshwright.search.found import Found

DESCRIPTION = """Search the whole space of plans: which is fastest, how sure that is, and why the others lost.

Facets: tp cp pp dp mb ep etp order sp algorithm recompute recompute_layers attention dtype grads master
moments overlap imbalance loss shares schedule vpp stages zero shard (meshwright explain says what they are).

Exit code 0: found; 1: nothing fits; 2: the question is wrong; 130: stopped before anything was found.
Ctrl-C ends the search with what was found, a second one at once."""
ASKED = ("model", "on", "train")
NO_STORE = "none"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``meshwright search`` takes."""

    model: options.positional("MODEL", "Catalog name or Hugging Face config.json.") = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    fix: options.repeated("FACET=VALUES", "Only these values: --fix tp=8, --fix schedule=1f1b,zb-h1.") = ()
    bound: options.repeated("FACET<=VALUE", "Only values within: --bound 'pp<=16'.") = ()
    exclude: options.repeated("FACET=VALUES", "Not these values: --exclude recompute=full.") = ()
    allow: options.repeated("FACET=VALUES", "Also these: --allow dtype=fp8, --allow stages=balanced.") = ()
    strategy: options.text("NAME", "exhaustive (default), beam or anneal.") = ""
    objective: options.text("NAME", "step (default), cost or energy.") = ""
    pareto: options.text("A,B", "Objectives of the Pareto front among step, cost, energy, headroom.") = ""
    top: options.text("COUNT", "How many plans to show; 5 if left out.") = ""
    save: options.text("FILE", "Write the winner as a plan file, plan.toml.") = ""
    report: options.text("FILE", "Write the search as one offline HTML file.") = ""
    store: options.text("FILE", "Where evaluated plans are kept, or none; the user's cache if left out.") = ""
    show: options.switch("List the questions in the store with their best plans, and do nothing else.") = False
    sql: options.text("SELECT", "Ask the store in SQL, and do nothing else.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when a plan was found, 1 when none fits, 130 when it was stopped before either was known."""
    given, wrong = options.read(Options, argv, command="search", description=DESCRIPTION)
    if given.show or given.sql:
        if wrong:
            raise MeshwrightError(wrong)
        return _ask(given)
    wanted = {field: WANTED[field] for field in ASKED}
    wrong += options.missing(msgspec.structs.asdict(given), wanted, command="search")
    wrong += unwritable(given.report, "--report") + unwritable(given.save, "--save")
    found = _search(given, wrong)
    if given.json:
        print_json(found.to_json())
    else:
        from meshwright.report.search_text import render

        render(found, console())
    _write_files(found, given)
    if found.fits:
        return 0
    return INTERRUPTED if found.stopped else 1


def _search(given: Options, wrong: list[Diagnostic]) -> Found:
    """Everything that is wrong with the question at once; then the answer."""
    from meshwright.search.found import OBJECTIVES
    from meshwright.search.restrict import restricted
    from meshwright.search.space import default
    from meshwright.spec.cluster import load as read_cluster
    from meshwright.spec.model import load as read_model
    from meshwright.spec.workload import parse as read_train

    asked: list[Any] = []
    for text, read in ((given.model, read_model), (given.on, read_cluster), (given.train, read_train)):
        try:
            asked += [read(text)] if text else []
        except MeshwrightError as error:
            wrong += error.diagnostics
    if given.top and not (given.top.isdecimal() and int(given.top)):
        wrong.append(Diagnostic(code="R002", message=f"{given.top!r} is not a count", place=f"--top {given.top}"))
    pair = tuple(given.pareto.split(",")) if given.pareto else ("step", "headroom")
    if len(pair) != 2:
        help = f"two of {', '.join(OBJECTIVES)}, such as --pareto step,headroom"
        wrong.append(Diagnostic(code="R003", message="a front is over two objectives", place="--pareto", help=help))
    if wrong:
        raise MeshwrightError(wrong)
    from meshwright.search.find import find

    gc.disable()  # a search makes millions of small objects that live on, and no cycles
    space = restricted(default(*asked), fix=given.fix, bound=given.bound, exclude=given.exclude, allow=given.allow)
    return find(
        *asked,
        space=space,
        strategy=given.strategy or "exhaustive",
        objective=given.objective or "step",
        objectives=pair,
        top=int(given.top or 5),
        store=_store(given),
        report=_progress,
    )


def _store(given: Options) -> str | None:
    if given.store == NO_STORE:
        return None
    if given.store:
        return given.store
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(cache) / "meshwright" / "search.sqlite")


def _progress(walk: Any) -> None:
    """One line that is written over on a terminal, a line now and then elsewhere."""
    from meshwright.search.progress import line

    if sys.stderr.isatty():
        print(f"\r\033[K{line(walk)}", end="", file=sys.stderr, flush=True)
        if walk.ended:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    elif walk.due():
        note(line(walk))


def _ask(given: Options) -> int:
    from meshwright.search.store import SHOWN, query

    columns, rows = query(_store(given) or "", given.sql or SHOWN)
    if given.json:
        print_json({"format_version": 1, "columns": columns, "rows": rows})
        return 0
    cells = [columns, *([_cell(v) for v in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        console().print("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip(), markup=False, soft_wrap=True)
    return 0


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write_files(found: Found, given: Options) -> None:
    if given.save and found.best:
        from meshwright.plan.toml import save

        question = {field: beside(getattr(given, field), given.save) for field in ASKED}
        save(found.best[0].plan, given.save, question)
        note(f"wrote {given.save}: meshwright predict {given.save} says more, meshwright run {given.save} trains it")
    if given.report:
        from meshwright.report.search_html import write

        write(found, given.report)
        note(f"wrote {given.report}")
