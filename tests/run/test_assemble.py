"""Recordings of all processes become one timeline. The oracle is a simulated one, handed out rank by rank."""

import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.compare.measured import steps, tasks
from meshwright.graph import KINDS, QUEUES, RankClass
from meshwright.plan import parse
from meshwright.replay.timed import timed, typical
from meshwright.run.assemble import Reading, assemble
from meshwright.run.clocks import RankClock
from meshwright.run.gather import pack, unpack
from meshwright.run.mesh import coordinates
from meshwright.run.record import HeldMemory, Label, Recording
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train

PLANS = ("pp4 dp2 mb1 1f1b zero1", "tp2 pp2 dp2 mb1 gpipe", "pp4 vpp2 dp2 mb1 interleaved", "dp8 zero3 mb1")


def answer(text):
    train = parse_train("batch=16,seq=4096")
    return predict(load_model("llama3-8b"), load_cluster("8xh100"), train, parse(text), detail=False)


def recorded(prediction, rank, *, skew_ns=0, steps=(3,), gap_ns=1_000_000):
    """What the process `rank` would have recorded of the predicted step, its clock off by `skew_ns`."""
    timeline, plan = prediction.timeline, prediction.plan
    mine = coordinates(plan, rank)["pp"]
    chosen = np.flatnonzero([timeline.ranks[r].stage == mine for r in timeline.rank])
    chosen = chosen[np.argsort(timeline.start_s[chosen], kind="stable")]
    labels, label = {}, []
    for i in chosen:
        stage, chunk, microbatch, layer, _ = timeline.attributes[:, i].tolist()
        said = Label(KINDS[timeline.kind[i]], QUEUES[timeline.queue[i]], stage, chunk, microbatch, layer, "", ())
        label.append(labels.setdefault(said, len(labels)))
    length = int(timeline.makespan_s * 1e9) + gap_ns
    start = np.round(timeline.start_s[chosen] * 1e9).astype(np.int64) + skew_ns
    end = np.round(timeline.end_s[chosen] * 1e9).astype(np.int64) + skew_ns
    at = [i * length for i in range(len(steps))]
    n = len(chosen)
    return Recording(
        rank=rank,
        host="h",
        labels=tuple(labels),
        label=np.tile(np.array(label, np.int32), len(at)),
        step=np.repeat(np.array(steps, np.int32), n),
        start_ns=np.concatenate([start + a for a in at]),
        end_ns=np.concatenate([end + a for a in at]),
        depth=np.zeros(n * len(at), np.int32),
        steps=tuple((s, a + skew_ns, a + skew_ns + length - gap_ns) for s, a in zip(steps, at)),
        memory=(HeldMemory(skew_ns, 1000 + rank, 2000 + rank),),
    )


@pytest.mark.parametrize("text", PLANS)
def test_recordings_of_all_ranks_are_the_timeline_again(text):
    prediction = answer(text)
    size = prediction.plan.layout.num_ranks
    found = assemble([Reading(recorded(prediction, r)) for r in range(size)], prediction.plan)
    assert len(found.ranks) == size == len(found.memory)
    assert found.makespan_s == pytest.approx(prediction.timeline.makespan_s, abs=1e-8)
    # every process has every span of its class, at its time
    for key, spans in tasks(prediction.timeline).items():
        ranks, *what = key
        for name in ranks:
            same = [(k, s) for k, s in tasks_of(found, name).items() if k == tuple(what)]
            assert same, key
            for _, members in same:
                np.testing.assert_allclose(found.end_s[members], prediction.timeline.end_s[spans[0]], atol=2e-9)
    # and what a span waited for had ended by then
    waiting = found.waited_for >= 0
    assert (found.end_s[found.waited_for[waiting]] <= found.start_s[waiting] + 3e-9).all()
    path = found.critical_path()
    assert found.start_s[path[0]] == pytest.approx(0.0, abs=1e-8)
    assert found.end_s[path[-1]] == pytest.approx(found.makespan_s)


def tasks_of(timeline, name):
    """Spans of the processes of a class, by what they are."""
    out = {}
    seen = {}
    for i in np.argsort(timeline.start_s, kind="stable"):
        if RankClass(stage=timeline.ranks[timeline.rank[i]].stage).name == name:
            what = (int(timeline.queue[i]), int(timeline.kind[i]), *timeline.attributes[:4, i].tolist())
            count = (int(timeline.rank[i]), what)
            seen[count] = seen.get(count, -1) + 1
            out.setdefault((*what, seen[count]), []).append(i)
    return out


