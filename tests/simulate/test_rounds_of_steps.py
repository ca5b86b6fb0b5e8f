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
from meshwright.simulate.rounds import PartTimes, Round, carried, waits
from meshwright.simulate.step import simulate
from meshwright.spec.dimensions import transformer
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
    said = found.to_json()["round"]
    assert {name: said[name] for name in ("every", "inner_s", "averaging_s", "parts", "delay", "waits_s")} == {
        "every": 8,
        "inner_s": one.inner_s,
        "averaging_s": one.averaging_s,
        "parts": 1,
        "delay": 0,
        "waits_s": 0.0,
    }
    assert said["hidden_gbit_s"] is None  # nothing goes on beside a step
    rarer = predict(*QUESTION, parse("sync=local:h=64"), detail=False)
    assert rarer.attribution["dp"] == pytest.approx(found.attribution["dp"] / 8)
    usual = predict(*QUESTION, parse(""), detail=False)
    assert usual.round is None and not any("approximate" in line for line in usual.cautions)


def test_parts_of_the_layers_are_sent_apart_and_together_are_all_of_them():
    whole, parts = (simulated(f"sync=diloco:h=8,parts={n}") for n in (1, 4))
    sent = [sum(p.num_bytes for p in run.round.parts) for run in (whole, parts)]
    assert sent[0] == pytest.approx(sent[1]) == pytest.approx(2 * 15 / 16 * 4 * MODEL.num_params)  # an all-reduce of 16
    assert parts.step_time_s == pytest.approx(whole.step_time_s, rel=0.02)  # nothing is hidden, but latencies
    assert max(p.sends_s for p in parts.round.parts) < whole.round.averaging_s


def test_layers_that_are_updated_within_the_backward_are_sent_beside_it():
    """One microbatch: as much is hidden as is left of the backward once its first layer, the last with the head, is
    updated. Nothing else changes but the order of the updates."""
    plan = "tp8 mb32 sync=diloco:h=8,rate=1,momentum=0{}"
    slow = mw.load_cluster("2x8xh100,nics=8,40gbe")
    late, early = (
        simulate(parse(plan.format(start)).on(16), MODEL, slow, TRAIN, standard_on(slow))
        for start in ("", ",start=backward")
    )
    assert early.round.inner_s == pytest.approx(late.round.inner_s, rel=0.01)
    hidden = late.round.averaging_s - early.round.averaging_s
    backward = sum(late.priced.durations[k] for k in late.lowered.graph.cost_key[late.lowered.graph.kind == KIND["BW"]])
    assert 0.7 * backward < hidden < backward
    # parts that are not due are in no other's way: one whose exchange fits in the backward is all but hidden
    parts = simulate(parse(plan.format(",start=backward,parts=8")).on(16), MODEL, slow, TRAIN, standard_on(slow)).round
    shown = sorted(p.sends_s - parts.inner_s for p in parts.parts)
    alone = (late.round.averaging_s - late.round.inner_s) / 8
    assert alone < 0.5 * backward and shown[-2] < 0.7 * alone
    assert sum(p.num_bytes for p in parts.parts) == pytest.approx(late.round.parts[0].num_bytes)


SHALLOW = transformer(layers=2, hidden=256, heads=8, ffn=512, vocab=1000, max_seq_len=2048, name="shallow")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("tp8 mb32", MODEL),
        ("pp2 tp4 mb16", MODEL),
        ("pp2 vpp2 tp4 mb16 interleaved", MODEL),
        ("pp2 tp4 mb16", SHALLOW),  # a layer a stage
    ],
)
def test_every_rank_is_updated_once_within_its_backward_and_spends_the_host_s_time_of_a_step_once(words, model):
    late, early = (
        simulate(parse(f"{words} sync=diloco:h=8,rate=1,momentum=0{start}").on(16), model, CLUSTER, TRAIN, COSTS)
        for start in ("", ",start=backward")
    )
    graph, programs = early.lowered.graph, early.lowered.programs
    tasks = [programs[key] for key in graph.cost_key.tolist()]
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    last = np.array([p.name == "optimizer" for p in tasks])
    assert np.bincount(rank[last]).tolist() == [1] * (rank.max() + 1)
    host = COSTS.framework.host_us_per_step * 1e-6
    assert early.priced.durations[graph.cost_key[last]] == pytest.approx(host)  # all else of it is in the backward
    updated = sum(p.work.num_bytes for p in tasks if p.kind == "pass" and p.work is not None)
    tasks = [late.lowered.programs[key] for key in late.lowered.graph.cost_key.tolist()]
    assert updated == pytest.approx(sum(p.work.num_bytes for p in tasks if p.name == "optimizer"))


