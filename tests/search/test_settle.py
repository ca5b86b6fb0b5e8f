"""Layers dealt to stages, where the stages are."""

import pytest

from meshwright.answer.predict import predict
from meshwright.search.evaluate import Evaluator
from meshwright.search.regions import USUAL
from meshwright.search.settle import settled, stages_of
from meshwright.search.space import BALANCED, EVEN, Core, Piped, State
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load
from meshwright.spec.workload import parse

ASKED = load("llama2-13b"), cluster("8xa100-80 + 8xh100"), parse("batch=64,seq=2048")
CORE = Core(devices=16, tp=2, cp=1, pp=2, dp=4, mb=1, ep=1, etp=0)
INNER = USUAL._replace(recompute="full")


@pytest.mark.parametrize("schedule", ["interleaved", "hanayo", "zb-v", "dualpipev"])
def test_the_faster_rank_gets_more_layers_of_both_its_chunks_wherever_those_are(schedule):
    """Ranks 0 and 1 hold stages 0 and 2, 1 and 3 of a loop, but 0 and 3, 1 and 2 of a V; rank 1 is on H100s."""
    evaluator = Evaluator(*ASKED)
    even, dealt = (
        settled(CORE, INNER, Piped(schedule=schedule, vpp=2, stages=s), State(zero=1), evaluator)
        for s in (EVEN, BALANCED)
    )
    fast = (1, 3) if schedule == "interleaved" else (1, 2)
    layers = dealt.layout.stages
    assert min(layers[s] for s in fast) > max(layers[s] for s in range(4) if s not in fast)
    took, before = (predict(*ASKED, plan, detail=False).step_time_s for plan in (dealt, even))
    assert took < before * 0.75
    assert stages_of(dealt, evaluator) == layers


def test_two_ranks_that_hold_a_stage_deal_it_as_fast_as_both_are():
    """DualPipe runs every stage on an A100 and on an H100: no stage is faster, so the ends alone make a difference."""
    evaluator = Evaluator(*ASKED)
    layers = settled(CORE, INNER, Piped(schedule="dualpipe", stages=BALANCED), State(zero=1), evaluator).layout.stages
    assert abs(layers[0] - layers[1]) <= 2
