"""Checkpoints of synthetic pieces: written, loaded, and the code of the error that either raises."""

import os

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.run.checkpoint import Meta, load
from meshwright.run.checkpoint.commit import commit
from meshwright.run.checkpoint.write import write_rank
from tests.run import shards
from tests.run.shards import ALONE

HASH = "cafe"


@pytest.fixture(scope="module", autouse=True)
def fast_disk():
    """No waiting for a real disk; what is synced, and when, has a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def meta(step=20, **changed):
    return Meta(**{"step": step, "seed": 3, "model": "m", "model_hash": HASH, "plan": "dp2", "world": 2} | changed)


def written(root, held, state, step=20, keep=9):
    """A checkpoint of several processes, written by this one alone."""
    root.mkdir(exist_ok=True)
    folder = root / f".step-{step}.part"
    for rank, mine in enumerate(held):
        pieces = shards.pieces(mine, state, next(iter(state.values())).dtype)
        write_rank(folder, rank, [(p, p.values) for p in pieces if p.owner], shards.NAMES)
    return commit(root, folder, meta(step), len(held), keep)


def loaded(path, held, dtype=torch.float32):
    """The pieces of one process, filled from a checkpoint by that process alone."""
    pieces = shards.pieces(held, None, dtype)
    load(path, pieces, ALONE, model_hash=HASH)
    return pieces


def code(call, *args, **named):
    with pytest.raises(MeshwrightError) as caught:
        call(*args, **named)
    return {d.code for d in caught.value.diagnostics}
