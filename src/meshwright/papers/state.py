"""The state of every row, from running its check; kept by the version of the code and of the torch that ran it.

A row *works* when its source is confirmed and everything its check judges holds; *partly* when the check runs and
something is missing or off, which is then said; *not yet* when there is no check, or nothing of it holds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import MeshwrightError
from meshwright.papers import trained
from meshwright.papers.checks import checks
from meshwright.papers.outcome import Figure, Outcome, by_processes, can_run, not_here
from meshwright.papers.record import Paper, papers

WORKS, PARTLY, NOT_YET = "works", "partly", "not yet"
STATES = (WORKS, PARTLY, NOT_YET)
#: Whether real processes carried out a row's recipe; "" where there is nothing for them.
EXECUTED, NOT_HERE = "executed", "not executed here"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one row: ``why`` says what is missing, ``judged`` how many figures and facts hold, ``executed``
    whether real processes took part, ``unchecked`` why something could not be checked on this machine; ``figures``
    are those that the paper gives, beside ours, but for what was measured now. A ``passing`` state may be that of the
    moment: it is not kept."""

    state: str
    why: str = ""
    judged: int = 0
    executed: str = ""
    unchecked: str = ""
    figures: tuple[Figure, ...] = ()
    passing: bool = False


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache file holds."""

    version: str
    states: dict[str, State]


def of(paper: Paper, outcome: Outcome | None) -> State:
    """The state that an outcome gives a row; None is a row without a check."""
    if outcome is None:
        return State(state=NOT_YET, why=paper.missing or "no check yet")
    failures = outcome.failures
    unverified = () if paper.verified else ("title, authors and year are not confirmed",)
    lacking = (*failures, *outcome.missing, *unverified)
    held = outcome.judged - len(failures)
    unchecked = "; ".join(outcome.unchecked)
    real = EXECUTED if outcome.executed else NOT_HERE if unchecked else ""
    reached, why = WORKS, ""
    if lacking or not held:
        reached = PARTLY if held else NOT_YET
        why = "; ".join(lacking) or (f"not checked here: {unchecked}" if unchecked else "the check judges nothing")
    return State(
        state=reached,
        why=why,
        judged=held,
        executed=real,
        unchecked=unchecked,
        figures=tuple(f for f in outcome.figures if f.paper is not None and not f.here),
        passing=outcome.passing or any(f.here and not f.ok for f in outcome.figures),
    )


def run(paper: Paper) -> Outcome | None:
    """The outcome of a row's check, with what training its plans found; None when it has none. A check that a plan
    refuses is an outcome too."""
    if not paper.check:
        return None
    try:
        found = checks()[paper.check]()
    except MeshwrightError as error:
        found = Outcome(missing=(f"the check does not run: {error.diagnostics[0].message}",))
    if not paper.runs:
        return found
    what = f"training {', '.join(map(repr, paper.runs))}"
    return by_processes(found, what, lambda: trained.judged(paper.runs))


def states(*, report: Callable[[str], None] | None = None, folder: Path | None = None) -> dict[str, State]:
    """The state of every row: from the cache of this version of the code, else by running its check.

    `report` is told what is done next; `folder` is where the cache lies (the user's cache folder if left
    out). A cache that cannot be read or written is no error: the checks run again.
    """
    file = (folder or cache_folder()) / "papers.json"
    found = _kept(file)
    rest = {name: paper for name, paper in papers().items() if name not in found}
    if not rest:
        return found
    plans = [plan for paper in rest.values() if paper.check for plan in paper.runs]
    if plans and not not_here():
        if report is not None:
            report(f"training {len(set(plans))} plans")
        trained.train(plans)
    for name, paper in rest.items():
        if paper.check and report is not None:
            report(f"checking {name}")
        found[name] = of(paper, run(paper))
    keep = {name: state for name, state in found.items() if not state.passing}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, msgspec.json.encode(Kept(version=code_version(), states=keep)))
    except (OSError, MeshwrightError):
        pass
    return found


def _kept(file: Path) -> dict[str, State]:
    """What the cache has for this version of the code, row by row."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
    except (OSError, ValueError, msgspec.MsgspecError):  # text that is no UTF-8 is a plain ValueError
        return {}
    if kept.version != code_version():
        return {}
    return {name: state for name, state in kept.states.items() if name in papers()}


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


@cache
def code_version() -> str:
    """A digest of every source and every catalog file of the package: a check may depend on any of them. Whether
    processes can be started, and with which torch, belongs to it as well."""
    digest = hashlib.blake2b(digest_size=16)
    root = Path(str(files("meshwright")))
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".toml", ".json", ".gz") and file.is_file():
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    digest.update(_torch().encode())
    return digest.hexdigest()


def _torch() -> str:
    """The version of torch; "" where there is none."""
    if not can_run():
        return ""
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:  # copied there without its metadata
        return "torch"
