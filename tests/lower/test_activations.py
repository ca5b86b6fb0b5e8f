"""Activation memory against Korthikanti et al. (2205.05198), to the byte.

A GPT block in 16 bits with dropout and unfused attention, per layer: s sequence, b microbatch, h hidden, a heads,
t tensor-parallel ranks. LayerNorms, biases and residuals as in the paper's figure 2.
"""

import msgspec
import pytest

from meshwright.lower.layer import program
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.lower.units import Unit
from meshwright.plan import parse
from meshwright.spec import cluster
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.layers import Moe
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train
from meshwright.work import AttentionCore, Gemm

S, H, A, V = 2048, 6144, 64, 51200  # the paper's 22B model
GPT = transformer(layers=48, hidden=H, heads=A, vocab=V, max_seq_len=S, name="gpt-22b")
SELENE = cluster.load("8xa100-80")


def stages(words, model=GPT, *, seq=S, dropout=True, dtype="fp16"):
    train = Train(global_batch=64, seq_len=seq, dropout=dropout, dtype=dtype)
    plan = parse(words).on(SELENE.num_devices)
    return Stages(plan, model, train, Mesh(plan, SELENE))


def saved(words, kind=0, **options):
    """Bytes that one microbatch leaves in one unit."""
    found = stages(words, **options)
    mode = found.plan.memory.recompute if kind == 0 else "none"
    units = next(c for c in found.compositions if any(u.kind == kind for u in c.units))
    one = type(units)((Unit(kind, mode),))
    return found.activations(one).saved


@pytest.mark.parametrize("b", [1, 4])
def test_a_gpt_block_keeps_sbh_34_plus_5as_over_h(b):
    # section 4.1, equation 1
    assert saved(f"mb{b} unfused") == S * b * (34 * H + 5 * A * S)


def test_the_equation_holds_for_other_shapes():
    for s, h, a in ((1024, 1024, 16), (512, 2048, 32), (4096, 4096, 32)):
        model = transformer(layers=2, hidden=h, heads=a, vocab=128, max_seq_len=s)
        assert saved("mb2 unfused", model=model, seq=s) == s * 2 * (34 * h + 5 * a * s)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallelism_leaves_10_of_34_on_every_rank(t):
    # section 4.2.1, equation 2: sbh (10 + 24/t + 5as/(ht))
    assert saved(f"tp{t} mb1 unfused nosp") == S * (10 * H + 24 * H / t + 5 * A * S / t)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallelism_divides_everything(t):
    # section 4.2.2, equation 4: sbh/t (34 + 5as/h)
    assert saved(f"tp{t} mb1 unfused") == S / t * (34 * H + 5 * A * S)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_inputs_kept_gathered_are_4_of_34_on_every_rank(t):
    # the inputs of the query-key-value product and of the MLP's first, 2sbh each (section 4.2.2 stores their shards)
    assert saved(f"tp{t} mb1 unfused gathered=kept") == S * (4 * H + 30 * H / t + 5 * A * S / t)
    assert saved(f"tp{t} mb1 unfused nosp gathered=kept") == saved(f"tp{t} mb1 unfused nosp")


def test_inputs_kept_gathered_are_not_gathered_again():
    for words, count in (("tp2 mb1", 2), ("tp2 mb1 gathered=kept", 0), ("tp2 mb1 nosp", 0)):
        entries = program(stages(words).pieces(0), "BW")
        assert sum(e.name.endswith("regather") for e in entries) == count


@pytest.mark.parametrize("t", [1, 8])
def test_selective_recompute_leaves_34(t):
    # section 5, equation 6: 34 sbh/t
    assert saved(f"tp{t} mb1 unfused selective") == 34 * S * H / t


def test_full_recompute_leaves_the_input():
    # table 2: 2 sbh, sharded with the sequence under sequence parallelism
    assert saved("mb1 unfused full") == 2 * S * H
    assert saved("tp8 mb1 unfused full nosp") == 2 * S * H
    assert saved("tp8 mb1 unfused full") == 2 * S * H / 8


def test_embedding_and_head_keep_what_section_4_3_counts():
    # dropout mask sbh/t; final norm and head input 2sbh/t each, fp32 logits 4sbv/t: together 4sbh/t (1 + v/h)
    t, b = 8, 2
    assert saved(f"tp{t} mb{b} unfused", kind=EMBEDDING) == S * b * H / t
    assert saved(f"tp{t} mb{b} unfused", kind=HEAD) == 4 * S * b / t * (H + V)


def test_without_dropout_its_masks_are_not_kept():
    # 34 is 32 and two masks of 1; attention keeps its softmax (2) and neither mask (1) nor dropped copy (2)
    assert saved("mb1 unfused", dropout=False) == S * (32 * H + 2 * A * S)


def test_flash_attention_keeps_a_number_per_row_instead_of_the_scores():
    # Dao 2307.08691: the logarithm of the sum of exponentials, fp32, per query and head
    assert saved("mb1 flash") == S * H * 34 + 4 * A * S