def test_an_outer_step_moves_what_it_reads_and_writes():
    """The change of a round: the parameter and what it was are read, the change is written; the step: the mean and what
    it was are read, the momentum read and written, and both results written: 4 bytes each, of every parameter."""
    run = simulated("sync=diloco:h=8")
    work = {p.name: p.work.num_bytes for p in run.lowered.programs if p.every > 1 and p.work is not None}
    assert work == {"change": 3 * 4 * MODEL.num_params, "outer step": 6 * 4 * MODEL.num_params}


def test_a_step_waits_for_a_part_that_takes_longer_than_its_delay():
    """Steps of 1 s, one part in four of them: a transfer of 2.5 s sent with a step's end and due two steps later has
    2 s, so half a second is waited for; two parts of 2 s, two steps apart, just fit on the link with a delay of 2."""
    late = PartTimes(sends_s=1.0, applies_s=1.0, ends_s=(3.5,), busy_s=(2.5,), num_bytes=0.0)
    assert waits((late,), every=4, lag=2, inner_s=1.0) == pytest.approx([0.5])
    fits = PartTimes(sends_s=1.0, applies_s=1.0, ends_s=(3.0,), busy_s=(2.0,), num_bytes=0.0)
    assert waits((fits, fits), every=4, lag=2, inner_s=1.0) == [0.0, 0.0]
    # each 2.5 s: the link is never free, and a round takes the 5 s that it needs
    assert sum(waits((late, late), every=4, lag=2, inner_s=1.0)) == pytest.approx(1.0)
    # sent from 0.5 s of its step on, beside the backward: the two queues of a pipeline, of which one is later
    early = PartTimes(sends_s=1.0, applies_s=1.25, ends_s=(2.0, 2.4), busy_s=(1.5, 1.9), num_bytes=0.0)
    assert waits((early,), every=4, lag=1, inner_s=1.0) == pytest.approx([2.4 - 2.0])


@pytest.mark.parametrize(
    ["words", "link"],
    [
        ("streaming-diloco:codec=none,h=4,parts=2,delay=1", 100),
        ("streaming-diloco:codec=none,h=6,parts=3,delay=2", 1),
        ("streaming-diloco:codec=none,h=4,delay=2", 1),
        ("eager-diloco:h=4,parts=2", 1),
    ],
)
def test_a_round_and_a_run_take_as_long_as_their_graph_unrolled_over_steps(words, link):
    """The reference: every task of every step in turn, on streams that go on, with the lagged edges that the graph has.
    Steps stall or not as the link is; what the kernels lose to exchanges beside them is no task. A run is from the
    first of these steps on, and ends with the kernels of its last."""
    cluster = mw.load_cluster(f"2x8xh100,nics=1,{link}gbe")
    plan = parse(f"tp8 sync={words}").on(16)
    run = simulate(plan, MODEL, cluster, TRAIN, standard_on(cluster))
    graph, programs, one = run.lowered.graph, run.lowered.programs, run.round
    assert {int(lag) for lag in graph.dep_lag if lag} == {one.lag}
    seconds, parts = run.priced.durations[graph.cost_key], len(one.parts)
    free, ends, last = [0.0] * len(graph.streams), [], []
    for step in range(1, 5 * one.every + 1):
        end = np.zeros(graph.num_tasks)
        for task in range(graph.num_tasks):
            program = programs[graph.cost_key[task]]
            sent = step - one.lag if program.applies else step
            due = program.every == 1 or (
                sent > 0 and sent % one.every == (program.part + 1) * one.every // parts % one.every
            )
            edges = slice(graph.dep_ptr[task], graph.dep_ptr[task + 1])
            at = 0.0
            for on, lag in zip(graph.dep[edges], graph.dep_lag[edges]):
                if not lag or (due and step > lag):
                    at = max(at, end[on] if not lag else ends[step - 1 - lag][on])
            streams = graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]]
            if due:
                at = max([at, *(free[s] for s in streams)])
            end[task] = at + seconds[task] * due
            for s in streams if due else ():
                free[s] = end[task]
        ends.append(end)
        compute = graph.streams.queue == QUEUE["compute"]
        last.append(max(t for t, kept in zip(free, compute) if kept))
    assert (last[-1] - last[-1 - one.every]) / one.every == pytest.approx(
        run.step_time_s - one.slows_s / one.every, rel=1e-9
    )
    assert (one.waits_s > 0) == (link == 1)
    for steps in (1, one.every, 2 * one.every, 5 * one.every):
        assert last[steps - 1] == pytest.approx(one.run_s(steps) - one.slows_s * steps / one.every, rel=1e-9)


