"""Controls offer what is legal, and a plan that is mended keeps what its user said."""

from itertools import product

import pytest

from meshwright.plan import check
from meshwright.plan.text import read as read_plan
from meshwright.spec import cluster, model, workload
from meshwright.ui.controls import CONTROLS, moved, shown
from meshwright.ui.repair import RepairPlace, changed, divisors, nearest

DENSE = (model.load("llama3-8b"), cluster.load("16xh100"), workload.parse("batch=64,seq=2048"))
MIXTURE = (model.load("mixtral-8x7b"), cluster.load("16xh100"), workload.parse("batch=64,seq=2048"))
PLANS = ["tp2 pp2 vpp2 zero1", "fsdp", "tp4 pp4 zb-h1 mb2", "cp2 tp2 pp2 full"]


def value(plan, name, devices=16):
    return CONTROLS[name].of(plan.on(devices))


@pytest.mark.parametrize("words", PLANS)
def test_every_stop_of_every_control_leads_to_a_legal_plan_with_its_value(words):
    plan = read_plan(words)
    for name, control in shown(plan, *DENSE).items():
        for stop in control.stops:
            after = moved(plan, name, stop.value, *DENSE)
            assert after is not None and check(after, *DENSE) == [], (name, stop)
            assert value(after, name) == stop.value


def test_a_stop_without_a_remark_changes_nothing_but_its_own_control():
    plan = read_plan("tp2 pp2 vpp2 zero1")
    for name, control in shown(plan, *DENSE).items():
        if name in ("dp", "schedule", "vpp"):  # these stand for other words: dp follows, a schedule has its chunks
            continue
        for stop in control.stops:
            if stop.also == "":
                after = moved(plan, name, stop.value, *DENSE)
                same = CONTROLS[name].put(plan, stop.value)
                assert changed(after, "layout", dp=0) == changed(same, "layout", dp=0), (name, stop)


def test_the_stops_of_tp_are_the_divisors_of_devices_and_heads():
    # llama3-8b has 32 heads and 8 key-value heads on 16 devices, all powers of two: every divisor of 16 works
    assert [s.value for s in shown(read_plan("fsdp"), *DENSE)["tp"].stops] == [1, 2, 4, 8, 16]


def test_what_else_a_stop_changes_is_said_in_the_words_of_a_plan():
    # 16 devices as tp8 pp2: eight stages leave no room for tp8, so tp2 comes with it
    stops = {s.value: s.also for s in shown(read_plan("tp8 pp2"), *DENSE)["pp"].stops}
    assert stops[2] == "" and stops[8] == "tp2"


def test_dp_is_moved_by_giving_its_devices_to_or_taking_them_from_the_other_axes():
    after = moved(read_plan("tp2 pp2"), "dp", 8, *DENSE)
    assert after.on(16).layout.dp == 8
    assert after.layout.dp == 0  # it follows from the others again


def test_a_dense_model_is_offered_no_experts_and_a_mixture_its_divisors():
    assert [s.value for s in shown(read_plan("fsdp"), *DENSE)["ep"].stops] == [1]
    assert [s.value for s in shown(read_plan("fsdp"), *MIXTURE)["ep"].stops] == [1, 2, 4, 8]  # eight experts


def test_one_chunk_is_plain_1f1b_and_more_are_interleaved():
    assert moved(read_plan("tp2 pp2 vpp2"), "vpp", 1, *DENSE).pipeline.schedule == "1f1b"
    assert moved(read_plan("tp2 pp2"), "vpp", 4, *DENSE).pipeline.schedule == "interleaved"


def test_a_legal_plan_is_its_own_nearest():
    plan = read_plan("tp2 pp2 vpp2 zero1")
    assert nearest(plan, RepairPlace(*DENSE)) == plan


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("tp3", {}),  # P011, P010: no divisor of the heads or the devices
        ("tp16 pp16", {}),  # P010: 256 ranks on 16 devices
        ("tp2 pp2 vpp40", {}),  # P013: more stages than layers
        ("mb48", {"zero": 0}),  # P014: batch 64
        ("cp2 ulysses4", {"cp": 2}),  # P015
        ("cp2 unfused", {"cp": 2}),  # P016
        ("ep4", {}),  # P017: no experts here
        ("pp2 dualpipe zero3", {"pp": 2}),  # P020
        ("recompute_layers=3", {}),  # P021
        ("params=fp8", {}),  # P022
        ("shard3 fsdp", {"zero": 3}),  # P019
        ("shares=1,2", {}),  # P025
        ("pp2 stages=1,2", {"pp": 2}),  # P013
    ],
)
def test_an_illegal_plan_has_a_nearest_legal_one_that_keeps_the_rest(words, kept):
    plan = read_plan(words)
    assert check(plan, *DENSE) != []
    after = nearest(plan, RepairPlace(*DENSE))
    assert after is not None and check(after, *DENSE) == []
    assert {name: value(after, name) for name in kept} == kept


def test_what_is_pinned_stays_or_there_is_no_plan():
    tp, pp = divisors(16), divisors(16)
    for a, b in product(tp, pp):
        plan = read_plan(f"tp{a} pp{b}")
        pinned = frozenset({("layout", "tp"), ("layout", "pp")})
        after = nearest(plan, RepairPlace(*DENSE, pinned))
        assert (after is None) == (a * b > 16)
        assert after is None or (after.layout.tp, after.layout.pp) == (a, b)


def test_experts_and_their_mesh_are_mended_together():
    plan = read_plan("tp8 ep8")  # ep8 * etp8 = 64 ranks of 16
    assert [d.code for d in check(plan, *MIXTURE)] == ["P018"]
    after = nearest(plan, RepairPlace(*MIXTURE, frozenset({("experts", "ep")})))
    assert after.experts.ep == 8 and check(after, *MIXTURE) == []
