"""Elastic runs: processes are killed at any instant, and the losses are those of a run that nobody disturbed."""

import os
import signal
import threading
import time
from functools import cache

import pytest
import torch

from meshwright.answer.replan import replanned
from meshwright.cli import main
from meshwright.plan import parse
from meshwright.run import data
from meshwright.run.checkpoint.format import RankIndex
from meshwright.run.data import tokenizer
from meshwright.run.elastic import launcher
from meshwright.run.elastic.launcher import Formed, run
from meshwright.run.elastic.memory import KeptRuns, Slot, Snapshots, written
from meshwright.run.job import Job
from meshwright.run.settings import Settings
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.decider import replayed
from meshwright.world.elastic import Elastic
from meshwright.world.trace import WorldEvent

MODEL = transformer(layers=2, hidden=16, heads=2, kv_heads=1, vocab=260, ffn=24, gated=True, max_seq_len=32)
TRAIN = Train(global_batch=3, seq_len=16, dtype="fp32")
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def trained(corpus, plan, train=TRAIN, *, kills=(), spares=None, ranks=2, **said):
    """A run in which the k-th time that all ranks hold the state, `kills[k]` picks a process: 0 the first host, 1 its
    worker. `said` are fields of its job."""
    own = parse(plan).on(ranks)
    settings = Settings(precision="float64", lr=1e-2)
    job = Job(model=MODEL, plan=own, train=train, settings=settings, corpus=corpus, steps=STEPS, quiet=True, **said)
    left = list(kills)

    def whole(pids):
        if left:
            os.kill(min(pids.items())[left.pop(0)], signal.SIGKILL)

    @cache
    def formed(size):
        found = None if size == ranks else replanned(MODEL, load(f"{ranks}xh100"), train, own, size)
        return Formed(own) if found is None else Formed(found.plan, found.counts, found.params)

    sizes = (ranks,) if spares is None else tuple(sorted({formed(n).plan.num_ranks for n in range(1, ranks + 1)}))
    decider = Elastic(sizes=sizes, spares=spares)
    found = run(job, decider, formed, repair_s=0.0, whole=whole)
    assert replayed(decider, found.log) == list(found.log)
    assert len(found.losses) == STEPS and found.summary["last_step"] == STEPS
    return found


def test_a_run_whose_hosts_and_workers_are_killed_has_the_losses_of_an_undisturbed_one_to_the_last_bit(corpus):
    even = Train(global_batch=4, seq_len=16, dtype="fp32")
    plain = trained(corpus, "dp2 zero1", even)
    found = trained(corpus, "dp2 zero1", even, kills=(0, 1), data_workers=1)  # whose batches others make
    assert plain.failures == 0 and plain.recoveries == ()
    assert found.failures == 2 and len(found.recoveries) == 2
    assert all(one.source == "memory" and one.repeated <= 1 and one.ranks == 2 for one in found.recoveries)
    assert found.losses == plain.losses and found.grad_norms == plain.grad_norms


def test_a_run_without_spares_shrinks_moves_its_layers_and_grows_again_with_the_same_losses(corpus):
    # three sequences: the order of sums over microbatches differs between two stages and one, nothing else
    plain = trained(corpus, "pp2")
    found = trained(corpus, "pp2", kills=(0,), spares=0)
    assert [one.ranks for one in found.recoveries] == [1, 2]
    assert all(one.source == "memory" and one.repeated <= 1 for one in found.recoveries)
    assert found.losses == pytest.approx(plain.losses, rel=1e-12)


def test_no_step_is_lost_where_the_launcher_hears_of_it_before_it_hears_where_the_ranks_began(corpus, monkeypatch):
    waited = launcher.wait

    def late(ways, timeout):
        """Look only when workers have had the time of several steps."""
        time.sleep(0.15)
        return waited(ways, timeout)

    plain = trained(corpus, "dp1", ranks=1)
    monkeypatch.setattr(launcher, "wait", late)
    assert trained(corpus, "dp1", ranks=1).losses == plain.losses
    assert trained(corpus, "dp1", ranks=1, kills=(0,)).losses == plain.losses


@pytest.mark.parametrize("last", [5, STEPS])
def test_no_step_is_lost_with_a_worker_that_is_killed_as_soon_as_it_has_kept_it(last, corpus, monkeypatch):
    plain, kept = trained(corpus, "dp1", ranks=1), Snapshots.keep

    def keep(memory, step):
        kept(memory, step)
        if step == last and memory.own[0].kept.epoch == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Snapshots, "keep", keep)
    found = trained(corpus, "dp1", ranks=1)
    assert [(one.step, one.repeated) for one in found.recoveries] == [(last, 0)]
    assert found.losses == plain.losses and found.grad_norms == plain.grad_norms


