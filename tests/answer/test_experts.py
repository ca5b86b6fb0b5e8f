"""Experts in an answer: loads, ports and drops by hand, and words that move the step the way they should."""

from __future__ import annotations

from functools import cache
from math import comb

import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.answer.serving import predict_serving
from meshwright.errors import MeshwrightError
from meshwright.layers.routed import most_rows, taken
from meshwright.plan import parse
from meshwright.plan.executable import unexecutable
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import load as load_model
from meshwright.spec.routing import write
from meshwright.spec.serve import parse as parse_serve
from meshwright.spec.workload import parse as parse_train

MODEL = transformer(
    layers=4, hidden=2048, heads=16, vocab=32000, ffn=4096, gated=True, experts=16, top_k=2, moe_ffn=4096
)
EVEN = "batch=128,seq=2048"


@cache
def answer(plan, train=EVEN, on="32xh100"):
    return predict(MODEL, load(on), parse_train(train), parse(plan), detail=False)


def test_the_busiest_rank_and_its_ports_are_those_of_the_counts(tmp_path):
    """Four experts with 40, 30, 20 and 10% of the tokens on two ranks of a node: the first rank has 70%, 1.4 times the
    mean; it receives what the other sends it, 70% where an even exchange has 50%."""
    write(tmp_path / "r.json", np.array([[40.0, 30, 20, 10]]))
    model = transformer(layers=1, hidden=64, heads=4, vocab=128, ffn=64, gated=True, experts=4, top_k=1, moe_ffn=32)
    train = parse_train("batch=2,seq=64,routing=r.json", base=tmp_path)
    found = predict(model, load("2xh100"), train, parse("ep2"), detail=False).experts
    assert found.busiest == pytest.approx(1.4)
    even = predict(model, load("2xh100"), train, parse("ep2 placement=balanced"), detail=False).experts
    assert even.busiest == pytest.approx(1.0)  # 40 and 10 against 30 and 20
    hot = predict(model, load("2xh100"), train, parse("ep2 hot=1"), detail=False).experts
    assert hot.busiest == pytest.approx(2 * 0.3 + 0.4)  # 30% of the tokens, and 40% of its own


def test_a_skewed_port_carries_what_others_send_to_the_busiest():
    """Of 4 ranks one is wanted by 70% of all tokens: it receives 0.7 * 3, and an even port 0.25 * 3."""
    from meshwright.layers.routed import _port

    assert _port(np.array([[0.7, 0.1, 0.1, 0.1]]), 1) == pytest.approx(2.8)
    assert _port(np.full((2, 4), 0.25), 1) == pytest.approx(1.0)
    assert _port(np.array([[0.4, 0.3, 0.2, 0.1]]), 2) == pytest.approx(1.4)  # nodes of two ranks: 70% and 30%


@pytest.mark.parametrize(("tokens", "capacity"), [(64, 1.0), (256, 1.25), (256, 0.5), (1024, 2.0)])
def test_what_a_capacity_leaves_is_the_mean_of_a_cut_binomial(tokens, capacity):
    """Against the exact sum over the binomial distribution, within half a percent of all copies."""
    share, top_k = np.array([[0.4, 0.3, 0.2, 0.1]]), 2
    limit = most_rows(tokens, top_k, 4, capacity)
    exact = 0.0
    for p in np.minimum(1.0, share[0] * top_k):
        exact += sum(comb(tokens, n) * p**n * (1 - p) ** (tokens - n) * min(n, limit) for n in range(tokens + 1))
    found = taken(share, top_k, tokens, capacity).sum()
    assert found == pytest.approx(exact / (tokens * top_k), abs=0.005)


def test_a_capacity_bounds_the_busiest_rank_and_says_what_it_drops():
    skewed = EVEN + ",routing=zipf:s=1"
    free, bounded = answer("ep16 mb1 full", skewed), answer("ep16 mb1 full capacity=1.25", skewed)
    assert free.experts.dropped == 0.0
    assert 0.1 < bounded.experts.dropped < 0.5
    assert bounded.experts.busiest <= 1.25 < free.experts.busiest
    assert bounded.step_time_s < free.step_time_s
    assert any("capacity=1.25 is approximate" in caution for caution in bounded.cautions)


def test_a_step_takes_longer_the_steeper_the_skew_and_less_where_experts_are_placed():
    times = [answer("ep8 mb1 full", f"{EVEN},routing=zipf:s={s}").step_time_s for s in (0, 1, 1.5)]
    assert times[0] < times[1] < times[2]  # a skew of a half hides in the host's time
    assert times[0] == pytest.approx(answer("ep8 mb1 full").step_time_s, rel=1e-9)  # no skew is an even router
    placed = answer("ep8 mb1 full placement=balanced", f"{EVEN},routing=zipf:s=1")
    assert placed.step_time_s < times[2]
    assert placed.experts.busiest >= placed.experts.busiest_bound


