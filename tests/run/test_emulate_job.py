"""A job over days, replayed in seconds by processes that are really killed, goes as the simulation of the job does."""

from __future__ import annotations

import json
from statistics import median

import pytest
from msgspec.structs import replace

from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.emulate.days import _check_lengths, emulate_job
from meshwright.run.emulate.hosts import missing
from meshwright.simulate.job import JobRun, JobSizes
from meshwright.spec import cluster, model
from meshwright.spec.workload import parse as workload
from meshwright.world.decider import replayed
from meshwright.world.recovery import Began, Ended, Failed, Finish, Repaired, Restart, Restarted, TrainFrom, Wait
from meshwright.world.trace import read

from .test_emulate_script import LLAMA

REASON = missing()
#: Two hours of 488,282 steps on two devices: 14.4 ms each.
HOURS, JOB_S = "batch=8,seq=512,tokens=2b", 7055.0


needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON or "there are hosts")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "config.json"
    file.write_text(json.dumps(LLAMA))
    return str(file)


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    world = tmp_path_factory.mktemp("worlds") / "failures.csv"
    world.write_text("2700,fail\n5000,fail 0\n6000,back 0\n14000,fail\n17500,slow 2\n19500,slow 1\n")
    return emulate_job(
        model.load(config), cluster.load("2xh100"), workload(HOURS), parse("dp2"),
        read(f"{world},spares=1,repair=1h,restart=50m,save=30m,checkpoint=1764s"),
        num_steps=24, rate_bits_s=1e9, compute_s=0.08,
    )  # fmt: skip


@needs_hosts
def test_a_job_of_processes_that_die_goes_as_simulated_event_by_event(done):
    # by hand: a quarter of the steps takes 1764 s and the checkpoint after it 1800 s. The first failure comes while the
    # ranks save, so nothing is saved; the second in the restart, when the one spare stands in for the first node: the
    # job waits until the node that is named is back, at 6000 s, before the first, whose repair takes an hour. It trains
    # again from 9000 s, and the third failure finds 6 steps saved.
    log = done.lived.run.log
    assert [(entry.event, entry.decisions) for entry in log] == [
        (Began(), (TrainFrom(0, 6),)),
        (Failed(0), (Restart(),)),
        (Failed(0), (Wait(),)),
        (Repaired(), (Restart(),)),
        (Repaired(), ()),
        (Restarted(), (TrainFrom(0, 6),)),
        (Failed(6), (Restart(),)),
        (Restarted(), (TrainFrom(6, 6),)),
        (Repaired(), ()),
        (Ended(), (Finish(),)),
    ]
    assert done.faster * done.sizes.num_steps * done.sizes.step_s == pytest.approx(JOB_S, rel=0.01)
    spent = {cause: seconds * done.faster for cause, seconds in done.lived.by_cause.items()}
    slack = 0.2 * done.faster  # 0.2 s here
    assert spent["lost"] == pytest.approx(2700 + (14000 - 9000 - 1764 - 1800), abs=slack)
    assert spent["waiting"] == pytest.approx(6000 - 5000, abs=slack)
    assert spent["restarts"] == pytest.approx(5000 - 2700 + 3000 + 3000, abs=slack)
    assert spent["checkpoints"] == pytest.approx(4 * 1800, abs=slack)
    assert sum(done.lived.by_cause.values()) == pytest.approx(done.lived.seconds)
    assert done.agrees and abs(done.error) <= done.tolerance
    assert done.lived.killed == (0, 0, 0)  # in turn it would have been rank 1 that died second
    assert replayed(done.decider, log) == list(log)
    # kernels, two thirds of a step or more, take twice as long for a while
    assert max(done.lived.step_s) > 1.4 * median(done.lived.step_s)


