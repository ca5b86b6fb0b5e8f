"""``meshwright ui``: the question as a local page."""

from __future__ import annotations

import msgspec

from meshwright.cli import options
from meshwright.cli.needs import lacking
from meshwright.cli.output import note, print_json
from meshwright.cli.question import GOAL, OPTIONAL, WANTED, asked
from meshwright.errors import Diagnostic, MeshwrightError

DESCRIPTION = """Open a page on this machine: model, cluster, workload and plan as controls, the answer live.

Say MODEL, --on, --train and --plan, or name a question.toml, and the page opens with them; it needs no network.

The page is on this machine only unless --host says otherwise. Ctrl-C ends it. Exit code 2: the options are wrong."""


class UiOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright ui``."""

    model: options.positional("MODEL", "Catalog name, Hugging Face config.json, or a question.toml.") = ""
    on: options.text("CLUSTER", "64xh100, a catalog name or a .toml file.") = ""
    train: options.text("WORKLOAD", "batch=SEQUENCES,seq=TOKENS and more: meshwright explain workload.") = ""
    plan: options.text("PLAN", "Words such as 'tp8 pp4 vpp5 zero1': meshwright explain plan.") = ""
    framework: options.text("NAME", "Whose host and memory costs: meshwright catalog frameworks.") = ""
    tokens: options.TOKENS = ""
    days: options.DAYS = ""
    budget: options.BUDGET = ""
    price: options.PRICE = ""
    host: options.text("ADDRESS", "Where the page listens; 127.0.0.1, this machine only, if left out.") = ""
    port: options.text("NUMBER", "Its port; 0 takes one that is free.") = ""
    no_open: options.switch("Do not open a browser.") = False
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0 once the page was closed with Ctrl-C."""
    given, wrong = options.read(UiOptions, argv, command="ui", description=DESCRIPTION)
    if given.port and not (given.port.isdecimal() and int(given.port) < 65536):
        help = "a number from 0 to 65535; 0 takes a free one"
        wrong.append(Diagnostic(code="I010", message=f"{given.port!r} is no port", place="--port", help=help))
    wrong += lacking("ui", "starlette", "uvicorn", extra="ui")
    start = _start(given, wrong)
    from meshwright.endpoint import hosts
    from meshwright.ui import serve

    host = given.host or hosts.LOOPBACK
    made = hosts.bind(host, int(given.port) if given.port else None, serve.PORT)
    url = hosts.address(made, host)
    if host not in hosts.ONLY_HERE:
        note(f"warning: {host} is open to others of the network, and the page asks nobody who they are")

    def ready() -> None:
        if given.json:
            print_json({"format_version": 1, "url": url})
        else:
            print(f"{url}   (Ctrl-C ends it)", flush=True)

    serve.serve(made, host, start, ready, browse=not given.no_open)
    note("closed")
    return 0


def _start(given: UiOptions, wrong: list[Diagnostic]) -> dict[str, str]:
    """The question that the page opens with. Files that the options name are read here, by who may; the page gets their
    text.

    Raises:
        MeshwrightError: everything that is wrong, `wrong` too.
    """
    from meshwright.cli.started import as_page

    try:
        question = asked({field: getattr(given, field) for field in (*WANTED, *OPTIONAL, *GOAL)})
        start = as_page(question)
    except MeshwrightError as error:
        wrong += error.diagnostics
        start = {}
    if wrong:
        raise MeshwrightError(wrong)
    return start
