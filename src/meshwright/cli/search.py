"""``meshwright search``: the fastest plan that fits, out of the whole space."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import options, scaling
from meshwright.cli.demands import Said
from meshwright.cli.guard import INTERRUPTED
from meshwright.cli.output import console, note, print_json, unwritable
from meshwright.cli.question import asked, path_of, unserved
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan.facets import fields
from meshwright.spec.graphs import is_graph_model
from meshwright.spec.recommender import is_recommender

if TYPE_CHECKING:
    from meshwright.search.found import Found
    from meshwright.spec.cluster import Cluster

DESCRIPTION = f"""Search the whole space of plans: which is fastest, how sure that is, and why the others lost.

{fill("Facets: " + " ".join(fields()) + " (meshwright explain says what they are).", 105)}

With --tokens it also answers how long the training run takes and what it costs; with --days and --budget whether
that is in time and in budget. Over several clusters, --on 8..512xh100 or --on given several times, it compares them:
time and cost over the number of devices, the cheapest that is in time, the fastest that is in budget.

With --objective time-to-loss it compares ways to keep replicas together (sync=) by the time they take to the loss that
exchanging gradients in every step has after --tokens: meshwright explain time_to_loss.

With --serve in place of --train: how many devices, which layout, replicas and scheduler keep --slo; with --day a whole
day of it, beside a training job where --train is said too.

With --denoise in place of --train: the plan under which a diffusion model makes its images soonest.

