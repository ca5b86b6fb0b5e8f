"""The search against brute force: bounds never exceed what they bound, and nothing better is ever thrown away."""

import numpy as np
from hypothesis import given, settings
from msgspec.structs import replace

from meshwright.plan import check
from meshwright.predict import predict
from meshwright.search.bounds import ROUNDING, Scope, compute_seconds, memory_bytes, step_seconds, work_seconds
from meshwright.search.evaluate import Evaluator
from meshwright.search.regions import Regions
from meshwright.search.settle import settled
from meshwright.search.space import cores, gathers_once, inners, pipelines, plan_of, states
from meshwright.search.strategies import exhaustive
from tests.random_plans import legal_plans
from tests.search.small import everything, questions, walk_of


@given(legal_plans())
@settings(max_examples=60)
def test_an_evaluated_plan_takes_what_predict_says_to_the_last_bit(question):
    """Also the second time, when its graph and its layers are shared with the first."""
    evaluator = Evaluator(question.model, question.where, question.train)
    said = predict(*question[1:], question.plan, costs=evaluator.costs, detail=False)
    for _ in range(2):
        answer = evaluator(question.plan)
        assert answer.step_time_s == said.step_time_s
        assert answer.headroom_bytes == said.tightest.headroom_bytes


@given(questions(clusters=("8xh100", "16xa100-80")))
@settings(max_examples=10)
def test_plans_that_share_a_graph_take_what_predict_says_to_the_last_bit(question):
    model, where, train, space = question
    evaluator = Evaluator(model, where, train)
    for point in list(everything(space, model, where, train))[::37][:12]:
        plan = settled(*point, evaluator)
        said = predict(model, where, train, plan, costs=evaluator.costs, detail=False)
        assert evaluator(plan) == (said.step_time_s, said.tightest.headroom_bytes)


@given(questions())
@settings(max_examples=40)
def test_no_bound_exceeds_the_step_time_or_the_memory_it_bounds(question):
    model, where, train, space = question
    evaluator = Evaluator(model, where, train)
    regions = Regions(evaluator)
    rng = np.random.default_rng(0)
    capacity = float(max(i.device.memory_bytes for i in where.islands))
    for core in cores(space, model, where, train):
        scope = Scope(
            core,
            inners(space, core, model, where, train),
            pipelines(space, core, model, train),
            states(space, core, where, train),
        )
        if not (scope.inners and scope.pipelines and scope.states):
            continue
        ideal = regions.glances.ideal_seconds(core, {(i.sp, i.algorithm, i.attention) for i in scope.inners})
        brief, one, which = regions.glances.costs(core, scope.inners)
        alike = scope._replace(inners=scope.inners.take(one))
        rough, _ = compute_seconds(regions, alike, brief)
        work = work_seconds(regions, alike, brief)
        costs = regions.costs(core, scope.inners)
        paths_s, least = compute_seconds(regions, scope, costs)
        exchanged = regions.exchanges.exchanged(core, scope.inners, scope.states)
        bound_s = step_seconds(regions, scope, costs, paths_s, least, exchanged)
        need = memory_bytes(regions, scope, costs)
        for flat in rng.integers(bound_s.size, size=4):
            a, b, c = np.unravel_index(flat, bound_s.shape)
            if not scope.legal()[a, b, c]:
                continue
            piped = scope.pipelines[b]
            plan = settled(core, scope.inners[a], piped, scope.states[c], evaluator)
            assert not check(plan, model, where, train)
            took = evaluator(plan)
            slack = took.step_time_s * (1 + ROUNDING)
            own = max(0.0, regions.makespan(core, scope.inners[a], piped, costs, a) - paths_s[a, b])
            assert max(ideal, work[which[a], b], rough[which[a], b], bound_s[a, b, c] + own) <= slack, plan.text()
            assert need[a, b, c] <= (capacity - took.headroom_bytes) * (1 + ROUNDING) + 1, plan.text()


@given(questions())
@settings(max_examples=12)
def test_branch_and_bound_finds_the_optimum_of_brute_force(question):
    model, where, train, space = question
    walk = walk_of(question)
    assert exhaustive.run(walk)
    evaluator = Evaluator(model, where, train)
    answers = (evaluator(settled(*point, evaluator)) for point in everything(space, model, where, train))
    fitting = [a.step_time_s for a in answers if a.fits]
    best = walk.fitting()
    assert bool(fitting) == bool(best)
    if fitting:
        assert best[0].step_time_s == min(fitting)
    assert walk.covered == sum(1 for _ in everything(space, model, where, train))
    assert walk.rejected.total() + len(walk.tried) >= walk.covered


@given(questions(clusters=("8xh100", "16xa100-80")))
@settings(max_examples=10)
def test_zero3_under_a_pipeline_is_zero1_in_other_words(question):
    """The space leaves it out where it says so: equal times, and memory equal up to the rounding of its sum."""
    model, where, train, space = question
    space = space.with_domain("zero", (0, 1, 3)).with_domain("pp", (2, 4))
    assert gathers_once(space, train)
    evaluator = Evaluator(model, where, train)
    for point in list(everything(space, model, where, train))[::29][:12]:
        plan = plan_of(*point)
        whole = replace(plan, layout=replace(plan.layout, zero=3))
        if plan.layout.zero == 1 and not check(whole, model, where, train):
            mine, other = evaluator(plan), evaluator(whole)
            assert mine.step_time_s == other.step_time_s
            assert abs(mine.headroom_bytes - other.headroom_bytes) < 1
