"""A step of a recommendation model: bytes and times of small cases by hand, memory, towers, what is refused."""

import json

import pytest

from meshwright.answer.recommending import predict_recommending
from meshwright.cost import load_framework, standard
from meshwright.cost.roofline import KERNEL_FLOOR_S, efficiency
from meshwright.errors import MeshwrightError
from meshwright.lower.recommending import GRADIENT, ROW_UPDATE, table_bytes, traffic
from meshwright.plan import parse
from meshwright.search.recommending import find_recommending
from meshwright.simulate.price import Pricer
from meshwright.simulate.recommending import TableWalk
from meshwright.spec.cluster import load as cluster
from meshwright.spec.recommender import EmbeddingTable, load_recommender, read_recommender
from meshwright.spec.samples import parse_samples
from meshwright.work import Collective, Elementwise

SMALL = {
    "architectures": ["DLRM"],
    "dense_features": 13,
    "bottom_mlp": [32, 64],
    "embedding_dim": 64,
    "rows": [1000, 500],
    "pooling": [4, 2],
    "interaction": "dot",
    "top_mlp": [16, 1],
}
MODEL = read_recommender(SMALL, name="small")
COSTS = standard(load_framework("fused"))
#: Eight tables of equal rows and lookups, so that towers are equal.
EVEN = read_recommender(
    {**SMALL, "rows": [100_000] * 64, "pooling": 10, "bottom_mlp": [64], "top_mlp": [64, 1]}, name="even"
)


def step_of(words, model=MODEL, on="2xh100", work="batch=64"):
    where = cluster(on)
    return TableWalk(model, parse(words).on(where.num_devices), where, parse_samples(work), COSTS).asked()


def seconds_of(program):
    return Pricer(COSTS)(program).seconds


def programs(found):
    """Programs by name, those of ranks with tables of their own as a list."""
    named = {}
    for program in found.placed.step.programs:
        named.setdefault(program.name, []).append(program)
    return named


def test_parameters_of_the_mlperf_models_are_those_of_their_tables_and_products():
    """DLRM: 13-512-256-128, then 27 vectors in 351 pairs beside 128 numbers, then 1024-1024-512-256-1."""
    dlrm = load_recommender("dlrm")
    bottom = 14 * 512 + 513 * 256 + 257 * 128
    top = (351 + 128 + 1) * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    assert dlrm.dense_params() == bottom + top
    assert dlrm.table_params == 128 * sum(t.rows for t in dlrm.tables)
    dcn, width = load_recommender("dlrm-dcnv2"), 27 * 128
    crossed = 3 * (2 * 512 * width + width)
    top = (width + 1) * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    assert dcn.dense_params() == bottom + crossed + top
    assert sum(t.pooling for t in dcn.tables) == 214


def test_bytes_of_lookups_and_updates_by_hand():
    work = parse_samples("batch=64")
    one = traffic(EmbeddingTable(rows=1000, dim=64, pooling=4), 64, work)
    assert one.lookup == 256 * (8 + 256) + 64 * 256  # an index and a row each, a sum a sample
    assert one.update == 256 * (8 + 256) + 256 * 2 * (256 + 4)  # a gradient each, 256 rows with one number of state
    few = traffic(EmbeddingTable(rows=3, dim=64, pooling=4), 64, work)
    assert few.update == 256 * (8 + 256) + 3 * 2 * (256 + 4)  # no more rows than there are
    assert table_bytes(EmbeddingTable(rows=1000, dim=64), work) == 1000 * 256 + 1000 * 4  # row-wise AdaGrad
    adam = parse_samples("batch=64,optimizer=adam")
    assert table_bytes(EmbeddingTable(rows=1000, dim=64), adam) == 3 * 1000 * 256


