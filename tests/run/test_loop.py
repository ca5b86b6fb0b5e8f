"""Long runs: the same losses however often they are interrupted, one line a step, and no step that is not a number."""

import json
import os
import resource
import signal
import threading
import time
from base64 import b64decode

import msgspec
import numpy as np
import pytest

from meshwright.compare.measured import repeats_s, step_times
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data, launch, loop, metrics
from meshwright.run.checkpoint import AsyncSaver, find, read_index
from meshwright.run.data import tokenizer
from meshwright.run.settings import Settings
from meshwright.run.weights import export_weights
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.timeline import Identity, unpack
from tests.run.processes import start_kept

MODEL = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=260, ffn=48, gated=True, max_seq_len=64)
TRAIN = Train(global_batch=4, seq_len=32, dtype="fp32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def job(corpus, **said):
    plan = parse(said.pop("plan", "dp2 zero1"))
    settings = Settings(**{"lr": 3e-3} | said.pop("settings", {}))
    return loop.Job(model=MODEL, plan=plan, train=TRAIN, settings=settings, corpus=corpus, **said)


def run(asked):
    return start_kept(loop.train, asked, num_ranks=asked.plan.layout.num_ranks)


def started(asked, main=loop.train):
    """A run in processes of its own."""
    return launch.start(main, asked, num_ranks=asked.plan.layout.num_ranks, device="cpu", stops=True)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(corpus):
    return run(job(corpus, steps=12, identity=Identity(model="tiny")))


def test_the_loss_falls_and_a_run_says_what_it_did(corpus, tmp_path, capfd):
    asked = job(corpus, steps=20, out=str(tmp_path / "out"), ideal_s=1e-3, settings={"warmup": 4})
    found = msgspec.convert(started(asked), loop.RunSummary)
    assert (found.first_step, found.last_step, found.stopped, found.device) == (1, 20, False, "cpu")
    assert found.losses[-1] < found.losses[0] - 1
    assert found.losses[0] == pytest.approx(5.56, abs=0.2)  # log 260: a model that knows nothing
    assert found.saved.endswith("step-00000020")
    assert len(found.peak_bytes) == 2 and min(found.peak_bytes) > 2**25
    assert 32 < found.lengths.mean < 2000  # sonnets
    said = lines(tmp_path / "out")
    assert [line["step"] for line in said] == list(range(1, 21))
    assert [line["loss"] for line in said] == found.losses
    assert [line["lr"] for line in said[:5]] == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 3e-3])
    assert said[4]["tokens"] == 5 * 4 * 32
    assert said[4]["tokens_per_s"] == pytest.approx(128 / said[4]["step_s"])
    assert said[4]["mfu"] == pytest.approx(1e-3 / said[4]["step_s"])
    told = capfd.readouterr().err.splitlines()
    assert 10 <= len(told) <= 12
    assert told[-1].startswith("step 20/20  loss ")
    assert told[-1].endswith("  0 s left")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp2 zero1", "pp2 dp1"])
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(plan, corpus, uninterrupted, tmp_path):
    out = tmp_path / "out"
    first = run(job(corpus, steps=5, out=str(out)))["losses"]
    second = run(job(corpus, steps=12, out=str(out), resume=True, plan=plan))
    assert second["first_step"] == 6
    tolerance = 0 if plan == "dp2 zero1" else 1e-5
    assert [*first, *second["losses"]] == pytest.approx(uninterrupted["losses"], rel=tolerance, abs=0)
    assert [line["step"] for line in lines(out)] == list(range(1, 13))


@pytest.mark.parametrize(
    "sync", ["local:h=3", "local:h=3,codec=int8,moments=mean", "streaming-diloco:h=4,parts=2,delay=1"]
)
def test_a_run_of_local_steps_goes_on_within_a_round_as_if_it_had_never_stopped(sync, corpus, tmp_path):
    plan, out = f"dp2 mb1 sync={sync}", tmp_path / "out"
    whole = run(job(corpus, steps=7, plan=plan))["losses"]
    first = run(job(corpus, steps=4, plan=plan, out=str(out)))["losses"]  # within a round, or a part in flight
    second = run(job(corpus, steps=7, plan=plan, out=str(out), resume=True))["losses"]
    assert [*first, *second] == whole


