"""Frozen layers in the waits of a pipeline (fill_layers=): where passes go, how long a step is, what is refused."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.flops import step_flops
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND, QUEUE
from meshwright.plan.filling import trained_part, without_frozen
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.simulate.filling import packed, waits
from meshwright.simulate.step import simulate
from meshwright.spec.dimensions import transformer

COSTS = standard(load_framework("fused"))
CLUSTER, TRAIN = mw.load_cluster("4xh100"), mw.parse_train("batch=8,seq=1024")


@pytest.fixture(scope="module")
def model():
    return transformer(layers=12, hidden=1024, heads=16, vocab=32000, max_seq_len=4096, tied_embeddings=False)


def steps(model, words):
    """The step of the trained layers alone, and that with the frozen ones."""
    plan = mw.parse_plan(words).on(CLUSTER.num_devices)
    alone = simulate(without_frozen(plan), trained_part(plan, model), CLUSTER, TRAIN, COSTS)
    return alone, simulate(plan, model, CLUSTER, TRAIN, COSTS)


def test_passes_go_into_the_first_wait_with_room_and_else_behind_all():
    free = waits([(1.0, 3.0), (3.0, 4.0), (6.0, 7.0)], 7.5)
    assert free == [(0.0, 1.0), (4.0, 6.0), (7.0, 7.5)]
    # by hand: 0.75 fits at 0, another not; 1.5 at 4, 0.5 behind it; 0.5 at 7; what is left behind the last wait
    (passes,) = packed(free, {1: [0.75, 1.5, 0.5, 0.5, 2.0]}, [1], [1])
    assert [one.at for one in passes] == [0.0, 4.0, 5.5, 7.0, 7.5]


def frozen_passes(run):
    """Task numbers of frozen passes, and the rank that runs each."""
    graph = run.lowered.graph
    found = np.flatnonzero((graph.kind == KIND["F"]) & (graph.attribute("stage") < 0))
    return found, graph.streams.rank[graph.member[graph.member_ptr[found]]]


@pytest.mark.parametrize(
    "words", ["pp4 mb1 fill_layers=3", "pp4 mb1 fill_layers=3 gpipe", "pp4 mb1 fill_layers=4 interleaved vpp2"]
)
def test_every_microbatch_passes_every_frozen_layer_once_and_a_step_with_room_is_no_longer(model, words):
    alone, full = steps(model, words)
    graph, plan = full.lowered.graph, mw.parse_plan(words).on(4)
    passes, _ = frozen_passes(full)
    done = list(zip(graph.attribute("microbatch")[passes].tolist(), graph.attribute("layer")[passes].tolist()))
    wanted = [(m, layer) for m in range(plan.num_microbatches(8)) for layer in range(plan.pipeline.fill)]
    assert sorted(done) == wanted
    assert full.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
    assert graph.num_tasks - alone.lowered.graph.num_tasks >= len(wanted)


def test_no_rank_computes_two_things_at_once_and_results_follow_their_last_layer(model):
    _, full = steps(model, "pp4 mb1 fill_layers=3")
    graph = full.lowered.graph
    for stream in np.flatnonzero(graph.streams.queue == QUEUE["compute"]).tolist():
        task = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))[graph.member == stream]
        order = np.argsort(full.start_s[task], kind="stable")
        assert (full.start_s[task][order][1:] >= full.end_s[task][order][:-1] - 1e-12).all()
    sends = np.flatnonzero([full.lowered.programs[k].name == "frozen result" for k in graph.cost_key])
    passes, ranks = frozen_passes(full)
    assert len(sends) == 8 - len({*graph.attribute("microbatch")[passes[ranks == 0]].tolist()})
    assert all(full.start_s[one] >= full.end_s[graph.dep[graph.dep_ptr[one]]] for one in sends.tolist())


def test_what_waits_have_no_room_for_makes_the_step_longer_by_no_more_than_its_work(model):
    alone, full = steps(model, "pp2 dp2 mb1 fill_layers=10")  # ten layers of forwards beside two that are trained
    passes, ranks = frozen_passes(full)
    longest = max(float((full.end_s - full.start_s)[passes[ranks == rank]].sum()) for rank in {*ranks.tolist()})
    assert alone.step_time_s < full.step_time_s <= alone.step_time_s + longest + 1e-3


def test_operations_of_frozen_layers_are_those_of_their_forward(model):
    plan = mw.parse_plan("pp4 mb1 fill_layers=3").on(4)
    pools = mw.parse_plan("a=[dp1 mb1 frozen part=0:3] + b=[dp3 pp1 part=3:12 mb1]").on(4)
    from meshwright.lower import lower

    whole = step_flops(lower(pools, model, CLUSTER, mw.parse_train("batch=24,seq=1024"))) / 3
    assert step_flops(simulate(plan, model, CLUSTER, TRAIN, COSTS).lowered) == pytest.approx(whole)


def test_memory_has_the_frozen_weights_on_every_rank_and_results_on_the_first(model):
    found = mw.predict(model, CLUSTER, TRAIN, mw.parse_plan("pp4 mb1 fill_layers=3"), detail=False)
    weights = 2 * (3 * model.block_params(0).total + model.embedding_params)
    assert [rank.alive["frozen parameters"] for rank in found.memory] == [pytest.approx(weights)] * 4
    # this step's and the next one's, 8 microbatches of 1,024 tokens in 16 bits
    assert [rank.alive.get("frozen results", 0) for rank in found.memory] == [2 * 8 * 1024 * 1024 * 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pp4 mb1 fill_layers=12", "leave none of"),
        ("dp4 mb1 fill_layers=3", "no waits to fill"),
        ("pp4 mb1 fill_layers=3 dualpipe", "first stage on two ranks"),
        ("pp2 mb1 fill_layers=3 zero3", "whole on every rank"),
        ("pp2 mb1 fill_layers=3 sync=diloco:h=4", "worked out without"),
        ("pp4 mb1 fill_layers=3 stages=3,3,3,3", "stages= hold 12 layers and"),
        ("a=[pp2 dp1 mb1 fill_layers=2 part=0:6] + b=[dp2 mb1 part=6:12]", "no part of a pool"),
    ],
)
def test_what_has_no_waits_or_no_whole_frozen_layers_is_refused(model, words, said):
    with pytest.raises(MeshwrightError, match=said):
        mw.predict(model, CLUSTER, TRAIN, mw.parse_plan(words))


def test_a_search_does_not_choose_what_is_frozen(model):
    with pytest.raises(MeshwrightError, match="does not choose"):
        find(model, CLUSTER, TRAIN, space=restricted(default(model, CLUSTER, TRAIN), fix=["fill_layers=3"]))