def test_tokens_that_stay_on_their_node_leave_the_network():
    near, far = (answer("ep16 mb1 full", f"{EVEN},routing=zipf:s=0{near}") for near in (";near=0.9", ""))
    assert near.attribution["ep"] < far.attribution["ep"]


def test_chunks_hide_a_part_of_the_exchange_behind_products():
    whole, chunked = answer("ep16 mb4 full"), answer("ep16 mb4 full portions=2")
    assert chunked.attribution["ep"] < whole.attribution["ep"]
    assert chunked.step_time_s < whole.step_time_s


def test_ranks_that_hold_the_same_tokens_send_less_where_duplicates_are_dropped():
    dropped, sent = (answer(f"tp4 ep8 mb4 full nosp etp4{word}") for word in ("", " duplicates=sent"))
    assert dropped.attribution["ep"] < 0.5 * sent.attribution["ep"]


def test_recomputed_layers_that_keep_what_collectives_brought_exchange_less_and_hold_more():
    """DeepSpeed-TED's way to recompute: of forward, recomputation and backward one exchanges no more, a
    third of the time, or up to half where weight gradients hide the backward's; what is kept is an activation."""
    again, kept = (answer(f"tp2 ep8 mb4 full etp2{word}") for word in ("", " brought=kept"))
    assert 0.5 < kept.attribution["ep"] / again.attribution["ep"] < 0.68
    assert kept.memory[0].alive["activations"] > again.memory[0].alive["activations"]
    assert any("brought" in d.message or "kept for recomputation" in d.message for d in refusals("brought=kept full"))


def refusals(words):
    model = transformer(layers=2, hidden=64, heads=4, vocab=128, ffn=64, gated=True, experts=4, top_k=2)
    return unexecutable(parse(words).on(2), model, parse_train("batch=2,seq=64"))


def test_every_other_layer_has_experts_where_the_model_says_so():
    model = transformer(layers=5, hidden=64, heads=4, vocab=128, experts=4, top_k=1, dense_layers=1, moe_every=2)
    assert model.routed_layers == (2, 4)


@cache
def served(plan, more=""):
    model = transformer(
        layers=2, hidden=2048, heads=16, vocab=1000, gated=True, ffn=1024, experts=64, top_k=2, moe_ffn=1024
    )
    asked = parse_serve("batch=64,prompt=256,output=2" + more)
    return predict_serving(model, load("16xa100"), asked, parse(plan), detail=False)


def test_requests_wait_for_the_rank_whose_experts_are_chosen_most():
    plan = "tp16 adp16 ep16"
    assert served(plan, ",expert_routing=zipf:s=1").metrics.e2e_s.mean > served(plan).metrics.e2e_s.mean


def test_tokens_that_stay_with_their_experts_cross_less_the_nearer_these_are_and_need_all_contexts_everywhere():
    near, by_number = (
        served(f"tp16 adp16 ep16 dispatch=stays{word}", ",expert_routing=zipf:s=0;affinity=0.9")
        for word in (" placement=exflow", "")
    )
    assert near.metrics.e2e_s.mean < by_number.metrics.e2e_s.mean
    assert near.kv_blocks < served("tp16 adp16 ep16").kv_blocks / 8  # every rank keeps all requests, not one in sixteen


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("tp16 adp16 ep16 dispatch=stays", "dispatch=stays goes by which expert follows which"),
        ("tp16 adp16 ep16 placement=exflow", "placement=exflow needs to know"),
        ("tp16 adp16 ep16 hot=2 capacity=1.5", "the plan says capacity, hot"),
    ],
)
def test_words_that_serving_has_nothing_for_are_refused(plan, said):
    with pytest.raises(MeshwrightError, match=said):
        served(plan)


def test_a_shortcut_hides_the_exchange_behind_attention_and_is_another_model():
    usual, short = (
        predict(load_model(name), load("8xa30"), parse_train("batch=8,seq=1024"), parse("ep8 full"), detail=False)
        for name in ("mixtral-8x7b", "mixtral-8x7b,shortcut")
    )
    assert short.model.name == "mixtral-8x7b,shortcut"
    assert short.model.num_params == usual.model.num_params
    assert short.attribution["ep"] < usual.attribution["ep"]
    with pytest.raises(MeshwrightError, match="no word 'short' of a model"):
        load_model("mixtral-8x7b,short")