def test_replicas_learn_at_the_end_of_a_round_that_one_of_them_has_diverged(corpus, tmp_path):
    out = tmp_path / "out"
    asked = job(corpus, steps=9, plan="dp2 mb1 sync=local:h=4", out=str(out), settings={"lr": 1e38}, save_every=4)
    with pytest.raises(MeshwrightError) as error:
        run(asked)
    (found,) = error.value.diagnostics
    assert (found.code, error.value.exit_code) == ("L004", 1)
    assert "in the round that ends with step 4" in found.message
    assert not list(out.glob("step-*"))


def test_a_checkpoint_within_a_round_is_of_no_other_plan_and_one_at_its_end_of_any(corpus, tmp_path):
    plan, out = "dp2 mb1 sync=local:h=3", tmp_path / "out"
    run(job(corpus, steps=4, plan=plan, out=str(out)))
    for other in ("dp2 mb1", "dp2 mb1 sync=local:h=2"):
        with pytest.raises(MeshwrightError, match=r"Y004.*within a round of 2 replicas"):
            run(job(corpus, steps=6, plan=other, out=str(out), resume=True))
    run(job(corpus, steps=6, plan=plan, out=str(out), resume=True))
    joined = run(job(corpus, steps=8, plan="dp2 zero1", out=str(out), resume=True))
    assert joined["first_step"] == 7


def after_lines(out, count, act):
    """Calls `act` once a run has done so many steps."""

    def wait():
        until = time.monotonic() + 60
        while time.monotonic() < until and (not (out / "metrics.jsonl").exists() or len(lines(out)) < count):
            time.sleep(0.01)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_a_run_told_to_end_finishes_its_step_saves_and_goes_on_later_as_if_nothing_had_been(
    corpus, uninterrupted, tmp_path
):
    out = tmp_path / "out"
    after_lines(out, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    first = started(job(corpus, steps=10**6, out=str(out)))
    done = first["last_step"]
    assert first["stopped"] and 3 <= done < 10**6
    assert first["saved"].endswith(f"step-{done:08d}")
    second = run(job(corpus, steps=done + 3, out=str(out), resume=True))
    assert (second["first_step"], second["stopped"]) == (done + 1, False)
    whole = [line["loss"] for line in lines(out)]
    assert len(whole) == done + 3
    losses = uninterrupted["losses"]
    shared = min(len(whole), len(losses))
    assert whole[:shared] == losses[:shared]
    assert whole == run(job(corpus, steps=done + 3))["losses"]


def shot(world, asked):
    """Rank 1 is killed after its fourth update has begun."""
    if world.rank == 1:
        plain = loop.Trainer.step

        def step(self, *batches):
            if self.step_count == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *batches)

        loop.Trainer.step = step
    return loop.train(world, asked)


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_from_its_last_checkpoint(corpus, uninterrupted, tmp_path):
    out = tmp_path / "out"
    begun = time.monotonic()
    with pytest.raises(launch.RankDied, match=r"rank 1 on .* died: killed by SIGKILL"):
        started(job(corpus, steps=12, out=str(out), save_every=1), main=shot)
    assert time.monotonic() - begun < 30
    kept = read_index(find(out)).meta.step
    assert 2 <= kept <= 4  # the save of the last step was under way
    found = run(job(corpus, steps=12, out=str(out), resume=True))
    assert found["first_step"] == kept + 1
    assert [line["loss"] for line in lines(out)] == uninterrupted["losses"]
    assert not list(out.glob(".step-*"))


def small_disk(world, asked):
    """Rank 1 can write no file of more than 100 bytes once it has saved step 2."""
    if world.rank == 1:
        begin = AsyncSaver.begin

        def begun(self, pieces, meta):
            if meta.step > 2:
                self.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            begin(self, pieces, meta)

        AsyncSaver.begin = begun
    return loop.train(world, asked)


