"""Plans under shared draws: how sure the order of the best is, and what decides it."""

import numpy as np
import pytest

from meshwright.answer.intervals import interval_draws
from meshwright.cost import load_framework, standard
from meshwright.plan import parse
from meshwright.search.draws import NUM_DRAWS, OWN, DrawnPlan, SharedDraws, standings, sureness
from meshwright.search.evaluate import Evaluator
from meshwright.search.find import find
from meshwright.search.restrict import restricted
from meshwright.search.space import default
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse as workload

ASKED = model("llama3-8b"), cluster("16xh100"), workload("batch=64,seq=4096")


def shared(name="default", capacity=float("inf")):
    return SharedDraws(Evaluator(*ASKED, standard(load_framework(name)), None), capacity)


def drawn(steps, fits=True):
    return DrawnPlan(float(np.mean(steps)), np.array(steps, float), np.array([fits] * len(steps)), 1.0)


def test_a_plan_is_alike_with_itself_and_what_two_plans_share_moves_both():
    """Two plans that differ in ZeRO alone compute the same passes: most of their spread is common, so that their
    difference is surer than either; a plan's draws spread as those of its own interval do."""
    draws = shared()
    one, other = (draws.of(parse(words)) for words in ("dp16 mb1 zero1", "dp16 mb1 zero2"))
    spread = np.std(np.log(one.steps_s))
    assert np.std(np.log(one.steps_s / other.steps_s)) < spread / 2
    assert 0.3 < spread / np.std(np.log(interval_draws(draws.run(parse("dp16 mb1 zero1"))))) < 3
    assert draws.tie(parse("dp16 mb1 zero1"), parse("dp16 mb1 zero1")).measure.startswith("nothing")


def test_the_chance_of_being_best_counts_draws_and_regret_is_over_the_fastest_in_each():
    # by hand: the first wins draws 1 and 2, the second draws 3 and 4; worst regrets 3/2 - 1 and 4/2 - 1
    first, second = standings([drawn([2, 2, 3, 3]), drawn([4, 3, 2, 2.5])])
    assert (first.best_probability, second.best_probability) == (0.5, 0.5)
    assert first.regret_worst == pytest.approx(0.5) and second.regret_worst == pytest.approx(1.0)
    assert first.regret_mean == pytest.approx((0 + 0 + 0.5 + 0.2) / 4)
    assert first.alike and second.alike


def test_a_plan_that_runs_out_of_memory_in_a_draw_is_not_the_best_there():
    fast, slow = standings([drawn([1.0] * 4, fits=False), drawn([2.0] * 4)])
    assert (fast.best_probability, slow.best_probability) == (0.0, 1.0)
    alone = standings([drawn([1.0] * 4, fits=False), drawn([2.0] * 4, fits=False)])
    assert alone[0].best_probability == 1.0  # where none fits, all are taken to run


def test_peaks_share_one_error_and_leave_the_room_that_their_spread_says():
    draws = shared(capacity=80e9)
    found = [draws.of(parse(words), room) for words, room in (("dp16 mb1 zero1", 0.0), ("dp16 mb1 zero2", 40e9))]
    assert found[0].p_fit == pytest.approx(0.5) and found[0].fits.mean() == pytest.approx(0.5, abs=0.05)
    assert found[1].fits.all() and found[1].p_fit > 0.98


@pytest.mark.parametrize(
    ("first", "other", "unknown"),
    [
        # other passes with other errors; tensor parallelism over more links of a node, or over those between nodes
        ("dp16 mb1 zero2", "dp16 mb2 zero2", OWN),
        ("tp16 dp1 mb4", "tp8 dp2 mb4 zero1", "network"),
    ],
)
def test_the_unknown_that_moves_two_plans_apart_is_named_with_the_command_that_measures_it(first, other, unknown):
    draws = shared("megatron-core")
    found = draws.decides(parse(first), parse(other))
    assert 0 < found.share <= 1 and found.command.startswith("meshwright calibrate")
    assert found.unknown.startswith(unknown)


def test_a_search_says_how_likely_its_first_is_the_best_and_a_robust_one_loses_least_in_the_worst_draw():
    space = restricted(default(*ASKED), fix=["recompute=none", "order=tp-cp-dp-pp", "cp=1", "pp=1", "zero=1,2,3"])
    usual, robust = (find(*ASKED, space=space, recommend=True, robust=one) for one in (False, True))
    assert usual.sure.num_draws == NUM_DRAWS and 0 < usual.sure.best_probability < 1
    assert sum(r.standing.best_probability for r in usual.best) == pytest.approx(1.0)
    assert [r.plan for r in usual.best] == [r.plan for r in robust.best]
    assert robust.recommended.regret_worst <= usual.recommended.regret_worst + 1e-12
    assert "worst draw" in robust.recommended.why and "worst draw" not in usual.recommended.why
    said = usual.to_json()
    assert said["sure"]["gain_realised"] == 1.19 and said["best"][0]["standing"]["alike"]


def test_one_plan_has_no_order_to_be_sure_of():
    draws = shared()
    plan = parse("dp16 mb1 zero1")
    assert sureness(draws, [plan], standings([draws.of(plan)])) is None