def test_twice_the_bytes_in_fp32_but_for_masks():
    # everything of 2 bytes doubles; the masks stay at 1 byte
    assert saved("mb1 unfused fp32") == S * H * (2 * 32 + 2) + A * S * S * (2 * 4 + 1)


def test_context_parallelism_divides_tokens():
    assert saved("cp4 mb1 flash") == saved("mb1 flash") / 4


def test_a_gated_mlp_and_grouped_queries_keep_what_they_make():
    # RMSNorm inputs 2 x 2sh; attention input 2sh, q 2sh, k and v 2s(kv width) each, out 2sh; statistics 4as; MLP input
    # 2sh, gate and up 2 x 2sf, their product 2sf
    h, f, a, kv, d = 4096, 14336, 32, 8, 128
    model = transformer(layers=2, hidden=h, heads=a, kv_heads=kv, ffn=f, vocab=128, gated=True)
    expected = S * (2 * 2 * h + 2 * h + 2 * h + 2 * 2 * kv * d + 2 * h + 4 * a + 2 * h + 3 * 2 * f)
    assert saved("mb1", model=model, dropout=False, dtype="bf16") == expected


def test_the_weight_gradient_needs_the_inputs_of_the_products_and_their_output_gradients():
    # From B to W: inputs of qkv, projection, both MLP products 2sh + 2sh + 2sh + 8sh, and output gradients 6sh + 2sh +
    # 8sh + 2sh (Qi et al. 2401.10241 count the former 32h with what B keeps otherwise).
    found = stages("mb1 unfused")
    assert found.activations(type(found.compositions[0])((Unit(0, "none"),))).held == S * H * (14 + 18)


LLAMA = transformer(layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=1024, gated=True, max_seq_len=S)


def test_recompute_by_operators_keeps_every_second_product_of_a_llama_layer():
    # by hand, features a token: q, v, gate and down (first, third, fifth, seventh product), the layer's input, and
    # the attention core's output with one fp32 log-sum-exp a head
    features = (4096 + 1024 + 14336 + 4096) + 4096 + 4096
    wanted = S * (2 * features + 4 * 32)
    assert saved("mb1 operators", model=LLAMA, dropout=False, dtype="bf16") == wanted
    assert saved("mb3 operators", model=LLAMA, dropout=False, dtype="bf16") == 3 * wanted


def test_recompute_by_operators_repeats_the_other_products_and_no_attention():
    pieces = stages("mb1 operators", LLAMA, dropout=False, dtype="bf16").pieces(0)
    again = [e for e in program(pieces, "BW", recompute="operators") if e.again]
    products = [e.work for e in again if isinstance(e.work, Gemm)]
    # k of the fused qkv, the output projection, up of the fused gate and up
    assert [(w.n, w.k) for w in products] == [(1024, 4096), (4096, 4096), (14336, 4096)]
    assert not any(isinstance(e.work, AttentionCore) for e in again)
    # nothing reads what comes after the last product, so it is not repeated
    assert "mlp activation" in {e.name for e in again}
    assert "mlp residual" not in {e.name for e in again}


def test_recompute_by_operators_keeps_what_was_scattered_and_gathers_again():
    pieces = stages("tp8 mb1 operators", LLAMA, dropout=False, dtype="bf16").pieces(0)
    again = [e.work.op for e in program(pieces, "BW", recompute="operators") if e.again and e.queue == "tp"]
    assert set(again) == {"all_gather"}
    whole = [e.work.op for e in program(pieces, "BW", recompute="full") if e.again and e.queue == "tp"]
    assert set(whole) == {"all_gather", "reduce_scatter"}


def test_below_16_bits_what_waits_for_the_weight_gradient_is_one_byte_an_element():
    # the same inputs (14 bytes a feature at 16 bits) and output gradients (18) as above, quantised to 8 bits
    found = stages("mb1 unfused fp8", dtype="bf16")
    assert found.activations(type(found.compositions[0])((Unit(0, "none"),))).held == S * H * (7 + 9)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp8", 1)])
def test_experts_keep_the_operands_of_their_products_as_they_are_multiplied(dtype, size):
    # of s tokens to 2 of 4 experts of width f: inputs 2sh and 2sf, output gradients 2s2f (gate and up) and 2sh
    h, f = 1024, 512
    moe = Moe(experts=4, top_k=2, ffn=f, gated=True, activation="silu")
    model = transformer(layers=2, hidden=h, heads=8, ffn=f, vocab=128, gated=True, max_seq_len=S)
    block = msgspec.structs.replace(model.blocks[0], mlp=moe)
    model = msgspec.structs.replace(model, blocks=(block,))
    found = stages(f"mb1 {dtype}", model=model, dtype="bf16")
    products = [p for p in found.pieces(0, 0) if p.name in ("experts up", "experts down")]
    assert sum(p.held for p in products) == size * 2 * S * (h + f)
    assert sum(p.gradient for p in products) == size * 2 * S * (2 * f + h)
