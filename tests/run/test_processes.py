"""What processes of a test hand back comes back as it was, and nothing of it is code."""

import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.run.processes import end_kept, launch, launch_kept


def test_what_a_process_hands_back_is_what_it_had():
    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    found = {
        "a": [1, 2.5, None, True, "x", (), (1, (2,))],
        (1, "key"): {"empty": {}},
        "tensors": (whole, whole.T, whole[0, 0], torch.empty(0, 3)),
        "array": np.array([[1, 2]], np.int32),
        "where": (slice(1, None), slice(0, 4, 2)),
        "exact": (0.1, math.inf, 2**60),
    }
    (got,) = launch(1, lambda rank: found)
    tensors, array = got.pop("tensors"), got.pop("array")
    for a, b in zip(tensors, found.pop("tensors"), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    assert isinstance(array, np.ndarray) and array.dtype == np.int32 and array.tolist() == [[1, 2]]
    found.pop("array")
    assert got == found
    assert math.isnan(launch(1, lambda rank: math.nan)[0])


def test_a_value_that_is_not_plain_is_named():
    with pytest.raises(AssertionError, match="hands back a complex: take it apart"):
        launch(2, lambda rank: 1j)


def called(rank: int, fails: bool):
    """The process, a random number, and the sum over all ranks of their numbers; a rank fails when told to."""
    if fails and rank:
        raise ValueError("told to")
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return os.getpid(), float(torch.rand(1)), int(total)


def test_ranks_that_are_kept_serve_call_after_call_alike_until_one_fails():
    first, second = launch_kept(2, called, False), launch_kept(2, called, False)
    assert first == second and len({pid for pid, *_ in first}) == 2  # no draw goes on from the call before
    assert [total for *_, total in first] == [1, 1]
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: told to"):
        launch_kept(2, called, True)
    anew = launch_kept(2, called, False)
    assert not {pid for pid, *_ in first} & {pid for pid, *_ in anew}
    end_kept()
    for pid, *_ in (*first, *anew):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
