"""Fixtures of tests that run what was planned."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """One thread of torch: tiny products are not worth a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
