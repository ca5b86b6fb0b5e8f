"""Steps of replicas that average now and then: an inner step exchanges nothing, an average takes what its bytes do."""

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.answer.predict import predict
from meshwright.compare import compare
from meshwright.cost import standard_on
from meshwright.graph import KIND, QUEUE
from meshwright.plan import check, parse
from meshwright.simulate.step import simulate
from meshwright.work import Collective

MODEL, CLUSTER = mw.load_model("llama3.2-1b"), mw.load_cluster("2x8xh100")
TRAIN = mw.parse_train("batch=64,seq=2048")
COSTS = standard_on(CLUSTER)
QUESTION = (MODEL, CLUSTER, TRAIN)


def simulated(words):
    return simulate(parse(words).on(16), *QUESTION, COSTS)


def test_the_step_time_is_the_mean_of_a_rounds_steps():
    one = simulated("sync=local:h=8").round
    assert one.every == 8
    assert simulated("sync=local:h=8").step_time_s == pytest.approx((7 * one.inner_s + one.averaging_s) / 8, rel=1e-12)
    assert simulated("sync=step").round is None


def test_an_average_takes_what_its_all_reduces_do():
    """Every parameter once, in fp32 (the masters), one all-reduce a segment: 16 layers, the ends with the outer two."""
    run = simulated("sync=local:h=8")
    averages = [p for p in run.lowered.programs if p.every > 1]
    sizes = {p: sum(m.num_bytes for m in p.moves) for p in averages}
    tasks = [run.lowered.programs[key] for key in run.lowered.graph.cost_key.tolist()]
    assert sum(sizes[p] for p in tasks if p in sizes) == 4 * MODEL.num_params
    group = run.lowered.mesh.group("dp")
    device = CLUSTER.islands[0].device
    alone = sum(
        COSTS.price(Collective(op="all_reduce", num_bytes=sizes[p], group=group), device).seconds
        for p in tasks
        if p in sizes
    )
    assert run.round.averaging_s - run.round.inner_s == pytest.approx(alone, rel=1e-9)
    assert len([p for p in tasks if p in sizes]) == MODEL.num_layers


def test_an_inner_step_is_that_of_a_replica_by_itself():
    """One H100 with its share of the batch; in the large job only the slowest of its devices is waited for."""
    one = simulate(parse("dp1").on(1), MODEL, mw.load_cluster("1xh100"), mw.parse_train("batch=4,seq=2048"), COSTS)
    slower = CLUSTER.islands[0].device.slowest_of(16) / CLUSTER.islands[0].device.slowest_of(1)
    inner = simulated("sync=local:h=8").round.inner_s
    assert one.step_time_s * (1 - 1e-9) <= inner <= one.step_time_s * slower * (1 + 1e-9)


def test_replicas_exchange_nothing_but_averages():
    run = simulated("sync=local:h=8")
    graph = run.lowered.graph
    queue = graph.streams.queue[graph.member[graph.member_ptr[:-1]]]
    programs = [run.lowered.programs[k] for k in graph.cost_key[queue == QUEUE["dp"]].tolist()]
    assert {p.every for p in programs if p.moves} == {8}


def test_ranks_of_a_sharding_scope_step_together():
    """hsdp8 inside a node: gathers and reductions as ever, over 8 ranks; two replicas average a shard each."""
    run = simulated("hsdp8 sync=local:h=8")
    usual = simulated("hsdp8")
    averages = [p for p in run.lowered.programs if p.every > 1]
    assert {m.group.size for p in averages for m in p.moves} == {2}
    tasks = [run.lowered.programs[key] for key in run.lowered.graph.cost_key.tolist()]
    assert sum(m.num_bytes for p in tasks if p.every > 1 for m in p.moves) == 4 * MODEL.num_params / 8
    assert run.round.inner_s < usual.step_time_s


