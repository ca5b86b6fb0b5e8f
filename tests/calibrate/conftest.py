"""A home of its own for what is measured of this machine."""

import pytest


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A home of its own for what is measured."""
    from meshwright.cost import framework, measured
    from meshwright.spec import cluster

    def forget():
        cluster.forget_here()
        measured.forget()
        framework.frameworks.cache_clear()

    monkeypatch.setenv("MESHWRIGHT_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()
