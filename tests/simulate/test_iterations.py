"""Tables of iteration costs against the prices of the very kernels, and against published steps."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.cost.standard import serving_costs
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.simulate.iterations import forward_prices, priced, token_nodes
from meshwright.spec.architecture import EMBEDDING
from meshwright.spec.routing import Routing
from meshwright.work import VarlenAttention


def built(model, cluster, words, **limits):
    model, cluster = mw.load_model(model), mw.load_cluster(cluster)
    plan = mw.parse_plan(words).on(cluster.num_devices)
    forward, costs = Forward(model, plan, Mesh(plan, cluster)), serving_costs()
    sizes = {"tokens": 2048, "batch": 128, "context": 8192} | limits
    return forward, costs, cluster.islands[0].device, priced(forward, cluster.islands[0].device, costs, **sizes)


@pytest.fixture(scope="module")
def llama():
    return built("llama3-8b", "1xh100", "tp1")


def test_the_token_wise_part_is_exact_at_its_nodes_and_near_between(llama):
    forward, costs, device, table = llama
    alone = [[costs.price(e.work, device).seconds for e in forward.tokenwise(0, n)] for n in (7, 600)]
    embedding = [sum(costs.price(e.work, device).seconds for e in forward.tokenwise(EMBEDDING, n)) for n in (7, 600)]
    exact = [32 * sum(layer) + first for layer, first in zip(alone, embedding)]
    assert table.linear_s[7] == pytest.approx(exact[0], rel=1e-9)  # a node
    assert table.linear_s[600] == pytest.approx(exact[1], rel=0.05)  # 576 and 640 are: products fill their last tiles


def test_requests_of_unequal_contexts_take_what_their_mean_does(llama):
    # the kernel over several contexts is priced as one: each takes the share of a kernel of its own context
    forward, costs, device, table = llama
    rng = np.random.default_rng(0)
    for count in (4, 24, 100):
        contexts = rng.integers(64, 8000, count)
        [mixing] = forward.mixing
        groups = tuple(forward.cores(mixing, 1, 1, int(c) - 1)[0].work for c in contexts)
        exact = costs.price(VarlenAttention(groups=groups), device).seconds * mixing.layers
        assert table.decoding(count, float(contexts.mean())) == pytest.approx(exact, rel=0.08), count


def test_a_prompt_behind_cached_tokens_takes_what_its_kernel_does(llama):
    forward, costs, device, table = llama
    [mixing] = forward.mixing
    for new, past in ((300, 0), (512, 700), (1500, 3000), (2000, 0)):
        exact = costs.price(forward.cores(mixing, 1, new, past)[0].work, device).seconds * mixing.layers
        assert table.prefilling(1, new, past) == pytest.approx(exact, rel=0.12), (new, past)


def test_weights_and_cache_of_llama_3_8b_are_those_of_its_shape(llama):
    forward = llama[0]
    # 8.03e9 parameters of 2 bytes; keys and values of 8 heads 128 wide in 32 layers: 2 * 8 * 128 * 32 * 2 bytes
    assert forward.weight_bytes(0) == pytest.approx(2 * 8.03e9, rel=1e-3) and forward.kv_bytes(0) == 131_072


def test_tensor_and_pipeline_parallel_ranks_share_weights_and_cache():
    forward = built("llama3-70b", "8xh100", "tp4 pp2", tokens=64, batch=8, context=512)[0]
    assert forward.kv_bytes(0) == forward.kv_bytes(1) == 2 * 2 * 128 * 40 * 2  # 2 of 8 heads in 40 of 80 layers
    assert sum(forward.weight_bytes(s) for s in (0, 1)) * 4 == pytest.approx(2 * 70.55e9, rel=2e-3)


def test_more_key_value_ranks_than_heads_hold_copies():
    forward = built("llama3-70b", "16xh100", "tp16", tokens=64, batch=8, context=512)[0]
    assert forward.kv_bytes(0) == 2 * 128 * 80 * 2  # a whole head on each of 16 ranks, of 8


def test_decoding_reads_the_weights_at_least_once(llama):
    # 8.03e9 parameters less the embedding's 0.53e9 of 2 bytes, at 3.35 TB/s: 4.5 ms, and the head's 1.05 GB of them
    # in the sampling
    table = llama[3]
    least = 2 * (8.03e9 - 2 * 0.525e9) / 3.35e12
    assert least < table.linear_s[1] < 1.8 * least


def test_experts_that_no_token_is_routed_to_are_not_read():
    forward, _, _, table = built("mixtral-8x7b", "2xh100", "tp2", tokens=256, batch=64, context=1024)
    one = [e.work.groups for e in forward.tokenwise(0, 1) if hasattr(e.work, "groups")]
    many = [e.work.groups for e in forward.tokenwise(0, 64) if hasattr(e.work, "groups")]
    assert set(one) == {2} and set(many) == {8}  # top 2 of 8
    assert table.linear_s[1] < 0.5 * table.linear_s[64]


def test_nodes_cover_what_is_asked():
    assert token_nodes(100)[-1] == 100 and token_nodes(40_000)[-1] == 40_000
    assert (np.diff(token_nodes(40_000)) > 0).all() and token_nodes(8)[0] == 1


def test_operands_of_experts_are_quantised_by_one_kernel():
    forward = built("mixtral-8x7b", "2xh100", "tp2 fp8", tokens=64, batch=8, context=512)[0]
    kernels = [e.work.kernels for e in forward.tokenwise(0, 8) if "quantise" in e.name]
    assert kernels and set(kernels) == {1}  # training has one for each of 8 experts


def test_tables_of_one_pass_share_their_prices_and_are_what_they_would_be_alone(llama):
    forward, costs, device, _ = llama
    alone = priced(forward, device, serving_costs(), tokens=512, batch=32, context=2048)
    asked = []
    price = costs.price
    costs.price = lambda work, on: asked.append(work) or price(work, on)
    again = priced(forward, device, costs, tokens=512, batch=32, context=2048)
    del costs.price
    assert len(asked) < 40  # the larger table knows nearly all of its nodes
    for name in ("linear_s", "sampled_s", "decode_s", "prefill_s"):
        assert np.array_equal(getattr(again, name), getattr(alone, name)), name


def test_another_cluster_or_device_has_prices_of_its_own(llama):
    forward, costs, _, table = llama
    other = mw.load_cluster("1xh200").islands[0].device
    assert priced(forward, other, costs, tokens=512, batch=32, context=2048).linear_s[1] < 0.9 * table.linear_s[1]


def test_prices_are_of_the_routing_that_was_said():
    model, cluster = mw.load_model("qwen3-30b-a3b"), mw.load_cluster("1xh100")
    plan, costs = mw.parse_plan("tp1").on(1), serving_costs()
    device, even = cluster.islands[0].device, Routing(said="even", skew=0.0)
    usual, drawn = (
        forward_prices(Forward(model, plan, Mesh(plan, cluster), routing=said), device, costs).linear(16)[0].sum()
        for said in (None, even)
    )
    assert usual < drawn  # 16 tokens choose fewer of 128 experts where some are wanted more
