"""Words by which an engine computes an iteration: ends, sums, orders, streams and nano-batches, by hand."""

import pytest

import meshwright as mw
from meshwright.causes import CAUSE
from meshwright.cost.roofline import contention, streaming_share
from meshwright.cost.standard import serving_costs
from meshwright.simulate.iterations import EXCHANGES, ForwardPrices
from meshwright.spec.architecture import EMBEDDING
from meshwright.work import Collective
from tests.lower.test_forward import forward

TABLE = 128256 * 4096 * 2.0


def named(entries):
    return {e.name: e.work for e in entries}


def exchanged(entries):
    return [(e.name, e.work.op, e.work.num_bytes) for e in entries if isinstance(e.work, Collective)]


def test_a_table_that_is_not_split_is_told_ids_or_tells_embeddings():
    split, whole, master = (forward(f"tp8 tables={name}") for name in ("split", "whole", "master"))
    assert exchanged(split.tokenwise(EMBEDDING, 64)) == [("embedding sum", "all_reduce", 64 * 4096 * 2)]
    assert exchanged(whole.tokenwise(EMBEDDING, 64)) == [("token ids", "broadcast", 64 * 4)]
    assert exchanged(master.tokenwise(EMBEDDING, 64)) == [("embeddings", "broadcast", 64 * 4096 * 2)]
    assert whole.weight_bytes(0) - split.weight_bytes(0) == TABLE * 7 / 8
    assert master.weight_bytes(0) - split.weight_bytes(0) == 2 * TABLE * 7 / 8  # and the head
    assert exchanged(master.head(4)) == []


def test_local_best_scores_are_gathered_in_place_of_all():
    every, best = (exchanged(forward(f"tp8 scores={name}").head(16)) for name in ("gathered", "local"))
    assert every == [("scores gather", "all_gather", 16 * 128256 * 2)]
    assert best == [("candidates gather", "all_gather", 16 * 8 * 64 * 8)]


def test_sums_over_one_rank_take_two_messages_and_every_buffer_through_its_port():
    costs, device = serving_costs(), mw.load_cluster("8xh200").islands[0].device
    usual, star = (named(forward(f"tp8 sums={how}").tokenwise(0, 64)) for how in ("usual", "star"))
    assert (usual["mlp all-reduce"].op, star["mlp all-reduce"].op) == ("all_reduce", "star")
    work = star["mlp all-reduce"]
    one = Collective(op="send", num_bytes=work.num_bytes, group=work.group)
    small = [Collective(op=op, num_bytes=1.0, group=work.group) for op in ("star", "send")]
    assert costs.price(work, device).seconds > 2 * costs.price(one, device).seconds
    first, second = (costs.price(w, device).seconds for w in small)
    assert first == pytest.approx(2 * second, rel=0.01)


def test_on_slow_links_a_star_of_small_sums_is_sooner_than_a_ring_and_of_large_ones_later():
    # TPI-LLM (2410.00531, section 3.2): latency of links, not bandwidth, bounds the sums of a decoded token
    found = forward("tp8", on="8x1xa100-80,1gbe")
    work, device = named(found.tokenwise(0, 1))["mlp all-reduce"], mw.load_cluster("1xa100-80").islands[0].device
    costs = serving_costs()
    for size, sooner in ((64.0, True), (64e6, False)):
        ring, star = (
            costs.price(Collective(op=op, num_bytes=size, group=work.group), device).seconds
            for op in ("all_reduce", "star")
        )
        assert (star < ring) == sooner


def test_features_are_gathered_and_reordered_between_two_products():
    aligned, gathered = (
        named(forward(f"tp8 w4a16 act_order={how}", "llama2-70b").tokenwise(0, 16)) for how in ("aligned", "gathered")
    )
    assert set(gathered) - set(aligned) == {"mlp features gather", "mlp features reorder"}
    assert gathered["mlp features gather"].num_bytes == 16 * 28672 * 2


