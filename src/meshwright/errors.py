"""Errors that teach: values, cause, place and fix, all violations at once.

A :class:`Diagnostic` is one violation. A :class:`MeshwrightError` carries every violation found, prints
them one below the other, and knows its exit code: 2 for misuse (bad input, illegal plan), 1 for "ran, and
the answer is no" (a legal plan that does not fit). The long explanation of a code (``meshwright explain
P003``) is data in ``catalog/codes/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """One violation. ``code`` is a letter for the area and three digits (``P003``); ``place`` names the
    key and where it was said (``plan.tp = 6   <- plan.toml:4``); ``help`` says how to mend it."""

    code: str
    message: str
    place: str = ""
    help: str = ""

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        if self.place:
            lines.append(f"  {self.place}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


class MeshwrightError(Exception):
    """Bad input or an illegal plan: every violation found, exit code 2."""

    exit_code = 2

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]):
        if isinstance(diagnostics, Diagnostic):
            diagnostics = (diagnostics,)
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__("\n".join(str(d) for d in self.diagnostics))

    @classmethod
    def one(cls, code: str, message: str, *, place: str = "", help: str = "") -> MeshwrightError:
        """The error with a single violation."""
        return cls(Diagnostic(code=code, message=message, place=place, help=help))


def a_folder(text: str, code: str, ending: str) -> MeshwrightError | None:
    """The error of a folder where a file of some ending is meant; None when `text` is no folder."""
    try:
        path = Path(text).expanduser()
        inside = sorted(f.name for f in path.iterdir() if f.name.endswith(ending)) if text and path.is_dir() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, an unknown user, not to be read
        return None
    if inside is None:
        return None
    files = " or ".join(f"{text.rstrip('/')}/{name}" for name in inside[:3])
    help = f"name a file in it: {files}" if files else f"it holds no {ending} file"
    return MeshwrightError.one(code, f"{text!r} is a folder, and a file is meant", help=help)


class Infeasible(MeshwrightError):
    """A legal question whose answer is no (does not fit in memory or power): exit code 1."""

    exit_code = 1


#: Whoever is told what is odd about a legal question; nobody is, unless :func:`remarking` says so.
_TOLD: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


def remark(text: str) -> None:
    """Tell whoever asked, if anybody listens, a line about a legal question that does not mean what it seems to."""
    tell = _TOLD.get()
    if tell is not None:
        tell(text)


@contextmanager
def remarking(tell: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, `tell` gets every line that is remarked, each once."""
    told: set[str] = set()

    def once(text: str) -> None:
        if text not in told:
            told.add(text)
            tell(text)

    before = _TOLD.set(once)
    try:
        yield
    finally:
        _TOLD.reset(before)


def unseparated(value: str) -> str:
    """A help line for a value that swallowed the word behind it (``batch=64 seq=4096``); "" for any other."""
    _first, *rest = value.replace(";", " ").split()[:2] or [""]
    return "words are separated by commas: such as batch=64,seq=4096" if rest and "=" in rest[0] else ""


def nearest(name: str, choices: Sequence[str], count: int = 3) -> str:
    """A help line that names the choices closest to `name`: ``did you mean h100_sxm, h100_pcie?``."""
    import difflib

    close = difflib.get_close_matches(name.lower(), [c.lower() for c in choices], n=count, cutoff=0.5)
    by_lower = {c.lower(): c for c in choices}
    if close:
        return "did you mean " + ", ".join(by_lower[c] for c in close) + "?"
    listed = sorted(choices)
    shown = ", ".join(listed[:12]) + (", ..." if len(listed) > 12 else "")
    return f"known: {shown}"
