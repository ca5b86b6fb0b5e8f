"""The search over models beside plain decoders: what it evaluates is what predict says, and its bounds hold."""

import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.search.space import default
from meshwright.spec import cluster
from meshwright.spec.model import load
from meshwright.spec.workload import Train
from tests.search.small import compared

WHERE = cluster.load("2x8xh100")
QUESTIONS = {
    "mamba2-2.7b": Train(global_batch=32, seq_len=1024),
    "jamba-v0.1": Train(global_batch=32, seq_len=1024),
    "zamba2-2.7b": Train(global_batch=32, seq_len=1024),
    "qwen3.5-35b-a3b": Train(global_batch=32, seq_len=1024),
    "t5-large": Train(global_batch=32, seq_len=512),
    "clip-vit-large-patch14": Train(global_batch=64, seq_len=77),
    "llava-1.5-7b": Train(global_batch=32, seq_len=1024),
    "bert-large": Train(global_batch=32, seq_len=512),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_bounds_hold_and_plans_take_what_predict_says(name):
    model, train = load(name), QUESTIONS[name]
    space = default(model, WHERE, train)
    found = list(compared((model, WHERE, train, space), rng=np.random.default_rng(3), regions=5, plans=3))
    assert found
    for one in found:
        assert not one.over(), one.plan.text()
    for one in found[::3]:
        said = predict(model, WHERE, train, one.plan, detail=False)
        assert one.took == (said.step_time_s, said.tightest.headroom_bytes)