def test_collectives_of_replicas_are_one_task_with_all_members():
    prediction = answer("pp4 dp2 mb1 1f1b zero1")
    found = assemble([Reading(recorded(prediction, r)) for r in range(8)], prediction.plan)
    exchanges = [s for s in np.unique(found.task) if QUEUES[found.queue[found.task == s][0]] == "dp"]
    members = sorted(int((found.task == s).sum()) for s in exchanges)
    # the norm joins all eight, every other exchange the two replicas of a stage
    assert members[-1] == 8 and set(members[:-1]) == {2}


def test_a_member_that_waits_for_the_last_is_not_yet_exchanging():
    prediction = answer("dp8 mb1")
    readings = [recorded(prediction, r) for r in range(8)]
    early = readings[3]
    norm = int(np.flatnonzero([early.labels[i].queue == "dp" and early.labels[i].stage < 0 for i in early.label])[0])
    early.start_ns[norm] -= 5_000_000
    found = assemble([Reading(r) for r in readings], prediction.plan)
    spans = np.flatnonzero((found.queue == QUEUES.index("dp")) & (found.attribute("stage") < 0))
    assert len(spans) == 8 and np.ptp(found.start_s[spans]) < 1e-9


def test_wrong_clocks_are_put_right_by_what_was_recorded():
    """Clocks off by milliseconds; messages and collectives of the step leave tens of microseconds."""
    prediction = answer("pp4 dp2 mb1 1f1b zero1")
    skew = [0, 3_000_000, -2_000_000, 1_000_000, -500_000, 4_000_000, 2_500_000, -4_000_000]
    readings = [
        Reading(recorded(prediction, r, skew_ns=s), RankClock(0, 0.0, 0.0, 1e12), f"clock {r}")
        for r, s in enumerate(skew)
    ]
    wrong = assemble([Reading(r.recording) for r in readings], prediction.plan)
    found = assemble(readings, prediction.plan)
    assert abs(wrong.makespan_s / prediction.timeline.makespan_s - 1) > 5e-3
    assert found.makespan_s == pytest.approx(prediction.timeline.makespan_s, rel=5e-3)


def test_clocks_that_are_known_are_used():
    prediction = answer("pp4 dp2 mb1 1f1b zero1")
    skew = [0, 3_000_000, -2_000_000, 1_000_000, -500_000, 4_000_000, 2_500_000, -4_000_000]
    readings = [
        Reading(recorded(prediction, r, skew_ns=s), RankClock(0, -float(s), 0.0, 10.0), f"clock {r}")
        for r, s in enumerate(skew)
    ]
    found = assemble(readings, prediction.plan)
    assert found.makespan_s == pytest.approx(prediction.timeline.makespan_s, abs=1e-6)


def test_steps_are_kept_apart_and_replayed_as_they_were():
    prediction = answer("pp4 dp2 mb1 1f1b zero1")
    readings = [Reading(recorded(prediction, r, steps=(3, 4, 5))) for r in range(8)]
    found = assemble(readings, prediction.plan)
    assert [s.number for s in steps(found)] == [3, 4, 5]
    assert [s.seconds for s in steps(found)] == pytest.approx([prediction.timeline.makespan_s] * 3, abs=1e-8)
    again = timed(typical(found))
    assert again.makespan_s == pytest.approx(prediction.timeline.makespan_s, rel=1e-6)


def test_only_steps_that_every_rank_kept_are_told():
    prediction = answer("dp8 mb1")
    readings = [Reading(recorded(prediction, r, steps=(3, 4) if r else (4, 5))) for r in range(8)]
    assert {s.number for s in steps(assemble(readings, prediction.plan))} == {4}


