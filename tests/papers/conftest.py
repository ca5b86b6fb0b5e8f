"""Every check is run once for all tests of this folder, whichever process asks first."""

import os
import time

import msgspec
import pytest

from meshwright.papers import checking, state, trained
from meshwright.papers.checks import replayed
from meshwright.papers.outcome import Outcome, can_run
from meshwright.papers.record import papers

if can_run():
    # before any test breaks something: what is loaded first in a broken test would keep what it imported from there
    import meshwright.run.equality
    import meshwright.run.in_turn
    import meshwright.run.placements
    import meshwright.run.sequences  # noqa: F401
#: Seconds that another process may take to run its part of the checks.
PATIENCE_S = 900.0


def parts():
    """Names of rows, in the parts that processes of one test session share out: those whose plans are trained are one,
    as their plans share jobs. All others are by themselves, so that at the end nobody waits for more than one, and what
    is known to take longest comes first."""
    named = papers()
    rest = sorted(
        (name for name, paper in named.items() if not paper.runs), key=lambda name: not rolls_out(named[name])
    )
    return [[name for name, paper in named.items() if paper.runs], *([name] for name in rest)]


def rolls_out(paper):
    """Whether a row asks for jobs of reinforcement learning, which are simulated from one answer to the next."""
    return any("rollout" in words for words in (paper.ask, *(figure.ask for figure in paper.figures)))


def outcomes_of(names):
    """Id -> what the row's check found; None without a check."""
    rows = [papers()[name] for name in names]
    # What is judged of a job on this machine depends on what else runs there, so that nothing of it is: its traces are
    # made and read all the same. What it would show is shown by the recorded ones, and by tests of measured steps.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "TRIES", 1)
        patch.setattr(replayed, "STEPS", 2)
        patch.setattr(replayed, "STEADY", -1.0)
        if can_run():
            trained.train(plan for paper in rows for plan in paper.runs)
        return {paper.id: checking.run(paper) for paper in rows}


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory, request):
    """Id -> what the row's check found; None without a check. Processes of one test session share the work, and none
    waits while there is a part that nobody has begun."""
    if not hasattr(request.config, "workerinput"):
        return {name: found for names in parts() for name, found in outcomes_of(names).items()}
    place = tmp_path_factory.getbasetemp().parent  # of the session, not of this process
    some = parts()
    files = [place / f"papers-{number}.json" for number in range(len(some))]
    for file, names in zip(files, some, strict=True):
        try:
            os.close(os.open(file.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        part = file.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(outcomes_of(names)))
        except BaseException as error:
            part.write_text(f"{type(error).__name__}: {error}")  # no outcomes: whoever waits fails at once
            raise
        finally:
            part.rename(file)
    deadline = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = (msgspec.json.decode(file.read_bytes(), type=dict[str, Outcome | None]) for file in files)
    return {name: outcome for part in found for name, outcome in part.items()}


@pytest.fixture(scope="session")
def states(outcomes):
    """Id -> state."""
    return {name: state.of(paper, outcomes[name]) for name, paper in papers().items()}


@pytest.fixture
def kept(states, tmp_path, monkeypatch):
    """A store with the states of this code, so that checking runs no check; the user's own is left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "meshwright"
    folder.mkdir()
    (folder / "papers.json").write_bytes(
        msgspec.json.encode(checking.KeptStates(version=checking.code_version(), states=states))
    )
    return folder
