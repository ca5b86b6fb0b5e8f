"""Steps by slopes along shared directions: as by hand, a byte a replica, without gradients."""

import pytest
import torch

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.mesh import alone
from meshwright.run.record import Off, Recorder, install
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import codes, local, small
from tests.run.processes import launch_kept as launch

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32", optimizer="sgd")
PLAN = "dp2 mb1 sync=one-byte:apart=0.01,levels=16"
STEPS = 3


def trained(rank, model):
    """Losses, parameters, what was sent, and whether any rank has room for a gradient."""
    trainer = local.begun(model, PLAN, TRAIN)
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=1)
    install(recorder)
    seen = [loss for loss, _ in local.steps(trainer, 0, STEPS)]
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    sent = [(one.kind, one.num_bytes) for one in labels if one.queue == "dp" and one.num_bytes]
    return seen, local.state(trainer), sent, any(b._gradient is not None for b in trainer.exchanges)


def by_hand(rank, model):
    """Both replicas in one process: each measures its slope along its direction, rounds it to a byte, and all step
    along both (algorithm 1 of Zelikman et al. 2306.10015)."""
    share = Train(global_batch=2, seq_len=16, dtype="fp32", optimizer="sgd")
    trainers = [Trainer(model, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(2)]
    drawn = local_directions(model)
    for step in range(STEPS):
        begun = [[b.master.clone() for b in t.exchanges] for t in trainers]
        codes_ = []
        for replica, trainer in enumerate(trainers):
            losses = []
            for side in (1, -1):
                for number, bucket in enumerate(trainer.exchanges):
                    bucket.master.copy_(begun[replica][number] + side * 0.01 * drawn(step, replica, number, bucket))
                    bucket.publish()
                losses.append(trainer.pipeline.run(trainer.passes(small.batch(TRAIN, model.vocab, step, 2, replica))))
            codes_.append(max(-127, min(127, round(float(losses[0] - losses[1]) / 0.02 * 16))))
        assert any(codes_)
        rate = local.SETTINGS.lr_at(step)
        for replica, trainer in enumerate(trainers):
            for number, bucket in enumerate(trainer.exchanges):
                bucket.master.copy_(begun[replica][number])
                for h in bucket.held():
                    h.master.mul_(1 - (rate * 0.1 if h.decays else 0))
                for other, code in enumerate(codes_):
                    bucket.master.sub_(rate * code / 16 / 2 * drawn(step, other, number, bucket))
                bucket.publish()
    return local.state(trainers[0])


def local_directions(model):
    """The directions of a trainer under the plan, which are drawn from seeds alone."""
    from meshwright.run.projected import ProjectedSteps

    steps = ProjectedSteps([], None, None, local.SETTINGS, 0.01, 16)
    return lambda step, replica, number, bucket: steps.direction(step, replica, number, bucket.master)


def test_replicas_stay_alike_to_the_last_bit_and_step_as_by_hand():
    model = small.llama(layers=1)
    (expected,) = launch(1, by_hand, model)
    one, other = launch(2, trained, model)
    first, second, by = (local.whole([held], "param") for held in (one[1], other[1], expected))
    assert max(small.differences(first, second).values()) == 0
    assert max(small.differences(first, by).values()) < 1e-9
    assert one[0] == other[0] and not (one[3] or other[3])  # no gradient buffer was made


def test_a_step_sends_a_byte_for_every_replica_as_predicted_and_passes_forward_alone():
    model = small.llama(layers=1)
    run = simulate(parse(PLAN), model, load("2xh100"), TRAIN, standard())
    kinds = [run.lowered.programs[key].which for key in run.lowered.graph.cost_key.tolist()]
    assert kinds.count("F") == 2 * 2 and not {"B", "W", "BW"} & set(kinds)  # two passes of two microbatches
    moves = [(m.op, m.num_bytes) for program in run.lowered.programs for m in program.moves]
    for _, _, sent, _ in launch(2, trained, model):
        assert sent == moves == [("all_gather", 2)]


def test_training_goes_on_from_a_checkpoint_by_seeds_alone(tmp_path):
    for on, again, kept, _ in launch(2, codes.resumed, small.llama(layers=1), PLAN, TRAIN, tmp_path, 2):
        assert on == again and not kept


@pytest.mark.parametrize(
    ["plan", "said"],
    [("dp2 tp2", "tp spreads them.*say tp1"), ("dp4 zero1", "whole directions.*drop the sharding"), ("dp1 pp4", "pp1")],
)
def test_a_replica_of_more_than_one_rank_is_refused(plan, said):
    with pytest.raises(MeshwrightError, match=f"(?s)Y003.*{said}"):
        mw.predict(small.llama(layers=1), load("4xh100"), TRAIN, parse(f"{plan} mb1 sync=one-byte"))


def test_slow_links_cost_nothing_and_gradients_no_memory():
    model, work = mw.load_model("llama3.2-1b"), mw.parse_train("batch=8,seq=2048,optimizer=sgd")
    plain, byte = (mw.predict(model, load("8x1xh100,1gbe"), work, parse(f"dp8 mb1{w}")) for w in ("", " sync=one-byte"))
    assert byte.step_time_s < plain.step_time_s / 100
    assert not byte.memory[0].alive.get("gradients") and not byte.memory[0].alive.get("activations")
    assert any("one direction" in line for line in byte.cautions)
