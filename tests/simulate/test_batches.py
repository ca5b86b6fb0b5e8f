"""Drawn batches: equal lengths are the plain step bit for bit, unequal ones make ranks wait, by hand and by oracle."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.cost import standard_on
from meshwright.lower import bind, structured
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages
from meshwright.plan import parse as parse_plan
from meshwright.simulate import batches, unfolded
from meshwright.simulate.batches import simulate_batches
from meshwright.simulate.price import Pricer
from meshwright.simulate.step import simulate
from meshwright.simulate.unfolded import Placed, members
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse


def asked(words: str, train: str, on: str = "8xh100", model: str = "llama3-8b"):
    cluster = load_cluster(on)
    return (
        parse_plan(words).on(cluster.num_devices),
        load_model(model),
        cluster,
        parse(train),
        standard_on(cluster, "fused"),
    )


PLANS = ["fsdp mb1", "tp2 pp2 dp2 zero1 mb2", "pp4 dp2 zb-h1 mb1", "pp4 dp2 zb-auto mb1", "cp2 dp4 zero2 mb1 full"]


@pytest.mark.parametrize("words", PLANS)
@pytest.mark.parametrize("pack", ["packed", "padded", "balanced", "concat"])
def test_documents_as_long_as_a_sequence_are_the_plain_step_bit_for_bit(words, pack):
    if pack == "balanced":
        words = words.replace("mb2", "mb1")  # two sequences are one row of twice the length
    drawn = predict(*_question(words, f"batch=16,seq=4096,lengths=4096,pack={pack}"), detail=False)
    plain = predict(*_question(words, "batch=16,seq=4096"), detail=False)
    assert drawn.step_time_s == plain.step_time_s
    assert drawn.step_time_interval_s == plain.step_time_interval_s
    assert drawn.attribution == plain.attribution | {"unequal": 0.0}
    assert (drawn.mfu, drawn.tokens_per_s_per_gpu) == (plain.mfu, plain.tokens_per_s_per_gpu)
    assert drawn.peak_memory_bytes == plain.peak_memory_bytes
    assert drawn.identity.graph == plain.identity.graph
    b = drawn.batches
    assert {b.mean_s, b.p10_s, b.p50_s, b.p90_s} == {plain.step_time_s} and (b.unequal_s, b.useful) == (0.0, 1.0)


def _question(words: str, train: str, on: str = "8xh100"):
    plan, model, cluster, train, _ = asked(words, train, on)
    return model, cluster, train, plan


@pytest.mark.parametrize("words", ["dp2 zero1 mb1", "fsdp dp2 mb1", "pp2 dp1 mb1 1f1b"])
def test_slices_apart_take_what_they_take_together(words):
    # the same structure with every data-parallel slice a class of its own, all microbatches equal
    plan, model, cluster, train, costs = asked(words, "batch=8,seq=2048", "2xh100")
    together = simulate(plan, model, cluster, train, costs)
    mesh = Mesh(plan, cluster, apart=tuple((d,) for d in range(plan.layout.dp)))
    apart = simulate(plan, model, cluster, train, costs, stages=Stages(plan, model, train, mesh))
    assert apart.step_time_s == together.step_time_s
    assert len(apart.lowered.graph.streams.ranks) == plan.layout.dp * len(together.lowered.graph.streams.ranks)


def drawn_by_hand(monkeypatch, words, train, rows, on="2xh100"):
    """The steps of one draw whose microbatches hold these documents each."""
    plan, model, cluster, train, costs = asked(words, train, on)

    real = batches.draw

    def chosen(train, microbatch):
        found = real(train, microbatch)
        laid = found.laid
        by = {}
        for r in range(laid.num_rows):
            key = tuple(sorted(laid.length[laid.row_ptr[r] : laid.row_ptr[r + 1]].tolist()))
            by.setdefault(key, r)
        return msgspec.structs.replace(found, rows=np.array([[[by[key]] for key in rows]]))

    monkeypatch.setattr(batches, "draw", chosen)
    return simulate_batches(plan, model, cluster, train, costs), (plan, model, cluster, train, costs)


LONG, SHORT = (2048,), (512, 512, 512, 512)
TWO = "batch=4,seq=2048,lengths=512:0.8;2048:0.2"


def seconds_of(question, batch) -> float:
    """Seconds of a whole step in which every microbatch holds `batch`."""
    plan, model, cluster, train, costs = question
    return simulate(
        plan, model, cluster, train, costs, stages=Stages(plan, model, train, Mesh(plan, cluster), batch=batch)
    ).step_time_s


def test_two_ranks_with_two_lengths_wait_for_the_costlier_by_hand(monkeypatch):
    # zero1 on two ranks of two microbatches each: ranks meet at the end alone, so that a step takes the longer rank
    by_hand, question = drawn_by_hand(monkeypatch, "dp2 zero1 mb1", TWO, [LONG, LONG, SHORT, SHORT])
    long = seconds_of(question, by_hand.drawn.batch(0, 0))
    short = seconds_of(question, by_hand.drawn.batch(0, 2))
    assert long > short
    assert by_hand.steps_s.tolist() == pytest.approx([long], rel=1e-12)
    assert by_hand.even.step_time_s == pytest.approx((long + short) / 2, rel=1e-6)
    assert by_hand.unequal_s == pytest.approx((long - short) / 2, rel=1e-4)


def test_the_same_documents_dealt_evenly_leave_no_waiting_by_hand(monkeypatch):
    by_hand, question = drawn_by_hand(monkeypatch, "dp2 zero1 mb1", TWO, [LONG, SHORT, LONG, SHORT])
    long = seconds_of(question, by_hand.drawn.batch(0, 0))
    short = seconds_of(question, by_hand.drawn.batch(0, 1))
    # the last microbatch runs beside the reduction of its gradients, which takes from it what it is longer
    assert by_hand.steps_s[0] == pytest.approx((long + short) / 2, rel=1e-4)
    assert by_hand.unequal_s == pytest.approx(0.0, abs=1e-4 * long)


def test_fully_sharded_ranks_meet_at_every_layer_by_hand(monkeypatch):
    # parameters are gathered for every microbatch: crossed documents make both ranks slow twice
    crossed, question = drawn_by_hand(monkeypatch, "fsdp dp2 mb1", TWO, [LONG, SHORT, SHORT, LONG])
    long = seconds_of(question, crossed.drawn.batch(0, 0))
    assert crossed.steps_s[0] == pytest.approx(long, rel=2e-3)
    assert crossed.unequal_s > 0.5 * (long - seconds_of(question, crossed.drawn.batch(0, 1))) / 2


def test_a_drawn_step_is_what_a_graph_bound_microbatch_by_microbatch_takes(monkeypatch):
    # oracle: the unfolded graph walked task by task, each pass priced with its own microbatch's items
    found, (plan, model, cluster, train, costs) = drawn_by_hand(
        monkeypatch, "pp2 dp2 zero1 mb1", TWO, [LONG, SHORT, SHORT, SHORT], "4xh100"
    )
    pricer, mesh = Pricer(costs), Mesh(plan, cluster, apart=((0,), (1,)))
    bound = {}
    for place_, batch in enumerate(found.drawn.batch(0, m) for m in range(4)):
        stages = Stages(plan, model, train, mesh, batch=batch)
        lowered = bind(structured(stages), stages, costs.framework.defaults.bucket_bytes)
        bound[divmod(place_, 2)] = (lowered, pricer.all(lowered.programs).durations)
    graph = bound[0, 0][0].graph
    free, end = [0.0] * len(graph.streams), [0.0] * graph.num_tasks
    microbatch = graph.attribute("microbatch").tolist()
    ranks = graph.streams.rank.tolist()
    for i in range(graph.num_tasks):
        members_ = graph.member[graph.member_ptr[i] : graph.member_ptr[i + 1]].tolist()
        slice_ = int(ranks[members_[0]]) // plan.layout.pp
        _, durations = bound[slice_, max(0, microbatch[i])]
        ready = [end[d] for d in graph.dep[graph.dep_ptr[i] : graph.dep_ptr[i + 1]].tolist()]
        end[i] = max([0.0, *ready, *(free[s] for s in members_)]) + durations[bound[slice_, 0][0].graph.cost_key[i]]
        for s in members_:
            free[s] = end[i]
    assert found.steps_s[0] == pytest.approx(max(end), rel=1e-12)


def test_microbatches_between_priced_ones_are_as_if_each_were_priced(monkeypatch):
    question = asked("dp8 zero1 mb1 full", "batch=64,seq=8192,lengths=lognormal:mean=2048;sigma=1")
    near = simulate_batches(*question)
    assert near.priced == 33 < near.distinct
    monkeypatch.setattr(batches, "PRICED", 10**6)
    exact = simulate_batches(*question)
    assert exact.priced == exact.distinct == near.distinct
    assert near.steps_s == pytest.approx(exact.steps_s, rel=2e-3)
    assert near.even.step_time_s == pytest.approx(exact.even.step_time_s, rel=5e-4)


def test_the_attribution_sums_to_the_mean_and_names_the_waiting():
    found = predict(*_question("fsdp mb1", "batch=64,seq=8192,lengths=lognormal:mean=2048;sigma=1"), detail=False)
    b = found.batches
    assert b.p10_s < b.p50_s < b.p90_s and b.p10_s < found.step_time_s == b.mean_s < b.p90_s
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s)
    assert found.attribution["unequal"] == b.unequal_s > 0.02 * found.step_time_s
    assert found.timeline.makespan_s == pytest.approx(found.step_time_s, rel=0.02)
    balanced = predict(
        *_question("fsdp mb1", "batch=64,seq=8192,lengths=lognormal:mean=2048;sigma=1,pack=balanced"), detail=False
    )
    assert balanced.attribution["unequal"] < 0.25 * found.attribution["unequal"]
    assert balanced.step_time_s < found.step_time_s


def test_padding_takes_time_and_counts_for_nothing():
    padded = predict(*_question("fsdp mb1", "batch=64,seq=4096,lengths=1024,pack=padded"), detail=False)
    packed = predict(*_question("fsdp mb1", "batch=64,seq=4096,lengths=1024,pack=packed"), detail=False)
    assert (padded.batches.useful, packed.batches.useful) == (0.25, 1.0)
    assert padded.batches.useful_tokens == 64 * 1024
    # a padded row is 1024^2 + 3072^2 score entries, a packed one 4 * 1024^2; products are the same
    assert packed.step_time_s < padded.step_time_s
    assert padded.tokens_per_s_per_gpu == pytest.approx(64 * 1024 / 8 / padded.step_time_s)
    assert padded.mfu < 0.3 * packed.mfu
    assert padded.money.usd_per_million_tokens > 4 * packed.money.usd_per_million_tokens


def test_a_run_of_useful_tokens_takes_more_padded_steps():
    found = predict(*_question("fsdp mb1", "batch=64,seq=4096,lengths=1024,pack=padded,tokens=65.536m"), detail=False)
    assert found.run.num_steps == 1000


def test_more_slices_than_the_graph_may_have_are_folded_within_their_kind():
    plan, _, cluster, *_ = asked("dp16 zero1 mb1 full shares=4,8", "batch=96,seq=4096", "8xa100-80 + 8xh100")
    mesh = Mesh(plan, cluster)
    assert members(plan, mesh, 10) == tuple((d,) for d in range(16))
    few = members(plan, mesh, 200_000)  # two kinds of slices in the folded graph, room for four
    assert [len(some) for some in few] == [4, 4, 4, 4]
    assert sorted(d for some in few for d in some) == list(range(16))
    assert Mesh(plan, cluster, apart=few).kinds_of_slices == (0, 0, 1, 1)


def test_folded_slices_take_as_long_as_all_of_them(monkeypatch):
    question = asked("dp8 zero1 mb1", "batch=32,seq=2048,lengths=lognormal:mean=500;sigma=1")
    whole = simulate_batches(*question)
    tasks = whole.typical.lowered.graph.num_tasks
    monkeypatch.setattr(unfolded, "MOST_TASKS", 2 * tasks)
    folded = simulate_batches(*question)
    assert (whole.classes, folded.classes) == (8, 2)
    assert folded.steps_s == pytest.approx(whole.steps_s, rel=5e-3)  # the costliest rank decides
    unequal = asked("dp16 zero1 mb1 full shares=4,8", "batch=96,seq=2048,lengths=512;2048", "8xa100-80 + 8xh100")
    assert simulate_batches(*unequal).steps_s.min() > 0


def test_placed_microbatches_weigh_one_in_all():
    loads = np.array([[1.0, 2.0, 2.0, 4.0]])
    found = Placed(batches=((), ()), middle=(), low=np.zeros((1, 4), np.int64), share=(loads - 1) / 3, distinct=3)
    assert found.weights.tolist() == pytest.approx([(1 + 2 / 3 + 2 / 3) / 4, (1 / 3 + 1 / 3 + 1) / 4])