def test_a_run_of_two_rounds_waits_for_half_of_what_comes_a_round_late():
    """By hand: steps of 1 s, rounds of four, an exchange of 10 s after each. Of eight steps the first four and the last
    four compute; the first exchange begins at 4 s and is waited for from 8 s to 14 s, the second by nobody. Without end
    a round takes what its exchange does."""
    part = PartTimes(sends_s=1.0, applies_s=1.0, ends_s=(11.0,), busy_s=(10.0,), num_bytes=0.0)
    made = (part,), 4, 4, 1.0
    ends = [now for now, _ in carried(*made, 8)]
    assert ends == [1, 2, 3, 4, 5, 6, 7, 14]
    assert waits(*made) == [pytest.approx(6.0)]


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


@pytest.mark.parametrize(
    ["words", "copies"],
    [
        ("diloco:h=8", 2),  # parameters as all had them last, and the outer momentum
        ("diloco:h=8,rate=1,momentum=0", 0),  # the mean is taken: nothing is kept
        ("diloco:h=8,rate=1,momentum=0,delay=2", 3),  # what they were, what is on its way, and what arrived
        ("streaming-diloco:h=8", 4),
    ],
)
def test_an_outer_step_keeps_its_momentum_and_what_is_in_flight(words, copies):
    plain, kept = (
        predict(*QUESTION, parse(f"sync={w}"), detail=False).memory[0].alive["parameters"] for w in ("local:h=8", words)
    )
    assert kept - plain == pytest.approx(copies * 4 * MODEL.num_params)


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


@pytest.mark.parametrize(["parts", "every", "lag"], [(1, 20, 2), (4, 16, 3), (4, 16, 9), (4, 16, 16)])
def test_at_the_rate_that_hides_an_exchange_no_step_waits_and_below_it_steps_do(parts, every, lag):
    """Steps of 1 s, parts of a gigabyte. Those that take longer than the steps from one to the next queue, however late
    they are applied: a round's have to be through within a round."""

    def made(busy_s):
        return (PartTimes(sends_s=1.0, applies_s=1.0, ends_s=(1.0 + busy_s,), busy_s=(busy_s,), num_bytes=1e9),) * parts

    nothing = np.zeros(0)
    one = Round(every, lag, 1.0, made(0.0), 0.0, nothing, (nothing, nothing), nothing)
    needed_s = 1e9 / one.hidden_bytes_per_s
    assert needed_s == min(lag, every / parts)
    assert waits(made(needed_s), every, lag, 1.0) == [0.0] * parts
    slower = made(1.02 * needed_s), every, lag, 1.0
    ends = [now for now, _ in carried(*slower, 200 * every)]
    longer = ends[-1] - ends[-1 - every] - every  # a round of many later, when the queue is as late as it gets
    assert sum(waits(*slower)) == pytest.approx(longer) and longer > 0
