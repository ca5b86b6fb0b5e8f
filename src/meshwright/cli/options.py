"""Options of a command as a record; what is wrong with them as diagnostics like any other.

Words that are all as they should be are read here, at once; tyro shows the help and reads all others.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest

Options = TypeVar("Options", bound=msgspec.Struct)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """How an option is written and what it takes; ``metavar`` is "" for a switch."""

    type: type
    metavar: str
    help: str
    name: str | None = None
    positional: bool = False


def text(metavar: str, help: str, *, name: str | None = None) -> object:
    """An option that takes one text, "" when it is not given; ``name`` where it cannot be the field's."""
    return Annotated[str, Option(type=str, name=name, metavar=metavar, help=help)]


def positional(metavar: str, help: str) -> object:
    """An argument without a name, "" when it is not given."""
    return Annotated[str, Option(type=str, metavar=metavar, help=help, positional=True)]


def repeated(metavar: str, help: str) -> object:
    """An option that may be given several times; every text it was given."""
    return Annotated[tuple[str, ...], Option(type=tuple, metavar=metavar, help=help)]


def switch(help: str) -> object:
    """An option without a value."""
    return Annotated[bool, Option(type=bool, metavar="", help=help)]


JSON = switch("Print one JSON object instead of text.")
#: What options are called elsewhere, and what they are called here.
OTHERS = {
    "cluster": "on", "gpus": "on", "devices": "on", "hardware": "on", "workload": "train", "training": "train",
    "serving": "serve", "requests": "serve", "output": "out", "out-dir": "out", "output-dir": "out", "dataset": "data",
    "learning-rate": "lr", "objectives": "slo", "target": "to", "format": "to",
}  # fmt: skip
#: What is asked of a whole training run.
TOKENS = text("COUNT", "Tokens of the whole training run, 15t; the workload's if left out.")
DAYS = text("DAYS", "The run has to end within so many days: 30, 36h or 6w.")
BUDGET = text("USD", "The run may cost so many US dollars: 2M or 750k.")
PRICE = text("USD", "US dollars for a device and hour: 2.10, or h100=2.10,a100=1.2; the catalog's if left out.")


def read(
    kind: type[Options], argv: Sequence[str], *, command: str, description: str
) -> tuple[Options, list[Diagnostic]]:
    """The options of `command` in `argv`, and X003 for every word that is none of them. ``--help`` prints and exits.

    Raises:
        MeshwrightError: X004 when the words cannot be read at all, as when an option lacks its value.
    """
    plain = _plain(kind, argv)
    if plain is not None:
        return plain, []
    if any(word in ("-h", "--help") for word in argv):
        print(_help(kind, command, description))
        raise SystemExit(0)
    options, unknown = _parsed(kind, argv, command)
    # The word after an unknown option is its value, no mistake of its own.
    values = {i + 1 for i, word in enumerate(unknown) if word.startswith("-") and "=" not in word}
    wrong = [w for i, w in enumerate(unknown) if w.startswith("-") or i not in values]
    unheard = [_unknown(word, kind, command) for word in wrong]
    return options, unheard + _twice(kind, argv, command) + _empty(argv, command)


def _plain(kind: type[Options], argv: Sequence[str]) -> Options | None:
    """The options where every word is as it should be, which takes no library; None where one is not or asks for help,
    for :func:`_parsed` to say so. The two agree on what both read."""
    named = _named(kind)
    known = {word: (field, option) for field, (word, option) in named.items() if not option.positional}
    places = [field for field, (_, option) in named.items() if option.positional]
    said: dict[str, Any] = {}
    words, over = iter(argv), False
    for word in words:
        if not word.startswith("-"):
            if not word or not places or over:
                return None  # one too many, or some here and some there
            said[places.pop(0)] = word
            continue
        name, given, value = word.partition("=")
        field, option = known.get(name, ("", None))
        if option is None or (field in said and option.type is not tuple):
            return None
        if option.type is bool:
            value = "" if given else "yes"
        elif not given:
            value = next(words, "")
        if not value or (not given and value.startswith("-")):
            return None
        said[field] = True if option.type is bool else (*said.get(field, ()), value) if option.type is tuple else value
        over = any(named[field][1].positional for field in said)
    return kind(**said)


