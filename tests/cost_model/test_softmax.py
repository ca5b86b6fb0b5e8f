"""Softmax of stored scores: the shapes that Megatron-LM's fused kernel does not take, by hand."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.cost import frameworks, load_framework, standard
from meshwright.cost.softmax import rows_for_fused, softmax_apart
from meshwright.layers.scores import stored_scores
from meshwright.lower.entry import Entry
from meshwright.plan import parse
from meshwright.simulate.layer import cost
from meshwright.spec.cluster import load_device
from meshwright.spec.layers import Attention
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train
from meshwright.work import Elementwise, Scores
from tests.lower.sizes import context

A100 = load_device("a100_80gb_sxm")
SEQ = 1024


def softmax(heads: int, rows: int, keys: int = SEQ) -> tuple[Elementwise, Elementwise]:
    """Forward and backward of the softmax of a rank's heads, without dropout."""
    model = transformer(name="m", layers=1, hidden=64 * heads, heads=heads, ffn=256, vocab=1024)
    made = context(parse(f"dp1 mb{rows} unfused"), model, Train(global_batch=rows, seq_len=keys))
    spec = Attention(heads=heads, kv_heads=heads, head_dim=64, v_head_dim=64, rotary=False)
    (piece,) = (p for p in stored_scores(made, spec, heads, keys, keys) if p.name == "attention softmax")
    return piece.forward, piece.backward


def test_a_softmax_says_which_scores_it_is_over():
    forward, backward = softmax(2, 3)
    assert forward.scores == Scores(batch=6, queries=SEQ, keys=SEQ)
    assert backward.scores == Scores(batch=6, queries=SEQ, keys=SEQ, backward=True)


@pytest.mark.parametrize(("heads", "rows", "keys"), [(2, 2, 1024), (1, 4, 1024), (4, 1, 2048), (12, 1, 1024)])
def test_scores_by_fours_are_one_kernel(heads, rows, keys):
    for work in softmax(heads, rows, keys):
        assert softmax_apart(work, 2048) is work


@pytest.mark.parametrize(("heads", "rows", "keys"), [(2, 1, 1024), (3, 2, 1024), (4, 1, 4096), (4, 1, 16), (4, 1, 30)])
def test_others_are_five_operators_in_32_bits(heads, rows, keys):
    """Forward 2+4 to fp32, 4+4 scale, 4+4 mask, 4+4 softmax, 4+2 back: 36 bytes a score for 4. Backward 2+4, 4+4+4,
    4+4, 4+4, 4+2: 40 for 6."""
    scores = heads * rows * keys**2
    forward, backward = (softmax_apart(work, 2048) for work in softmax(heads, rows, keys))
    assert (forward.num_bytes, forward.kernels) == (36 * scores, 5)
    assert (backward.num_bytes, backward.kernels) == (40 * scores, 5)


def test_dropout_stays_a_kernel_of_its_own():
    # 2 read and 2 written and a mask of a byte beside what the softmax takes
    work = Elementwise(num_bytes=9.0 * 64**2, kernels=2, scores=Scores(batch=1, queries=64, keys=64))
    apart = softmax_apart(work, 2048)
    assert (apart.num_bytes, apart.kernels) == ((36 + 5) * 64**2, 6)


@pytest.mark.parametrize(("batch", "times"), [(10, 2), (12, 1), (3, 4), (16, 1), (1, 4)])
def test_a_microbatch_that_nobody_said_is_one_the_kernel_takes(batch, times):
    # the 76B model of Megatron-LM's Table 1: 80 heads over 8 ranks, and examples/sc21/run_table_1.sh says two rows
    assert rows_for_fused(batch) == times


def test_stacks_with_that_kernel_pay_for_the_others_on_the_device_and_on_the_host():
    odd, even = softmax(2, 1)[0], softmax(2, 2)[0]
    profile = msgspec.structs.replace(load_framework("megatron-deepspeed"), elementwise_passes=1.0)
    always = msgspec.structs.replace(profile, defaults=msgspec.structs.replace(profile.defaults, softmax_keys=0))
    costs, whole = standard(profile), standard(always)
    bandwidth = lambda work: Elementwise(num_bytes=work, kernels=5, fused=True)  # noqa: E731
    assert costs.price(odd, A100).seconds == costs.price(bandwidth(36.0 * 2 * SEQ**2), A100).seconds
    assert costs.price(odd, A100).seconds > 5 * whole.price(odd, A100).seconds
    assert costs.price(even, A100).seconds == whole.price(even, A100).seconds

    def host_us(costs, work):
        one = cost([Entry("softmax", "compute", work, ())], "F", A100, costs)
        return one.seconds * 1e6

    # five launches of 64.4 us, of which the device hides none, for one
    assert host_us(costs, odd) == pytest.approx(5 * profile.host_us_per_kernel)
    assert host_us(whole, odd) == pytest.approx(profile.host_us_per_kernel)


def test_versions_say_how_long_rows_may_be():
    keys = {name: one.defaults.softmax_keys for name, one in frameworks().items()}
    assert (keys["megatron-lm"], keys["megatron-lm-v3"], keys["deepspeed"], keys["torchtitan"]) == (2048, 4096, 2048, 0)
