"""What the passes of a layer compute and send, counted by hand."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.answer.flops import model_flops
from meshwright.cost import Costs
from meshwright.layers.attention import copies
from meshwright.lower.layer import program
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.lower.state import lora_params
from meshwright.plan import Overlap, parse
from meshwright.simulate.step import simulate
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.model import load
from meshwright.spec.workload import LORA_TARGETS, Lora, Train
from meshwright.work import AttentionCore, Collective, Elementwise, Gemm, GroupedGemm, attended_pairs
from tests.random_plans import GPT, LLAMA, MIXTURE, legal_plans, sized

S = 128
TRAIN = Train(global_batch=64, seq_len=S)
PRODUCTS = (Gemm, GroupedGemm)


def layer(words, model=GPT, train=TRAIN, kind=0):
    plan = parse(words)
    mesh = Mesh(plan, sized(plan))
    return Stages(plan, model, train, mesh).pieces(kind)


def flops(pieces, which, *, of=PRODUCTS, **options):
    return sum(e.work.flops for e in program(pieces, which, **options) if isinstance(e.work, of))


def collectives(pieces, which, **options):
    """How often each collective runs in a pass, by (operation, queue)."""
    return Counter((e.work.op, e.queue) for e in program(pieces, which, **options) if isinstance(e.work, Collective))


def weights(model, kind=0):
    """Entries of the matrices a token is multiplied with in one block."""
    block = model.blocks[kind]
    a, mlp = block.attention, block.mlp
    h = model.hidden
    attention = h * a.q_width + h * a.kv_heads * 2 * a.head_dim + a.heads * a.v_head_dim * h
    return attention + h * mlp.ffn * (3 if mlp.gated else 2)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda m: m.name)
@pytest.mark.parametrize("b", [1, 2])
def test_the_forward_does_two_operations_per_weight_and_token(model, b):
    assert flops(layer(f"mb{b} dp1", model), "F") == 2 * weights(model) * b * S


def test_attention_does_four_operations_per_pair_and_width():
    # two products of 2 * width per (query, key) pair; causal: s(s+1)/2 pairs; five products backward (Dao 2307.08691)
    pairs = S * (S + 1) / 2
    assert flops(layer("dp1"), "F", of=AttentionCore) == 4 * pairs * 256
    assert flops(layer("dp1"), "BW", of=AttentionCore) == 10 * pairs * 256
    both = Train(global_batch=64, seq_len=S, causal=False)
    assert flops(layer("dp1", train=both), "F", of=AttentionCore) == 4 * S * S * 256


def test_unfused_attention_multiplies_every_pair():
    # full score matrices: 2 products of 2 s^2 h, masked or not, and twice that backward
    extra = flops(layer("dp1 unfused"), "F") - flops(layer("dp1"), "F")
    assert extra == 4 * S * S * 256
    assert flops(layer("dp1 unfused"), "BW") - flops(layer("dp1"), "BW") == 2 * extra


@pytest.mark.parametrize("words", ["dp1", "tp4 dp1", "tp4 dp1 nosp", "cp2 dp1", "tp2 dp1 unfused", "dp1 fp8"])
@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTURE], ids=lambda m: m.name)
def test_the_backward_does_twice_the_forward(model, words):
    if model is MIXTURE and "nosp" in words:
        pytest.skip("experts dispatch sequence shards")
    pieces = layer(words, model, kind=len(model.blocks) - 1)
    forward = flops(pieces, "F")
    assert flops(pieces, "BW") == 2 * forward
    assert flops(pieces, "B") + flops(pieces, "W") == flops(pieces, "BW")
    kinds = (*PRODUCTS, AttentionCore)
    assert flops(pieces, "B", of=kinds) + flops(pieces, "W", of=kinds) == flops(pieces, "BW", of=kinds)


@settings(max_examples=40)
@given(legal_plans())
def test_split_and_whole_backward_do_the_same_work(question):
    plan, model, where, train = question
    stages = Stages(plan, model, train, Mesh(plan, where))
    for kind in (*range(len(model.blocks)), EMBEDDING, HEAD):
        pieces = stages.pieces(kind)
        work = lambda which: Counter(repr(e.work) for e in program(pieces, which))  # noqa: B023, E731
        assert work("B") + work("W") == work("BW")


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_and_context_parallelism_divide_the_products(t):
    for words in (f"tp{t} dp1", f"cp{t} dp1", f"cp{t} dp1 ulysses", f"cp{t} dp1 allgather"):
        assert flops(layer(words), "F") == flops(layer("dp1"), "F") / t
        assert flops(layer(words), "F", of=AttentionCore) == pytest.approx(
            flops(layer("dp1"), "F", of=AttentionCore) / t
        )


def test_full_recompute_repeats_the_forward_and_selective_the_core():
    pieces = layer("dp1 unfused")
    forward, backward = flops(pieces, "F"), flops(pieces, "BW")
    assert flops(pieces, "BW", recompute="full") == backward + forward
    core = 4 * S * S * 256
    assert flops(pieces, "BW", recompute="selective") == backward + core


def test_a_token_passes_its_top_k_experts_the_router_and_the_shared_one():
    h, ffn, shared, k, e = 256, 128, 128, 2, 8
    expected = 2 * S * (4 * h * h + h * e + 3 * h * shared + k * 3 * h * ffn)
    assert flops(layer("dp1", MIXTURE, kind=1), "F") == expected


def test_expert_parallelism_keeps_the_products_and_adds_two_exchanges_each_way():
    one, four = (layer(words, MIXTURE, kind=1) for words in ("dp4", "dp4 ep4"))
    assert flops(one, "F") == flops(four, "F")
    assert collectives(one, "F") == {}
    assert collectives(four, "F") == {("all_to_all", "ep"): 2}
    assert collectives(four, "BW") == {("all_to_all", "ep"): 2}
    sent = [e.work.num_bytes for e in program(four, "F") if isinstance(e.work, Collective)]
    assert sent == [2 * S * 256 * 2] * 2  # top-2 copies of every token in 16 bits


@pytest.mark.parametrize("targets", [("q",), ("v",), ("q", "k", "v", "o"), ("gate",), ("up", "down"), LORA_TARGETS])
def test_frozen_weights_have_no_weight_gradient_and_targets_their_two_factors(targets):
    train = Train(global_batch=64, seq_len=S, phase="lora", lora=Lora(rank=8, targets=targets))
    pieces = layer("dp1", LLAMA, train)
    adapters = 2 * S * lora_params(LLAMA.blocks[0], LLAMA.hidden, train.lora)  # two operations per parameter and token
    assert flops(pieces, "F") == 2 * weights(LLAMA) * S + adapters
    assert flops(pieces, "W") == adapters
    assert flops(pieces, "B") == flops(pieces, "F")


def test_a_layer_all_reduces_twice_a_pass_or_does_it_in_sharded_halves():
    # Shoeybi et al. 1909.08053, section 3: two forward, two backward. Korthikanti et al. 2205.05198, section 4.2.2:
    # with sequence parallelism all-gathers and reduce-scatters, and the gather repeated for the weight gradient.
    plain = layer("tp4 dp1 nosp")
    assert collectives(plain, "F") == {("all_reduce", "tp"): 2}
    assert collectives(plain, "BW") == {("all_reduce", "tp"): 2}
    sharded = layer("tp4 dp1")
    assert collectives(sharded, "F") == {("all_gather", "tp"): 2, ("reduce_scatter", "tp"): 2}
    assert collectives(sharded, "BW") == {("all_gather", "tp"): 4, ("reduce_scatter", "tp"): 2}
    sizes = {e.work.num_bytes for e in program(sharded, "F") if isinstance(e.work, Collective)}
    assert sizes == {2.0 * S * 256}


def test_a_ring_sends_its_blocks_one_time_less_than_it_has_ranks():
    pieces = layer("cp4 dp1", LLAMA)
    assert collectives(pieces, "F") == {("send", "cp"): 3}
    (size,) = {e.work.num_bytes for e in program(pieces, "F") if isinstance(e.work, Collective)}
    assert size == S / 4 * 2 * 4 * 32 * 2  # keys and values of a quarter of the tokens, 4 heads of 32, 16 bits


def test_blocks_of_a_ring_are_merged_with_those_before_and_the_last_gradients_travel_home():
    # Ring Attention (2310.01889): every block but the first adds to fp32 outputs and, backward, to fp32 gradients of
    # queries, keys and values; of a zigzag ring's blocks, each half the queries or half the keys, 3/4 are touched. The
    # gradients of the block that came last belong to the next rank.
    pieces = layer("cp4 dp1", LLAMA)
    merged = lambda which: [e.work for e in program(pieces, which) if "merge" in e.name]  # noqa: E731
    outputs = S / 4 * 8 * 32
    assert [m.num_bytes for m in merged("F")] == [outputs * (2 + 8) * 0.75] * 3
    assert [m.num_bytes for m in merged("B")] == [S / 4 * (8 + 4 + 4) * 32 * (2 + 8) * 0.75] * 3
    sent = [e.work.num_bytes for e in program(pieces, "B") if e.queue == "cp"]
    kv = S / 4 * 2 * 4 * 32 * 2
    assert sent == [2 * kv] * 3 + [kv]
    blocks = [e.work for e in program(pieces, "F") if isinstance(e.work, AttentionCore)]
    assert {(b.q_len, b.kv_len) for b in blocks} == {
        (S // 4, S // 4 // 2)
    }  # as many pairs as half a block of a quarter


def test_ulysses_swaps_heads_and_sequence_around_the_core():
    pieces = layer("cp4 dp1 ulysses")
    assert collectives(pieces, "F") == {("all_to_all", "cp"): 2}
    assert collectives(pieces, "BW") == {("all_to_all", "cp"): 2}


def sizes(pieces, which="F"):
    """Bytes of every collective of a pass, by operation."""
    found = {}
    for entry in program(pieces, which):
        if isinstance(entry.work, Collective):
            found.setdefault(entry.work.op, []).append(entry.work.num_bytes)
    return found


def test_ulysses_inside_a_ring_swaps_neighbours_and_sends_between_their_groups():
    # 8 ranks: 4 swap heads, 2 such groups are a ring (Fang & Zhao 2405.07719). LLAMA has 8 query and 4 key-value
    # heads of 32, so a rank's share of S/8 tokens is [S/8, (8 + 4 + 4) * 32] before the swap; after it, S/2 tokens with
    # 2 query heads and one key-value head.
    pieces = layer("cp8 dp1 ulysses4", LLAMA)
    found = sizes(pieces)
    assert found["all_to_all"] == [S / 8 * 16 * 32 * 2, S / 8 * 8 * 32 * 2]
    assert found["send"] == [S / 2 * 2 * 32 * 2]
    assert {p.forward.group.size for p in pieces if p.queue == "cp"} == {4}
    (core,) = (p for p in pieces if p.exchange)
    assert (core.exchange.each.group.size, core.ring) == (2, 2)
    assert (core.forward.heads, core.forward.kv_heads) == (2, 1)
    assert flops(pieces, "F", of=AttentionCore) == pytest.approx(flops(layer("dp1", LLAMA), "F", of=AttentionCore) / 8)


def test_ulysses_of_latent_attention_swaps_the_keys_and_values_of_all_heads():
    # Keys of 192 and values of 128 for each of 16 heads (DeepSeek-V2-Lite); a latent has no heads to be divided.
    pieces = layer("cp4 dp1 ulysses", load("deepseek-v2-lite"))
    assert sizes(pieces)["all_to_all"] == [S / 4 * 16 * (192 + 192 + 128) * 2, S / 4 * 16 * 128 * 2]
    (core,) = (p for p in pieces if p.core)
    assert (core.forward.heads, core.forward.kv_heads) == (4, 4)


def test_ulysses_inside_a_gather_gathers_between_the_groups():
    found = sizes(layer("cp4 dp1 allgather ulysses2", LLAMA))
    assert found["all_gather"] == [S * 2 * 2 * 32 * 2]  # all tokens, two of four key-value heads
    assert found["all_to_all"] == [S / 4 * 16 * 32 * 2, S / 4 * 8 * 32 * 2]


def test_fewer_key_value_heads_than_ranks_are_sent_more_than_once():
    # 4 key-value heads over 8 ranks: each is sent to the two ranks whose query heads read it
    assert sizes(layer("cp8 dp1 ulysses", LLAMA))["all_to_all"] == [S / 8 * (8 + 8 + 8) * 32 * 2, S / 8 * 8 * 32 * 2]
    assert [copies(8, 4, n) for n in (2, 4, 8)] == [1, 1, 2]
    assert copies(12, 6, 4) == 2


def test_slicing_keeps_the_bytes_and_the_operations():
    # Wang et al., ASPLOS 2023: a collective and its product in as many parts as the group has ranks, of which a
    # rank's own does not travel: 3 of 4 sends
    pieces = layer("tp4 dp1")
    moved = lambda **o: sum(  # noqa: E731
        e.work.num_bytes for e in program(pieces, "F", **o) if isinstance(e.work, Collective)
    )
    assert moved(overlap=Overlap(tp=True)) == moved() * 3 / 4
    assert flops(pieces, "F", overlap=Overlap(tp=True)) == flops(pieces, "F")
    assert flops(pieces, "BW", overlap=Overlap(tp=True)) == flops(pieces, "BW")
    assert collectives(pieces, "F", overlap=Overlap(tp=True)) == {
        ("send", "tp"): 4 * 3
    }  # four collectives, three sends each


@pytest.mark.parametrize("words", ["dp8", "tp4 pp2 dp2", "pp4 dp4 zb-h1", "tp2 cp2 dp2 ulysses", "pp2 dp2 interleaved"])
def test_all_ranks_together_execute_the_operations_that_mfu_counts(words):
    # unfused attention does every pair, as the convention of published MFU does; biases and norms are the 1%
    plan = parse(f"{words} unfused")
    run = simulate(plan, GPT, sized(plan), TRAIN, Costs())
    graph = run.lowered.graph
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    executed = (run.priced.flops[graph.cost_key] * np.array(graph.streams.multiplicity)[rank]).sum()
    assert executed == pytest.approx(model_flops(GPT, TRAIN), rel=0.01)


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        ({"causal": True}, 8 * 9 / 2),
        ({"causal": False}, 64),
        # window 3: 1 + 2 + 3 * 6 keys
        ({"causal": True, "window": 3}, 1 + 2 + 3 * 6),
        # chunks of 4: two triangles of 10
        ({"causal": True, "window": 4, "chunked": True}, 20),
        ({"causal": True, "window": 100}, 36),
    ],
)
def test_pairs_that_a_mask_leaves_are_counted_by_hand(mask, pairs):
    assert attended_pairs(8, 8.0, **mask) == pairs


def test_packed_documents_attend_within_themselves():
    # two documents of 4 in a sequence of 8: 2 * 10 pairs, or 2 * 16 without a causal mask
    assert attended_pairs(8, 4.0, causal=True) == 20
    assert attended_pairs(8, 4.0, causal=False) == 32


def test_norms_over_all_heads_add_two_numbers_of_each_token_over_ranks():
    # a query's and a key's sum of squares in fp32, of 2 x 128 tokens; of one rank, or norms by head, nothing
    a = LLAMA.blocks[0].attention

    def sums(words, params):
        normed = msgspec.structs.replace(a, qk_norm=True, qk_norm_params=params)
        blocks = tuple(msgspec.structs.replace(block, attention=normed) for block in LLAMA.blocks)
        pieces = layer(words, msgspec.structs.replace(LLAMA, blocks=blocks))
        return [p.forward.num_bytes for p in pieces if p.name == "qk norm sum" and p.forward == p.backward]

    over_all = (a.heads + a.kv_heads) * a.head_dim
    assert sums("tp2 dp1 mb2", over_all) == [2 * S * 2 * 4]
    assert sums("dp2 mb2", over_all) == sums("tp2 dp1 mb2", 2 * a.head_dim) == []


def test_compiled_norms_rotations_and_activations_move_the_bytes_of_fused_kernels():
    def chains(words):
        return {p.name: p.forward for p in layer(words, LLAMA) if isinstance(p.forward, Elementwise)}

    plain, made = chains("dp1 mb2"), chains("dp1 mb2 compile=yes")
    for name in ("attention norm", "mlp norm", "rotary", "mlp activation"):
        assert not plain[name].fused and made[name].fused
        assert (made[name].num_bytes, made[name].kernels) == (plain[name].num_bytes, plain[name].kernels)
    rest = plain.keys() - {"attention norm", "mlp norm", "rotary", "mlp activation"}
    assert rest and all(made[name] == plain[name] for name in rest)
