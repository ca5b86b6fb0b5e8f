"""Schedules searched for given times get the priced ones; power that a site cannot deliver is a no."""

import msgspec

from meshwright import plan as plans
from meshwright.cost import standard
from meshwright.lower import lower
from meshwright.predict import predict, simulate
from meshwright.simulate.price import Pricer
from meshwright.simulate.schedule_times import measured_times, takes_times
from meshwright.spec import cluster, model, workload

MODEL = model.load("gpt3-6.7b")
CLUSTER = cluster.load("8xa100")
TRAIN = workload.parse("batch=16,seq=1024")


def test_times_are_those_of_the_priced_passes_of_each_rank():
    plan = plans.parse("pp8 zb-h1 mb1").on(8)
    lowered = lower(plan, MODEL, CLUSTER, TRAIN)
    priced = Pricer(lowered, standard()).all()
    times = measured_times(lowered, priced)
    graph = lowered.graph
    stage, kind = graph.attribute("stage"), graph.kind
    one = (stage == 3) & (kind == 0) & (graph.attribute("microbatch") == 5)
    assert abs(times["t_f"][3] - priced.durations[graph.cost_key[one]].sum() * 1e6) < 1e-3 * times["t_f"][3]
    assert len(times["t_w"]) == 8 and 0 < times["keep_w"] <= 1


def test_a_searched_schedule_is_no_slower_than_the_handcrafted_one_of_its_memory():
    costs = standard()
    searched = simulate(plans.parse("pp8 zb-2p mb1").on(8), MODEL, CLUSTER, TRAIN, costs)
    by_hand = simulate(plans.parse("pp8 zb-h2 mb1").on(8), MODEL, CLUSTER, TRAIN, costs)
    assert searched.step_time_s <= by_hand.step_time_s * 1.005  # the search sees passes, not the optimizer behind them


def test_only_searched_schedules_take_times():
    assert takes_times(plans.parse("pp8 zb-1p")) and not takes_times(plans.parse("pp8 1f1b"))


def test_more_power_than_the_site_delivers_does_not_fit():
    plan = plans.parse("tp8 mb1")
    free = predict(MODEL, CLUSTER, TRAIN, plan, detail=False)
    # 8 A100 at 400 W and their host: more than 3.2 kW, so a limit of 3.2 kW cannot carry it
    assert free.fits and free.money.power_w > 3200
    tight = msgspec.structs.replace(CLUSTER, power_limit_w=3200.0)
    answer = predict(MODEL, tight, TRAIN, plan, detail=False)
    assert not answer.fits and answer.power_over_w == free.money.power_w - 3200.0