def test_a_step_of_two_whole_tables_is_the_longest_way_through_its_tasks():
    found = step_of("embeddings=table")
    named = programs(found)
    seconds = {name: [seconds_of(p) for p in some] for name, some in named.items()}
    looked = sorted(one.layers[0].entries[0].work.num_bytes for one in named["embedding lookup"])
    assert looked == [128 * 264 + 64 * 256, 256 * 264 + 64 * 256]
    assert [one.moves[0].num_bytes for one in named["pooled embeddings"]] == [64 * 64 * 4.0]
    longest = max(seconds["embedding lookup"])
    bottom, top = seconds["bottom MLP"], seconds["interaction and top MLP"]
    there = longest + seconds["pooled embeddings"][0]
    begin = max(there, longest + bottom[0])
    back = begin + top[0] + top[1]
    gradients = max(back, there + seconds["indices of the next step"][0]) + seconds["gradients of embeddings"][0]
    low = back + bottom[1]
    sums = back + seconds["gradients of the top MLP"][0]
    sums = max(sums, low) + seconds["gradients of the bottom MLP"][0]
    ends = [max(max(gradients, low) + update, sums) + seconds["optimizer"][0] for update in seconds[ROW_UPDATE]]
    assert found.placed.seconds == pytest.approx(max(ends), rel=1e-12)
    assert sum(found.places.values()) == pytest.approx(found.placed.seconds, rel=1e-12)


def test_a_lookup_takes_its_bytes_at_the_rate_of_memory():
    """84 MB: as many at the share of the datasheet's bandwidth that kernels reach, and a start."""
    found = step_of("embeddings=table", work="batch=64000")
    kernel = programs(found)["embedding lookup"][0].layers[0].entries[0].work
    device = cluster("2xh100").islands[0].device
    rate = device.memory_gb_s * 1e9 * efficiency(device, "memory")[0]
    assert COSTS.price(kernel, device).seconds == pytest.approx(kernel.num_bytes / rate + KERNEL_FLOOR_S, rel=1e-9)
    assert kernel.num_bytes in (64_000 * (4 * 264 + 256), 64_000 * (2 * 264 + 256))


def test_exchanges_of_rows_columns_and_replicas_by_hand():
    rows = programs(step_of("embeddings=row"))
    assert [(m.op, m.num_bytes) for m in rows["pooled embeddings"][0].moves] == [("reduce_scatter", 64 * 128 * 4.0)]
    assert [(m.op, m.num_bytes) for m in rows["gradients of embeddings"][0].moves] == [("all_gather", 64 * 128 * 4.0)]
    found = step_of("embeddings=column columns=2")
    assert [r.width for r in found.placed.step.ranks] == [64, 64]
    # each rank has half of the columns of both tables, whose indices it is sent as if they were whole
    assert {r.indices for r in found.placed.step.ranks} == {64 * 6 * 8.0}
    alike = step_of("embeddings=table small=1000")
    named = programs(alike)
    assert "pooled embeddings" not in named and alike.placed.step.ranks[0].width == 0
    # bottom MLP and both tables are summed in fp32; a rank looks up for its own samples
    assert [m.num_bytes for m in named["gradients of the bottom MLP"][0].moves] == [
        4.0 * (14 * 32 + 33 * 64),
        4.0 * 96_000,
    ]
    assert named[GRADIENT][0].layers[0].entries[0].work.num_bytes == 32 * 6 * 264 + 96_000 * 4
    assert alike.placed.step.ranks[0].lookup == 32 * 6 * 264 + 2 * 32 * 256


def test_pooled_vectors_in_half_the_bits_are_half_the_bytes_and_approximate():
    found = programs(step_of("embeddings=table pooled=bf16"))["pooled embeddings"][0]
    assert found.moves[0].num_bytes == 64 * 64 * 2.0 and found.work.num_bytes == 2 * 64 * 64 * 6.0
    where = cluster("2xh100")
    told = predict_recommending(MODEL, where, parse_samples("batch=64"), parse("embeddings=table pooled=bf16"))
    assert any("approximate" in one for one in told.cautions)