def test_streamed_layers_have_room_for_a_few():
    # Llama-3-8B: 218,103,808 + 2 * 4096 parameters of 2 bytes in each of 32 layers; the tables stay
    layer, ends = (218_103_808 + 8192) * 2.0, 2 * TABLE + 8192
    found = forward("weights_from=host slots=2", on="1xh100")
    assert found.weight_bytes(0) == 2 * layer + ends and found.streamed_bytes(0) == 32 * layer
    found = forward("weights_from=host slots=2 resident=8", on="1xh100")
    assert found.weight_bytes(0) == 10 * layer + ends and found.streamed_bytes(0) == 24 * layer


def test_streams_of_a_token_pass_the_same_weights_at_once():
    one, eight = forward("tp1", on="1xh100"), forward("streams=8", on="1xh100")
    assert named(eight.tokenwise(0, 4))["mlp up"].m == 32 and named(eight.tokenwise(EMBEDDING, 4)) == named(
        one.tokenwise(EMBEDDING, 4)
    )
    assert eight.kv_bytes(0) == 8 * one.kv_bytes(0)
    [mixing] = eight.mixing
    core = eight.cores(mixing, 2, 1, 99)[0].work
    assert (core.batch, core.kv_len) == (16, 100 + 48)  # behind the learned tokens of each stream
    joined = (8 * 4096 * 4096 + 4096 * 8) * 2.0
    assert eight.weight_bytes(0) - one.weight_bytes(0) == joined + 8 * 48 * one.kv_bytes(0)
    assert named(eight.head(4))["streams hidden"].k == 8 * 4096


def test_a_shared_prefix_is_read_once_for_all_requests():
    found = forward("shared_prefix=once", on="1xh100", shared=1024)
    [mixing] = found.mixing
    own, prefix, _ = (e.work for e in found.cores(mixing, 64, 1, 1151))
    assert (own.batch, own.q_len, own.kv_len) == (64, 1, 128)
    # 32 heads make as many blocks of queries: the H100's 132 multiprocessors hold those of four parts of the keys
    assert (prefix.batch, prefix.q_len, prefix.kv_len, prefix.batch * prefix.pairs) == (4, 64, 256, 64 * 1024)
    apart = found.cores(mixing, 64, 1, 1000)  # before all of the prefix is there
    assert len(apart) == 1 and apart[0].work.kv_len == 1001
    assert (
        own.num_bytes + prefix.num_bytes
        < 0.2 * forward("tp1", on="1xh100").cores(mixing, 64, 1, 1151)[0].work.num_bytes
    )


def test_nano_batches_hide_exchanges_and_reading_but_for_the_share_they_keep():
    device = mw.load_cluster("8xh200").islands[0].device
    one, two = (ForwardPrices(forward(words, "llama2-70b"), device, serving_costs()) for words in ("tp8", "tp8 nano2"))
    half, whole = one.linear(1024)[0], two.linear(2048)[0]
    assert whole[CAUSE["gemm"]] == pytest.approx(2 * half[CAUSE["gemm"]])
    assert whole[EXCHANGES].sum() == pytest.approx(2 * half[EXCHANGES].sum() * contention(device))
    alone, beside = one.decoding(512, 2000), two.decoding(512, 2000)
    products = two.linear(512)[0]
    free = products[CAUSE["gemm"]] - products[EXCHANGES].sum()
    assert alone - beside == pytest.approx(min(alone, free) * (1 - streaming_share(device)))
    # one token is not cut
    assert two.linear(1)[0] == pytest.approx(one.linear(1)[0]) and two.decoding(1, 500) == one.decoding(1, 500)


def test_reading_memory_needs_a_fifth_of_an_a100():
    # 2,039 GB/s of 108 SMs whose ports carry 64 bytes a clock at 1.41 GHz
    device = mw.load_cluster("1xa100-80").islands[0].device
    assert streaming_share(device) == pytest.approx(2.039e12 / (108 * 64 * 1.41e9), rel=0.01)