Exit code 0: found; 1: nothing fits, or not in time and budget; 2: the question is wrong; 130: stopped before anything
was found.
Ctrl-C ends the search with what was found, a second one at once."""
NO_STORE = "none"
#: Words that mean none to most people, and would be names of files.
NO_FILES = ("no", "off", "false")
PICKS = ("recommended", "fastest")
#: Options of ``predict`` about what no search is asked, and what to do instead.
PREDICTED = {
    "--rollout": "meshwright predict --rollout ...,devices=best tries every split of the devices; the plan that "
    "trains is found by a search with --train alone",
    "--feed": "a search takes data to be there in time: search without it and --save plan.toml, then meshwright "
    "predict plan.toml --feed ... says whether steps wait",
}
#: Whom --runnable asks: the exporters' usual targets and this package's executor.
ENGINES = ("megatron", "torchtitan", "deepspeed", "accelerate", "meshwright")


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright search``."""

    model: options.positional("MODEL", "Catalog name, Hugging Face config.json, or a question.toml.") = ""
    on: options.repeated("CLUSTER", "64xh100, a catalog name or a .toml file; a range: 8..512xh100, 8,64xh100.") = ()
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    serve: options.text(
        "REQUESTS", "rate=20,prompt=1024,output=256 or trace=FILE,rate=20: meshwright explain serve."
    ) = ""
    denoise: options.text("IMAGES", "images=1,size=1024,steps=50 of a diffusion model: meshwright explain denoise.") = (
        ""
    )
    slo: options.text("BOUNDS", "With --serve: bounds to keep, ttft=500ms,tpot=50ms@p90.") = ""
    day: options.text("DAY", "With --serve: a day with autoscaling, low=4,start=3m,lose=10h.") = ""
    rates: options.text("RATES", "With --serve: the best plan at each of these rates, 5,10,20.") = ""
    goodput: options.switch("With --serve: the greatest rate at which each of the best keeps them.") = False
    tokens: options.TOKENS = ""
    days: options.DAYS = ""
    budget: options.BUDGET = ""
    price: options.PRICE = ""
    fix: options.repeated("FACET=VALUES", "Only these values: --fix tp=8, --fix schedule=1f1b,zb-h1.") = ()
    bound: options.repeated("FACET<=VALUE", "Only values within: --bound 'pp<=16'.") = ()
    exclude: options.repeated("FACET=VALUES", "Not these values: --exclude recompute=full.") = ()
    allow: options.repeated("FACET=VALUES", "Also these: --allow dtype=fp8, --allow stages=balanced.") = ()
    for_: options.text(
        "ENGINES",
        "Plans these run: megatron, torchtitan, deepspeed, accelerate, torch-ddp, torchft or meshwright.",
        name="for",
    ) = ""
    framework: options.text("NAME", "Whose time and memory: meshwright catalog frameworks.") = ""
    headroom: options.text("AMOUNT", "Memory that plans leave on every device: 5% or 4GiB.") = ""
    risk: options.text(
        "SHARE", "Plans that run out of memory with at most this probability; 5% if left out and any plan keeps it."
    ) = ""
    robust: options.switch("Recommend the plan that loses least in the worst draw of what is unknown.") = False
    runnable: options.switch("Only plans that an engine of --for, or run, can run, as they are.") = False
    strategy: options.text(
        "NAME", "exhaustive (default), beam or anneal; with --serve distserve-high or distserve-low."
    ) = ""
    objective: options.text(
        "NAME", "step, cost, energy, time-to-loss; with --serve: devices, cost, goodput, throughput, e2e."
    ) = ""
    study: options.text("FOLDER", "Of meshwright converge, by whose losses time-to-loss goes, not the catalog's.") = ""
    pareto: options.text("A,B", "Objectives of the Pareto front: step,headroom; with --serve cost,throughput,e2e.") = ""
    top: options.text("COUNT", "How many families of plans to show; 5 if left out.") = ""
    variants: options.switch("Show single plans, not the best of each family.") = False
    save: options.text("FILE", "Write the recommended plan as a plan file, plan.toml.") = ""
    pick: options.text("WHICH", "Which plan --save writes: recommended (default) or fastest.") = ""
    report: options.text("FILE", "Write the search as one offline HTML file.") = ""
    plot: options.text("FILE", "Write the front, or time and cost over several clusters, as .svg or .png.") = ""
    store: options.text("FILE", "Where evaluated plans are kept, or none; the user's cache if left out.") = ""
    show: options.switch("List the questions in the store with their best plans, and do nothing else.") = False
    sql: options.text("SELECT", "Ask the store in SQL, and do nothing else.") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 when a plan was found, 1 when none fits, 130 when it was stopped before either was known."""
    given, wrong = options.read(SearchOptions, argv, command="search", description=DESCRIPTION)
    if given.store.lower() in NO_FILES:
        help = f"say --store {NO_STORE}, or name the file ./{given.store}"
        message = f"{given.store!r} names a file in which plans are kept, and {NO_STORE} is the word for no store"
        wrong.append(Diagnostic(code="R010", message=message, place=f"--store {given.store}", help=help))
    if given.show or given.sql:
        if wrong:
            raise MeshwrightError(wrong)
        return _ask(given)
    wrong = [_predicted_alone(one) for one in wrong]
    question = asked({field: getattr(given, field) for field in ("model", "serve", "denoise")} | {"on": ""})
    if question.denoise:
        from meshwright.cli.denoising import search_denoised

        said = ("model", "train", "framework", "tokens", "days", "budget", "price", "serve", "denoise")
        of_images = asked({field: getattr(given, field) for field in said} | {"on": ",".join(given.on)})
        return search_denoised(of_images, given, wrong)
    if question.serve:
        from meshwright.cli.search_serving import search_served

        return search_served(question, given, wrong)
    if is_recommender(path_of(question.model, question.base)):
        from meshwright.cli.recommending import search_recommended

        said = ("model", "train", "framework", "tokens", "days", "budget", "price", "serve")
        of_tables = asked({field: getattr(given, field) for field in said} | {"on": ",".join(given.on)})
        return search_recommended(of_tables, given, wrong)
    if is_graph_model(path_of(question.model, question.base)):
        from meshwright.cli.graphs import search_graph

        said = ("model", "train", "framework", "tokens", "days", "budget", "price", "serve")
        of_graph = asked({field: getattr(given, field) for field in said} | {"on": ",".join(given.on)})
        return search_graph(of_graph, given, wrong)
    wrong += unserved(given, ("slo", "goodput", "day", "rates"), "search")
    if given.study and given.objective != "time-to-loss":
        help = "add --objective time-to-loss, or drop it"
        said = {"message": "--study says how fast losses fall", "place": "--study", "help": help}
        wrong.append(Diagnostic(code="X004", **said))
    wrong += unwritable(given.report, "--report") + unwritable(given.save, "--save") + scaling.plottable(given.plot)
    ask = _read(given, wrong)
    kept = _as_kept(given, ask)
    if given.objective == "time-to-loss":
        from meshwright.cli.search_to_loss import search_to_loss

        return search_to_loss(given, kept, _said(given, ask))
    gc.disable()  # a search makes millions of small objects that live on, and no cycles
    if ask.is_scaling:
        return scaling.run(given, kept, partial(_find, given, ask))
    found = _of_run(_find(given, ask, ask.curves[0].clusters[0][1]), ask)
    if given.json:
        print_json(found.to_json())
    else:
        from meshwright.report.search_text import render

        render(found, console())
    _write_files(found, given, kept)
    if found.fits:
        return 0 if found.best[0].prediction.good else 1
    return INTERRUPTED if found.stopped else 1


def _predicted_alone(wrong: Diagnostic) -> Diagnostic:
    """A fault of the options, which says what to do instead where ``predict`` alone has such an option."""
    help = next((help for option, help in PREDICTED.items() if f"'{option}" in wrong.message), "")
    return msgspec.structs.replace(wrong, help=help) if help else wrong


def _read(given: SearchOptions, wrong: list[Diagnostic]) -> scaling.AskedCurve:
    """Read the question that the options ask; everything that is wrong with it is raised at once."""
    if given.top and not (given.top.isdecimal() and int(given.top)):
        wrong.append(Diagnostic(code="R002", message=f"{given.top!r} is not a count", place=f"--top {given.top}"))
    if len(_objectives(given)) != 2:
        from meshwright.search.found import OBJECTIVES

        help = f"two of {', '.join(OBJECTIVES)}, such as --pareto step,headroom"
        wrong.append(Diagnostic(code="R003", message="a front is over two objectives", place="--pareto", help=help))
    if given.pick and given.pick not in PICKS:
        place, help = f"--pick {given.pick}", nearest(given.pick, PICKS)
        wrong.append(Diagnostic(code="R004", message=f"no plan {given.pick!r}", place=place, help=help))
    wrong += Said(headroom=given.headroom, risk=given.risk, engines=given.for_).wrong()
    if given.runnable and given.for_:
        message, help = "--for says already who shall run it", "drop --runnable, or --for to allow every engine"
        wrong.append(Diagnostic(code="R003", message=message, place="--runnable", help=help))
    return scaling.read(given, wrong)


def _objectives(given: SearchOptions) -> tuple[str, ...]:
    return tuple(given.pareto.split(",")) if given.pareto else ("step", "headroom")


def _said(given: SearchOptions, ask: scaling.AskedCurve) -> Said:
    engines = ",".join(ENGINES) if given.runnable else given.for_
    return Said(headroom=given.headroom, risk=given.risk, engines=engines, framework=ask.question.framework)


def _as_kept(given: SearchOptions, ask: scaling.AskedCurve) -> scaling.AskedCurve:
    """The question as a file keeps it: with the framework whose costs the answer has, so that predict says the same."""
    question = msgspec.structs.replace(ask.question, framework=_said(given, ask).profile)
    return msgspec.structs.replace(ask, question=question)


def _find(given: SearchOptions, ask: scaling.AskedCurve, cluster: Cluster, *, before: str = "", **hints: Any) -> Found:
    """The answer on one cluster; `before` stands before its progress."""
    from meshwright.cost import standard_on
    from meshwright.search.engines import extended
    from meshwright.search.find import find
    from meshwright.search.restrict import restricted
    from meshwright.search.space import default

    asked = (ask.model, cluster, ask.train)
    said = _said(given, ask)
    demands, remarks = said.of(*asked)
    costs = standard_on(cluster, said.profile, ask.train.dtype)
    usual = extended(default(*asked, costs.framework.defaults.gather), demands.engines)
    found = find(
        *asked,
        space=restricted(usual, fix=given.fix, bound=given.bound, exclude=given.exclude, allow=given.allow),
        costs=costs,
        strategy=given.strategy or "exhaustive",
        objective=given.objective or "step",
        objectives=_objectives(given),
        top=1 if ask.is_scaling else int(given.top or 5),
        families=not given.variants and not ask.is_scaling,
        demands=demands,
        recommend=not ask.is_scaling,
        robust=given.robust,
        store=_store(given),
        report=partial(_progress, before=before) if before else _progress,
        **hints,
    )
    return msgspec.structs.replace(found, remarks=(*found.remarks, *remarks, *cluster.notes))


def _of_run(found: Found, ask: scaling.AskedCurve) -> Found:
    """The answer with every plan's training run held against the goal."""
    held = [
        msgspec.structs.replace(r, prediction=msgspec.structs.replace(r.prediction, goal=ask.goal)) for r in found.best
    ]
    return msgspec.structs.replace(found, best=tuple(held))


