"""Passes over a graph's buckets: bytes, times and memory of small cases by hand, and what is refused."""

import json
import random

import pytest

from meshwright.answer.node_embedding import predict_node_embedding
from meshwright.assign.buckets import inside_out, loads
from meshwright.cli import main
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.lower.bucket_training import READ_NS, WALK_READS, kernels, partition_bytes
from meshwright.plan import parse
from meshwright.simulate.bucket_training import _without
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import load as cluster
from meshwright.spec.edge_samples import parse_edge_samples
from meshwright.spec.graphs import load_graph_model, read_graph_model
from meshwright.work import Gemm

SMALL = {"architectures": ["NodeEmbedding"], "nodes": 8_000_000, "edges": 64_000_000, "dim": 64}
ONE = read_graph_model(SMALL, name="one")
TWO = read_graph_model({**SMALL, "context": True}, name="two")
OWN = "batch=100000,negatives=3"
COSTS = standard(load_framework("fused"))


def asked(words, model=TWO, on="1xp100", work=OWN):
    return predict_node_embedding(model, cluster(on), parse_edge_samples(work), parse(words), costs=COSTS)


def test_bytes_of_samples_by_hand():
    (kernel,) = kernels(TWO, parse_edge_samples("batch=10,negatives=3"), 10)
    assert kernel.work.num_bytes == 10 * (2 + 3) * (4 + 2 * 64 * 4)  # a head, a tail and three others, read and written
    (kernel,) = kernels(ONE, parse_edge_samples("batch=10,negatives=3,optimizer=adagrad"), 10)
    assert kernel.work.num_bytes == 10 * (2 + 6) * (4 + 4 * 64 * 4)  # both ends have others, and a number of state each


def test_shared_negatives_are_products_and_fewer_rows():
    work = parse_edge_samples("batch=100,negatives=30,shared=10,optimizer=rowwise-adagrad")
    found = kernels(ONE, work, 100)
    rows = 2 * 100 + 2 * 10 * 20  # ends, and twenty others for each of ten chunks and both ends
    assert found[0].work.num_bytes == rows * (4 + 2 * 256)
    assert found[-1].work.num_bytes == rows * (4 + 256 + 2 * 260)
    products = [one.work for one in found if isinstance(one.work, Gemm)]
    assert len(products) == 6 and sum(p.flops for p in products) == 2 * 3 * 2 * 10 * 10 * 30 * 64


def test_what_is_left_of_stretches_is_that_of_each_point_of_them():
    """Stretches of small whole numbers against the points that they cover, one by one."""
    draw = random.Random(0)
    for _ in range(50):
        ends = sorted(draw.sample(range(40), 8))
        free = list(zip(ends[::2], ends[1::2]))
        busy = sorted((start, start + draw.randrange(6)) for start in draw.choices(range(40), k=6))
        left, took = _without(free, busy)
        points = {p for start, stop in free for p in range(start, stop)}
        covered = {p for start, stop in busy for p in range(start, stop)}
        assert {p for start, stop in left for p in range(start, stop)} == points - covered
        assert took == len(points & covered) == len(points) - sum(stop - start for start, stop in left)


def test_one_device_swaps_before_each_bucket_or_beside_the_last_one():
    """Four partitions of two tables of 2,000,000 rows of 256 bytes: 17 loads and as many stores in the first pass."""
    waits = asked("partitions=4")
    lowered = waits.times.lowered
    assert lowered.item_bytes == 2_000_000 * 256 and lowered.samples == 4_000_000
    assert loads(inside_out(4, True), 4, True) == 17
    copy = lowered.item_bytes / (0.82 * 15.75e9) + 10e-6
    pricer = Pricer(COSTS)
    (training,) = [p for p in lowered.programs if p.kind == "pass"]
    train = pricer(training).seconds * 40
    assert waits.times.first_s == pytest.approx(18 * copy + 16 * train + 14 * copy, rel=1e-3)
    beside = asked("partitions=4 swap=beside")
    assert beside.times.first_s < waits.times.first_s
    assert beside.times.pass_s >= 16 * max(train, copy) * 0.999
    assert beside.times.lowered.held["partitions"] == 3 * lowered.item_bytes
    for one in (waits, beside):
        assert sum(one.times.places.values()) == pytest.approx(one.times.pass_s)


def test_drives_read_the_next_partitions_before_they_write_the_last_ones():
    """One drive reads and writes in turn: beside training all of it is hidden where training takes longer."""
    on, work = "1xxeon_e5_2680v3_2s", "batch=1000,rate=100000"
    waits, beside = (asked(f"partitions=4 swap={way}", ONE, on, work).times for way in ("wait", "beside"))
    train = 64e6 / 100_000
    read, write = (2_000_000 * 256 / rate / 1e9 for rate in (0.54, 0.52))
    assert waits.pass_s == pytest.approx(train + 6 * (read + write), rel=1e-3)
    assert beside.pass_s == pytest.approx(train, rel=1e-3)


def test_memory_falls_with_partitions():
    whole, some = (asked(f"partitions={p}", ONE).times.lowered.held["partitions"] for p in (1, 16))
    assert whole == 8_000_000 * 256 and some == 2 / 16 * whole


