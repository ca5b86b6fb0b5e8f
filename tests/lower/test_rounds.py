"""Gradients sharded under a pipeline: scattered after rounds, which costs an exchange each and saves memory."""

import numpy as np
import pytest

from meshwright.cost import Costs
from meshwright.graph import KIND
from meshwright.lower import lower
from meshwright.lower.residency import IN_FLIGHT
from meshwright.plan import parse
from meshwright.schedules import build
from meshwright.simulate import memory
from meshwright.simulate.step import simulate
from meshwright.spec import cluster
from meshwright.spec.workload import Train
from meshwright.sync.due import rounds
from tests.random_plans import LLAMA, MIXTURE

WHERE = cluster.load("16xh100")


def asked(words, batch=32):
    return parse(words).on(16), LLAMA, WHERE, Train(global_batch=batch, seq_len=128)


def num_rounds(actions):
    return int(rounds(actions)[0].sum())


@pytest.mark.parametrize(
    ("schedule", "vpp", "microbatches", "expected"),
    [
        ("1f1b", 1, 8, 4),  # one stage a rank is one round
        ("gpipe", 1, 8, 4),
        # an interleaved schedule takes pp microbatches through a chunk at a time (2104.04473, section 2.2): on each of
        # 4 ranks two chunks in turn, 8 / 4 = 2 groups of microbatches
        ("interleaved", 2, 8, 4 * 2 * 2),
        ("interleaved", 3, 4, 4 * 3 * 1),
        ("breadth-first", 2, 8, 4 * 2),  # every microbatch of a chunk before the next chunk
    ],
)
def test_rounds_are_those_counted_by_hand(schedule, vpp, microbatches, expected):
    actions = build(schedule, 4, microbatches, vpp)
    assert num_rounds(actions) == int(rounds(actions)[1].sum()) == expected


@pytest.mark.parametrize("overlap", ["dp,pp", "pp", "none"])
@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("pp2 dp8 vpp2 interleaved mb1 zero2", LLAMA),
        ("pp4 dp4 vpp3 interleaved mb1 zero2 shard2", LLAMA),
        ("pp4 tp2 dp2 zb-v mb1 zero2", LLAMA),
        ("pp4 dp4 vpp3 breadth-first mb1 zero2", LLAMA),
        ("pp2 dp4 tp2 1f1b mb1 zero2", LLAMA),
        ("pp2 dp8 vpp2 interleaved mb1 zero2 ep4 etp1", MIXTURE),
        ("pp2 dp8 vpp2 interleaved mb1 zero2 ep8 etp1", MIXTURE),  # one replica of each expert: nothing to scatter
    ],
)
def test_what_a_round_accumulates_is_scattered_whole_and_a_rank_has_two_stages_at_most(words, model, overlap):
    plan, _, where, train = asked(f"{words} overlap={overlap}", 64)
    layout = plan.layout
    run = simulate(plan, model, where, train, Costs())
    stages, actions = run.lowered.stages, run.lowered.actions
    traces = memory.traces(run.lowered.graph, run.start_s, run.end_s, run.lowered.static_bytes, {})
    for rank, trace in enumerate(traces):
        flying = trace.num_bytes[trace.categories.index(IN_FLIGHT)]
        held = [s for s, ranks in enumerate(actions.stage_ranks) if rank % layout.pp in ranks]
        whole = sorted(4 * _params(stages, s) for s in held)
        assert flying[-1] == pytest.approx(0.0, abs=1.0)
        assert flying.min() > -1.0
        assert whole[0] - 1 <= flying.max() <= max(2 * whole[-1], sum(whole[-2:])) + 1


def _params(stages, stage):
    params = stages.total_params(stages.compositions[stage].units)
    experts = params.trained_expert if stages.plan.edp > 1 else 0.0
    return params.trained_dense + experts


def test_every_round_is_one_more_exchange_of_its_stage():
    """By hand: pp2 with 2 chunks and 8 microbatches is 4 rounds a chunk; ZeRO-1 reduces a chunk once."""
    one, two = (lower(*asked(f"pp2 dp8 vpp2 interleaved mb1 {z}", 64)) for z in ("zero1", "zero2"))
    moved = []
    for lowered in (one, two):
        graph = lowered.graph
        keys = graph.cost_key[graph.kind == KIND["reduce_scatter"]]
        moved.append(sum(lowered.programs[k].moves[0].num_bytes for k in keys.tolist()))
    params = sum(_params(one.stages, s) for s in range(4))
    assert moved[0] == pytest.approx(4 * params)
    assert moved[1] == pytest.approx(4 * moved[0])


def test_one_stage_a_rank_takes_as_long_as_zero1():
    one, two = (simulate(*asked(f"pp4 dp4 1f1b mb1 {z}"), Costs()) for z in ("zero1", "zero2"))
    assert one.step_time_s == two.step_time_s


def test_rounds_save_memory_and_never_time():
    runs = [simulate(*asked(f"pp4 dp4 vpp3 interleaved mb1 {z}", 64), Costs()) for z in ("zero1", "zero2")]
    assert runs[1].step_time_s >= runs[0].step_time_s
    gradients = []
    for run in runs:
        graph, (first, *_) = run.lowered.graph, run.lowered.static_bytes
        _, alive = memory.peaks(graph, run.start_s, run.end_s, len(graph.streams.ranks))
        flying = alive[0, graph.memory.categories.index(IN_FLIGHT)] if IN_FLIGHT in graph.memory.categories else 0.0
        gradients.append(first["gradients"] + flying)
    assert gradients[1] < gradients[0]
    assert np.isfinite(gradients).all()
