"""Swarms on the virtual clock: hand calculations, and what choosing peers is worth where they are unequal."""

import msgspec
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.simulate.swarm import SwarmSizes, SwarmWorld, simulate_swarm
from meshwright.world.decider import replayed
from meshwright.world.swarm import Swarm
from meshwright.world.trace import WorldEvent, read


def sizes(peers, stages, forward=1.0, message=0.0, **said):
    """Backwards of three forwards, sums and updates that take no time."""
    usual = {
        "forward_s": ((forward,) * stages,) * peers,
        "backward_s": ((3 * forward,) * stages,) * peers,
        "message_s": (message,) * peers,
        "message_bytes": 10,
        "code_s": 0.0,
        "sum_s": ((0.0,) * (peers + 1),) * stages,
        "update_s": ((0.0,) * stages,) * peers,
        "state_s": (0.0,) * stages,
    }
    return SwarmSizes(**(usual | said))


def world(*failures, computing, **said):
    return SwarmWorld(tuple(computing), (1.0,) * len(computing), failures=failures, **said)


def test_one_microbatch_through_two_stages_takes_its_passes_and_messages_one_after_the_other():
    one = sizes(2, 2, message=0.5, update_s=((0.25, 0.25),) * 2)
    run = simulate_swarm(one, Swarm(stages=2, stage_of=(0, 1), microbatches=1, trainers=1), world(computing=(1, 1)), 3)
    # forward and out, in and forward, in and backward and out, in and backward, update
    assert run.step_s == pytest.approx([1.5 + 1.5 + 4.0 + 3.5 + 0.25] * 3)
    assert run.sent_bytes == 5 * 10 and run.computing_s == pytest.approx((4 + 4) / 2)
    computed = [(one.peer, one.kind, one.start_s, one.end_s) for one in run.spans if one.queue == "compute"]
    assert computed == [
        (0, "F", 0.0, 1.0),
        (1, "F", pytest.approx(2.0), pytest.approx(3.0)),
        (1, "BW", pytest.approx(3.5), pytest.approx(6.5)),
        (0, "BW", pytest.approx(7.5), pytest.approx(10.5)),
        *((peer, "optimizer", pytest.approx(10.5), pytest.approx(10.75)) for peer in (0, 1)),
    ]


def test_unequal_peers_of_one_stage_are_as_fast_as_their_speeds_together():
    # ideal: 64 microbatches of 1 + 2.5 forwards' time at one over 1 + 1/4 passes a second
    slow = sizes(4, 2, backward_s=((2.5, 2.5),) * 4)
    decider = Swarm(stages=2, stage_of=(0, 1) * 2, microbatches=64, trainers=12)
    run = simulate_swarm(slow, decider, world(computing=(1, 1, 4, 4)), 6)
    ideal = 64 * 3.5 / 1.25
    assert ideal < run.mean_s < 1.15 * ideal
    assert run.mean_s < 0.6 * (64 / 2 * 3.5 * 4)  # of half each, where all wait for the slow ones
    assert replayed(decider, run.log) == list(run.log)


def test_peers_that_are_lost_are_missed_until_they_come_back_and_the_last_of_a_stage_ends_it():
    decider = Swarm(stages=2, stage_of=(0, 0, 1, 1), microbatches=8, trainers=8)
    even = simulate_swarm(sizes(4, 2), decider, world(computing=(1,) * 4), 6)
    gone = WorldEvent(12.0, node=3)
    less = simulate_swarm(sizes(4, 2), decider, world(gone, computing=(1,) * 4, spares=0), 6)
    assert less.step_s[0] > even.step_s[0] and less.step_s[-1] == pytest.approx(32, rel=0.15)  # one peer, 8 of 4 s
    assert even.step_s[-1] < 0.75 * less.step_s[-1] and less.again > 0
    back = simulate_swarm(
        sizes(4, 2), decider, world(msgspec.structs.replace(gone, back_s=40.0), computing=(1,) * 4), 6
    )
    assert back.step_s[-1] == pytest.approx(even.step_s[-1], rel=0.1) and back.joined == 1
    both = (gone, WorldEvent(13.0, node=2))
    with pytest.raises(MeshwrightError, match=r"O008.*at 13 s the last peer of stage 1 is lost"):
        simulate_swarm(sizes(4, 2), decider, world(*both, computing=(1,) * 4, spares=0), 6)


def test_a_stage_of_fewer_peers_is_given_one_of_another_as_time_goes_by():
    decider = Swarm(stages=2, stage_of=(0,) * 5 + (1,), microbatches=12, trainers=12)
    stays = simulate_swarm(sizes(6, 2), decider, world(computing=(1,) * 6), 8)
    moving = msgspec.structs.replace(decider, rebalance_s=1.0)
    moves = simulate_swarm(sizes(6, 2), moving, world(computing=(1,) * 6), 8)
    assert stays.moved == 0 and moves.moved == 2 and [one.stage for one in moves.peers].count(1) == 3
    assert moves.step_s[-1] < 0.5 * stays.step_s[-1]


def test_an_answer_has_the_swarm_in_its_world_beside_fixed_ranks_that_wait_for_the_slowest():
    asked = mw.load_model("llama3-8b"), mw.load_cluster("8x1xa100,100gbe"), mw.parse_train("batch=32,seq=2048")
    uneven = read("ranks=1/1/1/3")
    fixed, swarm = (
        mw.predict(*asked, mw.parse_plan(f"pp2 dp4 mb1 {words}"), detail=False, world=uneven)
        for words in ("", "passes=swarm")
    )
    assert swarm.step_time_s < 0.85 * fixed.step_time_s
    assert sum(swarm.attribution.values()) == pytest.approx(swarm.step_time_s)
    assert swarm.timeline.makespan_s == pytest.approx(swarm.swarm.step_s[-1])
    assert [rank.rank for rank in swarm.memory] == [rank.name for rank in swarm.timeline.ranks]
    slow, fast = (swarm.swarm.peers[at].passes for at in (3, 0))
    assert 2 < fast / slow < 4
    alone = mw.predict(*asked, mw.parse_plan("pp2 dp4 mb1"), detail=False)
    assert swarm.metrics.hfu.value > swarm.metrics.mfu.value * 1.2  # a backward computes its forward again
    assert min(rank.peak_bytes for rank in swarm.memory) < max(rank.peak_bytes for rank in alone.memory)