def _store(given: SearchOptions) -> str | None:
    if given.store.lower() == NO_STORE:
        return None
    if given.store:
        return given.store
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(cache) / "meshwright" / "search.sqlite")


def _progress(walk: Any, before: str = "") -> None:
    """One line that is written over on a terminal, a line now and then elsewhere."""
    from meshwright.search.progress import line

    if sys.stderr.isatty():
        print(f"\r\033[K{before}{line(walk)}", end="", file=sys.stderr, flush=True)
        if walk.ended:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    elif walk.due():
        note(f"{before}{line(walk)}")


def _ask(given: SearchOptions) -> int:
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


def _write_files(found: Found, given: SearchOptions, ask: scaling.AskedCurve) -> None:
    if found.best:
        _say_next(found, given, ask)
    if given.report:
        from meshwright.report.search_html import write

        write(found, given.report)
        note(f"wrote {given.report}")
    if given.plot and found.pareto:
        from meshwright.report.search_plot import figure

        figure(found).write(given.plot)
        note(f"wrote {given.plot}")


def _say_next(found: Found, given: SearchOptions, ask: scaling.AskedCurve) -> None:
    """Save the plan that was asked for, and say what follows: training it, or a configuration of an engine."""
    from meshwright.cli.next_steps import after_search, training_engines

    pick = found.best[0].plan if given.pick == "fastest" or not found.recommended else found.recommended.plan
    if given.save:
        from meshwright.plan.toml import save

        which = "the fastest plan" if pick == found.best[0].plan else "the recommended plan (--pick fastest: the other)"
        save(pick, given.save, ask.saved(ask.curves[0].text, given.save))
        note(f"wrote {given.save}, {which}: meshwright predict {given.save} says more")
    cluster = ask.curves[0].clusters[0][1]
    note(after_search(given.save, training_engines(ask.model, cluster, ask.train, pick), _engine(given)))


def _engine(given: SearchOptions) -> str:
    """The first engine that was asked for."""
    return given.for_.partition(",")[0].strip()