def test_an_exchange_in_which_one_rank_sends_all_takes_its_port_and_its_nodes_whole_share():
    """One table on one of 16 ranks: it sends everything, its node an eighth of eight times that."""
    one = read_recommender({**SMALL, "rows": [1000], "pooling": 4}, name="one")
    move = programs(step_of("embeddings=table", one, "16xh100"))["pooled embeddings"][0].moves[0]
    assert move.num_bytes == 64 * 64 * 4.0
    assert [hop.carried for hop in move.group.hops] == [1.0, 1 / 8]


def test_memory_is_tables_with_state_and_what_dense_layers_and_vectors_take():
    found = step_of("embeddings=table")
    held = max(found.placed.held, key=lambda one: one["tables"])
    assert held["tables"] == 1000 * 260
    dense = MODEL.dense_params()
    assert held["dense layers"] == dense * (4 + 4 + 4 + 2)
    assert held["pooled embeddings"] == 2 * 4 * (64 * 64 + 32 * 2 * 64)
    assert held["indices"] == 2 * 64 * 4 * 8
    assert sum(found.placed.step.ranks[r].tables for r in (0, 1)) == 1500 * 260


def test_a_slice_by_columns_has_a_state_of_its_own_and_says_so():
    found = step_of("embeddings=column columns=2")
    assert [r.tables for r in found.placed.step.ranks] == [1500 * (32 * 4 + 4)] * 2
    told = predict_recommending(MODEL, cluster("2xh100"), parse_samples("batch=64"), parse("embeddings=column"))
    assert any("row-wise state each" in one for one in told.cautions)


def test_tables_that_no_device_holds_fit_by_rows():
    """500 million rows of 64 fp32 numbers are 130 GB with their state."""
    large = read_recommender({**SMALL, "rows": [500_000_000, 500]}, name="large")
    work, where = parse_samples("batch=64"), cluster("8xh100")
    whole = predict_recommending(large, where, work, parse("embeddings=table"))
    assert not whole.fits and any("room" in caution for caution in whole.cautions)
    rows = predict_recommending(large, where, work, parse("embeddings=row"))
    assert rows.fits and rows.memory[0].alive["tables"] == pytest.approx((500_000_000 + 500) * 260 / 8)
    auto = predict_recommending(large, where, work, parse("embeddings=auto"))
    assert auto.fits and auto.tables[0].way in ("row", "column")


def test_the_walk_is_no_slower_than_any_way_that_all_tables_have():
    model, where, work = load_recommender("dlrm-dcnv2"), cluster("8xh100"), parse_samples("batch=65536")
    plans = ("auto", "table", "row", "column", "column columns=4")
    times = [predict_recommending(model, where, work, parse(f"embeddings={words}")).step_time_s for words in plans]
    assert times[0] <= min(times[1:])


def test_a_tower_exchanges_inside_its_node_first_and_leaves_what_its_module_keeps():
    """64 tables of 64 numbers on two nodes of 8: 32 tables a tower, of which a rank has 4 for all 1,024 samples."""
    plain = step_of("embeddings=table towers=node", EVEN, "16xh100", "batch=1024")
    named = programs(plain)
    inside, between = named["pooled embeddings"][0].moves[0], named["towers"][0].moves[0]
    assert (inside.num_bytes, inside.group.size) == (1024 * 4 * 64 * 4.0, 8)
    assert (between.num_bytes, between.group.size) == (128 * 32 * 64 * 4.0, 2)
    assert all(not hop.scale_out for hop in inside.group.hops) and between.group.hops[-1].scale_out
    short = step_of("embeddings=table towers=node compress=4", EVEN, "16xh100", "batch=1024")
    named = programs(short)
    assert named["towers"][0].moves[0].num_bytes == between.num_bytes / 4
    product = named["tower module"][0].layers[0].entries[0].work
    assert (product.m, product.k, product.n) == (128, 32 * 64, 8 * 64)
    (summed,) = named["gradients of tower modules"][0].moves
    assert (summed.num_bytes, summed.group.size) == (4.0 * (2048 * 512 + 512), 8)
    assert short.placed.step.features == 2 * 8 + 1


