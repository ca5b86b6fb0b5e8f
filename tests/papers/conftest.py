"""Every check is run once for all tests of this folder."""

import pytest

from meshwright.papers import state
from meshwright.papers.record import papers


@pytest.fixture(scope="session")
def outcomes():
    """Id -> what the row's check found; None without a check."""
    return {name: state.run(paper) for name, paper in papers().items()}


@pytest.fixture(scope="session")
def states(outcomes):
    """Id -> state."""
    return {name: state.of(paper, outcomes[name]) for name, paper in papers().items()}


@pytest.fixture
def kept(states, tmp_path, monkeypatch):
    """A cache folder with the states of this code, so that commands run no check; the user's own is left alone."""
    import msgspec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "meshwright"
    folder.mkdir()
    (folder / "papers.json").write_bytes(msgspec.json.encode(state.Kept(version=state.code_version(), states=states)))
    return folder
