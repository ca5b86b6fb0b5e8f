"""Steps whose compute varies: all wait for the slowest, neighbours for some, and none where nothing varies."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.simulate.meetings import Due, paced
from meshwright.simulate.rounds import PartTimes, Round
from meshwright.simulate.slowed import slowed
from meshwright.simulate.step import simulate
from meshwright.simulate.stragglers import straggling
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.sync.groups import graph
from meshwright.world.crowd import Slowness, factors
from meshwright.world.slow import SlowOne, SlowStep
from meshwright.world.trace import read

MODEL = transformer(layers=4, hidden=512, heads=8, ffn=2048, vocab=8192, max_seq_len=256)
CLUSTER, TRAIN = load("2x4xh100,nics=1,100gbe"), Train(global_batch=16, seq_len=256)
COSTS = standard_on(CLUSTER)
ONE = Slowness("listed", (1.0,))


def asked(words, world=None):
    said = None if world is None else read(world)
    return predict(MODEL, CLUSTER, TRAIN, parse(words), costs=COSTS, detail=False, world=said)


@pytest.mark.parametrize(
    "words",
    [
        "mb1",
        "pp2 mb1 zero1",
        "mb1 sync=local:h=3",
        "mb1 sync=diloco:h=6,parts=3,delay=2",
        "mb1 zero1 shard2 sync=co2:h=4",
        "mb1 sync=qsr:h=2,growth=0.0175,rate=0.008,steps=300",
        "mb1 sync=gossip:graph=ring",
        "mb1 sync=gossip:graph=exponential,overlap=yes",
        "pp2 mb1 sync=gossip:graph=torus,codec=int8",
    ],
)
def test_steps_that_do_not_vary_are_the_step_that_is_predicted_otherwise(words):
    usual, found = asked(words), asked(words, "jitter=lognormal:0")
    assert found.step_time_s == pytest.approx(usual.step_time_s, rel=1e-9)
    assert found.stragglers.waits_s == pytest.approx(0, abs=1e-9 * usual.step_time_s)
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s, rel=1e-9)


@pytest.mark.parametrize("words", ["mb1", "mb1 sync=local:h=2", "mb1 sync=gossip:graph=ring", "pp2 mb1"])
def test_ranks_that_are_slow_together_take_the_mean_of_such_steps(words):
    """Every rank takes once and three times as long, in turns: local steps of two have one of each."""
    both = asked(words, "jitter=1/3").step_time_s
    apart = [asked(words, f"ranks={factor}").step_time_s for factor in (1, 3)]
    assert both == pytest.approx(sum(apart) / 2, rel=1e-6)


def test_a_sum_of_all_waits_for_the_largest_of_exponential_times():
    """The mean of the largest of n exponentials is their mean times 1 + 1/2 + ... + 1/n; a step of one rank that is f
    times as slow is straight in f where nothing hides."""
    words = "mb1 zero1"
    one, two = (asked(words, f"ranks={f}").step_time_s for f in (4, 5))
    drawn = SlowStep().varying(factors("exp:0.5"), 8, 1024).max(axis=1)
    assert drawn.mean() == pytest.approx(1 + 0.5 * sum(1 / k for k in range(1, 9)), rel=0.05)
    assert drawn.min() > 1
    found = asked(words, "jitter=exp:0.5").step_time_s
    assert found == pytest.approx(one + (two - one) * (drawn.mean() - 4), rel=0.01)


@pytest.mark.parametrize(["words", "slow"], [("pp2 mb1", {}), ("mb1", {"slownic": (SlowOne((2,), 3.0),)})])
def test_drawn_steps_are_those_of_ranks_that_are_as_slow(words, slow):
    """Each of three drawn steps, simulated by itself with every rank's factor."""
    plan = parse(words).on(8)
    run, jitter = simulate(plan, MODEL, CLUSTER, TRAIN, COSTS), factors("lognormal:0.4")
    drawn = SlowStep().varying(jitter, 8, 3)
    alone = [
        slowed(run, COSTS, SlowStep(slow=tuple(SlowOne((r,), f) for r, f in enumerate(row)), **slow)).step_time_s
        for row in drawn.tolist()
    ]
    found = straggling(run, COSTS, SlowStep(**slow), jitter, (0, 3))
    assert found.mean_s == pytest.approx(np.mean(alone), rel=1e-9) and found.num_steps == 3


