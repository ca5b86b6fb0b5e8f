"""Fixtures of tests that run what was planned."""

import sys

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """One thread of torch: tiny products are not worth a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_kept_ranks():
    """Processes that tests have kept end with the session."""
    yield
    if "tests.run.processes" in sys.modules:
        sys.modules["tests.run.processes"].end_kept()
