"""A log as a timeline: every event at its time, in words and in numbers."""

import numpy as np

from meshwright import trace
from meshwright.simulate.job import JobSizes, run_job
from meshwright.timeline import Identity
from meshwright.world.history import history
from meshwright.world.recovery import Recovery
from meshwright.world.trace import WorldEvent

#: By hand: ten steps of 10 s, a checkpoint of 5 s after every four: 45, 90 and 115 s without failures.
JOB = JobSizes(num_steps=10, step_s=10.0, save_s=5.0, restart_s=60.0, repair_s=1000.0)


def run(*failures):
    return run_job(JOB, Recovery(save_every=4, spares=None), iter([WorldEvent(at) for at in failures]))


def test_events_stand_at_their_times():
    found = run(50.0)
    line = history(found.log)
    # the failure at 50 s loses what came after the checkpoint at 45; up at 110; six steps and two checkpoints more
    assert [line.instants.names[what] for what in line.instants.what] == ["began", "failed", "restarted", "ended"]
    assert line.instants.time_s.tolist() == [0.0, 50.0, 110.0, found.seconds] == [0.0, 50.0, 110.0, 180.0]
    table = line.records["event"]
    assert table["event"].tolist() == ["began", "failed saved_steps=4", "restarted", "ended"]
    assert table["decision"].tolist() == [
        "trainfrom first_step=0 save_every=4",
        "restart",
        "trainfrom first_step=4 save_every=4",
        "finish",
    ]


def test_what_events_count_is_a_counter():
    line = history(run(50.0, 200.0, 201.0).log)
    (saved,) = line.counters
    assert saved.name == "saved steps" and saved.time_s.tolist() == [50.0]  # the job was over at 180 s
    (saved,) = history(run(20.0, 140.0).log).counters
    # up at 80 s, the first checkpoint at 125
    assert (saved.time_s.tolist(), saved.value.tolist()) == ([20.0, 140.0], [0.0, 4.0])


def test_a_history_is_a_trace_that_comes_back(tmp_path):
    line = history(run(50.0).log, Identity(model="tiny"))
    trace.write(line, tmp_path / "job.json")
    back = trace.read(tmp_path / "job.json")
    assert back.num_spans == 0 and back.identity == line.identity
    assert np.allclose(back.instants.time_s, line.instants.time_s)
    assert back.records["event"]["decision"].tolist() == line.records["event"]["decision"].tolist()


def test_a_job_without_events_has_an_empty_history():
    line = history(())
    assert len(line.instants.time_s) == 0 and line.counters == () and len(line.records["event"]["at_s"]) == 0
