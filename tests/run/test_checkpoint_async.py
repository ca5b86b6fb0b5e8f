"""Saving while training goes on: what is copied when, who waits, and when all ranks know."""

import json
import threading
import time

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.checkpoint import AsyncSaver, latest
from meshwright.run.checkpoint import saving as checkpoint_save
from tests.run import shards
from tests.run.checkpoints import fast_disk, loaded, meta  # noqa: F401
from tests.run.processes import launch
from tests.run.shards import ALONE

HASH = "cafe"


def test_what_is_saved_is_the_state_when_the_save_began(tmp_path):
    (held,), state = shards.sharding(2, 1), shards.values(1)
    pieces = shards.pieces(held, state)
    saver = AsyncSaver(tmp_path, ALONE)
    for step in (1, 2):  # the second in the same buffers
        expected = [p._replace(values=p.values.clone()) for p in pieces]
        saver.begin(pieces, meta(step))
        saver.before_update()
        for piece in pieces:
            piece.values.add_(1.0)
        saver.wait()
        back = loaded(tmp_path, held)
        assert all(torch.equal(b.values[b.values != -7], e.values[b.values != -7]) for b, e in zip(back, expected))
    assert len(saver._buffers) == len([p for p in pieces if p.owner])


def test_a_rank_says_that_training_waits_for_its_disk(tmp_path, monkeypatch):
    (held,) = shards.sharding(2, 1)
    pieces, write = shards.pieces(held, shards.values(1)), safetensors_file.write
    told, twice = [], threading.Event()

    def say(text, **_):
        told.append(text)
        if len(told) == 2:
            twice.set()

    def slow_write(*args):
        assert twice.wait(10)
        return write(*args)

    monkeypatch.setattr(safetensors_file, "write", slow_write)
    monkeypatch.setattr(checkpoint_save, "print", say, raising=False)
    monkeypatch.setattr(checkpoint_save, "WORD_S", 0.02)
    monkeypatch.setattr(checkpoint_save, "AGAIN_S", 0.02)
    saver = AsyncSaver(tmp_path, ALONE)
    saver.begin(pieces, meta(1))
    saver.before_update()
    assert saver.poll() is None and not told  # steps go on beside a disk that has not written yet
    saver.begin(pieces, meta(2))  # the next is due: it waits for the last
    saver.before_update()
    assert len(told) >= 2 and all("rank 0 has waited" in line and "of step 1 is still" in line for line in told)
    assert saver.wait().name == "step-00000002"


def test_before_update_waits_for_the_copies_and_for_nothing_else(tmp_path, monkeypatch):
    (held,) = shards.sharding(2, 1)
    pieces = shards.pieces(held, shards.values(1))[:1]
    times = {}
    copy, write = checkpoint_save.copy, safetensors_file.write

    def slow_copy(buffer, values):
        time.sleep(0.15)
        copy(buffer, values)
        times["copied"] = time.monotonic()

    def slow_write(*args):
        time.sleep(0.3)
        times["written"] = time.monotonic()
        return write(*args)

    monkeypatch.setattr(checkpoint_save, "copy", slow_copy)
    monkeypatch.setattr(safetensors_file, "write", slow_write)
    saver = AsyncSaver(tmp_path, ALONE)
    begun = time.monotonic()
    saver.begin(pieces, meta())
    times["returned"] = time.monotonic()
    saver.before_update()
    times["may update"] = time.monotonic()
    assert saver.pending and saver.poll() is None
    with pytest.raises(MeshwrightError, match="incomplete"):  # one piece is not the model
        saver.wait()
    assert times["returned"] - begun < 0.1
    assert times["copied"] <= times["may update"] < times["written"]
    assert not saver.pending


def _train(rank, root, slow_rank):
    """Six steps of "training" that save at the second, while one rank is slow to write; when the save was complete."""
    group = shards.world(rank, 2)
    write = safetensors_file.write
    if rank == slow_rank:

        def slow_write(*args):
            time.sleep(0.25)
            return write(*args)

        safetensors_file.write = slow_write
    pieces = shards.pieces(shards.sharding(9, 2)[rank], shards.values(1))
    saver, done = AsyncSaver(root, group), []
    for step in range(1, 7):
        time.sleep(0.1)
        saver.before_update()
        for piece in pieces:
            piece.values.add_(step)
        done.append(saver.poll() is not None)
        if step == 2:
            saver.begin(pieces, meta(step))
    saver.wait()
    return done


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_all_ranks_learn_of_a_complete_checkpoint_at_the_same_step(tmp_path, slow_rank):
    one, other = launch(2, _train, tmp_path, slow_rank)
    assert one == other and sum(one) == 1 and one.index(True) >= 4
    expected = shards.pieces(shards.sharding(9, 1)[0], {k: v + 1 + 2 for k, v in shards.values(1).items()})
    assert shards.differences(loaded(tmp_path, shards.sharding(9, 1)[0]), expected) == []


def test_a_save_begun_before_the_last_is_written_waits_for_it(tmp_path):
    (held,) = shards.sharding(2, 1)
    saver = AsyncSaver(tmp_path, ALONE, keep=5)
    for step in range(1, 5):
        saver.begin(shards.pieces(held, shards.values(step)), meta(step))
        saver.before_update()
    saver.wait()
    assert [
        json.loads((f / "index.json").read_text())["index"]["meta"]["step"] for f in sorted(tmp_path.iterdir())
    ] == [
        1,
        2,
        3,
        4,
    ]
    saver.close()


def test_a_saver_saves_the_same_pieces_every_time(tmp_path):
    (held,) = shards.sharding(2, 1)
    saver = AsyncSaver(tmp_path, ALONE)
    saver.begin(shards.pieces(held, shards.values(1)), meta(1))
    with pytest.raises(ValueError, match="the same pieces every time"):
        saver.begin(shards.pieces(held, shards.values(1))[1:], meta(2))
    assert latest(tmp_path).name == "step-00000001"
