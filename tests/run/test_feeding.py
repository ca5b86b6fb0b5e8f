"""Batches that other processes make ahead: the same tokens in the same order, whoever makes them and whoever dies."""

import json
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data, launch, loop
from meshwright.run.data import feeding as feeding_module
from meshwright.run.data import tokenizer
from meshwright.run.data.corpus import Batch
from meshwright.run.data.feeding import Feeding
from meshwright.run.settings import Settings
from meshwright.simulate.feed import FeedSizes, fed
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from tests.run.processes import start_kept
from tests.run.virtual_feed import FeedClock

MODEL = transformer(layers=1, hidden=32, heads=4, kv_heads=2, vocab=260, ffn=48, gated=True, max_seq_len=64)
TRAIN = Train(global_batch=4, seq_len=32, dtype="fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def made(step):
    """A batch that is told from every other, with columns that come and go."""
    rng = np.random.default_rng(step)
    tokens = torch.from_numpy(rng.integers(0, 1000, (3, 9)))
    documents = torch.from_numpy(rng.integers(0, 5, (3, 8)).astype(np.int32)) if step % 2 else None
    return Batch(tokens, documents, None, tokens[:, 1:] if step % 3 else None, step)


def same(one, other):
    columns = zip(one[:4], other[:4])
    return all((a is None and b is None) or torch.equal(a, b) for a, b in columns) and one[4] == other[4]


@pytest.mark.parametrize("workers, ahead", [(0, 0), (1, 1), (2, 0), (3, 2), (2, 5)])
def test_batches_are_those_of_a_run_that_makes_its_own(workers, ahead):
    feeding = Feeding(made, 4, 16, workers=workers, ahead=ahead)
    try:
        for step in range(4, 16):
            assert same(feeding.take(step), made(step))
            assert step == 15 or same(feeding.take(step + 1), made(step + 1))  # a look ahead
    finally:
        feeding.close()


def test_a_worker_that_fails_or_is_killed_ends_the_run_with_one_error(capfd):
    def fails(step):
        if step == 6:
            raise OSError("the disk is gone")
        return made(step)

    feeding = Feeding(fails, 4, 16, workers=2)
    with pytest.raises(MeshwrightError, match=r"D011.*the disk is gone"):
        for step in range(4, 16):
            feeding.take(step)
    feeding.close()
    for killed, ahead in ((2, 4), (1, 3)):  # also one that is asked next while another answers
        feeding = Feeding(made, 4, 99, workers=2, ahead=ahead)
        feeding.take(4)
        for worker in feeding._workers[:killed]:
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(MeshwrightError, match=r"D011.*has ended"):
            for step in range(5, 99):
                feeding.take(step)
        feeding.close()


@pytest.fixture
def clock(monkeypatch):
    """A virtual clock for workers, by which a feed that it returns says what it waited."""

    def fed_by(make_s, workers, ahead, last):
        time_of = FeedClock(workers, first=1)  # the rank makes the first batch itself
        real = feeding_module._Worker.answer

        def answer(worker):
            time_of.await_made(made_ahead.next)
            return real(worker)

        def slow(step):
            time_of.work(step, make_s)
            return made(step)

        monkeypatch.setattr(feeding_module._Worker, "answer", answer)
        only = SimpleNamespace(perf_counter=time_of.now, monotonic=time.monotonic, sleep=time.sleep)
        monkeypatch.setattr(feeding_module, "time", only)
        made_ahead = Feeding(slow, 0, last, workers=workers, ahead=ahead)
        time_of.asked = lambda: min(last, made_ahead.next + made_ahead.ahead)
        return time_of, made_ahead

    return fed_by


def test_workers_end_with_their_rank_and_hide_what_batches_take(clock):
    passed, feeding = clock(make_s=0.02, workers=2, ahead=0, last=20)
    feeding.take(0)
    waited = []
    for step in range(1, 12):
        passed.sleep(0.03)
        feeding.take(step)
        waited.append(feeding.waited_s)
    assert waited == [0.0] * 11 and feeding.make_s == 0.02
    (pid, *_) = [worker.pid for worker in feeding._workers]
    feeding.close()
    with pytest.raises(OSError):
        os.kill(pid, 0)


def job(corpus, **said):
    how = {"plan": parse("dp2 zero1"), "train": TRAIN, "settings": Settings(lr=3e-3), "quiet": True}
    return loop.Job(model=MODEL, corpus=corpus, **how, **said)


def run(asked):
    return start_kept(loop.train, asked, num_ranks=2)


def dies(world, asked):
    """A rank that dies by a signal that it cannot catch, behind its seventh step."""
    steps = loop.RankRun.steps

    def until(self):
        self.after_step.append(lambda step, *_: os.kill(os.getpid(), 9) if step == 7 and world.rank == 1 else None)
        steps(self)

    loop.RankRun.steps = until  # of this fork alone
    return loop.train(world, asked)


def test_a_killed_run_with_workers_goes_on_with_the_losses_of_one_without(corpus, tmp_path):
    whole = run(job(corpus, steps=10))
    assert len(whole["data_s"]) == 10 and min(whole["data_s"]) > 0
    out = tmp_path / "out"
    with pytest.raises(MeshwrightError, match="L001"):
        asked = job(corpus, steps=10, out=str(out), save_every=3, data_workers=2, prefetch=3)
        launch.start(dies, asked, num_ranks=2, device="cpu")
    again = run(job(corpus, steps=10, out=str(out), resume=True, data_workers=1))
    said = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in said] == list(range(1, 11))
    assert [line["loss"] for line in said] == whole["losses"]
    assert again["first_step"] in (4, 7) and all(line["data_s"] >= 0 for line in said)


