"""A device that names a framework profile is priced with it by prediction and search alike, unless another is named."""

import msgspec
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import standard_on
from meshwright.plan import parse
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=2, hidden=256, heads=4, ffn=512, vocab=1000, max_seq_len=512, gated=True)
TRAIN = Train(global_batch=8, seq_len=512)
PLAIN = load_cluster("2xh100")


def named(framework):
    island = PLAIN.islands[0]
    device = msgspec.structs.replace(island.device, framework=framework)
    return msgspec.structs.replace(PLAIN, islands=(msgspec.structs.replace(island, device=device),))


def step(cluster, costs=None):
    return predict(MODEL, cluster, TRAIN, parse("dp2"), costs=costs, detail=False).step_time_s


def test_a_device_s_own_framework_is_meant_where_none_is_named():
    # a name without a year is the newest version of the software, a name with one that of its year
    assert standard_on(named("megatron-lm")).framework.name == "megatron-lm-v3"
    assert standard_on(named("megatron-lm@2022")).framework.name == "megatron-lm"
    assert standard_on(named("megatron-lm"), "default").framework.name == standard_on(PLAIN).framework.name == "default"
    own, usual = step(named("megatron-lm")), step(PLAIN)
    assert own == step(PLAIN, standard_on(PLAIN, "megatron-lm"))
    assert own != usual


def test_a_search_predicts_as_a_prediction_does():
    cluster = named("megatron-lm")
    space = restricted(default(MODEL, cluster, TRAIN), fix=["dp=2", "zero=0", "mb=1", "recompute=none"])
    best = find(MODEL, cluster, TRAIN, space=space).best[0]
    assert best.prediction.step_time_s == pytest.approx(
        predict(MODEL, cluster, TRAIN, best.plan, detail=False).step_time_s, rel=1e-12
    )