def test_a_grid_of_four_devices_trains_four_blocks_at_a_time():
    one, four = asked("partitions=4 buckets=grid"), asked("partitions=4 buckets=grid", on="4xp100")
    assert len(four.times.lowered.rounds) == 4 and four.times.lowered.moved_bytes < one.times.lowered.moved_bytes
    assert four.times.places["training"] == pytest.approx(one.times.places["training"] / 4, rel=0.02)
    assert four.samples_per_s > 2 * one.samples_per_s


def test_walks_are_made_beside_training_and_are_what_is_waited_for_where_they_take_longer():
    """Walks of 2 edges give 3 pairs; steps wait for three reads of 90 ns in each of so many threads."""
    work = parse_edge_samples("batch=100000,negatives=1,walk=2,augment=2")
    assert work.steps_a_sample == pytest.approx(2 / 3)
    words = "batch=100000,negatives=1,walk=2,augment=2"
    slow = asked("partitions=4 buckets=grid samplers=1", on="4xp100", work=words)
    made = 64e6 * 2 / 3 * WALK_READS * READ_NS * 1e-9
    assert slow.times.pass_s == pytest.approx(made, rel=1e-6)
    assert slow.times.places["sampling"] > 0.5 * made
    fast = asked("partitions=4 buckets=grid", on="4xp100", work=words)
    assert fast.times.pass_s < slow.times.pass_s / 10
    assert fast.host_bytes["samples"] == 2 * 64e6 * 8


def test_machines_hold_their_share_of_partitions_that_nobody_trains():
    on = "2xxeon_e5_2680v3_2s"
    found = asked("partitions=4", ONE, on, "batch=1000")
    held = found.memory.alive
    assert held["partitions"] == 2 * 2_000_000 * 256 == held["partitions of others"]
    sends = [p for p in found.times.lowered.programs if p.kind == "send"]
    assert [p.moves[0].num_bytes for p in sends] == [partition_bytes(ONE, parse_edge_samples("batch=1000"), 4)]


def test_a_measured_rate_takes_the_place_of_kernels():
    found = asked("partitions=1", ONE, "1xxeon_e5_2680v3_2s", "batch=1000,rate=1m,epochs=10")
    assert found.total_s == pytest.approx(10 * 64)


@pytest.mark.parametrize(
    ("words", "model", "on", "said"),
    [
        ("tp2", ONE, "2xp100", "tp2 says nothing of one"),
        ("partitions=2", ONE, "2xp100", "2 devices hold two partitions"),
        ("partitions=256", ONE, "1xp100", "65,536 buckets"),
        ("partitions=4 buckets=grid", ONE, "4xp100", "without a context"),
        ("partitions=6 buckets=grid", TWO, "4xp100", "do not divide partitions=6"),
        ("partitions=4 idle=host", ONE, "1xxeon", "the memory of"),
        ("partitions=4", ONE, "1xxeon", "have none"),
        ("partitions=4 idle=peers", ONE, "1xp100", "one machine"),
        ("partitions=16 idle=host", ONE, "8xp100", "not there for the others"),
        ("dp1", ONE, "4xp100", "dp=1 of a cluster of 4"),
    ],
)
def test_what_vectors_of_nodes_cannot_have_is_refused(words, model, on, said):
    with pytest.raises(MeshwrightError) as error:
        asked(words, model, on)
    assert {d.code for d in error.value.diagnostics} == {"P084"}
    assert any(said in d.message and d.help for d in error.value.diagnostics)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "nodes"),
        ({"context": 1}, "true or false"),
        ({"layers": 3}, "unknown key"),
        ({"architectures": ["DLRM"]}, "architecture"),
    ],
)
def test_a_file_that_is_no_model_of_a_graph_says_why(change, said):
    with pytest.raises(MeshwrightError) as error:
        read_graph_model({**SMALL, **change})
    assert error.value.diagnostics[0].code == "M011" and said in error.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "W003"), ("batch=0", "W002"), ("batch=8,seq=3", "W001"), ("batch=8,shared=4,negatives=2", "W005")],
)
def test_a_workload_of_edges_that_is_none_says_why(text, code):
    with pytest.raises(MeshwrightError) as error:
        parse_edge_samples(text)
    assert error.value.diagnostics[0].code == code
    one = parse_edge_samples("batch=8,negatives=8,shared=4,epochs=3,walk=5,augment=2,optimizer=adam")
    assert parse_edge_samples(one.text()) == one


def test_commands_answer_for_graphs(capsys, tmp_path):
    assert main(["catalog", "graphs"]) == 0 and "youtube-line" in capsys.readouterr().out
    words = [
        "--train",
        "batch=100k,walk=40,augment=5,epochs=4000",
        "--plan",
        "partitions=4 buckets=grid episode=50000000",
    ]
    assert main(["predict", "youtube-line", "--on", "4xp100", *words]) == 0
    out = capsys.readouterr().out
    assert "swapping" in out and "(0, 0)" in out
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SMALL))
    assert main(["predict", str(path), "--on", "1xp100", "--train", OWN, "--plan", "partitions=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["swapped_bytes"] > 0
    assert (
        main(["predict", "llama3-8b", "--on", "8xh100", "--train", "batch=8,seq=4096", "--plan", "partitions=4"]) == 2
    )
    assert "[P083]" in capsys.readouterr().err
    assert (
        main(["export", "youtube-line", "--on", "8xh100", "--train", "batch=8", "--plan", "dp8", "--to", "megatron"])
        == 2
    )
    assert "[M011]" in capsys.readouterr().err
    assert load_graph_model("friendster").nodes == 65_608_366
