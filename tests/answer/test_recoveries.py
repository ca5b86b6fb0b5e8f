"""Ways to go on after failures: what each costs, against hand calculations, and side by side in one answer."""

import pytest

import meshwright as mw
from meshwright.answer.recoveries import DETECTED_S, EDITED_S, StateBytes, state_of, ways
from meshwright.cli import main
from meshwright.cost import standard_on
from meshwright.simulate.job import JobSizes, run_job
from meshwright.simulate.step import simulate
from meshwright.world.decider import replayed
from meshwright.world.elastic import Elastic
from meshwright.world.recovery import Recovery
from meshwright.world.trace import JobWorld, WorldEvent, read

JOB = JobSizes(num_steps=100, step_s=10.0, save_s=5.0, restart_s=60.0, repair_s=1000.0)
#: 8 GB on a device: 0.4 s to the host, and where no replica holds it 1.6 s to another node.
STATE = StateBytes(each=8e9, alone=8e9, copy_bytes_s=20e9, send_bytes_s=5e9)


def one(word, passes_s=9.0, spares=0, state=STATE, on_fewer=lambda nodes: 10.0 * 4 / nodes):
    (found,) = ways(read(f"{word},spares={spares}"), JOB, 10, 3600.0, state, passes_s, 4, on_fewer)
    return found


def test_a_lazy_checkpoint_costs_what_outlasts_the_passes_and_counts_when_it_is_written():
    found = one("saving=lazy")
    assert (found.job.save_s, found.job.flush_s) == (0.0, 5.0 + 0.4)
    assert found.every == 1  # nothing stands still: as often as the last one is written, within a step of 10 s
    slow = one("saving=lazy", passes_s=0.1)
    assert (slow.job.save_s, slow.job.flush_s) == (pytest.approx(0.3), pytest.approx(5.1))
    assert slow.every == 5  # Young: sqrt(2 * 0.3 s * 3600 s) = 46.5 s, five steps


def test_a_checkpoint_that_is_not_written_yet_is_lost_with_what_came_after():
    job = JobSizes(num_steps=100, step_s=10.0, save_s=0.0, restart_s=60.0, repair_s=0.0, flush_s=30.0)
    # after 100 s ten steps are saved, and count from 130 s on; at 125 s nothing does, at 135 s 35 s are lost
    for at_s, lost in ((125.0, 125.0), (135.0, 35.0)):
        found = run_job(job, Recovery(save_every=10), iter([WorldEvent(at_s)]))
        assert found.by_cause["lost"] == lost
        assert found.seconds == 1000 + lost + 60 + 30  # and the last one has to be written
    assert run_job(job, Recovery(save_every=10), iter(())).by_cause["checkpoints"] == 30.0


def test_every_step_in_a_neighbours_memory_costs_the_slower_of_copy_and_message_beyond_the_passes():
    assert one("recovery=memory").job.save_s == 0.0
    assert one("recovery=memory", passes_s=1.0).job.save_s == pytest.approx(8 / 5 - 1.0)
    replicated = StateBytes(each=8e9, alone=0.0, copy_bytes_s=20e9, send_bytes_s=5e9)
    assert one("recovery=memory", passes_s=0.1, state=replicated).job.save_s == pytest.approx(0.4 - 0.1)


def test_an_elastic_job_goes_on_at_once_on_fewer_nodes_and_grows_again():
    found = one("recovery=elastic")
    assert found.decider == Elastic(sizes=(1, 2, 3, 4), spares=0)
    assert found.job.regroup_s == DETECTED_S + EDITED_S + 8 / 5
    job = JobSizes(
        num_steps=100, step_s=10.0, save_s=0.0, restart_s=60.0, repair_s=200.0, regroup_s=5.0,
        step_of={4: 10.0, 3: 15.0},
    )  # fmt: skip
    decider = Elastic(sizes=(3, 4), spares=0)
    ran = run_job(job, decider, iter([WorldEvent(103.0)]))
    # ten steps, 3 s lost, regrouped at 108; 13 steps of 15 s to 303, where the node is back and joins by 308; 77 left
    assert ran.by_cause == {"steps": 100 + 195 + 770, "checkpoints": 0.0, "lost": 3.0, "restarts": 10.0, "waiting": 0.0}
    assert ran.seconds == 103 + 5 + 195 + 5 + 770
    assert replayed(decider, ran.log) == list(ran.log)


def test_replicas_that_average_now_and_then_keep_the_ends_of_their_rounds_and_send_nothing():
    rounds = StateBytes(each=8e9, alone=0.0, copy_bytes_s=20e9, send_bytes_s=5e9, rounds=20)
    found = one("recovery=elastic", passes_s=0.1, state=rounds)
    assert found.decider == Elastic(sizes=(1, 2, 3, 4), spares=0, save_every=20) and found.every == 20
    assert found.job.save_s == pytest.approx(0.4 - 0.1)  # the copy to the host, once in 20 steps
    job = JobSizes(
        num_steps=100, step_s=10.0, save_s=0.0, restart_s=60.0, repair_s=250.0, regroup_s=50.0, shrink_s=5.0,
        in_rounds=True, step_of={4: 10.0, 3: 15.0},
    )  # fmt: skip
    decider = Elastic(sizes=(3, 4), spares=0, save_every=10)
    ran = run_job(job, decider, iter([WorldEvent(103.0)]))
    # ten steps, 3 s lost, three nodes from 108 on; the node is back at 353 and joins when 20 steps are done, at 408
    expected = {"steps": 100 + 300 + 700, "checkpoints": 0.0, "lost": 3.0, "restarts": 55.0, "waiting": 0.0}
    assert ran.by_cause == pytest.approx(expected, abs=1e-3) and ran.seconds == pytest.approx(1158, abs=1e-3)
    asked = mw.load_model("llama3-8b"), mw.load_cluster("4x8xh100,1gbe"), mw.parse_train("batch=256,seq=4096")
    for words, each, alone in (("hsdp8", 1, True), ("hsdp8 sync=intellect", 100, False)):
        run = simulate(mw.parse_plan(f"{words} mb1 full").on(32), *asked, standard_on(asked[1]))
        state = state_of(run.lowered, asked[1], 1e12)
        assert (state.rounds, state.alone > 0) == (each, alone)


def test_no_way_is_told_twice_and_all_of_them_side_by_side():
    found = ways(JobWorld(recovery="all"), JOB, 10, 3600.0, STATE, 9.0, 4, lambda nodes: None)
    assert [way.name for way in found] == ["checkpoint", "lazy", "memory", "elastic"]


ASKED = ["predict", "llama3-8b", "--on", "64xh100", "--train", "batch=256,seq=4096,tokens=300e9", "--plan"]


def test_all_ways_stand_in_one_answer_the_fastest_in_full(capsys):
    world = "mtbf=2h,spares=1,repair=1d,draws=5,save=60s,recovery=all"
    assert main([*ASKED, "pp2 dp32 mb1 zero1 full", "--world", world]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"by {name}" in said for name in ("checkpoint", "lazy", "memory", "elastic"))
    assert said.count("told below") == 1


@pytest.mark.parametrize(
    ("world", "told"),
    [
        ("recovery=elastc", "is not one of checkpoint, memory, elastic, all"),
        ("recovery=memory,saving=lazy", "saving=lazy is of checkpoints"),
        ("saving=async", "is not one of blocking, lazy"),
    ],
)
def test_a_way_that_there_is_not_is_refused(world, told, capsys):
    assert main([*ASKED, "dp64 zero1", "--world", world]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
