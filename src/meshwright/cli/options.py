"""Options of a command as a record, read by tyro; what is wrong with them as diagnostics like any other."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import tyro

from meshwright.errors import Diagnostic, MeshwrightError, nearest

Options = TypeVar("Options", bound=msgspec.Struct)


def text(metavar: str, help: str, *, name: str | None = None) -> object:
    """An option that takes one text, "" when it is not given; ``name`` where it cannot be the field's."""
    return Annotated[str, tyro.conf.arg(name=name, metavar=metavar, help=help, help_behavior_hint="")]


def positional(metavar: str, help: str) -> object:
    """An argument without a name, "" when it is not given."""
    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint="")]


def repeated(metavar: str, help: str) -> object:
    """An option that may be given several times; every text it was given."""
    shown = tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint="")
    return Annotated[tuple[str, ...], tyro.conf.UseAppendAction, shown]


def switch(help: str) -> object:
    """An option without a value."""
    return Annotated[bool, tyro.conf.arg(help=help, help_behavior_hint="")]


JSON = switch("Print one JSON object instead of text.")
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
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            options, unknown = tyro.cli(
                kind,
                prog=f"meshwright {command}",
                description=description,
                args=list(argv),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise MeshwrightError(_unreadable(complaint.getvalue(), command)) from None
    # The word after an unknown option is its value, no mistake of its own.
    values = {i + 1 for i, word in enumerate(unknown) if word.startswith("-") and "=" not in word}
    wrong = [w for i, w in enumerate(unknown) if w.startswith("-") or i not in values]
    return options, [_unknown(word, kind, command) for word in wrong] + _twice(kind, argv, command) + _empty(
        argv, command
    )


def missing(said: Mapping[str, object], wanted: dict[str, str], *, command: str) -> list[Diagnostic]:
    """X004 for every field of `wanted` (field -> how it is written) that `said` has empty or not at all."""
    return [
        Diagnostic(
            code="X004",
            message=f"{how.split()[0].rstrip(',')} is missing",
            place=f"meshwright {command}",
            help=f"add {how}",
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
        for option, hint in _named(kind)
        if given[option] > 1 and tyro.conf.UseAppendAction not in hint.__metadata__
    ]


def _named(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Every option as it is written (``save_every`` is ``--save-every``), and its hint."""
    hints = get_type_hints(kind, include_extras=True)
    named = ((next((n for m in h.__metadata__ if (n := getattr(m, "name", None))), f), h) for f, h in hints.items())
    return [("--" + name.replace("_", "-"), hint) for name, hint in named]


def _unknown(word: str, kind: type[msgspec.Struct], command: str) -> Diagnostic:
    known = [name for name, hint in _named(kind) if tyro.conf.Positional not in hint.__metadata__]
    what = "option" if word.startswith("-") else "argument"
    help = nearest(word.partition("=")[0], known) if what == "option" else "quote a value that has spaces in it"
    return Diagnostic(code="X003", message=f"unknown {what} {word!r}", place=f"meshwright {command}", help=help)
