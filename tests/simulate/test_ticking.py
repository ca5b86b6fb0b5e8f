"""Replicas with clocks of their own, simulated: who waits for whom, links between nodes, and the mean over units."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.cost import standard
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.simulate.ticking import ended, meetings_of, num_units, rate_of
from meshwright.sync.clocks import Clocks
from meshwright.world.trace import read as read_world

MODEL, TRAIN = mw.load_model("llama3.2-1b"), mw.parse_train("batch=32,seq=2048,optimizer=sgd")


def test_a_meeting_waits_for_its_two_and_no_other():
    """Every tick by the longest way to it, over all ticks of those that are in it; the answer of whether a run ends is
    never late where steps are about equal and replicas many."""
    clocks, n, units = Clocks(graph="ring", meetings=0.5, seed=2), 5, 6
    steps = np.random.default_rng(1).uniform(1, 1.2, (units, n))
    got = ended(clocks, steps, lambda i, j: 0.1 * (i + j))
    ticks = [(unit, tick) for unit in range(units) for tick in clocks.ticks(n, unit)]

    def when(number: int, replica: int) -> float:
        """When a replica is free before one of all ticks."""
        for before in range(number - 1, -1, -1):
            unit, tick = ticks[before]
            if replica in (tick.replica, tick.other):
                if tick.other < 0:
                    return when(before, replica) + steps[unit, replica]
                both = max(when(before, tick.replica), when(before, tick.other))
                return both + 0.1 * (tick.replica + tick.other)
        return 0.0

    wanted = [when(len(ticks), replica) for replica in range(n)]
    assert got[-1] == pytest.approx(wanted, rel=1e-12) or (got[-1] >= np.array(wanted) - 1e-12).all()
    assert got[-1].max() == pytest.approx(max(wanted), rel=1e-12)


def test_a_step_is_its_pass_and_its_meetings_with_what_they_wait_for():
    where, clocks = mw.load_cluster("8x1xh100,10gbe"), Clocks(graph="ring", meetings=1.0)
    run = simulate(parse("dp8 mb1 sync=dadao:meetings=1").on(8), MODEL, where, TRAIN, standard())
    one, (part,) = run.round, run.round.parts
    meets = part.sends_s - one.inner_s
    ends = ended(clocks, np.full((num_units(clocks, 8), 8), one.inner_s), lambda i, j: meets)
    assert run.step_time_s == pytest.approx(rate_of(ends), rel=1e-9)
    assert run.step_time_s > one.inner_s + meets  # one meeting a step, and waiting
    gossip = simulate(parse("dp8 mb1 sync=gossip:h=2").on(8), MODEL, where, TRAIN, standard()).round.parts[0]
    assert part.num_bytes == gossip.num_bytes / 2  # one message, where a ring has two


def test_meetings_inside_a_node_are_as_short_as_its_links():
    where = mw.load_cluster("2x4xh100,nics=1,10gbe")
    run = simulate(parse("dp8 mb1 sync=dadao").on(8), MODEL, where, TRAIN, standard())
    takes = meetings_of(run.lowered, standard(), run.round.parts[0].sends_s - run.round.inner_s)
    assert takes(0, 7) == takes(3, 4) > 20 * takes(0, 1) > 0


def test_replicas_whose_steps_vary_wait_for_the_few_that_they_meet():
    where = mw.load_cluster("8x1xh100,100gbe")
    asked = (MODEL, where, TRAIN, parse("mb1 full sync=dadao:meetings=0.2"))
    found, even = (mw.predict(*asked, detail=False, world=w) for w in (read_world("jitter=normal:0.2"), None))
    every = mw.predict(*asked[:3], parse("mb1 full"), detail=False, world=read_world("jitter=normal:0.2"))
    assert even.step_time_s == pytest.approx(found.stragglers.even_s)
    added, of_all = (one.stragglers.mean_s - one.stragglers.even_s for one in (found, every))
    assert 0 < added < of_all / 3  # a sum of all waits for the slowest of eight