def predicted(workers, ahead, make_s, step_s):
    """Steps of one rank whose batches take so long and need nothing that is shared."""
    nothing = {"read_bytes": 0.0, "copy_bytes": 0.0, "read_bytes_s": 0.0, "stream_bytes_s": 0.0, "copy_bytes_s": 0.0}
    how = {"readers": 1, "samples": 1, "work_s": {}, "cores": 0.0, "copied_ahead": False} | nothing
    return fed(FeedSizes(workers=workers, ahead=max(1, ahead), latency_s=make_s, step_s=step_s, **how))


#: Steps until what was made ahead is used up, and those of some whole turns of 1, 2, 3 and 4 workers behind them.
WARM, STEADY = 36, 24


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (1, 1), (2, 4), (3, 6), (4, 2)])
def test_steps_wait_as_the_simulator_says(workers, ahead, clock):
    make_s, step_s = 0.06, 0.025
    passed, feeding = clock(make_s, workers, ahead, WARM + STEADY + 12)
    waited = []
    for step in range(WARM + STEADY):
        feeding.take(step)
        waited.append(feeding.waited_s)
        passed.sleep(step_s)
    feeding.close()
    assert np.mean(waited[WARM:]) == pytest.approx(predicted(workers, ahead, make_s, step_s).wait_s, abs=1e-9)


class Slow(Dataset):
    """Samples whose batches of 4 take 60 ms each."""

    def __init__(self, passed):
        self.passed = passed

    def __len__(self):
        return 4 * (WARM + STEADY + 12)

    def __getitem__(self, place):
        if place % 4 == 3:
            self.passed.work(place // 4, 0.06)
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_of_torchs_loader_wait_as_the_simulator_says(workers):
    passed, waited = FeedClock(workers, first=0), []
    loader = iter(DataLoader(Slow(passed), batch_size=4, num_workers=workers, prefetch_factor=2))
    for step in range(WARM + STEADY):
        passed.asked = lambda step=step: step + 2 * workers  # as many as are to be there, behind those it has given out
        begun = passed.now()
        passed.await_made(step)
        next(loader)
        waited.append(passed.now() - begun)
        passed.asked = lambda step=step: step + 1 + 2 * workers
        passed.sleep(0.025)
    told = predicted(workers, 2 * workers, 0.06, 0.025)
    assert told.wait_s == pytest.approx([0.035, 0.005][workers - 1])
    assert np.mean(waited[WARM:]) == pytest.approx(told.wait_s, abs=1e-9)
