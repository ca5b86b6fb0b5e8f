"""Steps that wait for their data: what the simulator says against sums by hand, bounds, and another queue."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.feed import readers_of
from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import parse as parse_plan
from meshwright.simulate.feed import FeedSizes, _factors, _folded, enough, fed, horizon
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.feed import Feed, parse
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train


def sizes(**said) -> FeedSizes:
    usual = FeedSizes(
        readers=1,
        workers=1,
        ahead=2,
        samples=4,
        read_bytes=0.0,
        latency_s=0.0,
        work_s={"decode": 0.3},
        copy_bytes=0.0,
        copied_ahead=False,
        read_bytes_s=0.0,
        stream_bytes_s=0.0,
        cores=64.0,
        copy_bytes_s=0.0,
        step_s=0.1,
    )
    return msgspec.structs.replace(usual, **said)


def test_a_step_without_workers_makes_its_batch_first():
    found = fed(sizes(workers=0, ahead=1, latency_s=0.05, read_bytes=2e9, read_bytes_s=1e9))
    assert found.period_s == pytest.approx(0.1 + 0.05 + 2.0 + 0.3)
    assert found.first_s == pytest.approx(2.35)


@pytest.mark.parametrize("workers, period", [(1, 0.3), (2, 0.15), (3, 0.1), (5, 0.1)])
def test_workers_in_turn_share_the_making_until_the_step_is_the_slower(workers, period):
    assert fed(sizes(workers=workers, ahead=2 * workers)).period_s == pytest.approx(period)


def test_fewer_batches_ahead_than_workers_keep_as_many_of_them_busy():
    assert fed(sizes(workers=8, ahead=2)).period_s == pytest.approx(0.15)


def test_a_batch_in_the_making_as_one_trains_hides_behind_it():
    assert fed(sizes(workers=1, ahead=1, work_s={"decode": 0.08})).period_s == pytest.approx(0.1)


def test_readers_share_the_source_and_the_cores_of_their_node():
    # 4 readers of 1 GB a batch from 8 GB/s: 0.5 s a batch, however many workers there are
    assert fed(sizes(readers=4, workers=8, ahead=16, work_s={}, read_bytes=1e9, read_bytes_s=8e9)).period_s == (
        pytest.approx(0.5)
    )
    # 4 readers of 0.3 s of a core each on 6 cores: 0.2 s
    assert fed(sizes(readers=4, workers=8, ahead=16, cores=6.0)).period_s == pytest.approx(0.2)


def test_one_worker_reads_no_faster_than_a_stream():
    found = fed(sizes(workers=2, ahead=4, work_s={}, read_bytes=1e9, read_bytes_s=8e9, stream_bytes_s=1e9))
    assert found.period_s == pytest.approx(0.5)


def test_steps_wait_for_producers_that_are_slower_than_they_train():
    # a batch of 4 samples, of which all producers together make 8 a second
    assert fed(sizes(workers=0, producers=8, make_s=0.5, work_s={})).period_s == pytest.approx(0.5)
    assert fed(sizes(workers=0, producers=8, make_s=0.05, work_s={})).period_s == pytest.approx(0.1)


def test_a_copy_to_the_device_is_a_part_of_the_step_or_hidden_beside_the_one_before():
    said = {"workers": 4, "ahead": 8, "copy_bytes": 2e8, "copy_bytes_s": 1e10}
    assert fed(sizes(**said)).period_s == pytest.approx(0.12)
    assert fed(sizes(**said, copied_ahead=True)).period_s == pytest.approx(0.1)


def test_ranks_that_compute_on_the_cores_slow_down_beside_workers():
    # 2 ranks and 2 workers always busy on 2 cores: each has half a core
    busy = sizes(readers=2, workers=1, ahead=2, cores=2.0, step_cores=2.0, work_s={"decode": 0.1})
    assert fed(busy).period_s == pytest.approx(0.2)


def test_no_step_is_faster_than_its_bounds_or_slower_than_all_in_turn():
    rng = np.random.default_rng(3)
    for _ in range(40):
        workers = int(rng.integers(1, 7))
        one = sizes(
            readers=int(rng.integers(1, 5)),
            workers=workers,
            ahead=int(rng.integers(1, 4)) * workers,
            read_bytes=float(rng.uniform(0, 2e9)),
            read_bytes_s=float(rng.uniform(1e9, 4e9)),
            cores=float(rng.integers(1, 12)),
            work_s={"decode": float(rng.uniform(0, 0.4)), "tokenise": float(rng.uniform(0, 0.4))},
            latency_s=float(rng.uniform(0, 0.1)),
        )
        found = fed(one).period_s
        assert found >= one.bound_s() * 0.995
        assert found <= one.step_s + one.make_alone_s * one.readers  # everything one after the other


def test_a_disk_and_cores_that_are_each_used_in_part_overlap():
    # 60% of the disk and 60% of the cores while no step waits: workers are not all at the disk at once
    one = sizes(workers=8, ahead=16, read_bytes=6e7, read_bytes_s=1e9, cores=3.0, work_s={"decode": 0.18})
    assert fed(one).period_s == pytest.approx(0.1, rel=1e-3)
    # where the cores are full, they set the pace, however long the disk would take beside
    full = sizes(workers=8, ahead=16, read_bytes=6e7, read_bytes_s=1e9, cores=3.0, work_s={"decode": 0.36})
    assert fed(full).period_s == pytest.approx(0.12)


def test_the_fewest_workers_that_are_enough_are_the_fewest():
    one = sizes(work_s={"decode": 0.73})
    count, _ = enough(one, 0.01, 1024, 2)
    assert count == 8
    assert fed(one.with_workers(7, 14)).wait_s > 0.01 * fed(one.with_workers(7, 14)).period_s
    assert enough(sizes(read_bytes=1e9, read_bytes_s=1e9), 0.01, 1024, 2) is None


def test_drawn_samples_are_waited_for_as_a_recursion_by_hand_has_it():
    one = sizes(readers=3, workers=2, ahead=4, sigma={"decode": 1.0}, samples=2, work_s={"decode": 0.15})
    found, (warm, half, steps) = fed(one), horizon(one)
    took = 0.15 * _factors(_folded(one), steps)["decode"]
    taken, made, end = np.zeros((3, steps)), np.zeros((3, steps)), np.zeros(steps)
    for s in range(steps):
        for r in range(3):
            free = made[r, s - 2] if s >= 2 else 0.0
            place = taken[r, s - 4] if s >= 4 else 0.0
            made[r, s] = max(free, place) + took[r, s]
            taken[r, s] = max(made[r, s], end[s - 1] if s else 0.0)
        end[s] = taken[:, s].max() + 0.1
    between = end[warm + half : warm + 2 * half].mean() - end[warm : warm + half].mean()
    assert found.period_s == pytest.approx(between / half)
    assert found.period_s > 0.11  # two workers are fast enough in the mean


def test_words_of_a_feed_are_read_back_and_wrong_ones_named_together():
    words = "workers=8,read=2GB/s,latency=2ms,decode=lognormal:mean=3ms;sigma=0.5,tokenise=12ns/token,sample=4B/token"
    feed = parse(words)
    assert (feed.workers, feed.ahead, feed.read_bytes_s, feed.latency_s) == (8, 16, 2e9, 2e-3)
    assert feed.work["decode"].sigma == 0.5 and feed.work["tokenise"].of(1000) == pytest.approx(12e-6)
    assert parse(feed.text()) == feed
    assert feed.over("workers=2,prefetch=3").ahead == 3
    with pytest.raises(MeshwrightError) as wrong:
        parse("worker=8,read=2,prefetch=4,producers=3,keep=2")
    assert {one.code for one in wrong.value.diagnostics} == {"W001", "W002", "W003"}


def test_a_replica_is_read_once_or_by_each_of_its_ranks():
    cluster, plan = load_cluster("4x8xh100"), parse_plan("tp4 pp2").on(32)
    assert readers_of(Feed(), plan, cluster) == (2, 2, 4)  # stage 0 is on the first two nodes
    assert readers_of(Feed(readers="rank"), plan, cluster) == (8, 4, 32)


def test_a_prediction_with_a_feed_sums_up_and_says_what_is_full():
    asked = load_model("llama3-8b"), load_cluster("8xh100"), parse_train("batch=64,seq=4096"), parse_plan("fsdp mb1")
    alone = predict(*asked, detail=False)
    rich = predict(*asked, detail=False, feed=parse("workers=4,tokenise=1us/token"))
    assert rich.feed.bound == "step" and rich.step_time_s == pytest.approx(alone.step_time_s, rel=1e-3)
    poor = predict(*asked, detail=False, feed=parse("workers=4,tokenise=1us/token,sample=2MB,read=1MB/s"))
    assert poor.feed.full == ("source",) and poor.feed.enough is None
    assert poor.step_time_s == pytest.approx(64 * 2e6 / 1e6, rel=1e-2)  # all samples through the node's source
    assert sum(poor.attribution.values()) == pytest.approx(poor.step_time_s)
    assert poor.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / 8 / poor.step_time_s)
    few = predict(*asked, feed=parse("workers=1,latency=900ms"))  # 7.2 s a batch, two are enough
    helps = {one.name: one.change for one in few.sensitivities}
    assert helps.keys() == {"data latency", "data workers"} and helps["data workers"] < -0.45
    assert helps["data latency"] == pytest.approx(1 / 1.1 - 1, rel=1e-4)
    low, high = poor.step_time_interval_s
    assert high / low < 1.01  # the source sets the pace, whatever the step's own error is


def test_a_plan_of_several_pools_is_refused_a_feed():
    plan = parse_plan("encoder=[dp2 mb4 on=0:2 part=0:8] + lm=[tp2 pp3 mb1 1f1b on=2:8 part=8:32]")
    asked = load_model("llama3-8b"), load_cluster("8xh100"), parse_train("batch=64,seq=8192"), plan
    with pytest.raises(MeshwrightError, match="W021"):
        predict(*asked, feed=parse("workers=4"))