def followed(steps, met, lag, busy):
    """When replicas end their steps, by following every message through the ports: one after the other as their other
    ends come, each an equal part of `busy`; `met`: of every replica those that it hears, and those that hear it."""
    num_steps, n = steps.shape
    now, free, arrives, out = np.zeros(n), np.zeros(n), {}, []
    for step in range(num_steps):
        now = now + steps[step]
        start = np.maximum(now, free) if lag else now
        ends = start + busy
        for i in range(n):
            for way in met[i]:
                done = 0.0
                for at in sorted(max(start[i], start[j]) for j in way):
                    done = max(done, at) + busy / len(way)
                ends[i] = max(ends[i], done)
        arrives[step] = free = ends
        if step >= lag:
            now = np.maximum(now, arrives[step - lag])
        out.append(now)
    return np.array(out)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("text", ["ring", "random:degree=3,seed=2", "static-exponential"])
def test_neighbours_wait_as_messages_do_that_are_followed_one_by_one(text, lag):
    some, n, busy = graph(text, 8), 8, 0.7
    steps = np.random.default_rng(1).exponential(1.0, (40, n)) + 0.2
    (turn,) = some.turns
    hears = [[one.source for one in heard] for heard in turn]
    met = [(hears[i], [j for j in range(n) if i in hears[j]]) for i in range(n)]
    whole = (1.0 + (0 if lag else busy), 1.0, (1.0 + busy,) if lag else (), (busy,) if lag else ())
    one = Round(1, lag, 1.0, (PartTimes(*whole, 0.0),), 0.0, np.zeros(0), (), np.zeros(0))
    due = Due(*(np.ones((40, 1), np.int32) for _ in range(2)), np.arange(1, 41))
    due.applied[:lag] = 0
    assert paced(one, due, some, steps) == pytest.approx(followed(steps, met, lag, busy), rel=1e-12)
    all_s = paced(one, due, None, steps)
    assert (all_s >= paced(one, due, some, steps) - 1e-12).all()


def test_factors_of_more_steps_begin_with_those_of_fewer():
    slow = SlowStep(slow=(SlowOne((1,), 2.0),), seed=4)
    some, more = (slow.varying(factors("slow:0.2x5"), 3, count) for count in (10, 40))
    assert (more[:10] == some).all() and set(np.unique(more[:, 1])) == {2.0, 10.0}
    assert (more[:, 0] == 5).mean() == pytest.approx(0.2, abs=0.25)


@pytest.mark.parametrize(
    ["words", "world", "code"],
    [
        ("mb1", "jitter=exp:1,drop=0.1", "O005"),
        ("mb1", "speeds=1/2", "O005"),
        ("mb1 sync=local:h=4", "slowlink=0-1x3,jitter=exp:1", "O006"),
        ("mb1 sync=masha:h=4,codec=randomk,share=0.1,feedback=no", "jitter=exp:1", "O006"),
        ("mb1", "jitter=exp:1,slow=99x2", "O006"),
    ],
)
def test_worlds_that_steps_do_not_have_are_refused(words, world, code):
    train = msgspec.structs.replace(TRAIN, optimizer="sgd") if "masha" in words else TRAIN
    with pytest.raises(MeshwrightError) as refused:
        predict(MODEL, CLUSTER, train, parse(words), costs=COSTS, detail=False, world=read(world))
    assert [d.code for d in refused.value.diagnostics] == [code]