@pytest.mark.parametrize(["code", "share"], [("none", 1.0), ("bf16", 0.5), ("int8", 16 * (1 + 4 / 256) / 4)])
def test_a_code_sends_what_its_wire_takes(code, share):
    """int8 cannot be added on its way: each of 16 replicas gathers all, a byte a value and 4 for 256."""
    run = simulated(f"sync=local:h=8,codec={code}")
    tasks = [run.lowered.programs[key] for key in run.lowered.graph.cost_key.tolist()]
    sent = sum(m.num_bytes for p in tasks if p.every > 1 for m in p.moves)
    assert sent == pytest.approx(4 * MODEL.num_params * share, rel=1e-6)
    coded = [p.name for p in tasks if p.every > 1 and p.work is not None]
    assert coded == ([] if code == "none" else ["encode", "decode"])


def test_the_answer_says_both_steps_and_that_it_is_approximate():
    found = predict(*QUESTION, parse("sync=local:h=8"))
    one = found.round
    assert found.step_time_s == pytest.approx((7 * one.inner_s + one.averaging_s) / 8)
    assert found.timeline.makespan_s == pytest.approx(one.averaging_s)
    assert sum(found.attribution.values()) == pytest.approx(found.step_time_s)
    low, high = found.step_time_interval_s
    assert low < found.step_time_s < high
    assert any("approximate" in line for line in found.cautions)
    assert found.to_json()["round"] == {"every": 8, "inner_s": one.inner_s, "averaging_s": one.averaging_s}
    rarer = predict(*QUESTION, parse("sync=local:h=64"), detail=False)
    assert rarer.attribution["dp"] == pytest.approx(found.attribution["dp"] / 8)
    usual = predict(*QUESTION, parse(""), detail=False)
    assert usual.round is None and not any("approximate" in line for line in usual.cautions)


def test_unequal_islands_wait_for_one_another_at_the_average_alone():
    islands = mw.load_cluster("8xh100+8xa100")
    costs = standard_on(islands)
    run = simulate(parse("sync=local:h=8").on(16), MODEL, islands, TRAIN, costs)
    slow = simulate(
        parse("sync=local:h=8").on(8), MODEL, mw.load_cluster("8xa100"), mw.parse_train("batch=32,seq=2048"), costs
    )
    assert run.round.inner_s == pytest.approx(slow.round.inner_s, rel=0.05)
    graph, (_, end) = run.lowered.graph, run.round.times
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    updates = graph.kind == KIND["optimizer"]
    fast, last = (float(end[updates & (rank == r)].max()) for r in (0, 1))
    assert fast < 0.7 * last  # an H100 is done with its own step long before


def test_a_run_of_rounds_is_compared_in_the_mean_of_whole_rounds():
    """Ten measured steps after a warm-up of four: the last eight are a round, seven of 1 s and one of 9 s."""
    found = predict(*QUESTION, parse("sync=local:h=8"), detail=False)
    table = {"step": {"seconds": np.array([5.0] * 6 + [1.0] * 7 + [9.0])}}
    measured = msgspec.structs.replace(found.timeline, records=table)
    got = compare(found, measured)
    assert got.step_time_s.predicted == found.step_time_s
    assert got.step_time_s.measured == 2.0


def test_a_lossy_code_keeps_the_parameters_of_the_last_average():
    """One fp32 copy of what a rank updates, beside which nothing changes in what is constant."""
    plain, coded = (
        predict(*QUESTION, parse(f"sync=local:h=8,codec={code}"), detail=False).memory[0].alive["parameters"]
        for code in ("none", "int8")
    )
    assert coded - plain == pytest.approx(4 * MODEL.num_params)


@pytest.mark.parametrize(
    ["words", "said"],
    [
        ("zero1 sync=local:h=8", "none has a copy of its own"),
        ("tp16 sync=local:h=8", "the plan has one"),
        ("cp4 dp4 shard2 sync=local:h=8", "cuts through the 4 ranks"),
        ("dp16 shares=4 sync=local:h=8", "unequal shares"),
    ],
)
def test_layouts_without_replicas_of_their_own_are_refused(words, said):
    wrong = check(parse(words), *QUESTION)
    assert [d.code for d in wrong if said in d.message] == ["Y003"]
    assert all(d.help for d in wrong)


def test_experts_that_take_tokens_of_all_replicas_are_refused():
    mixture = mw.load_model("mixtral-8x7b")
    wrong = check(parse("tp2 ep4 sync=local:h=8"), mixture, CLUSTER, TRAIN)
    assert [d.code for d in wrong if "experts" in d.message] == ["Y003"]