def rounds(corpus, *trace, spares=None, ranks=2, sync="diloco:h=3", **said):
    """A run whose replicas average once in three steps, with hosts killed at the times of a trace."""
    own = parse(f"dp{ranks} sync={sync}").on(ranks)
    settings = Settings(precision="float64", lr=1e-2)
    train = Train(global_batch=6, seq_len=16, dtype="fp32", optimizer="sgd")
    job = Job(model=MODEL, plan=own, train=train, settings=settings, corpus=corpus, steps=STEPS, quiet=True)
    sizes = (ranks,) if spares is None else tuple(range(1, ranks + 1))
    formed = lambda size: Formed(own if size == ranks else parse(f"dp{size} sync={sync}"))  # noqa: E731
    found = run(job, Elastic(sizes=sizes, spares=spares, save_every=3), formed, trace=trace, **said)
    assert len(found.losses) == STEPS and found.summary["last_step"] == STEPS
    return found


def test_replicas_that_average_now_and_then_go_on_from_the_last_average_when_one_is_killed(corpus):
    found = rounds(corpus, WorldEvent(0.05, node=0), WorldEvent(0.4, node=1))
    assert found.failures >= 1 and all(one.step % 3 == 0 and one.source == "memory" for one in found.recoveries)
    of_second = rounds(corpus, WorldEvent(0.05, node=1), WorldEvent(0.4, node=1))
    plain = rounds(corpus).losses
    assert of_second.failures >= 1 and of_second.losses == plain
    # without moments nothing of a replica is lost but its round; of a step that the first replica had ended and had not
    # told when it was killed, which is a round's last, the loss of another is kept
    others = [i + 1 for i, pair in enumerate(zip(found.losses, plain, strict=True)) if len({*pair}) > 1]
    assert len(others) <= found.failures and all(step % 3 == 0 for step in others)
    assert found.losses[-1] == plain[-1]


def test_a_host_that_does_not_run_and_is_killed_takes_no_done_step_along(corpus):
    """A host is stopped while its worker trains, so that it passes nothing on, and is then killed."""
    stopped = []

    def whole(pids):
        if not stopped:
            stopped.append(min(pids))
            os.kill(stopped[0], signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (stopped[0], signal.SIGKILL)).start()

    found, plain = rounds(corpus, whole=whole), rounds(corpus)
    assert found.failures == 1
    others = [i + 1 for i, pair in enumerate(zip(found.losses, plain.losses, strict=True)) if len({*pair}) > 1]
    assert len(others) <= 1 and all(step % 3 == 0 for step in others)


def test_replicas_leave_and_join_a_run_between_rounds(corpus):
    found = rounds(corpus, WorldEvent(0.05, node=1), spares=0, ranks=3, repair_s=0.1)
    assert [one.ranks for one in found.recoveries][:1] == [2] and {one.step % 3 for one in found.recoveries} == {0}
    assert found.losses[-1] < found.losses[0]


def test_a_slot_that_is_being_written_holds_no_step():
    fd, empty = os.memfd_create("slot"), os.memfd_create("empty")
    slot = Slot(fd, KeptRuns(3, RankIndex(tensors={}, file=None, layouts=(), entries=()), 16))
    assert written([fd, empty]) == []
    slot.values.view(torch.float64)[:] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    slot.commit(7)
    (found,) = written([fd, empty])
    assert (found.step, found.kept.epoch) == (7, 3)
    assert found.values.view(torch.float64).tolist() == [1.0, 2.0]
    slot.commit(-1)
    assert written([fd, empty]) == []
    os.close(fd), os.close(empty)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--device", "cuda"], "--elastic --device cuda cannot be"),
        (["--link", "100mbit"], "--elastic --link cannot be"),
        (["--plan", "dp2 sync=gossip"], "replicas that hold the same at the ends of rounds"),
        (["--world", "mtbf=3h"], "killed at the times of a trace, not of a mean"),
    ],
)
def test_what_an_elastic_run_cannot_do_is_refused(more, told, tmp_path, capsys):
    asked = ["run", "--model", "llama-1m", "--on", "2xh100", "--train", "batch=2,seq=16", "--data", "sample"]
    plan = [] if "--plan" in more else ["--plan", "dp2"]
    assert main([*asked, *plan, "--elastic", *more]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
