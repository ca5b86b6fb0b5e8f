"""Ways of overlapping inside layers in a search: exact ones are taken by itself, approximate ones are named."""

from __future__ import annotations

from meshwright.answer.predict import predict
from meshwright.cost import load_framework, standard
from meshwright.export.runnable import engine
from meshwright.plan import check, parse
from meshwright.search.engines import Demands
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import PLAIN, WHOLE, cores, default, inners, plan_of
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import Train

ASKED = model("llama2-13b"), cluster("8xh100"), Train(global_batch=32, seq_len=2048)
#: Kernels of a compiler and a host that keeps up with them.
COSTS = standard(load_framework("fused"))
FIXED = ["tp=8", "mb=4", "recompute=none", "zero=0"]


def searched(*fix, others=()):
    space = restricted(default(*ASKED), fix=[*FIXED, *fix])
    return find(*ASKED, space=space, costs=COSTS, recommend=True, demands=Demands(others=others))


def seconds(words):
    return predict(*ASKED, parse(words), costs=COSTS, detail=False).step_time_s


def test_the_recommended_plan_takes_the_fastest_exact_way_and_the_proof_stays_that_of_the_space():
    found = searched()
    plain = found.best[0].plan
    assert found.proven_optimal and not plain.overlap.tp
    words = plain.text()
    times = {way: seconds(f"{words} overlap=dp,{way}pp") for way in ("", "tp,", "tp:domino,", "tp:ladder,")}
    best = min(("", "tp,", "tp:domino,"), key=times.get)
    pick = found.recommended
    assert best and pick.plan.overlap.exact and pick.prediction.step_time_s == times[best]
    assert f"overlap=dp,{best}pp gives the same numbers in {1 - times[best] / times['']:.1%} less time" in pick.why
    assert ("overlap=dp,tp:ladder,pp is another model" in pick.why) == (times["tp:ladder,"] * 1.005 < times[best])


def test_an_approximate_way_is_named_and_not_taken():
    pick = searched("sp=no").recommended
    assert pick.plan.overlap.exact and "overlap=dp,tp:ladder,pp is another model, to be trained so, and" in pick.why


def test_a_way_that_no_engine_of_the_plan_runs_is_not_taken():
    # Megatron-Core overlaps products with the gathers of sequence parallelism alone, and has no slices of the batch
    megatron = (engine("megatron", *ASKED),)
    assert not searched("sp=no", others=megatron).recommended.plan.overlap.tp
    assert searched(others=megatron).recommended.plan.overlap.how == ""


def test_a_search_that_is_told_what_overlaps_keeps_to_it_and_one_over_ways_bounds_them_all():
    assert not searched("overlap=dp+pp").recommended.plan.overlap.tp
    several = searched("overlap=dp+pp,dp+tp+pp,dp+tp:domino+pp,dp+tp:ladder+pp", "sp=yes,no")
    words = [
        f"tp8 mb4 {sp}overlap=dp,{way}pp" for sp in ("", "nosp ") for way in ("", "tp,", "tp:domino,", "tp:ladder,")
    ]
    assert several.proven_optimal
    assert several.best[0].prediction.step_time_s == min(map(seconds, words))


def test_parts_that_do_not_divide_leave_the_space_and_others_stay():
    fix = ["tp=8", "mb=1,2", "recompute=none", "zero=0", "sp=yes,no", "order=tp-cp-dp-pp"]
    ways = "overlap=dp+pp+tp:domino,dp+pp+tp:domino1x2"
    space = restricted(default(*ASKED), fix=fix, allow=[ways])
    plans = [plan_of(c, i, PLAIN, WHOLE) for c in cores(space, *ASKED) for i in inners(space, c, *ASKED)]
    found = {(p.pipeline.microbatch, p.layout.sp, p.overlap.how) for p in plans if p.overlap.tp}
    # one row is not cut in two, and columns are cut where sums are not scattered
    assert found == {(2, True, "domino"), (2, False, "domino"), (1, False, "domino1x2"), (2, False, "domino1x2")}
    assert not any(check(plan, *ASKED) for plan in plans)
    alone = restricted(default(*ASKED), fix=[*fix, "overlap=dp+pp+tp:domino"])
    assert {c.mb for c in cores(alone, *ASKED) if inners(alone, c, *ASKED)} == {2}
