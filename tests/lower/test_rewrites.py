"""Rewrites of a layer's pass: what each leaves of the plain one's data flow, and the times of small cases by hand."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.answer.predict import predict
from meshwright.causes import PRICED
from meshwright.cost import Costs, load_framework, standard
from meshwright.cost.chain import Estimate
from meshwright.errors import MeshwrightError
from meshwright.lower.entry import JOINS, LANDS, PRODUCT, WEIGHT, Entry
from meshwright.lower.layer import plain, program
from meshwright.lower.place import Mesh
from meshwright.lower.rewrites import by_columns, by_rows, hoisted, proof, relaxed, tiled
from meshwright.lower.stages import Stages
from meshwright.plan import check, parse
from meshwright.simulate.layer import cost
from meshwright.spec.cluster import load, load_device
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import Train
from meshwright.work import Collective, Elementwise, Gemm, Group
from tests.random_plans import GPT, LLAMA, MIXTURE, sized

TRAIN = Train(global_batch=64, seq_len=128)
#: Kernels of a compiler and a host that keeps up with them.
FUSED = standard(load_framework("fused"))
FOUR = Group(size=4, hops=())
#: A card whose memory moves what is finished by itself loses nothing to exchanges.
ALONE = msgspec.structs.replace(load_device("h100"), comm_slowdown=0.0, speed_spread=0.0)


def passes(model, words, which, recompute="none"):
    plan = parse(words)
    pieces = Stages(plan, model, TRAIN, Mesh(plan, sized(plan))).pieces(len(model.blocks) - 1)
    entries, ends = plain(pieces, which, recompute=recompute, overlap=plan.overlap)
    return entries, ends, program(pieces, which, recompute=recompute, overlap=plan.overlap)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTURE], ids=lambda m: m.name)
def test_exact_ways_keep_every_edge_of_every_pass(model, recompute):
    for sp in ("", " nosp"):
        for way in ("tp", "tp:domino", "tp:domino4", "tp:domino2x2", "tp:domino1x4"):
            for which in ("F", "B", "W", "BW"):
                verdict = proof(*passes(model, f"tp4 dp1 mb4{sp} overlap={way}", which, recompute))
                assert verdict.exact, (way, sp, which, verdict)


def test_a_ladder_drops_the_edges_into_the_next_part_and_no_other():
    forward = proof(*passes(LLAMA, "tp4 dp1 nosp overlap=tp:ladder", "F"))
    assert set(forward.dropped) == {("attention residual", "mlp norm"), ("mlp residual", "attention norm")}
    back = proof(*passes(LLAMA, "tp4 dp1 nosp overlap=tp:ladder", "BW"))
    assert set(back.dropped) == {
        ("mlp norm backward", "attention residual backward"),
        ("attention norm backward", "mlp residual backward"),
    }


def test_a_rewrite_that_loses_doubles_or_outruns_work_is_refused():
    entries, ends, found = passes(LLAMA, "tp4 dp1 mb4 nosp overlap=tp:domino", "BW")
    with pytest.raises(MeshwrightError, match=r"G003.*1/2 of"):
        proof(entries, ends, found[:-1])
    with pytest.raises(MeshwrightError, match=r"G003.*3/2 of"):
        proof(entries, ends, [*found, found[-1]])
    small = [e._replace(work=msgspec.structs.replace(e.work, m=1)) if e.role == PRODUCT else e for e in found]
    with pytest.raises(MeshwrightError, match=r"G003.*operations are done"):
        proof(entries, ends, small)
    product = next(i for i, e in enumerate(found) if e.role == PRODUCT)
    late = [*found[:product], found[product]._replace(after=(product + 3,)), *found[product + 1 :]]
    with pytest.raises(MeshwrightError, match="waits for what comes after it"):
        proof(entries, ends, late)


def test_a_landing_that_does_not_wait_for_its_sum_is_no_exact_rewrite():
    # what an earlier form of the tiles did: the kernel behind a scattered product waited for the product alone
    entries, ends, found = passes(LLAMA, "tp4 dp1 mb4 overlap=tp", "F")
    at, landing = next((i, e) for i, e in enumerate(found) if e.role == LANDS)
    products = tuple(a for a in landing.after if found[a].queue == "compute")
    hasty = [*found[:at], landing._replace(after=products), *found[at + 1 :]]
    assert proof(entries, ends, found).exact
    assert proof(entries, ends, hasty).dropped == (("attention scatter", "attention residual"),)


# a part of a layer: a product of 4 s, its sum of 3 s, and what lands behind it, 1 s
SECONDS = {"product": 4.0, "sum": 3.0, "land": 1.0, "weight": 2.0}
PART = [
    Entry("product", "compute", Gemm(m=400, n=100, k=1), (), role=PRODUCT),
    Entry("sum", "tp", Collective(op="all_reduce", num_bytes=400.0, group=FOUR), (0,), role=JOINS),
    Entry("land", "compute", Elementwise(num_bytes=400.0, fused=True), (1,), role=LANDS),
]


def given_times(work, device):
    """Each kind of work as long as its share of the whole's size says."""
    match work:
        case Gemm():
            return Estimate(4.0 * work.m * work.n / 40000, "gemm", "given", 0.0)
        case Collective(op="send" | "pushed"):
            return Estimate(1.5 * work.num_bytes / 400, "network", "given", 0.0)  # half of an all-reduce's way
        case Collective():
            factor = 1.5 if work.op in ("all_gather", "gather_in_place") else 3.0
            return Estimate(factor * work.num_bytes / 400, "network", "given", 0.0)
    return Estimate(work.num_bytes / 400, "elementwise", "given", 0.0)


