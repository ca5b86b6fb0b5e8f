"""Shipped: the states of all rows as the checks found them for a release, so that listing them runs nothing.

``states.json`` beside this file is written by ``meshwright papers --check --write`` alone. It says for which version
and which code it was computed; that the code has changed since is seen by its digest, what that changes by checking.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import isclose
from pathlib import Path

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.papers.outcome import Figure
from meshwright.papers.state import PaperState

NAME = "states.json"
#: What the code is made of: a check may depend on any of it.
SUFFIXES = (".py", ".toml", ".json", ".gz")
#: Figures that differ by no more, relative, are the same: processors round sums differently.
SAME = 1e-3
_NUMBER = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


class Unsettled(MeshwrightError):
    """The checks ran, and some of what they found cannot be shipped: exit code 1."""

    exit_code = 1


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """``states`` by row, and what they were computed for: the version, a digest of its code and of what it reads
    (:func:`code_digest`), and the torch that trained the plans."""

    version: str
    digest: str
    torch: str
    states: dict[str, PaperState]

    @property
    def changed(self) -> bool:
        """Whether this code is another than the states were computed for."""
        return self.digest != code_digest()

    @property
    def said(self) -> str:
        """The version that the states were computed for, and whether the code has changed since, in words."""
        said = f"states computed for meshwright {self.version} by `meshwright papers --check`"
        return said + ("; the code has changed since, and checking says whether they have" if self.changed else "")


@cache
def shipped() -> Shipped:
    """The states that came with this package."""
    return msgspec.json.decode(files("meshwright.papers").joinpath(NAME).read_bytes(), type=Shipped)


@cache
def code_digest() -> str:
    """A digest of every source and every catalog file of the package, but for the shipped states themselves."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(str(files("meshwright")))
    for path in sorted(_sources(root)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name != "__pycache__":
                yield from _sources(path)
        elif path.suffix in SUFFIXES and path.name != NAME:
            yield path


def differences(before: Mapping[str, PaperState], after: Mapping[str, PaperState]) -> list[tuple[str, str]]:
    """(row, what differs) for every row of `after` that `before` has otherwise. Of a row that could not be checked in
    full only the figures that both have are compared."""
    out = []
    for name, now in after.items():
        was = before.get(name)
        said = ["not among the shipped"] if was is None else list(_differing(was, now))
        if said:
            out.append((name, "; ".join(said)))
    return out


def _differing(was: PaperState, now: PaperState) -> Iterator[str]:
    whole = not now.unchecked
    if whole and now.state != was.state:
        moment = " (may be of this moment: check again)" if now.passing else ""
        yield f"{now.state}, shipped as {was.state}{moment}" + (f": {now.why}" if now.why else "")
    elif whole and _NUMBER.sub("#", now.why) != _NUMBER.sub("#", was.why):
        yield f"missing {now.why or 'nothing'!r}, shipped {was.why or 'nothing'!r}"
    if whole and now.executed != was.executed:
        yield f"{now.executed or 'nothing to execute'}, shipped as {was.executed or 'nothing to execute'}"
    ours, theirs = ({f.what: f for f in state.figures} for state in (now, was))
    for what in ours.keys() | theirs.keys() if whole else ours.keys() & theirs.keys():
        a, b = ours.get(what), theirs.get(what)
        if a is None or b is None:
            yield f"{what}: {'no figure any more' if a is None else f'{a.ours:.4g}, not among the shipped'}"
        elif not _same(a, b):
            yield f"{what}: {a.ours:.4g} for {a.paper:.4g}, shipped {b.ours:.4g} for {b.paper:.4g}"


def _same(a: Figure, b: Figure) -> bool:
    near = isclose(a.ours, b.ours, rel_tol=SAME, abs_tol=1e-9)
    return near and (a.paper, a.unit, a.judge, a.bound) == (b.paper, b.unit, b.judge, b.bound)


def write(states: Mapping[str, PaperState], path: str | Path, *, version: str, torch: str) -> None:
    """Write states to ship to `path`, whole or not at all.

    Raises:
        Unsettled: J006 for every row that could not be checked in full, or whose state may be of the moment.
        MeshwrightError: X104 when the file cannot be written.
    """
    open_ = {name: s.unchecked or s.why for name, s in states.items() if s.unchecked or s.passing}
    if open_:
        help = "check where torch is installed and the machine is quiet: meshwright papers --check"
        raise Unsettled(
            [
                Diagnostic(code="J006", message=f"{name} is not settled: {why}", place=f"--write {path}", help=help)
                for name, why in open_.items()
            ]
        )
    rounded = {
        name: msgspec.structs.replace(s, figures=tuple(map(_rounded, s.figures))) for name, s in sorted(states.items())
    }
    told = {"version": version, "digest": code_digest(), "torch": torch}
    head = [f'"{key}":{msgspec.json.encode(value).decode()}' for key, value in told.items()]
    rows = [f'"{name}":{msgspec.json.encode(state).decode()}' for name, state in rounded.items()]  # a line each
    text = "{" + ",\n".join([*head, '"states":{']) + "\n" + ",\n".join(rows) + "\n}}\n"
    write_bytes(path, text.encode())


def _rounded(figure: Figure) -> Figure:
    """Six digits: no more are shown, and the rest depends on the processor; all of them where the judgement of the
    figure, such as equal, needs more."""
    short = msgspec.structs.replace(figure, ours=float(f"{figure.ours:.6g}"))
    return short if short.ok == figure.ok else figure


__all__ = ["NAME", "Shipped", "Unsettled", "code_digest", "differences", "shipped", "write"]