def test_a_message_nobody_saw_arrive_lasts_until_its_pass_begins():
    """A message that says only when it was sent: its pass begins when it is there, as that rank had nothing to do."""
    prediction = answer("pp4 dp2 mb1 1f1b zero1")
    readings = [recorded(prediction, r) for r in range(8)]
    for r in readings:
        instant = np.array([la.kind == "send" for la in r.labels])[r.label]
        r.end_ns[instant] = r.start_ns[instant]
    found = assemble([Reading(r) for r in readings], prediction.plan)
    first = found.queue == QUEUES.index("pp_forward")
    first &= (found.attribute("microbatch") == 0) & (found.attribute("stage") == 0)
    simulated = prediction.timeline
    same = simulated.queue == QUEUES.index("pp_forward")
    same &= (simulated.attribute("microbatch") == 0) & (simulated.attribute("stage") == 0)
    np.testing.assert_allclose(found.end_s[first], simulated.end_s[same][0], atol=1e-8)


def one(rank, spans):
    """What a process recorded that had these spans: label, start and end in nanoseconds."""
    return Reading(
        Recording(
            rank=rank,
            host="",
            labels=tuple(la for la, _, _ in spans),
            label=np.arange(len(spans), dtype=np.int32),
            step=np.zeros(len(spans), np.int32),
            start_ns=np.array([s for _, s, _ in spans]),
            end_ns=np.array([e for _, _, e in spans]),
            depth=np.zeros(len(spans), np.int32),
            steps=((0, 0, 100),),
        )
    )


def test_a_pass_that_stood_still_for_an_exchange_is_what_it_did_before_and_after():
    """Rank 0's pass from 0 to 50 gathers from 10 to 28, and rank 1's, until 40, from 20 to 30: 8 and 10 that nothing
    hides, and another 10 that rank 0 waited for rank 1."""
    plan = parse("dp2 zero3 mb1").on(2)
    forward = Label("F", "compute", 0, 0, 3, -1, "", ())
    gather = Label("all_gather", "dp_gather", 0, -1, -1, 1, "", (0, 1), inside=True)
    readings = one(0, [(forward, 0, 50), (gather, 10, 28)]), one(1, [(forward, 0, 40), (gather, 20, 30)])
    found = assemble(readings, plan)
    for rank, gathered, passes in ((0, 8, [(0, 10), (28, 50)]), (1, 10, [(0, 20), (30, 40)])):
        mine = found.of_rank(rank)
        times = np.vstack([found.start_s[mine], found.end_s[mine]]).T
        np.testing.assert_allclose(times, np.array(passes) * 1e-9, atol=1e-15)
        assert found.exposed_comm(rank) == {"dp_gather": pytest.approx(gathered * 1e-9)}
        (between,) = found.of_rank(rank, "dp_gather")
        assert found.attribute("microbatch")[between] == 3
        # the rest of the pass needs what was gathered, whoever has it first, and that the rank that came last
        assert found.waited_for[mine[1]] == between
        assert found.waited_for[between] == found.of_rank(1)[0]
    # one that runs beside a pass is no part of it
    beside = gather._replace(inside=False)
    whole = assemble([one(r, [(forward, 0, 50), (beside, 10, 30)]) for r in (0, 1)], plan)
    assert len(whole.of_rank(0)) == 1 and whole.exposed_comm(0) == {"dp_gather": 0.0}


def test_a_target_that_was_busy_says_how_long_a_message_took():
    """Sent at 10, waited for from 50 to 51 when it had long been there: it took 1, from 10 on."""
    plan = parse("pp2 mb1 1f1b").on(2)
    send = Label("send", "pp_forward", 0, -1, 0, -1, "", ())
    arrival = send._replace(group=(0, 1))
    busy = one(0, [(send, 10, 10)]), one(1, [(arrival, 50, 51)])
    found = assemble(busy, plan)
    assert (found.start_s.tolist(), found.end_s.tolist()) == ([1e-8], [pytest.approx(1.1e-8)])
    waiting = one(0, [(send, 10, 10)]), one(1, [(arrival, 5, 30)])
    assert assemble(waiting, plan).end_s.tolist() == [pytest.approx(3e-8)]


def test_a_reading_survives_the_way():
    prediction = answer("dp8 mb1")
    recording = recorded(prediction, 2, skew_ns=77)
    again = unpack(pack(recording, RankClock(1, 2.0, 3.0, 4.0), "c"))
    assert again.clock == RankClock(1, 2.0, 3.0, 4.0) and again.clock_name == "c"
    assert again.recording.labels == recording.labels and again.recording.memory == recording.memory
    for name in ("label", "step", "start_ns", "end_ns", "depth"):
        assert (getattr(again.recording, name) == getattr(recording, name)).all()
