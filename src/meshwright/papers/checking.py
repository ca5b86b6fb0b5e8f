"""Running the checks of all rows; what they found is kept by the version of the code and of the torch that ran them.

Every row is kept as soon as its check has ended, so that who interrupts goes on from there. States that may be of the
moment, as when a process died or the machine was busy, are not kept and found anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import MeshwrightError
from meshwright.papers import trained
from meshwright.papers.checks import checks
from meshwright.papers.evaluate import evaluate
from meshwright.papers.outcome import Outcome, by_processes, can_run, joined, not_here
from meshwright.papers.record import Paper, papers
from meshwright.papers.shipped import code_digest
from meshwright.papers.state import PaperState, of

#: Told a name, how much is done and how much there is.
Progress = Callable[[str, int, int], None]


class KeptStates(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the store's file: the version of the code, and the states by row."""

    version: str
    states: dict[str, PaperState]


def run(paper: Paper) -> Outcome | None:
    """The outcome of a row's figures and check, with what training its plans found; None when it has neither. What a
    plan refuses is an outcome too."""
    if not paper.checked:
        return None
    parts: list[Callable[[], Outcome]] = [lambda: evaluate(paper)] if paper.figures else []
    parts += [checks()[paper.check]] if paper.check else []
    found = joined([_tried(part) for part in parts])
    if not paper.runs:
        return found
    what = f"training {', '.join(map(repr, paper.runs))}"
    return by_processes(found, what, lambda: trained.judged(paper.runs))


def _tried(part: Callable[[], Outcome]) -> Outcome:
    try:
        return part()
    except MeshwrightError as error:
        return Outcome(missing=(f"the check does not run: {error.diagnostics[0].message}",))


def checked(
    *, only: Collection[str] | None = None, progress: Progress | None = None, folder: Path | None = None
) -> dict[str, PaperState]:
    """The state of every row (of those in `only`, where it is given): from the store of this version of the code, else
    by running its check. `folder` is where the store lies (the user's cache folder if left out). A store that cannot
    be read or written is no error: the checks run again.
    """
    file = (folder or store_folder()) / "papers.json"
    kept = _kept(file)
    wanted = {name: paper for name, paper in papers().items() if only is None or name in only}
    found = {name: state for name, state in kept.items() if name in wanted}
    for name, paper in wanted.items():
        if name not in found and not paper.checked:
            found[name] = of(paper, run(paper))
    # those that train nothing first, then by the size of their jobs, so that each can be kept when its plans are done
    rest = sorted((paper for name, paper in wanted.items() if name not in found), key=_most_ranks)
    trains = bool(rest) and any(paper.runs for paper in rest) and not not_here()
    plans = len({plan for paper in rest for plan in paper.runs}) if trains else 0
    done, total = 0, len(rest) + plans

    def tell(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress("checking", done, total)

    tell(0)
    for _, together in groupby(rest, key=_most_ranks):
        rows = list(together)
        if trains:
            trained.train((plan for paper in rows for plan in paper.runs), done=tell)
        for paper in rows:
            found[paper.id] = of(paper, run(paper))
            _keep(file, kept | found)
            tell(1)
    _keep(file, kept | found)
    return {name: found[name] for name in wanted}


def num_kept(folder: Path | None = None) -> int:
    """Rows with a check whose state is in the store."""
    return sum(papers()[name].checked for name in _kept((folder or store_folder()) / "papers.json"))


def _most_ranks(paper: Paper) -> int:
    return max((trained.read(plan).layout.num_ranks for plan in paper.runs), default=0)


def _keep(file: Path, states: dict[str, PaperState]) -> None:
    keep = {name: state for name, state in states.items() if not state.passing}
    with contextlib.suppress(OSError, MeshwrightError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, msgspec.json.encode(KeptStates(version=code_version(), states=keep)))


def _kept(file: Path) -> dict[str, PaperState]:
    """Return the states in the store for this version of the code, by row; empty when it cannot be read."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=KeptStates)
    except (OSError, ValueError, msgspec.MsgspecError):  # text that is no UTF-8 is a plain ValueError
        return {}
    if kept.version != code_version():
        return {}
    return {name: state for name, state in kept.states.items() if name in papers()}


def store_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def code_version() -> str:
    """The code and, where processes can be started, the torch that they run with."""
    return f"{code_digest()} {torch_version()}".strip()


def torch_version() -> str:
    """The version of torch; "" where there is none."""
    if not can_run():
        return ""
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:  # copied there without its metadata
        return "torch"


__all__ = ["KeptStates", "checked", "code_version", "num_kept", "run", "store_folder", "torch_version"]
