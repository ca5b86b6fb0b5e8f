"""The decider of a swarm: what a step computes is its batch, whoever is asked, lost or joins."""

from collections import Counter

import msgspec
import numpy as np

from meshwright.world.decider import LogEntry, replayed
from meshwright.world.swarm import (
    AskPeer,
    GradientsSummed,
    PassDone,
    PeerJoined,
    PeerLost,
    PeerReady,
    Request,
    StageLost,
    StepBegun,
    SumGradients,
    Swarm,
    TakeStage,
    UpdateStages,
)


def driven(swarm, seed, *, losing=0.05, joining=0.05, steps=3):
    """Steps of a swarm whose answers come in a random order, among which peers are lost and join at random; what
    every peer holds at each sum, and the log."""
    rng, state, now = np.random.default_rng(seed), swarm.begin(), 0.0
    todo, holds, gone, log, sums = [], {n: Counter() for n in range(len(swarm.stage_of))}, [], [], []
    taking, stage = {}, dict(enumerate(swarm.stage_of))

    def tell(event):
        nonlocal state
        state, decisions = swarm.decide(state, event)
        log.append(LogEntry(event, decisions, now))
        for one in decisions:
            match one:
                case AskPeer(peer=peer, request=request):
                    assert stage[peer] == request.stage and peer not in gone and peer not in taking
                    todo.append((peer, request))
                case TakeStage(peer=peer, stage=its, source=source):
                    assert stage[source] == its and source not in gone and source != peer
                    stage[peer], taking[peer], holds[peer] = its, source, Counter()
        return decisions

    for _ in range(steps):
        for one in holds.values():
            one.clear()
        decided = tell(StepBegun(now))
        while not any(isinstance(one, SumGradients) for one in decided):
            now += 1.0
            there = [n for n in stage if n not in gone and n not in taking]
            alone = [n for n in there if sum(stage[m] == stage[n] for m in there) == 1]
            if rng.random() < losing and len(there) > len(alone):
                peer = int(rng.choice([n for n in there if n not in alone]))
                gone.append(peer)
                todo[:] = [one for one in todo if one[0] != peer]
                taking = {n: s for n, s in taking.items() if s != peer and n != peer}
                decided = tell(PeerLost(peer, now))
            elif gone and rng.random() < joining:
                peer = gone.pop(0)
                decided = tell(PeerJoined(peer, now))
            elif taking and (not todo or rng.random() < 0.3):
                peer = min(taking)
                del taking[peer]
                decided = tell(PeerReady(peer, now))
            else:
                peer, request = todo.pop(int(rng.integers(len(todo))))
                if request.backward:
                    holds[peer][request.microbatch, request.stage] += 1
                decided = tell(PassDone(peer, request, now))
        pools = next(one for one in decided if isinstance(one, SumGradients)).pools
        sums.append([sum((holds[n] for n in pool), Counter()) for pool in pools])
        assert tell(GradientsSummed(now)) == (UpdateStages(),)
    return sums, log


def test_every_step_sums_each_microbatch_once_at_each_stage_whoever_is_lost_or_joins_meanwhile():
    swarm = Swarm(stages=3, stage_of=(0, 1, 2) * 3, microbatches=7, trainers=4, rebalance_s=10.0)
    whole = [Counter({(m, s): 1 for m in range(7)}) for s in range(3)]
    lost = 0
    for seed in range(40):
        sums, log = driven(swarm, seed)
        assert all(one == whole for one in sums)
        assert replayed(swarm, log) == log
        lost += sum(isinstance(one.event, PeerLost) for one in log)
    assert lost > 100


def test_peers_are_asked_in_proportion_to_the_speed_that_was_measured():
    swarm = Swarm(stages=2, stage_of=(0, 0, 1), microbatches=400, trainers=8)
    state, free, now, asked = swarm.begin(), {0: 0.0, 1: 0.0, 2: 0.0}, 0.0, Counter()
    speed, heap = {0: 1.0, 1: 3.0, 2: 0.01}, []
    state, decisions = swarm.decide(state, StepBegun(0.0))
    while not any(isinstance(one, SumGradients) for one in decisions):
        for one in decisions:
            asked[one.peer] += 1
            free[one.peer] = max(now, free[one.peer]) + speed[one.peer] * one.request.size
            heap.append((free[one.peer], one.peer, one.request))
        heap.sort(key=lambda one: one[:2])
        now, peer, request = heap.pop(0)
        state, decisions = swarm.decide(state, PassDone(peer, request, now))
    assert 2.6 < asked[0] / asked[1] < 3.4  # three times as fast
    assert sum(asked.values()) == 2 * 2 * 400


def test_a_peer_of_the_idlest_stage_goes_over_to_the_busiest_where_that_makes_the_slowest_stage_faster():
    swarm = Swarm(stages=2, stage_of=(0, 0, 0, 1), microbatches=1, trainers=1, rebalance_s=1.0)
    peers = [msgspec.structs.replace(p, mean_s=0.1, answers=1) for p in swarm.begin().peers]
    state = msgspec.structs.replace(swarm.begin(), peers=tuple(peers), waited=(1.0, 9.0), looked_s=0.0)
    state, decisions = swarm.decide(state, StepBegun(2.0))
    assert [one for one in decisions if isinstance(one, TakeStage)] == [TakeStage(0, 1, 3)]
    even = msgspec.structs.replace(swarm, stage_of=(0, 0, 1, 1))
    state = msgspec.structs.replace(even.begin(), peers=tuple(
        msgspec.structs.replace(p, mean_s=0.1, answers=1) for p in even.begin().peers), waited=(1.0, 9.0))  # fmt: skip
    assert not any(isinstance(one, TakeStage) for one in even.decide(state, StepBegun(2.0))[1])


def test_the_last_peer_of_a_stage_takes_its_parameters_with_it():
    swarm = Swarm(stages=2, stage_of=(0, 1), microbatches=1, trainers=1)
    state, _ = swarm.decide(swarm.begin(), StepBegun(0.0))
    assert swarm.decide(state, PeerLost(1, 1.0))[1] == (StageLost(1),)
    assert Request(0, 1, backward=True).size == 2.5
