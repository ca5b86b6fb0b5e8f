"""Training with state on drives: the same numbers as without, room for what the answer says, and errors that teach."""

import pytest
import torch

from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.run.bench.drives import figures
from meshwright.run.checkpoint import AsyncSaver, Meta, identity, load
from meshwright.run.drives import ALIGNED, Drives, on_cores
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import small
from tests.run.processes import launch_kept as launch
from tests.simulate.test_cores import cluster

TRAIN = Train(global_batch=4, seq_len=64, dtype="fp32")
MODEL = small.llama(layers=5)
BOTH = "offload=optimizer:nvme+activations:nvme"


def trained(rank, words, steps=2):
    return small.train_steps(rank, MODEL, words, TRAIN, steps)


@pytest.mark.parametrize(
    ("words", "offload"),
    [
        ("dp1 mb1", f"{BOTH} prefetch=1"),
        ("dp1 mb2 full", "offload=optimizer:nvme@0.4+activations:nvme@0.6"),
        ("dp2 mb1 zero3", BOTH),
        ("pp2 mb1 gpipe", BOTH),
        ("dp2 mb1 zero2", "offload=optimizer@0.4+activations"),
        ("pp2 mb2 full", "offload=optimizer+activations@0.6 prefetch=1"),
    ],
)
def test_state_on_drives_or_another_memory_trains_to_the_last_bit_as_state_in_memory(words, offload):
    ranks = parse(words).layout.num_ranks
    for plain, moved in zip(launch(ranks, trained, words), launch(ranks, trained, f"{words} {offload}")):
        assert plain[0] == moved[0]  # losses and gradient norms, float64
        for one, other in zip(plain[1] + plain[2], moved[1] + moved[2], strict=True):
            assert one[:3] == other[:3] and (one[3] == other[3]).all()


def begun(words):
    torch.set_num_threads(1)  # as a rank has it
    plan = parse(words).on(1)
    return Trainer(MODEL, plan, TRAIN, build(plan), settings=Settings(lr=1e-2))


def step(trainer, number):
    return trainer.step(small.batch(TRAIN, MODEL.vocab, number)).loss


def test_drives_hold_the_bytes_that_the_answer_says_and_memory_holds_a_window():
    trainer = begun("dp1 mb1 offload=optimizer:nvme")
    step(trainer, 0)
    drives, moments = trainer.away.drives, trainer.optimizer.moments_away
    said = predict(MODEL, cluster("1xh100", 2), TRAIN, parse("dp1 mb1 offload=optimizer:nvme"), detail=False).tiers
    (predicted,) = said
    assert predicted.alive == {"optimizer": 8.0 * MODEL.num_params}  # AdamW's two moments in fp32
    assert 0 <= drives.held_bytes - predicted.peak_bytes < len(moments.layers) * ALIGNED
    largest = max(layer.slot.num_bytes for layer in moments.layers)
    assert drives.buffer_bytes == moments.room * largest
    kept = [v for state in trainer.optimizer.torch.state.values() for name, v in state.items() if name != "step"]
    assert kept == []


def test_activations_leave_the_memory_and_their_room_on_drives_is_free_after_the_step():
    plain, moved = begun("dp1 mb4"), begun("dp1 mb4 offload=activations:nvme prefetch=1")
    assert step(plain, 0) == step(moved, 0)
    drives = moved.away.drives
    assert drives.held_bytes == 0
    words = "dp1 mb4 offload=activations:nvme prefetch=1"
    (predicted,) = predict(MODEL, cluster("1xh100", 2), TRAIN, parse(words), detail=False).tiers
    # the executor saves what torch's kernels save, which is more than fused ones do
    assert predicted.peak_bytes < drives.peak_bytes < 3 * predicted.peak_bytes


def resumed(rank, first, second, root):
    """Losses of two steps under a plan, saved, and two under another."""
    trainer = begun(first)
    out = [step(trainer, number) for number in range(2)]
    saver = AsyncSaver(root, trainer.mesh["world"])
    said = Meta(step=2, seed=0, model=MODEL.name, model_hash=identity(MODEL), plan=first, world=1)
    saver.begin(trainer.pieces(), said)
    path = saver.wait()
    saver.close()
    trainer = begun(second)
    load(path, trainer.pieces(), trainer.mesh["world"], model_hash=identity(MODEL), device=trainer.mesh.device)
    trainer.set_step(2)
    return out + [step(trainer, number) for number in range(2, 4)]


def test_a_checkpoint_goes_on_with_moments_on_drives_or_in_memory(tmp_path):
    plain, there = "dp1 mb1", "dp1 mb1 offload=optimizer:nvme@0.5"
    wanted = launch(1, resumed, plain, plain, tmp_path / "a")
    assert launch(1, resumed, plain, there, tmp_path / "b") == wanted
    assert launch(1, resumed, there, plain, tmp_path / "c") == wanted


def test_requests_return_what_was_written_whatever_the_order_of_slots(tmp_path):
    drives = Drives(str(tmp_path))
    slots = [drives.slot(size) for size in (10_000, 4096, 10_000)]
    for number, slot in enumerate(slots):
        buffer = drives.buffer(slot.num_bytes)
        buffer.values.fill_(number + 1)
        drives.write(slot, buffer).result()
        drives.give_back(buffer)
    for number in (2, 0, 1):
        buffer = drives.buffer(slots[number].num_bytes)
        drives.read(slots[number], buffer).result()
        assert (buffer.values == number + 1).all()
    assert drives.held_bytes == 12_288 + 4096 + 12_288
    assert list(tmp_path.iterdir()) == []  # the file has no name
    drives.close()
    found = figures(str(tmp_path), request=1 << 16, total=1 << 18)
    assert min(found.read_gb_s, found.write_gb_s, found.free_bytes) > 0


def test_a_folder_that_is_not_there_is_told_with_the_way_out(tmp_path):
    with pytest.raises(MeshwrightError) as caught:
        Drives(str(tmp_path / "none"))
    (said,) = caught.value.diagnostics
    assert said.code == "X104" and "none" in said.message and "--drives" in said.help
    with pytest.raises(MeshwrightError, match="--device cpu"):
        on_cores(torch.device("cuda"), str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dp1 offload=params:nvme", "params off the device"),
        ("dp1 zero2 offload=grads:nvme+optimizer:nvme", "grads off the device"),
        ("dp1 zero3 offload=optimizer", "under zero3"),
        ("dp1 bf16 offload=optimizer:nvme", "16-bit parameters"),
    ],
)
def test_what_is_not_run_is_refused_with_a_plan_that_is(words, said):
    found = [d for d in unexecutable(parse(words), MODEL, TRAIN) if d.code == "P033"]
    assert any(said in d.message for d in found)
    assert all("nearest plan that runs" in d.help for d in found)
