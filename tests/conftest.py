"""Shared fixtures. ``--data DIR`` (or MESHWRIGHT_DATA) names a folder of measurements that some tests check against;
without it they are skipped."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests start hundreds of processes: what Python compiles is kept for the next one, whatever the shell says of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Processes of tests fill the cores by themselves: threads of one that share a product of a few numbers only spin while
# they wait for each other, which took most of what small tensors cost. Before anything loads numpy or torch.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# The same generated examples every time, so that a verdict is one of the code; `make fuzz` looks at others. And no
# deadline: the first example of a process may compile or load compiled code.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", default=os.environ.get("MESHWRIGHT_DATA"), help="folder of measurement tables")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect no garbage while modules are imported, and never look at what they hold afterwards: that is a million
    objects, which every process that a test forks would look at too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # a twentieth of the processor's time of tests that search and simulate went into looking for cycles
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of measurements; skips the test when none was given."""
    given = request.config.getoption("--data")
    if not given:
        pytest.skip("needs --data DIR or MESHWRIGHT_DATA")
    folder = Path(given)
    if not folder.is_dir():
        pytest.fail(f"--data {folder} is not a folder")
    return folder
