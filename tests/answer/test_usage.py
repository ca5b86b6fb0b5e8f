"""Use of the devices by served requests: utilisation, energy and money, worked out by hand."""

import msgspec
import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.cost.engine import EngineProfile
from meshwright.spec.serve import parse

WORDS = "batch=8,prompt=512,output=128"
MODEL = mw.load_model("llama3-8b")


def asked(words=WORDS, *, on="1xh100", plan="tp1", model=MODEL):
    at_once = EngineProfile(name="at once")  # clients see a token when it is computed
    return predict_serving(model, mw.load_cluster(on), parse(words), mw.parse_plan(plan), profile=at_once)


@pytest.fixture(scope="module")
def usual():
    return asked()


def span_of(prediction):
    table = prediction.timeline.records["requests"]
    return float(table["end_s"].max() - table["arrival_s"].min())


def test_operations_are_those_of_weights_and_of_pairs_that_attend(usual):
    # 8 requests of 512 + 127 tokens that are computed; 6.98e9 parameters of 32 layers' products, the head's
    # 128,256 x 4,096 for 128 tokens of each answer; 4 x 32 heads x 128 operations for each pair and layer
    layers = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    weights = 8 * (639 * layers + 128 * 128_256 * 4096) * 2
    pairs = 8 * 639 * 640 / 2 * 32 * 4 * 32 * 128
    assert usual.usage.mfu == pytest.approx((weights + pairs) / span_of(usual) / 989.4e12, rel=2e-3)


def test_traffic_is_the_weights_once_an_iteration_and_the_cache_behind_every_new_token(usual):
    held = usual.memory[0].alive["weights"]
    # each token after the first reads those before it and itself: 513 to 639 tokens of 128 KiB
    cached = 8 * sum(range(513, 640)) * 131_072
    read = usual.iterations * held + cached
    assert usual.usage.mbu == pytest.approx(read / span_of(usual) / 3.35e12, rel=1e-3)


def test_a_mixture_reads_fewer_weights_than_it_has_where_few_tokens_are_computed():
    few, many = (
        asked(f"batch={n},prompt=16,output=64", model=mw.load_model("mixtral-8x7b"), on="2xh100", plan="tp2")
        for n in (1, 64)
    )
    each = [one.usage.mbu * span_of(one) * 2 * 3.35e12 / one.iterations for one in (few, many)]
    held = few.memory[0].alive["weights"] * 2
    # one token of top 2 of 8 reads a quarter of the experts, which are 45.1 of 46.7e9 parameters, 64 tokens all;
    # of one request 63 iterations compute one token, and the first its 16
    unread = 45.1 / 46.7 * (63 * 0.75 + 0.75**16) / 64
    assert each[0] == pytest.approx(held * (1 - unread), rel=0.01)
    assert each[1] == pytest.approx(held, rel=0.02)


def test_energy_is_by_what_devices_do_and_money_is_by_the_hour(usual):
    found, span = usual.usage, span_of(usual)
    busy = 1 - usual.attribution["host"] / span  # nobody is idle in a static batch
    assert found.busy == pytest.approx(busy, abs=1e-6)
    # an H100: 70 W idle, 700 W rated at the 0.803 x 0.92 of its peak that large products reach, 23% of the way while
    # memory moves the 0.91 x 0.80 of its rate that kernels reach; an eighth of 4.6 kW of its host, the site's overhead
    multiplies, waits, pue = found.mfu / (0.803 * 0.92), found.mbu / (0.91 * 0.80), mw.load_cluster("1xh100").pue
    low, watts, high = ((70 + 630 * (multiplies + share * waits) + 575) * pue for share in (0.10, 0.23, 0.36))
    assert found.power_w == pytest.approx(watts) and watts < (700 + 575) * pue
    assert found.joules_per_token == pytest.approx(watts * span / (8 * 128))
    assert found.power_interval_w == pytest.approx((low, high))
    assert found.usd_per_million_tokens == pytest.approx(6.88 / 3600 * span / (8 * 128) * 1e6)


def test_devices_of_a_cluster_that_are_left_free_cost_nothing():
    alone, within = asked(on="1xh100"), asked(on="8xh100", plan="tp1 dp1")
    assert within.usage.usd_per_million_tokens == pytest.approx(alone.usage.usd_per_million_tokens, rel=1e-6)


def test_a_device_without_a_price_or_power_has_neither_cost_nor_energy():
    cluster = mw.load_cluster("1xh100")
    (island,) = cluster.islands
    device = msgspec.structs.replace(island.device, price_usd_hour=None, tdp_w=None)
    bare = msgspec.structs.replace(cluster, islands=(msgspec.structs.replace(island, device=device),))
    found = predict_serving(MODEL, bare, parse(WORDS), mw.parse_plan("tp1")).usage
    assert (found.usd_per_million_tokens, found.joules_per_token, found.power_w) == (None, None, None)


def test_the_answer_has_them_as_plain_values_and_none_where_nothing_is_served(usual):
    said = usual.to_json()
    assert said["mfu"] == usual.usage.mfu and said["usage_source"] == usual.usage.source
    nothing = asked(model=mw.load_model("llama3-70b")).to_json()
    assert nothing["mfu"] is None and nothing["usd_per_million_tokens"] is None
