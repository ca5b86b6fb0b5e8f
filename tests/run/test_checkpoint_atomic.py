"""A kill or a full disk leaves the last good checkpoint."""

import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.run import safetensors_file
from meshwright.run.checkpoint import AsyncSaver, latest, read_index, save
from tests.run import shards
from tests.run.checkpoints import code, fast_disk, loaded, meta, written  # noqa: F401
from tests.run.processes import launch
from tests.run.shards import ALONE


def _save_forever(root, held):
    """Save steps 1, 2, 3...; the values of step n are those of seed n."""
    saver = AsyncSaver(root, ALONE, keep=2)
    step = max((int(f.name[5:13]) for f in root.glob("step-*")), default=0)
    while True:
        step += 1
        saver.begin(shards.pieces(held, shards.values(step)), meta(step))
        saver.before_update()
        saver.wait()


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_last_good_checkpoint(tmp_path):
    (held,) = shards.sharding(2, 1)
    draw, last, seen, kills, longest_s = random.Random(0), 0, 0, 0, 0.04
    # however slow the machine: a process lives for between nothing and some saves
    while kills < 40 or seen < 10:
        kills += 1
        child = os.fork()
        if child == 0:
            try:
                _save_forever(tmp_path, held)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.0, longest_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        folder = latest(tmp_path)
        step = read_index(folder).meta.step if folder else 0
        assert step >= last and len(list(tmp_path.glob("step-*"))) <= 3
        if folder:
            assert shards.differences(loaded(folder, held), shards.pieces(held, shards.values(step))) == []
        longest_s *= 0.95 if step > last else 1.1
        seen, last = seen + (step > last), step
    AsyncSaver(tmp_path, ALONE).close()
    assert not list(tmp_path.glob(".step-*"))


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    (held,), log = shards.sharding(3, 1), []
    rename = Path.rename

    def logged(source, target):
        log.append(f"rename {target.name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda handle: log.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    monkeypatch.setattr(Path, "rename", logged)
    save(tmp_path, shards.pieces(held, shards.values(3)), meta(1), ALONE)
    hidden = log[3]
    assert hidden.startswith(".step-00000001.") and hidden.endswith(".part")
    assert log == [
        "rank-00000.safetensors",
        "rank-00000.json",
        "index.json",
        hidden,
        "rename step-00000001",
        tmp_path.name,
    ]


def _save_on_a_small_disk(rank, root):
    """Rank 1 may write only a little; rank 0 everything."""
    group = shards.world(rank, 2)
    held = shards.sharding(9, 2)[rank]
    saver = AsyncSaver(root, group)
    saver.begin(shards.pieces(held, shards.values(1)), meta(1))
    saver.wait()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    saver.begin(shards.pieces(held, shards.values(2)), meta(2))
    saver.before_update()
    try:
        saver.wait()
        said = ""
    except MeshwrightError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    there = sorted(f.name for f in root.iterdir())
    dist.barrier()  # nobody begins the next one while another still looks
    saver.begin(shards.pieces(held, shards.values(3)), meta(3))
    return said, there, saver.wait().name


def test_a_disk_that_fills_on_one_rank_is_one_error_on_all_and_leaves_nothing(tmp_path):
    (said, _, third), (other, _, _) = results = launch(2, _save_on_a_small_disk, tmp_path)
    assert said == other and said.count("error[") == 1
    assert "error[H005]: cannot save a checkpoint: File too large" in said and "(rank 1)" in said
    assert results[0][1] == ["step-00000001"]
    assert third == "step-00000003"


@pytest.mark.parametrize("call", range(8))
def test_a_disk_that_fills_at_any_write_leaves_nothing(tmp_path, monkeypatch, call):
    (held,), state = shards.sharding(3, 1), shards.values(3)
    save(tmp_path, shards.pieces(held, state), meta(1), ALONE)
    calls = []
    write = os.write

    def full(handle, data):
        calls.append(len(data))
        if len(calls) == call + 1:
            return write(handle, data[: len(data) // 2])
        if len(calls) == call + 2:
            raise OSError(28, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(safetensors_file.os, "write", full)
    with pytest.raises(MeshwrightError, match=r"H005.*No space left on device"):
        save(tmp_path, shards.pieces(held, state), meta(2), ALONE)
    assert [f.name for f in tmp_path.iterdir()] == ["step-00000001"]
    assert shards.differences(loaded(tmp_path, held), shards.pieces(held, state)) == []


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert code(AsyncSaver, tmp_path / "file", ALONE) == {"H005"}
