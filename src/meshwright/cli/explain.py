"""``meshwright explain``: what a word of the output, a word of a plan, or an error code means."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from meshwright import catalog
from meshwright.cli import options
from meshwright.cli.output import console, print_json
from meshwright.errors import MeshwrightError

DESCRIPTION = """What a word or an error code means.

Every word of the output, of a plan and of a workload, every schedule and every error code has an explanation."""
FORMAT_VERSION = 1


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``meshwright explain`` takes."""

    term: options.positional("TERM", "A word (mfu, zero1, tp8, zb-h1) or an error code (P003).") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; a word without an explanation is misuse (X001)."""
    given, wrong = options.read(Options, argv, command="explain", description=DESCRIPTION)
    wrong += options.missing(given, {"term": "TERM, such as mfu, tp8 or P003"}, command="explain")
    if wrong:
        raise MeshwrightError(wrong)
    entry = look_up(given.term)
    if given.json:
        print_json({"format_version": FORMAT_VERSION, **entry})
    else:
        _show(entry)
    return 0


def look_up(word: str) -> dict[str, Any]:
    """The entry of a word as it is written anywhere: ``tp8`` is ``tp``, ``stages=9,10`` is ``stages``.

    Raises:
        MeshwrightError: X001 with the nearest words.
    """
    aliases = _aliases()
    for form in _forms(word):
        try:
            return catalog.explanation(aliases.get(form.lower(), form))
        except MeshwrightError:
            continue
    return catalog.explanation(word)


def _forms(word: str) -> list[str]:
    """The word, then what is left of it without its value, its number or the schedule it is put over."""
    word = word.strip().strip("-")
    plain = word.replace("_", "-")
    forms = [word, plain, plain.replace("-", "_"), plain.replace(" ", "_"), plain.replace(" ", "-")]
    key = word.partition("=")[0]
    over = word.partition(":")[0]
    return [*forms, key, over, re.sub(r"\d+$", "", key)]


def _aliases() -> dict[str, str]:
    """Other names of terms -> the term."""
    terms = catalog.tables("terms")
    return {alias.lower(): name for name, entry in terms.items() for alias in entry.get("aliases", ())}


def _show(entry: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    out = console()
    out.print(f"[bold]{escape(entry['name'])}[/bold]  {escape(entry['title'])}")
    out.print(Padding(escape(entry["text"].strip()), (1, 2)))
    for key, label in (("unit", "unit"), ("see", "see also"), ("source", "source")):
        if key in entry:
            value = entry[key]
            out.print(f"  {label}: {escape(', '.join(value) if isinstance(value, list) else value)}")
