"""``meshwright explain``: what a word of the output, a word of a plan, or an error code means."""

from __future__ import annotations

import re
from functools import cache
from sys import modules
from textwrap import fill, indent
from typing import Any

import msgspec

from meshwright import catalog, serving
from meshwright.cli import options
from meshwright.cli.output import console, print_json
from meshwright.errors import MeshwrightError, nearest
from meshwright.plan.facet import ALONE, KEYED, NUMBERED, Field
from meshwright.plan.facets import fields

DESCRIPTION = """Explain a word or an error code.

Every word of the output, of a plan and of a workload, every schedule and every error code has an explanation."""
FORMAT_VERSION = 1


class ExplainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``meshwright explain``."""

    term: options.positional("TERM", "A word (mfu, zero1, tp8, zb-h1) or an error code (P003).") = ""
    json: options.JSON = False


def run(argv: list[str]) -> int:
    """0; a word without an explanation is misuse (X001)."""
    given, wrong = options.read(ExplainOptions, argv, command="explain", description=DESCRIPTION)
    wrong += options.missing({"term": given.term}, {"term": "TERM, such as mfu, tp8 or P003"}, command="explain")
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
    names = catalog.words()
    for form in _forms(word):
        if form in names:
            return catalog.explanation(names[form])
        if form in fields():
            return _of_field(fields()[form])
        if form in _serving_policies():
            return _of_policy(*_serving_policies()[form])
        if said := _workload_words().get(form):
            return _of_workloads(form, said)
    if unknown := _unknown_code(word.strip()):
        raise unknown
    near = nearest(word, sorted({*catalog.tables("terms"), *fields(), *_serving_policies(), *_workload_words()}))
    help = f"{near}   (models, devices, clusters: meshwright catalog)"
    raise MeshwrightError.one("X001", f"no explanation of {word!r}", help=help)


def _unknown_code(word: str) -> MeshwrightError | None:
    """The error of a word that is written as codes are and is none, with the codes whose numbers are nearest; None for
    any other word, names of devices such as h100 among them."""
    code, codes = word.upper(), catalog.tables("codes")
    devices = {part for name in catalog.names("devices") for part in name.split("_")}
    if not re.fullmatch(r"[A-Z]\d{3}", code) or word.lower() in devices:
        return None
    family = [one for one in codes if one[0] == code[0]]
    near = sorted(sorted(family, key=lambda one: abs(int(one[1:]) - int(code[1:])))[:3])
    said = ", ".join(f"{one} ({codes[one]['title']})" for one in near)
    letters = ", ".join(sorted({one[0] for one in codes}))
    help = f"the nearest are {said}" if near else f"codes are one of the letters {letters} and three digits"
    return MeshwrightError.one("X001", f"there is no error code {code}", help=help)


def _of_field(field: Field) -> dict[str, Any]:
    """The entry of a field of plans that the catalog has no text for."""
    said = {NUMBERED: f"{field.name}4", ALONE: "its value alone", KEYED: f"{field.name}=VALUE"}[field.spelled]
    text = f"Part of the {field.facet} of a plan, said as {said}: {field.form.wanted}. It decides {field.kinds}."
    return {"name": field.name, "title": field.help, "text": text}


@cache
def _serving_policies() -> dict[str, tuple[str, str]]:
    """Return axis and name of every policy of serving, by the names that it is called."""
    return {name: (axis, name) for axis in serving.MODULES for name in serving.names(axis)}


def _of_policy(axis: str, name: str) -> dict[str, Any]:
    """The entry of a policy of serving: its title, and what its file says that it does and where it was published."""
    policy = serving.get(axis, name)
    word = serving.WORDS.get(axis, axis)
    about = " ".join((modules[type(policy).__module__].__doc__ or "").split()).replace("``", "`")
    text = f"A word of a serving workload, said as {word}={name}. {about}"
    return {"name": name, "title": policy.title, "text": text, "see": [word, "serve"]}


@cache
def _workload_words() -> dict[str, list[tuple[str, str, str]]]:
    """Words that only the texts of workloads say, each with the options that have it: the option, the term that
    explains all of the option's words, and what the word's values are."""
    from meshwright.spec import denoise, edge_samples, feed, graph_epochs, rollout, samples

    known: dict[str, list[tuple[str, str, str]]] = {}
    for option, term, readers in (
        ("--feed", "feed", feed.READERS),
        ("--denoise", "denoise", denoise.READERS),
        ("--rollout", "rollout", rollout.READERS),
        ("--train of vectors of nodes", "graph_model", edge_samples.READERS),
        ("--train of a graph network", "graph_network", graph_epochs.READERS),
        ("--train of a recommendation model", "recommendation_model", samples.READERS),
    ):
        for word, (_, wanted) in readers.items():
            known.setdefault(word, []).append((option, term, wanted))
    return known


def _of_workloads(word: str, said: list[tuple[str, str, str]]) -> dict[str, Any]:
    """The entry of a word of workloads: what its values are, and what the option's explanation says of it."""
    where = ", ".join(option for option, _, _ in said)
    parts = []
    for option, term, wanted in said:
        about = re.split(r"(?<=[^.]\.) (?=[-A-Z`])", catalog.tables("terms")[term]["text"])
        told = " ".join(line for line in about if re.search(rf"\b{word}=", line))
        parts.append(f"A word of {option}, said as {word}=VALUE: {wanted}. {told}".strip())
    title = f"{word}=: a word of {where}"
    return {"name": word, "title": title, "text": " ".join(parts), "see": [term for _, term, _ in said]}


def _forms(word: str) -> list[str]:
    """The word, then what is left of it without its value, its number or the schedule it is put over."""
    plain = word.strip().strip("-").lower()
    key = plain.partition("=")[0]
    ways = [plain, plain.replace("_", "-"), plain.replace("-", "_").replace(" ", "_"), plain.replace("_", " ")]
    return [*ways, key, plain.partition(":")[0], key.rstrip("0123456789")]


def _show(entry: dict[str, Any]) -> None:
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{entry['name']}[/bold]  {escape(entry['title'])}\n")
    width = min(out.width, 100) - 2
    out.print(indent(fill(entry["text"].strip(), width), "  "), markup=False)
    see = ", ".join(entry.get("see", ()))
    shown = (("unit", entry.get("unit")), ("see also", see), ("source", entry.get("source")))
    if any(value for _, value in shown):
        out.print()
    for label, value in shown:
        if value:
            out.print(indent(fill(f"{label}: {value}", width), "  "), markup=False)