@needs_hosts
def test_a_replayed_job_is_told_as_text_as_json_and_as_a_timeline(done, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("meshwright.run.emulate.days.emulate_job", lambda *_, **__: done)
    asked = ["emulate", "llama3-8b", "--on", "2xh100", "--train", HOURS, "--plan", "dp2", "--world", "mtbf=1h"]
    assert main([*asked, "--job-trace", str(tmp_path / "job.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "24 steps stand for 488,282" in said
    assert "rank 0, 0, 0" in said
    assert "all events within 5% of the job's length" in said
    instants = [e["name"] for e in json.loads((tmp_path / "job.json").read_text())["traceEvents"] if e["ph"] == "i"]
    assert instants.count("failed") == 3
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"] and found["killed"] == [0, 0, 0]
    assert len(found["measured"]["log"]) == len(found["simulated"]["log"]) == 10
    assert found["measured"]["seconds"] == done.lived.seconds


@needs_hosts
def test_a_job_that_went_otherwise_does_not_agree(done):
    log = done.lived.log
    late = [replace(line, at_s=line.at_s + 2 * done.tolerance * done.simulated.seconds) for line in log]
    for other in (late, log[:-1], [replace(log[0], decisions=(Wait(),)), *log[1:]]):
        assert not replace(done, lived=replace(done.lived, log=tuple(other))).agrees


@pytest.mark.parametrize(
    ("world", "more", "code", "told"),
    [
        ("late.csv,save=1m", [], "U005", "nothing happens to the job: the first event comes after 90,000 s"),
        ("w.csv,save=1m", ["--steps", "3"], "U005", "--steps 4 or more"),
        ("w.csv,save=1m", ["--tokens", "10000", "--steps", "4"], "U005", "--steps 3 or fewer"),
        ("odd.csv,save=1m", [], "O002", "the event must be fail, fail or back and the number of a node, or slow"),
        ("rank.csv,save=1m", [], "O007", "node 7 fails at 3000 s, and there are 1 nodes"),
        ("w.csv,mtbf=1h", [], "O001", "keep one of them"),
        ("mtbf=1s,save=10s", [], "O003", "failures come every 1.000 s"),
        ("w.csv", ["--steps", "0"], "U004", "--steps 0 cannot be"),
        ("w.csv", ["--repeats", "3", "--trace", "t.json"], "U004", "--trace t.json cannot be"),
        ("", ["--steps", "9"], "X004", "--world is missing"),
        ("", ["--job-trace", "j.json"], "X004", "--world is missing"),
    ],
)
def test_a_world_that_is_not_replayed_is_refused(world, more, code, told, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.csv").write_text("3000,fail\n")
    (tmp_path / "late.csv").write_text("90000,fail\n")
    (tmp_path / "odd.csv").write_text("3000,back\n")
    (tmp_path / "rank.csv").write_text("3000,fail 7\n")
    asked = ["emulate", config, "--on", "2xh100", "--train", "batch=8,seq=512", "--plan", "dp2"]
    asked += [] if "--tokens" in more else ["--tokens", "2b"]
    asked += ["--world", f"{world},checkpoint=1764s"] if world else []
    assert main([*asked, *more]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error[{code}]" in said and told in said
    assert "emulating" not in said


def test_a_world_of_a_run_without_tokens_is_refused(config, capsys):
    asked = ["emulate", config, "--on", "2xh100", "--train", "batch=8,seq=512", "--plan", "dp2", "--world", "mtbf=1h"]
    assert main(asked) == 2
    assert "error[B003]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("restart_s", "seconds", "told"),
    [(0.1, 50.0, "--steps 500 or more"), (0.0, 50.0, "restart=500s"), (2.0, 4000.0, "would take 4,000 s here")],
)
def test_restarts_and_jobs_of_a_length_that_is_not_replayed_are_refused(restart_s, seconds, told):
    sizes = JobSizes(num_steps=100, step_s=0.5, save_s=0.1, restart_s=restart_s, repair_s=1.0)
    run = JobRun(seconds=seconds, by_cause={}, failures=1, log=())
    with pytest.raises(MeshwrightError) as caught:
        _check_lengths(sizes, run, faster=1000.0)
    assert caught.value.diagnostics[0].code == "U005"
    assert told in str(caught.value)