def seconds(entries):
    found = cost(entries, "F", ALONE, Costs(links=(given_times,)))
    return {name: value for name, value in zip(PRICED, found.parts.tolist()) if value}, found.drain


def test_a_plain_part_exposes_its_sum():
    assert seconds(PART) == ({"gemm": 4.0, "tp": 3.0, "elementwise": 1.0}, 0.0)


def test_two_slices_hide_each_others_sums_over_the_borders_of_layers():
    # steady state by hand: land and multiply one half (2.5 s), then the other; a half's sum takes 1.5 s and is over
    # before its turn comes again. Behind the last layer the second half's sum is exposed whole.
    found = by_rows(hoisted(PART, (2,)), 2)
    assert proof(PART, (2,), found).exact
    assert seconds(found) == ({"gemm": 4.0, "elementwise": 1.0}, 1.5)


def test_hoisting_alone_changes_no_time():
    # one slice: the sum is waited for by the next layer's first kernel, and the first layer waits for none
    assert seconds(hoisted(PART, (2,))) == ({"gemm": 4.0, "tp": 3.0, "elementwise": 1.0}, 0.0)


def test_slices_by_columns_expose_the_last_sum():
    # 4 columns: products of 1 s, sums of 0.75 s each: only the last is exposed
    found = by_columns(PART, 4)
    assert proof(PART, (2,), found).exact
    assert seconds(found) == ({"gemm": 4.0, "tp": 0.75, "elementwise": 1.0}, 0.0)


def test_a_ladder_s_sum_runs_beside_the_next_part():
    # product 4 s, then the landing of the part before, whose 3 s were over meanwhile; behind the last part 3 s less the
    # 1 s of that landing
    found = relaxed(PART, (2,))
    assert not proof(PART, (2,), found).exact
    assert seconds(found) == ({"gemm": 4.0, "elementwise": 1.0}, 2.0)


def test_tiles_of_an_all_reduce_scatter_in_a_ring_and_gather_behind_it():
    # four products of 1 s, three steps of 0.375 s in their shadow (the last one's is over before its own product is);
    # the gather of 1.5 s is exposed
    found = tiled(PART)
    assert proof(PART, (2,), found).exact
    assert [e.name for e in found if e.queue == "tp"] == ["sum 1/4", "sum 2/4", "sum 3/4", "sum gather"]
    assert seconds(found) == ({"gemm": 4.0, "tp": 1.5, "elementwise": 1.0}, 0.0)


