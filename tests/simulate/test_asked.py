"""A rank that asks peers for its experts on the virtual clock: hand calculations, and an answer of it."""

import pytest

import meshwright as mw
from meshwright.report.remedies import remedies
from meshwright.simulate.asked import AskedSizes, simulate_asked
from meshwright.simulate.swarm import SwarmWorld
from meshwright.world.trace import WorldEvent


def sizes(**said):
    """One mixture, two peers: a forward of 2 s, a backward of 4 s, an update of 1 s; messages of 0.5 s; experts of 1 s
    forward, 3 s backward and 0.25 s a step."""
    usual = {
        "microbatches": 1,
        "forward_s": 2.0,
        "backward_s": 4.0,
        "update_s": 1.0,
        "message_bytes": (100.0,),
        "message_s": ((0.5,),) * 2,
        "experts_forward_s": ((1.0,),) * 2,
        "experts_backward_s": ((3.0,),) * 2,
        "experts_update_s": ((0.25,),) * 2,
        "state_s": (0.0,) * 2,
    }
    return AskedSizes(**(usual | said))


def world(*failures, computing=(1.0, 1.0, 1.0), **said):
    return SwarmWorld(computing, (1.0,) * 3, failures=failures, **said)


def test_a_step_is_what_the_rank_computes_and_what_it_waits_for():
    # forward: sends end at 0.5 and 1, experts at 1.5 and 2, answers at 2 and 2.5; backward, two messages each: sends
    # end at 1 and 2, experts at 4 and 5, answers at 4.5 and 5.5
    run = simulate_asked(sizes(), 100.0, world(), 2)
    assert run.step_s == pytest.approx((2 + 2.5 + 4 + 5.5 + 1,) * 2)
    assert run.waited_s == pytest.approx(8.0) and run.update_s == 1.0 and run.left_out == 0
    assert run.sent_bytes == 500  # rows and back; rows, gradients and back
    assert [peer.passes for peer in run.peers] == [4, 4]
    assert simulate_asked(sizes(microbatches=3), 100.0, world(), 1).step_s == pytest.approx((3 * 14 + 1,))


def test_a_late_answer_is_left_out_and_its_peer_is_asked_when_it_has_come():
    # peer 2 takes 20 s forward: the rank waits 5 s, and for peer 1 alone (2 s forward, 4.5 s backward) until the answer
    # is there at 22.5 s, after the second step's forward; the third step asks both
    run = simulate_asked(sizes(), 5.0, world(computing=(1.0, 1.0, 20.0)), 3)
    assert run.step_s == pytest.approx((2 + 5 + 4 + 4.5 + 1, 2 + 2 + 4 + 4.5 + 1, 2 + 5 + 4 + 4.5 + 1))
    assert run.left_out == 6 / 12 and run.peers[1].passes == 2
    assert run.sent_bytes == pytest.approx((2 * (200 + 150) + 100 + 150) / 3)


def test_nobody_waits_for_a_peer_that_is_lost_and_one_that_is_back_is_asked_again():
    gone = simulate_asked(sizes(), 100.0, world(WorldEvent(1.6, node=2), spares=0), 2)
    # peer 2 is lost while it computes; peer 1 answers at 2 s (forward) and 4.5 s (backward)
    assert gone.step_s == pytest.approx((2 + 2 + 4 + 4.5 + 1,) * 2)
    assert gone.left_out == 4 / 8 and gone.lost == 1 and gone.peers[1].stage == -1
    back = simulate_asked(sizes(), 100.0, world(WorldEvent(1.6, node=2, back_s=13.0)), 2)
    assert back.step_s == pytest.approx((13.5, 15.0)) and back.joined == 1 and back.left_out == 2 / 8


def test_an_answer_prices_the_messages_and_the_experts_of_peers():
    asked = mw.load_model("mixtral-8x7b"), mw.parse_train("batch=4,seq=2048")
    found = mw.predict(
        asked[0], mw.load_cluster("5x1xh200,1gbe"), asked[1], mw.parse_plan("dp1 mb1 passes=dmoe:peers=4")
    )
    # two layers of rows there and back, three in the backward, of 2 experts a token, in bf16
    assert found.swarm.sent_bytes == 4 * 32 * 5 * 2048 * 2 * 4096 * 2
    # a port of 1 Gbit/s has three fifths of that one way at least
    assert found.attribution["ep"] > 0.6 * found.swarm.sent_bytes / 0.125e9
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s)
    assert found.timeline.makespan_s == pytest.approx(found.swarm.step_s[-1])
    assert [rank.rank for rank in found.memory] == [rank.name for rank in found.timeline.ranks]
    assert "more peers" in remedies(found)[1]
    one = mw.predict(asked[0], mw.load_cluster("1x1xh200,1gbe"), asked[1], mw.parse_plan("dp1 mb1"))
    state = [sum(rank.alive[kind] for kind in ("parameters", "optimizer")) for rank in (*one.memory, *found.memory)]
    assert sum(state[1:]) == pytest.approx(state[0])  # each expert is held once
    assert found.metrics.hfu.value > found.metrics.mfu.value * 1.2  # peers pass rows again
    fast = mw.load_cluster("5x1xh200,100gbe")
    slow = mw.predict(asked[0], fast, asked[1], mw.parse_plan("dp1 mb1 passes=dmoe:peers=4,wait=1ms"))
    assert slow.swarm.left_out > 0 and any("left out" in one for one in slow.cautions)
