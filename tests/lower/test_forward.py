"""The forward pass of a serving iteration: bytes and exchanges by hand, for attention groups, experts and formats."""

import pytest

import meshwright as mw
from meshwright.cost import exchange
from meshwright.cost.exchange import MoeExchange
from meshwright.cost.standard import serving_costs
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.lower.served_experts import load, popularity
from meshwright.spec.workload import WEIGHT_BYTES
from meshwright.work import Collective, Convolution, Gemm, GroupedGemm, Scan


def forward(plan, model="llama3-8b", on="8xh200", **changed):
    cluster = mw.load_cluster(on)
    plan = mw.parse_plan(plan).on(cluster.num_devices)
    return Forward(mw.load_model(model), plan, Mesh(plan, cluster), **changed)


def exchanges(found, kind, tokens=512):
    return [(e.name, e.work.op, e.work.group.size) for e in found.tokenwise(kind, tokens) if type(e.work) is Collective]


def works(found, kind, which, tokens=512):
    return {e.name: e.work for e in found.tokenwise(kind, tokens) if type(e.work) is which}


# Llama-3-8B: 32 layers of q, o [4096, 4096], k, v [1024, 4096] and three [14336, 4096]; two tables [128256, 4096]
MATRICES = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
TABLES, NORMS = 2 * 128256 * 4096, 65 * 4096


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ("bf16", 2.0),
        ("fp8", 1.0),
        ("int8", 1.0),
        ("bf16 weights=int4", 0.515625),
        ("w4a16", 0.515625),
        ("bf16 weights=mxfp4", 0.53125),
        ("fp8 weights=nvfp4", 0.5625),
    ],
)
def test_quantised_weights_take_their_formats_bytes_and_tables_and_norms_two(words, each):
    assert forward(words).weight_bytes(0) == MATRICES * each + (TABLES + NORMS) * 2.0


def test_a_product_of_quantised_weights_reads_them_and_multiplies_in_16_bits():
    up = works(forward("w4a16"), 0, Gemm, tokens=1)["mlp up"]
    assert (up.dtype, up.weights) == ("bf16", "int4")
    assert up.num_bytes == 4096 * 2 + 28672 * 4096 * WEIGHT_BYTES["int4"] + 28672 * 2
    [head] = [e.work for e in forward("fp8 weights=int4").head(1) if type(e.work) is Gemm]
    assert (head.dtype, head.weights) == ("bf16", "")


def test_expert_weights_alone_are_stored_in_fewer_bits():
    # Mixtral 8x7B: 8 experts of three [14336, 4096] in each of 32 layers
    usual, stored = (forward(w, "mixtral-8x7b").weight_bytes(0) for w in ("bf16", "bf16 expert_weights=mxfp4"))
    assert usual - stored == 32 * 8 * 3 * 14336 * 4096 * (2.0 - WEIGHT_BYTES["mxfp4"])


def test_experts_lie_on_the_ranks_that_ep_and_etp_name():
    experts = 32 * 8 * 3 * 14336 * 4096 * 2.0 / 8
    beside = forward("tp8", "mixtral-8x7b").weight_bytes(0) - experts
    for words in ("tp8 ep8", "tp8 ep4", "tp8 ep2 etp4"):
        assert forward(words, "mixtral-8x7b").weight_bytes(0) - experts == beside
    alone = forward("tp8 adp8 ep8", "mixtral-8x7b").weight_bytes(0) - experts
    # attention, tables: whole on every rank; the router and the norms are that with tp too
    assert alone - beside == pytest.approx(7 / 8 * 2.0 * (32 * (2 * 4096 * 4096 + 2 * 1024 * 4096) + 2 * 32000 * 4096))


def test_the_busiest_rank_has_what_is_drawn_evenly_and_some_more():
    assert load(8, 2, 1, 1) == (2, 2)  # a token has two of eight experts
    assert load(8, 2, 10_000, 1) == (20_000, 8)
    rows, active = load(256, 8, 64, 8, 0.0)  # mean 64 rows and 32 (1 - (1 - 8/256)^64) = 27.8 experts
    assert 64 < rows < 90 and 28 < active <= 32
    rows, active = load(256, 8, 1, 8)  # a token's eight experts: one of them on each rank if evenly
    assert 1 < rows <= 8 and 1 <= active <= 8