def _parsed(kind: type[Options], argv: Sequence[str], command: str) -> tuple[Options, list[str]]:
    """The options by tyro, and the words that it has no use for."""
    import tyro

    def hint(option: Option) -> object:
        shown = tyro.conf.arg(name=option.name, metavar=option.metavar or None, help=option.help, help_behavior_hint="")
        marks = (tyro.conf.UseAppendAction,) if option.type is tuple else ()
        marks += (tyro.conf.Positional,) if option.positional else ()
        return Annotated[(option.type, *marks, shown)]

    fields = [(field, hint(option), option.type()) for field, (_, option) in _named(kind).items()]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found, unknown = tyro.cli(
                msgspec.defstruct(kind.__name__, fields, kw_only=True),
                prog=f"meshwright {command}",
                args=list(argv),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise MeshwrightError(_unreadable(complaint.getvalue(), command)) from None
    said = msgspec.structs.asdict(found)
    # Where another word is unknown, tyro has "[]" for an argument that is not there.
    absent = {f: "" for f, (_, o) in _named(kind).items() if o.positional and said[f] == "[]" and "[]" not in argv}
    return kind(**{**said, **absent}), unknown


#: Fields of a question that ask something else than a training step does.
IN_PLACE = ("serve", "denoise")


def missing(said: Mapping[str, object], wanted: dict[str, str], *, command: str) -> list[Diagnostic]:
    """X004 for every field of `wanted` (field -> how it is written) that `said` has empty or not at all."""
    other = next((name for name in IN_PLACE if said.get(name)), "")
    elsewhere = f"; the question says {other}= in place of train=: meshwright predict answers it" if other else ""
    return [
        Diagnostic(
            code="X004",
            message=f"{how.split()[0].rstrip(',')} is missing",
            place=f"meshwright {command}",
            help=f"add {how}{elsewhere if field == 'train' else ''}",
        )
        for field, how in wanted.items()
        if not said.get(field)
    ]


def _unreadable(complaint: str, command: str) -> Diagnostic:
    """tyro's own words, without the frame that it draws around them."""
    lines = [line.strip("│╭╮╰╯─ ") for line in complaint.splitlines()]
    said = " ".join(line for line in lines if line and "--help" not in line and "full helptext" not in line)
    lacking = re.search(r"Missing value for argument '(--[\w-]+)'", said)
    said = f"{lacking[1]} has no value" if lacking else said
    return Diagnostic(
        code="X004", message=said, place=f"meshwright {command}", help=f"meshwright {command} --help lists the options"
    )


def _empty(argv: Sequence[str], command: str) -> list[Diagnostic]:
    """X004 for every option whose value is written and empty, as a shell variable that is not set leaves it."""
    return [
        Diagnostic(
            code="X004",
            message=f"{word.rstrip('=')} has an empty value",
            place=f"meshwright {command}",
            help="give it a value, or leave the option out",
        )
        for word, after in pairwise([*argv, None])
        if word.startswith("--") and ((after == "" and "=" not in word) or word.endswith("="))
    ]


def _twice(kind: type[msgspec.Struct], argv: Sequence[str], command: str) -> list[Diagnostic]:
    """X005 for every option that takes one value and was given several times."""
    given = Counter(word.partition("=")[0] for word in argv)
    return [
        Diagnostic(
            code="X005",
            message=f"{option} is given {given[option]} times",
            place=f"meshwright {command}",
            help="keep one of them; meshwright diff compares two",
        )
        for option, kept in _named(kind).values()
        if given[option] > 1 and kept.type is not tuple
    ]


def _named(kind: type[msgspec.Struct]) -> dict[str, tuple[str, Option]]:
    """Return how each field is written (``save_every`` is ``--save-every``), with its option."""
    hints = get_type_hints(kind, include_extras=True)
    options = {field: next(m for m in hint.__metadata__ if isinstance(m, Option)) for field, hint in hints.items()}
    return {f: ("--" + (option.name or f).replace("_", "-"), option) for f, option in options.items()}


def names(kind: type[msgspec.Struct]) -> list[str]:
    """Every option of a command as it is written, without its arguments."""
    return [name for name, option in _named(kind).values() if not option.positional]


def _help(kind: type[msgspec.Struct], command: str, description: str) -> str:
    from meshwright.cli.help_text import help_text

    said = _named(kind).values()
    arguments = [(option.metavar, option.help) for _, option in said if option.positional]
    rows = [(f"{name} {option.metavar}".strip(), option.help) for name, option in said if not option.positional]
    return help_text(command, description, arguments, rows)


def _unknown(word: str, kind: type[msgspec.Struct], command: str) -> Diagnostic:
    what = "option" if word.startswith("-") else "argument"
    quoted = f"quote a value that has spaces in it; meshwright {command} --help lists what it takes"
    help = _meant(word.partition("=")[0], kind) if what == "option" else quoted
    return Diagnostic(code="X003", message=f"unknown {what} {word!r}", place=f"meshwright {command}", help=help)


def _meant(word: str, kind: type[msgspec.Struct]) -> str:
    """The option that others call `word`, or the argument that is written without it; else the nearest options."""
    said = word.lstrip("-").lower()
    known = names(kind)
    if (ours := f"--{OTHERS.get(said, '')}") in known:
        return f"did you mean {ours}?"
    for _, option in _named(kind).values():
        if option.positional and said == option.metavar.lower():
            return f"write {option.metavar} without {word}, first"
    return nearest(word, known)


def numbers(
    given: Any, wanted: Mapping[str, tuple[float, float, bool, str]], wrong: list[Diagnostic], *, command: str
) -> dict[str, Any]:
    """The numbers among the options that are given, by field; L005 is added to `wrong` for those that are none.
    `wanted`: (least, most, whole numbers only, what is wanted in words)."""
    out: dict[str, Any] = {}
    for field, (least, most, whole, words) in wanted.items():
        text = getattr(given, field)
        if not text:
            continue
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if least <= value <= most:
            out[field] = value
        else:
            place = f"--{field.replace('_', '-')} {text}"
            message, said = f"{place} cannot be", f"it is {words}"
            wrong.append(Diagnostic(code="L005", message=message, place=f"meshwright {command}", help=said))
    return out