def test_towers_that_compress_gain_on_several_nodes():
    where, work = cluster("64xh100"), parse_samples("batch=1m")
    flat, towers, short = (
        predict_recommending(EVEN, where, work, parse(f"embeddings=table {words}")).step_time_s
        for words in ("", "towers=node", "towers=node compress=4")
    )
    assert short < flat and short < towers


def test_a_search_finds_the_fastest_of_its_plans_and_keeps_to_restrictions():
    where, work = cluster("2xh100"), parse_samples("batch=64")
    found = find_recommending(MODEL, where, work, fix=["small=0,1000"])
    each = [predict_recommending(MODEL, where, work, one.plan).step_time_s for one in found.best]
    assert each == sorted(each) and found.fits
    only = find_recommending(MODEL, where, work, fix=["embeddings=row", "small=0"], allow=["pooled=bf16"])
    assert {one.plan.embeddings.pooled for one in only.best} == {"fp32", "bf16"}
    assert {one.plan.embeddings.way for one in only.best} == {"row"}


@pytest.mark.parametrize(
    ("words", "on", "work", "said"),
    [
        ("tp2", "2xh100", "batch=64", "tp2 says nothing of small"),
        ("pp2 embeddings=table", "2xh100", "batch=64", "pp2 says nothing of small"),
        ("zero1", "2xh100", "batch=64", "zero1 says nothing"),
        ("dp1", "2xh100", "batch=64", "dp=1 of a cluster of 2 devices"),
        ("embeddings=auto", "2xh100", "batch=65", "2 devices do not share 65 samples alike"),
        ("embeddings=row columns=4", "2xh100", "batch=64", "columns=4 is about tables that are cut by columns"),
        ("embeddings=column columns=3", "2xh100", "batch=64", "columns=3 does not divide vectors of 64"),
        ("towers=node", "8xh100", "batch=64", "the cluster has one"),
        ("compress=2", "16xh100", "batch=64", "there are no towers"),
    ],
)
def test_what_a_recommendation_model_cannot_have_is_refused(words, on, work, said):
    with pytest.raises(MeshwrightError) as error:
        predict_recommending(MODEL, cluster(on), parse_samples(work), parse(words))
    assert {d.code for d in error.value.diagnostics} == {"P082"}
    assert any(said in d.message and d.help for d in error.value.diagnostics)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": []}, "rows"),
        ({"pooling": [1]}, "1 poolings for 2 tables"),
        ({"pooling": 0}, "above 0"),
        ({"interaction": "cat"}, "neither dot nor dcn"),
        ({"interaction": "dcn"}, "a number and a rank"),
        ({"bottom_mlp": [32, 63]}, "ends with 63 numbers"),
        ({"embedding_dim": True}, "embedding_dim"),
        ({"layers": 3}, "unknown key"),
    ],
)
def test_a_file_that_is_no_recommendation_model_says_why(change, said):
    with pytest.raises(MeshwrightError) as error:
        read_recommender({**SMALL, **change})
    assert {d.code for d in error.value.diagnostics} == {"M010"}
    assert any(said in d.message for d in error.value.diagnostics)


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "W003"), ("batch=0", "W002"), ("batch=64,seq=3", "W001"), ("batch=64,batch=32", "W005"), ("batch", "W002")],
)
def test_a_workload_that_is_none_says_why(text, code):
    with pytest.raises(MeshwrightError) as error:
        parse_samples(text)
    assert error.value.diagnostics[0].code == code


def test_an_exchange_is_priced_as_any_other_all_to_all():
    found = programs(step_of("embeddings=table"))["pooled embeddings"][0]
    move, device = found.moves[0], cluster("2xh100").islands[0].device
    alone = COSTS.price(Collective(op="all_to_all", num_bytes=move.num_bytes, group=move.group), device)
    assert seconds_of(found) == alone.seconds
    assert COSTS.price(Elementwise(num_bytes=1e9, fused=True), device).cause == "elementwise"


def test_a_model_of_a_users_own_is_read_from_a_json_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SMALL))
    assert load_recommender(str(path)).tables == MODEL.tables