def test_experts_that_are_chosen_unevenly_are_fewer_of_as_many_tokens():
    # quantiles of a normal distribution at 1/8, 3/8, 5/8, 7/8: 1.1503 and 0.3186 from its middle; exp(0.7 of them) are
    # 0.4470, 0.8001, 1.2499 and 2.2372, 4.7342 together
    assert popularity(4, 1, 0.7) == pytest.approx((0.0944, 0.1690, 0.2640, 0.4726), abs=1e-4)
    assert popularity(8, 2, 0.0) == pytest.approx((0.25,) * 8)
    assert max(popularity(4, 3, 5.0)) == 1.0 and sum(popularity(4, 3, 5.0)) == pytest.approx(3.0)
    # 16 tokens of 256 experts, eight each: 256 (1 - (1 - 8/256)^16) = 102.0 if evenly
    assert load(256, 8, 16, 1, 0.0) == (128, 102) and load(256, 8, 16, 1) == (128, 93)
    [up] = [w for name, w in works(forward("tp8", "deepseek-v3"), 1, GroupedGemm, tokens=16).items() if "up" in name]
    assert up.groups == 93


def test_experts_split_in_groups_multiply_whole_widths_and_those_split_by_width_all_experts():
    whole, split = (works(forward(w, "mixtral-8x7b"), 0, GroupedGemm) for w in ("tp8 ep8", "tp8"))
    assert (whole["experts up"].groups, whole["experts up"].n) == (1, 2 * 14336)
    assert (split["experts up"].groups, split["experts up"].n) == (8, 2 * 14336 // 8)
    assert split["experts up"].rows == 1024 and 128 < whole["experts up"].rows < 170


def test_outputs_of_experts_are_summed_once_where_every_rank_has_all_tokens():
    assert exchanges(forward("tp8 ep8", "mixtral-8x7b"), 0) == [
        ("attention all-reduce", "all_reduce", 8),
        ("experts all-reduce", "all_reduce", 8),
    ]


def test_tokens_of_attention_groups_are_sent_to_experts_or_gathered():
    sent = exchanges(forward("tp8 adp8 ep8", "mixtral-8x7b"), 0)
    assert sent == [("dispatch", "all_to_all", 8), ("combine", "all_to_all", 8)]
    gathered = exchanges(forward("tp8 adp4 ep8 dispatch=gathered", "mixtral-8x7b"), 0)
    assert gathered == [
        ("attention all-reduce", "all_reduce", 2),
        ("dispatch gather", "all_gather", 4),
        ("combine scatter", "reduce_scatter", 8),
        ("combine gather", "all_gather", 2),
    ]


def test_tokens_are_sent_by_the_fastest_kernels_of_the_fabric():
    device, costs = mw.load_cluster("8xh200").islands[0].device, serving_costs()
    found = {}
    for tokens in (512, 65536):
        works = forward("tp8 adp8 ep8", "deepseek-v3").tokenwise(1, tokens)
        [work] = [e.work for e in works if e.name == "dispatch"]
        found[tokens] = costs.price(work, device)
        item = MoeExchange(
            phase="dispatch", tokens=tokens // 8, hidden=7168, top_k=8, experts=256, group=work.group
        )  # fmt: skip
        mode = "low_latency" if tokens == 512 else "normal"  # the first's buffers end at 2,048 tokens of a rank
        assert found[tokens] == exchange.price(item, device, mode=mode)
    assert found[512].seconds < 0.1 * found[65536].seconds


def test_the_mlp_of_a_dense_model_is_shared_by_all_attention_groups():
    found = forward("tp8 adp8")
    assert exchanges(found, 0) == [("mlp gather", "all_gather", 8), ("mlp scatter", "reduce_scatter", 8)]
    gemms = works(found, 0, Gemm)
    assert (gemms["qkv"].m, gemms["mlp up"].m) == (64, 512) and gemms["mlp up"].n == 28672 // 8


def test_a_token_is_cached_by_one_attention_group():
    # the latent is whole on every tensor-parallel rank: 512 + 64 numbers of 2 bytes in 61 layers
    one, groups = (forward(w, "deepseek-v3").kv_bytes(0) for w in ("tp8 ep8", "tp8 adp8 ep8"))
    assert one == 61 * 576 * 2 and groups == one / 8


def test_an_attention_group_has_its_part_of_the_requests_with_all_heads():
    found = forward("tp8 adp8 ep8", "deepseek-v3")
    [mixing] = found.mixing
    [core] = [entry.work for entry in found.cores(mixing, 64, 1, 1023)]
    assert (core.batch, core.heads, core.kv_heads) == (8, 128, 1)


def test_a_request_keeps_what_its_windows_see_again():
    # Gemma 3 12B: 8 of 48 layers see all, 40 the last 1,024 tokens; 8 key-value heads 256 wide, 2 bytes
    found, token = forward("tp1", "gemma3-12b", "1xh100"), 2 * 8 * 256 * 2
    assert found.request_bytes(0, 512) == 48 * token * 512
    assert found.request_bytes(0, 8192) == token * (8 * 8192 + 40 * 1024)


def test_a_request_keeps_a_state_of_fixed_size_in_scans():
    # Mamba-2 2.7B: 64 layers of 80 heads of 64 x 128 numbers and 3 taps of 5120 + 2 * 128 channels, 4 bytes each
    found = forward("tp1", "mamba2-2.7b", "1xh100")
    state = 64 * (80 * 64 * 128 + 3 * (5120 + 256)) * 4.0
    assert found.request_bytes(0, 100) == found.request_bytes(0, 100_000) == state and found.kv_bytes(0) == 0
    assert forward("tp2", "mamba2-2.7b", "2xh100").request_bytes(0, 1) == state / 2


def test_a_decoding_scan_reads_and_writes_every_requests_state():
    found = forward("tp1", "mamba2-2.7b", "1xh100")
    [mixing] = found.mixing
    works = {type(e.work): e.work for e in found.cores(mixing, 32, 1, 5000)}
    states = 32 * 80 * 64 * 128 * 8.0
    assert (works[Scan].batch, works[Scan].seq_len) == (32, 1) and 0 < works[Scan].num_bytes / states - 1 < 0.05
    assert found.cores(mixing, 32, 1, 5000) == found.cores(mixing, 32, 1, 50)  # whatever came before
    assert not any(isinstance(e.work, Scan | Convolution) for e in found.tokenwise(0, 32))


def test_attention_behind_a_window_reads_no_more_than_it():
    found = forward("tp1", "gemma3-12b", "1xh100")
    near, far = sorted(found.mixing, key=lambda mixing: -mixing.layers)
    assert (near.layers, far.layers) == (40, 8)
    [short], [long] = (found.cores(mixing, 1, 1, 8191) for mixing in (near, far))
    assert (short.work.kv_len, short.work.pairs, long.work.kv_len) == (1024, 1024, 8192)


def test_context_parallel_ranks_share_a_prompt_and_its_cache():
    one, four = forward("tp1", on="1xh100"), forward("cp4", on="4xh100")
    assert four.kv_bytes(0) == one.kv_bytes(0) / 4 and four.weight_bytes(0) == one.weight_bytes(0)
    [mixing] = four.mixing
    ring = four.cores(mixing, 1, 4096, 0)
    assert [e.queue for e in ring].count("compute") == 4 and [e.queue for e in ring].count("cp") == 3
    pairs = 4096 * 4097 / 2
    assert sum(e.work.pairs for e in ring if e.queue == "compute") == pytest.approx(pairs / 4)
    gathered = forward("cp4 allgather", on="4xh100").cores(mixing, 1, 4096, 0)
    assert [(e.name, e.work.num_bytes) for e in gathered[:1]] == [("keys gather", 4096 * 2 * 8 * 128 * 2)]
    assert gathered[1].work.q_len == 1024 and gathered[1].work.kv_len == 4096
    queries, core, merged = four.cores(mixing, 8, 1, 4095)
    assert (queries.work.op, core.work.kv_len, merged.work.op) == ("all_gather", 1024, "reduce_scatter")
    assert four.tokenwise(0, 4096)[0].work == one.tokenwise(0, 1024)[0].work


def test_an_encoders_tokens_see_all_others_and_nothing_is_kept():
    found = forward("tp1", "bert-base", "1xh100")
    [mixing] = found.mixing
    [core] = [entry.work for entry in found.cores(mixing, 4, 256, 0)]
    assert core.pairs == 256 * 256 and found.request_bytes(0, 256) == 0.0


def test_shared_blocks_of_a_hybrid_keep_keys_of_every_place():
    found = forward("tp1", "zamba2-2.7b", "1xh100")
    attention = [mixing for mixing in found.mixing if mixing.spec is not None]
    assert sum(mixing.layers for mixing in attention) == 9  # 9 places in 54 layers, 32 heads 160 wide
    assert found.kv_bytes(0) == 9 * 2 * 32 * 160 * 2


def test_a_cache_of_eight_bits_is_half_as_large_and_read_as_it_is():
    usual, low = (forward("tp1", on="1xmi300x", kv=kv) for kv in ("bf16", "int8"))
    assert low.kv_bytes(0) / usual.kv_bytes(0) == (1 + 4 / 128) / 2  # with a scale in fp32 for each head of a token
    [mixing] = usual.mixing
    half, full = (found.cores(mixing, 64, 1, 8191)[0].work for found in (low, usual))
    assert half.num_bytes / full.num_bytes == pytest.approx(0.5, rel=0.01)
