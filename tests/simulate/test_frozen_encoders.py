"""Frozen encoders of diffusion models: where they are run, how full waits are, what a search and a paper's word do."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.flops import model_flops, step_flops
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.graph import KIND
from meshwright.plan import check
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.simulate.filling import packed
from meshwright.simulate.step import simulate

COSTS = standard(load_framework("fused"))
SD, CONTROL = "sd-2-1-with-encoders", "controlnet-1.0"
CLUSTER, TRAIN = mw.load_cluster("4xa100-80"), mw.parse_train("batch=32,image=256")


def predicted(words, model=SD):
    return mw.predict(mw.load_model(model), CLUSTER, TRAIN, mw.parse_plan(words), detail=False, costs=COSTS)


def test_rows_of_long_layers_go_into_waits_in_parts():
    free = [(0.0, 1.0), (4.0, 6.0), (9.0, 9.5)]
    # by hand, a layer that takes 1.2, 0.7, 0.4 for 4, 2 and 1 rows: two rows at 0, one at 4 behind none that fit at
    # 0.7, and so on; behind all waits what finds no room
    durations = {1: [0.4], 2: [0.7], 4: [1.2]}
    ((first), (second)) = packed(free, durations, [4, 2, 1], [4, 4])
    assert [(p.first, p.rows, p.at) for p in first] == [(0, 2, 0.0), (2, 2, 4.0)]
    assert [(p.first, p.rows, pytest.approx(p.at)) for p in second] == [(0, 4, 4.7)]
    ((whole),) = packed(free, durations, [4], [4])
    assert [(p.rows, p.at) for p in whole] == [(4, 4.0)]


@pytest.mark.parametrize("model", [SD, CONTROL])
def test_waits_shorten_a_step_and_parts_fill_them_fuller(model):
    before, waits, parts = (predicted(f"pp2 dp2 mb8 filling={way}", model) for way in ("before", "waits", "parts"))
    assert parts.step_time_s <= waits.step_time_s < before.step_time_s
    assert 0.5 < waits.filled.share <= parts.filled.share <= 1 and parts.bubble < waits.bubble < before.bubble
    assert before.filled.inside_s == 0 and predicted("pp2 dp2 mb8", model).step_time_s == before.step_time_s
    said = parts.to_json()["frozen"]
    assert said["way"] == "parts" and said["layers"] == mw.load_model(model).frozen


def test_passes_before_a_step_are_a_step_of_their_own():
    # data parallelism waits for all of them, and for nothing else
    alone = predicted("dp4 mb8")
    assert alone.step_time_s == pytest.approx(alone.filled.trained_s + alone.filled.frozen_s, rel=0.02)


def test_a_first_stage_waits_for_what_other_ranks_have_encoded():
    plan = mw.parse_plan("pp2 dp2 mb8 filling=before").on(4)
    run = simulate(plan, mw.load_model(SD), CLUSTER, TRAIN, COSTS)
    graph, names = run.lowered.graph, [run.lowered.programs[k].name for k in run.lowered.graph.cost_key]
    sends = [i for i, name in enumerate(names) if name == "frozen result"]
    assert sends
    for one in sends:
        microbatch = graph.attribute("microbatch")[one]
        readers = (graph.kind == KIND["F"]) & (graph.attribute("stage") == 0)
        (reader,) = np.flatnonzero(readers & (graph.attribute("microbatch") == microbatch))[:1]
        assert run.start_s[reader] >= run.end_s[one]


def test_both_executors_follow_one_order_in_which_every_row_passes_every_layer():
    found = predicted("pp2 dp2 mb8 filling=parts")
    order, layers = found.filled.order, found.filled.layers
    rows = [
        (one.microbatch, one.layer, row)
        for mine in order.ranks
        for one in mine
        for row in range(one.first, one.first + one.rows)
    ]
    assert sorted(rows) == [(m, layer, row) for m in range(2) for layer in range(layers) for row in range(8)]
    assert all(one.first % order.chunk + one.rows <= order.chunk for mine in order.ranks for one in mine)
    for mine in order.ranks:
        assert [one.actions for one in mine] == sorted(one.actions for one in mine)


def test_a_locked_layer_has_no_gradients_of_its_weights():
    model = mw.load_model(CONTROL)
    run = simulate(mw.parse_plan("dp4 mb8").on(4), model, CLUSTER, TRAIN, COSTS)
    stages = run.lowered.stages
    locked = [kind for kind, block in enumerate(stages.model.blocks) if block.locked]
    assert locked and not any(piece.weight for kind in locked for piece in stages.pieces(kind))
    assert sum(u.trained_dense for u in map(stages.params, stages.compositions[0].units)) == 361_279_120
    assert step_flops(run.lowered) < model_flops(model, TRAIN)


def test_memory_has_the_encoders_on_every_rank():
    found = predicted("pp2 dp2 mb8 filling=parts")
    assert [rank.alive["frozen parameters"] for rank in found.memory] == [2.0 * (340_387_840 + 34_163_664)] * 2


REFUSED = {
    "dp4 mb8 filling=waits": "no waits to fill",
    "pp2 dp2 mb8 fill_layers=4": "has 39 frozen layers of its own",
    "pp2 dp2 mb8 dualpipe filling=parts": "first stage on two ranks",
    "pp2 dp2 mb8 sync=diloco:h=4": "worked out without frozen layers",
    "a=[dp2 mb8 part=0:60] + b=[dp2 mb8 part=60:116]": "the first 39 layers of sd-2-1-with-encoders are not trained",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_with_encoders_is_refused(words):
    with pytest.raises(MeshwrightError, match=REFUSED[words]):
        predicted(words)


def test_a_model_without_frozen_layers_has_nothing_to_fill_with():
    with pytest.raises(MeshwrightError, match="has no frozen layers") as caught:
        predicted("pp2 dp2 mb8 filling=parts", "sd-2-1")
    assert [one.place for one in caught.value.diagnostics] == ["plan.pipeline.filling = parts"]


def test_an_error_names_the_word_of_the_plan():
    with pytest.raises(MeshwrightError) as caught:
        predicted("dp4 mb8 filling=waits")
    assert [one.place for one in caught.value.diagnostics] == ["plan.pipeline.filling = waits"]


def test_a_search_chooses_where_encoders_are_run_and_proves_it():
    model = mw.load_model(SD)
    space = restricted(default(model, CLUSTER, TRAIN), fix=["pp=2", "zero=0", "schedule=1f1b", "mb=4,8", "stages=even"])
    found = find(model, CLUSTER, TRAIN, space=space, costs=COSTS)
    best = found.best[0].prediction
    words = [f"pp2 dp2 mb{mb} filling={way}" for mb in (4, 8) for way in ("before", "waits", "parts")]
    assert best.step_time_s == pytest.approx(min(predicted(one).step_time_s for one in words), rel=1e-9)
    assert best.plan.pipeline.filling in ("waits", "parts")


@pytest.mark.parametrize(("words", "said"), [("tp2 pp2 mb2", "P011 P027"), ("cp2 pp2 mb2", "P027"), ("pp2 mb2", "")])
def test_ranks_share_the_layers_of_an_encoder_as_its_kinds_allow(words, said):
    """A diffusion transformer's heads are divided among ranks that cannot divide the convolutions in front of it."""
    model = mw.load_model("dit-xl-2-256-with-encoder")
    found = check(mw.parse_plan(words).on(4), model, CLUSTER, TRAIN)
    assert {one.code for one in found} == set(said.split())