@pytest.mark.slow
def test_a_run_whose_disk_fills_says_so_and_keeps_the_checkpoint_before(corpus, uninterrupted, tmp_path):
    out = tmp_path / "out"
    begun = time.monotonic()
    with pytest.raises(MeshwrightError) as caught:
        started(job(corpus, steps=12, out=str(out), save_every=2), main=small_disk)
    assert time.monotonic() - begun < 15
    (found,) = caught.value.diagnostics
    assert found.code == "H005" and "File too large" in found.message and "(rank 1)" in found.place
    assert sorted(f.name for f in out.iterdir()) == ["metrics.jsonl", "step-00000002"]
    assert run(job(corpus, steps=12, out=str(out), resume=True))["first_step"] == 3
    assert [line["loss"] for line in lines(out)] == uninterrupted["losses"]


def test_a_loss_that_is_no_number_is_not_applied_and_the_state_before_it_is_saved(corpus, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(MeshwrightError) as error:
        run(job(corpus, steps=9, out=str(out), settings={"lr": 1e38}))
    (found,) = error.value.diagnostics
    assert (found.code, error.value.exit_code) == ("L004", 1)
    done = len(lines(out))
    assert found.message.startswith(f"step {done + 1} is not a number: loss ")
    assert f"the state before it is {out}/step-{done:08d}" in found.message
    assert read_index(find(out)).meta.step == done
    assert all(isinstance(line["loss"], float) for line in lines(out))


def test_another_seed_does_not_go_on_from_a_checkpoint(corpus, tmp_path):
    out = str(tmp_path / "out")
    run(job(corpus, steps=1, out=out))
    with pytest.raises(MeshwrightError) as error:
        run(job(corpus, steps=2, out=out, resume=True, settings={"seed": 3}))
    assert [(d.code, d.help) for d in error.value.diagnostics] == [("L005", "--seed 0")]


def test_another_batch_goes_on_with_a_note(corpus, tmp_path, capfd):
    out = str(tmp_path / "out")
    run(job(corpus, steps=1, out=out))
    asked = msgspec.structs.replace(
        job(corpus, steps=2, out=out, resume=True), train=Train(global_batch=8, seq_len=32, dtype="fp32")
    )
    started(asked)
    assert (
        "the checkpoint was trained on batch=4,seq=32,dtype=fp32: the data goes on at step 1\n"
        in capfd.readouterr().err
    )


def test_a_run_that_is_done_does_nothing(corpus, tmp_path):
    out = str(tmp_path / "out")
    run(job(corpus, steps=2, out=out))
    found = run(job(corpus, steps=2, out=out, resume=True))
    assert (found["first_step"], found["last_step"], found["step_s"]) == (3, 2, [])


def test_the_corpus_is_built_by_the_run_where_it_is_not_there(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert started(job("", steps=2))["losses"] == run(job(corpus, steps=2))["losses"]
    assert len(list((tmp_path / "meshwright" / "corpus").iterdir())) == 1


def test_a_text_that_cannot_be_read_is_one_error_of_the_whole_job(tmp_path):
    with pytest.raises(MeshwrightError) as error:
        started(job("", steps=2, text=str(tmp_path / "absent")))
    assert [d.code for d in error.value.diagnostics] == ["D001"]


def test_a_run_returns_the_timeline_of_its_last_steps_on_every_rank_and_a_row_for_each_step(uninterrupted):
    found = uninterrupted
    line = unpack(b64decode(found["timeline"]))
    assert len(line.ranks) == 2
    assert (line.identity.model, line.identity.source) == ("tiny", "measured")
    assert {"BW", "F", "optimizer"} <= {name.split()[0] for name in line.names()}
    # the spans of five steps are kept, the recorder's numbers being those of the steps done before
    assert line.steps.number.tolist() == [7, 8, 9, 10, 11]
    assert sorted(set(line.attribute("step").tolist())) == [7, 8, 9, 10, 11]
    table = line.records["step"]
    assert table["step"].tolist() == list(range(1, 13))
    assert (table["seconds"].tolist(), table["loss"].tolist()) == (found["step_s"], found["losses"])
    assert line.records["rank"]["peak_bytes"].tolist() == found["peak_bytes"]
    loss = next(c for c in line.counters if c.name == "loss")
    assert loss.value.tolist() == found["losses"][7:] and np.array_equal(loss.time_s, line.steps.end_s)
    # three of twelve only warm up; what the loop does between two steps counts as the second's
    assert repeats_s(line).tolist() == found["step_s"][3:]
    assert len(step_times(line)) == 5 and step_times(line).min() > 0


def test_the_bytes_of_a_timeline_are_bounded_by_the_steps_that_are_kept(corpus, uninterrupted):
    """Of more steps only the table is longer, by five numbers of eight bytes each."""
    longer = run(job(corpus, steps=18))
    short, long = (len(b64decode(found["timeline"])) for found in (uninterrupted, longer))
    assert long - short <= 6 * 5 * 8 + 1000


def test_a_run_of_many_ranks_keeps_fewer_steps_and_one_at_least():
    assert [loop.kept_steps(n) for n in (1, 64, 102, 103, 256, 512, 16_384)] == [5, 5, 5, 4, 2, 1, 1]


def test_metrics_keep_what_stays_done_and_nothing_torn(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step":1}\n{"step":2}\n{"step":3}\n{"ste')
    kept = metrics.Metrics(file, done=2)
    kept.add({"step": 3, "loss": 0.5})
    assert file.read_text() == '{"step":1}\n{"step":2}\n{"step":3,"loss":0.5}\n'
    kept.close()


def test_metrics_that_cannot_be_written_are_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError) as error:
        metrics.Metrics(tmp_path / "file" / "metrics.jsonl", done=0)
    assert error.value.diagnostics[0].code == "X104"


@pytest.mark.parametrize(("left", "said"), [(50, "50 s left"), (7200, "2.0 h left"), (600, "10 min left")])
def test_a_progress_line_says_rates_of_the_median_step_and_what_is_left(left, said):
    line = metrics.ProgressLine(101, 1000, 0.1)
    line.seconds = [left / 100] * 3 + [1e6]
    line._said_at = time.monotonic()
    shown = line.line(1, 2.5)
    seconds = left / 100
    assert shown == f"step 1/101  loss 2.5000  {1000 / seconds:,.0f} tokens/s  MFU {0.1 / seconds:.1%}  {said}"


def test_a_progress_line_says_that_a_rate_is_of_learnt_tokens():
    line = metrics.ProgressLine(10, 1000)
    line(1, 2.5, 1.0, 300)  # of conversations the answers alone
    assert "  300 learnt tokens/s  " in line.line(1, 2.5)
    line(2, 2.5, 1.0, 1000)
    assert "  1,000 tokens/s  " in line.line(2, 2.5)


def test_on_a_terminal_the_line_is_written_over_and_closed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    say = metrics.ProgressLine(2, 1)
    for step in (1, 2):
        say(step, 1.0, 1e-6)
    say.close()
    shown = capsys.readouterr().err
    assert shown.count("\r\033[K") == 2
    assert shown.count("\n") == 1 and shown.endswith("left\n")


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (5, 5), (20, 10), (1000, 10)])
def test_where_lines_stay_there_are_about_ten(steps, count, capsys):
    say = metrics.ProgressLine(steps, 1)
    say._said_at = time.monotonic()
    for step in range(1, steps + 1):
        say(step, 1.0, 1e-6)
    assert len(capsys.readouterr().err.splitlines()) == count


def test_a_run_begins_with_published_weights(corpus, tmp_path):
    first = run(job(corpus, steps=6, out=str(tmp_path / "out")))
    export_weights(first["saved"], tmp_path / "weights")
    again = run(job(corpus, steps=1, weights=str(tmp_path / "weights"), plan="tp2 dp1"))
    assert again["losses"][0] < first["losses"][0] - 0.2
