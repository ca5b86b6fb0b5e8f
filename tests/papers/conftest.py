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
#: Seconds that another process may take to run all checks.
PATIENCE_S = 900.0


def run_all():
    """Id -> what the row's check found; None without a check."""
    # other tests run beside: where steps of one job are not steady, those of two more are not either
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "TRIES", 1)
        return _outcomes()


def _outcomes():
    if can_run():
        trained.train(plan for paper in papers().values() for plan in paper.runs)
    return {name: checking.run(paper) for name, paper in papers().items()}


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory, request):
    """Id -> what the row's check found; None without a check. Processes of one test session share them."""
    if not hasattr(request.config, "workerinput"):
        return run_all()
    place = tmp_path_factory.getbasetemp().parent  # of the session, not of this process
    done, begun = place / "papers.json", place / "papers.begun"
    try:
        os.close(os.open(begun, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        deadline = time.monotonic() + PATIENCE_S
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        return msgspec.json.decode(done.read_bytes(), type=dict[str, Outcome | None])
    found = run_all()
    part = place / "papers.part"
    part.write_bytes(msgspec.json.encode(found))
    part.rename(done)
    return found


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
