"""A real job of a few processes, recorded: the same tasks as predicted, at little cost."""

import numpy as np
import pytest

from meshwright.compare.measured import steps
from meshwright.graph import KINDS, QUEUES
from meshwright.plan import parse
from meshwright.replay.timed import timed, typical
from meshwright.run import clocks
from meshwright.run.gather import gather
from meshwright.run.mesh import build
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from meshwright.timeline import Identity
from meshwright.trace import decode, encode
from tests.run import small
from tests.run.processes import launch_kept as launch

TRAIN = Train(global_batch=8, seq_len=64)


def trainer_of(text, size, **dims):
    plan = parse(text).on(size)
    model, mesh = small.llama(**dims), build(plan)
    trainer = Trainer(model, plan, TRAIN, mesh, settings=Settings())

    def step(number):
        trainer.step(small.batch(TRAIN, model.vocab, number, plan.layout.dp, mesh["dp"].index))

    return trainer, step


def job(rank, text, size):
    trainer, step = trainer_of(text, size)
    recorder = Recorder(rank=rank, warmup=1, keep=3)
    install(recorder)
    before = clocks.probe()
    for number in range(5):
        step(number)
    trainer.settle()
    found = gather(recorder, trainer.plan, before=before, identity=Identity(model="small"))
    return None if found is None else encode(found).decode()


@pytest.mark.parametrize(
    "text, size, tasks",
    [
        # two stages, eight microbatches: a forward and a backward of each on either, a message each way
        ("pp2 mb1 1f1b", 2, {"F": 16, "BW": 16, "pp_forward": 8, "pp_backward": 8, "optimizer": 2}),
        ("pp2 mb1 zb-h1", 2, {"F": 16, "B": 16, "W": 16, "BW": 0, "pp_forward": 8}),
        # four replicas' microbatches each; four layers' gradients and the norm, on both
        ("dp2 mb1", 2, {"F": 8, "BW": 8, "dp": 10, "optimizer": 2}),
        # a microbatch gathers five units forward and four backward, the rest having stayed, and reduces five; its
        # passes stand still meanwhile
        (
            "dp2 mb1 zero3",
            2,
            {"F": 8 * 6, "BW": 8 * 10, "dp_gather": 72, "dp": 42, "reduce_scatter": 40, "optimizer": 2},
        ),
        # the same of two microbatches on four, and what is scattered over two is summed over the two pairs
        (
            "dp4 hsdp2 mb1",
            4,
            {"F": 8 * 6, "BW": 8 * 15, "dp_gather": 72, "reduce_scatter": 40, "all_reduce": 40 + 4, "optimizer": 4},
        ),
        ("pp2 dp2 mb2 zero1", 4, {"F": 8, "BW": 8, "pp_forward": 4, "optimizer": 4}),
    ],
)
def test_every_task_of_every_step_is_measured(text, size, tasks):
    found, *others = launch(size, job, text, size)
    found = decode(found.encode())
    assert others == [None] * (size - 1)
    assert [s.number for s in steps(found)] == [2, 3, 4]
    assert found.identity.model == "small" and found.identity.source == "measured"
    for step in steps(found):
        one = step.timeline
        kinds = np.array(KINDS)[one.kind]
        queues = np.array(QUEUES)[one.queue]
        for name, count in tasks.items():
            assert ((kinds == name) | (queues == name)).sum() == count, name
        for key, before in (("F", "BW"), ("F", "B"), ("B", "W")):
            order(one, kinds, key, before)
        path = one.critical_path()
        assert (np.diff(one.start_s[path]) >= 0).all() and len(path) > 4
        assert step.seconds > 0


def order(one, kinds, first, second):
    """On one rank the first pass of a microbatch and stage ends before the second begins."""
    where = np.vstack([one.rank, one.attributes[[0, 2]]]).T.tolist()
    end = {tuple(w): one.end_s[i] for i, w in enumerate(where) if kinds[i] == first}
    for i, w in enumerate(where):
        if kinds[i] == second:
            assert end[tuple(w)] <= one.start_s[i]


def test_what_fully_sharded_layers_exchange_on_a_processor_is_hidden_by_nothing():
    found = decode(launch(2, job, "dp2 mb1 zero3", 2)[0].encode())
    for rank in (0, 1):
        exposed = found.exposed_comm(rank)
        assert exposed["dp_gather"] == pytest.approx(found.busy_s(rank, "dp_gather"))
        assert exposed["dp"] == pytest.approx(found.busy_s(rank, "dp"))


@pytest.mark.parametrize("text", ["pp2 mb1 1f1b", "dp2 mb1 zero3"])
def test_a_measured_step_replays_as_long_as_it_took(text):
    found = decode(launch(2, job, text, 2)[0].encode())
    # host time is kept before tasks, so all that can differ is what overlaps against the rules: that makes a replay
    # shorter, more so where the machine stops a rank within a send, and never longer
    errors = [timed(typical(step.timeline)).makespan_s / step.timeline.makespan_s - 1 for step in steps(found)]
    assert len(errors) == 3 and max(errors) <= 0.02 and abs(np.median(errors)) <= 0.05


def spans(rank, size):
    """Spans of a step by kind."""
    trainer, step = trainer_of("dp2 mb1 zero1", size)
    recorder = Recorder(rank=rank, warmup=1, keep=1)
    install(recorder)
    for number in range(2):
        step(number)
    install(Off())
    trainer.settle()
    found = recorder.recording()
    return [found.labels[label].kind for label in found.label.tolist()]


def test_a_step_records_its_tasks_and_no_more():
    """What recording costs is a look-up and two stores for each of these (``python -m bench.overhead`` measures it)."""
    trained = small.llama()
    # four microbatches a rank; a bucket for each layer and one for each end, but for the last, exchanged with a layer
    buckets = trained.num_layers + 2
    for kinds in launch(2, spans, 2):
        assert kinds.count("F") == kinds.count("BW") == 4
        assert kinds.count("optimizer") == kinds.count("all_reduce") == 1
        assert kinds.count("all_gather") == kinds.count("reduce_scatter") <= buckets
        assert len(kinds) == 10 + 2 * kinds.count("all_gather")
