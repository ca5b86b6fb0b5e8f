"""The metrics of an answer: what they are made of, how sure they are, and who reads them."""

import msgspec
import pytest

import meshwright as mw
from meshwright.answer.metrics import METRICS, RATES, Metric, TrainMetrics
from meshwright.search.found import METRIC_OF, OBJECTIVES, value_of


@pytest.fixture(scope="module")
def answer():
    train = mw.parse_train("batch=64,seq=4096")
    return mw.predict(
        mw.load_model("llama3-8b"), mw.load_cluster("16xh100"), train, mw.parse_plan("tp2 pp2"), detail=False
    )


def test_every_metric_has_a_name_in_words_and_is_read_by_it(answer):
    assert tuple(METRICS) == TrainMetrics.__struct_fields__ and set(RATES) <= set(METRICS)
    for name, metric in answer.metrics.items():
        assert answer.metrics[name] is metric is getattr(answer.metrics, name)
    with pytest.raises(KeyError):
        answer.metrics["ttft_s"]


def test_what_follows_from_the_step_time_is_as_sure_as_it_is(answer):
    """By hand: rates are an amount over the step, so their bounds are that amount over its other bound; what a step
    costs grows with it."""
    step, m = answer.metrics.step_time_s, answer.metrics
    low, high = step.interval
    assert low <= step.value <= high and answer.step_time_interval_s == step.interval
    tokens = 64 * 4096 / 16
    assert m.tokens_per_s_per_gpu.value == pytest.approx(tokens / step.value)
    assert m.tokens_per_s_per_gpu.interval == pytest.approx((tokens / high, tokens / low))
    assert m.mfu.interval == pytest.approx((m.mfu.value * step.value / high, m.mfu.value * step.value / low))
    usd = m.usd_per_million_tokens
    assert usd.value == answer.money.usd_per_million_tokens
    assert usd.interval == pytest.approx((usd.value * low / step.value, usd.value * high / step.value))
    assert m.peak_memory_bytes == Metric(answer.peak_memory_bytes) and m.peak_memory_bytes.interval is None
    assert m.headroom_bytes.value == answer.tightest.headroom_bytes


def test_what_the_catalog_has_no_price_of_is_no_metric(answer):
    free = mw.load_cluster("16xh100")
    device = msgspec.structs.replace(free.islands[0].device, price_usd_hour=None)
    free = msgspec.structs.replace(free, islands=(msgspec.structs.replace(free.islands[0], device=device),))
    found = mw.predict(answer.model, free, answer.train, mw.parse_plan("tp2 pp2"), detail=False)
    assert found.metrics["usd_per_million_tokens"] is None and value_of("cost", found) is None
    assert found.to_json()["metrics"]["usd_per_million_tokens"] is None


def test_json_has_every_metric_with_its_interval(answer):
    said = answer.to_json()
    for name, metric in answer.metrics.items():
        assert said["metrics"][name] == {"value": metric.value, "interval": metric.interval}, name
    assert said["step_time_s"] == said["metrics"]["step_time_s"]["value"]


def test_objectives_of_a_search_are_metrics_of_which_less_is_better(answer):
    assert {name: METRICS[metric].words for name, metric in METRIC_OF.items()} == OBJECTIVES
    assert value_of("step", answer) == answer.step_time_s
    assert value_of("headroom", answer) == -answer.tightest.headroom_bytes
