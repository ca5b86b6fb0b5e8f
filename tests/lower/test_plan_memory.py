"""Memory of whole plans: against the schedules walked action by action, and published figures."""

import numpy as np
import pytest
from hypothesis import assume, given, settings

from meshwright.cost import Costs
from meshwright.lower import lower
from meshwright.lower.units import Unit
from meshwright.plan import parse
from meshwright.schedules.actions import BW, B, F, W
from meshwright.schedules.timing import peak_in_flight
from meshwright.simulate import memory
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train
from tests.random_plans import legal_plans


def walked(lowered, rank):
    """Peak of activations and workspace on a pipeline rank, by walking its actions in order."""
    actions, stages = lowered.actions, lowered.stages
    kept = [stages.activations(c) for c in stages.compositions]
    split = bool((actions.kind == W).any())
    now = peak = 0.0
    for j in range(actions.rank_ptr[rank], actions.rank_ptr[rank + 1]):
        kind, one = actions.kind[j], kept[actions.stage[j]]
        now += one.saved if kind == F else 0.0
        peak = max(peak, now + one.working)
        now -= {F: 0.0, W: one.held, BW: one.saved, B: one.saved - (one.held if split else 0.0)}[kind]
        peak = max(peak, now)
    assert now == pytest.approx(0.0, abs=1.0)
    return peak


@settings(max_examples=60)
@given(legal_plans())
def test_the_peak_of_a_timed_plan_is_that_of_its_actions_one_after_the_other(question):
    assume(not (question.plan.layout.shards_gradients and question.plan.layout.pp > 1))  # gradients come and go too
    run = simulate(*question, Costs())
    graph, pp = run.lowered.graph, question.plan.layout.pp
    _, alive = memory.peaks(graph, run.start_s, run.end_s, len(graph.streams.ranks))
    expected = [walked(run.lowered, rank % pp) for rank in range(len(graph.streams.ranks))]
    np.testing.assert_allclose(alive.sum(axis=1), expected, rtol=1e-9)


#: Korthikanti et al. 2205.05198, figures 1 and 7, models of table 3: GB of activations on the first pipeline rank, all
#: kept without sequence parallelism and with it under selective recompute; GB of its blocks' state.
PUBLISHED = {
    "175B": ((96, 12288, 96), "tp8 pp8 interleaved vpp3", 64, (71.77, 13.26), 48.92),
    "1T": ((128, 25600, 160), "tp8 pp64 1f1b", 512, (140.93, 28.52), 35.39),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_memory_of_the_first_rank_is_met(name):
    (layers, hidden, heads), words, gpus, activations, state = PUBLISHED[name]
    model = transformer(layers=layers, hidden=hidden, heads=heads, vocab=51200, max_seq_len=2048, name=name)
    train, where = Train(global_batch=gpus, seq_len=2048, dropout=True, dtype="fp16"), cluster.load(f"{gpus}xa100-80")
    found = []
    for mode in ("nosp norecompute", "selective"):
        plan = parse(f"{words} dp1 mb1 unfused {mode}")
        lowered = lower(plan, model, where, train)
        stages = lowered.stages
        # as the paper counts: layers alone, without the embedding's share
        composition = stages.compositions[0]
        units = tuple(u for u in composition.units if u.kind == 0)
        bytes_per_chunk = stages.activations(type(composition)(units)).saved
        found.append(peak_in_flight(lowered.actions)[0] * bytes_per_chunk / 1e9)
    assert found == pytest.approx(activations, abs=0.01)
    blocks = stages.params(Unit(0, "none")).dense * layers / plan.layout.pp
    assert 18 * blocks / 1e9 == pytest.approx(state, abs=0.03)