def test_triggered_steps_take_no_multiprocessor_from_the_product():
    device = msgspec.structs.replace(ALONE, comm_slowdown=0.5)
    costs = Costs(links=(given_times,))
    software, hardware = (cost(tiled(PART, triggered=way), "F", device, costs).seconds for way in (False, True))
    # software: 3 steps of 0.375 s hidden, each costs half of its time
    assert software - hardware == pytest.approx(0.5 * 3 * 0.375)


def test_weight_gradients_are_cut_along_what_they_sum_over():
    entries = [*PART, Entry("weight", "compute", Gemm(m=100, n=100, k=400), (), role=WEIGHT)]
    halves = [e.work for e in by_rows(entries, 2) if e.role == WEIGHT]
    assert [(w.m, w.n, w.k) for w in halves] == [(100, 100, 200)] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp4 dp2 mb1 nosp overlap=tp:domino", "a microbatch of mb=1 cannot be cut into 2 equal parts"),
        ("tp4 dp2 mb4 overlap=tp:domino2x2", "sequence parallelism scatters sums by rows"),
        ("tp4 dp2 mb7 nosp overlap=tp:domino7x7", "columns are not cut into 7 equal parts"),
        ("tp4 dp2 mb4 overlap=tp:triggered", "starts no exchange by itself"),
    ],
)
def test_ways_that_do_not_fit_are_refused_with_the_number(words, said):
    found = check(parse(words), LLAMA, load("8xh100"), msgspec.structs.replace(TRAIN, global_batch=56))
    assert any(d.code == "P058" and said in d.message for d in found), found


@pytest.mark.parametrize("word", ["tp:", "tp:domino1", "tp:domino99", "tp:domino2x", "dp:ladder", "tp,tp:ladder"])
def test_words_that_say_no_way_are_refused_with_those_that_do(word):
    with pytest.raises(MeshwrightError, match=r"P002.*overlap="):
        parse(f"tp8 overlap={word}")


@pytest.mark.parametrize(
    ("word", "said"), [("tp:tiles", "dp,tp"), ("tp:domino2x1", "dp,tp:domino"), ("tp:domino4x1", "dp,tp:domino4")]
)
def test_ways_have_one_spelling(word, said):
    assert parse(f"tp8 overlap=dp,{word}").text().split()[-1] == f"overlap={said}"


def test_a_card_whose_memory_moves_what_is_finished_gains_more_than_slices_of_software():
    model, train, where = load_model("llama2-13b"), Train(global_batch=64, seq_len=2048), load("8xh100,triggers")
    asked = (model, where, train)
    ways = ("none", "tp", "tp:triggered")
    times = [predict(*asked, parse(f"tp8 mb4 full overlap={way}"), costs=FUSED).step_time_s for way in ways]
    assert times == sorted(times, reverse=True) and times[2] < 0.999 * times[1]
    # its parts are one kernel, which the host issues once, and nobody issues the steps
    slow = standard(msgspec.structs.replace(FUSED.framework, host_us_per_kernel=1e3, host_us_per_collective=1e3))
    waits = [predict(*asked, parse(f"tp8 mb4 full overlap={way}"), costs=slow).step_time_s for way in ways]
    assert waits[2] < waits[0] < waits[1]


def test_an_answer_says_that_a_ladder_is_another_model():
    asked = load_model("llama2-13b"), load("8xh100"), Train(global_batch=8, seq_len=2048)
    told = {way: predict(*asked, parse(f"tp8 nosp overlap=tp:{way}")).cautions for way in ("tiles", "ladder")}
    assert any("another model" in caution for caution in told["ladder"])
    assert not any("another model" in caution for caution in told["tiles"])


def test_domino_is_faster_than_waiting_for_sums_where_they_are_long_and_a_ladder_is_no_slower():
    model, train = load_model("llama2-13b"), Train(global_batch=64, seq_len=2048)
    times = {
        way: predict(model, load("8xh100"), train, parse(f"tp8 nosp mb8 overlap={way}"), costs=FUSED).step_time_s
        for way in ("none", "tp:domino", "tp:ladder")
    }
    assert times["tp:domino"] < 0.97 * times["none"]
    assert times["tp:ladder"] < times["none"]
