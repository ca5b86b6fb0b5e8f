"""Timelines: the critical path, attribution, exposed communication, memory over time."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.answer.predict import predict
from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Framework, standard
from meshwright.graph import GraphBuilder
from meshwright.plan import parse
from meshwright.simulate import events, memory
from meshwright.simulate.attribute import attribution
from meshwright.simulate.engine import times
from meshwright.spec.workload import Train
from meshwright.timeline import KEY, Counter, Instants, StepBounds, Timeline, _outside, from_times, pack, unpack
from tests.random_plans import LLAMA, legal_plans, of_size

TRAIN = Train(global_batch=16, seq_len=128)


@settings(max_examples=60)
@given(legal_plans())
def test_for_any_legal_plan_the_parts_add_up_and_the_critical_path_spans_the_step(question):
    plan, model, where, train = question
    found = predict(model, where, train, plan, detail=False)
    line, step = found.timeline, found.step_time_s
    assert sum(found.attribution.values()) == pytest.approx(step, rel=1e-9)
    assert min(found.attribution.values()) >= -1e-12
    path = line.critical_path()
    assert line.start_s[path[0]] == 0.0 and line.end_s[path[-1]] == step
    np.testing.assert_array_equal(line.start_s[path[1:]], line.end_s[path[:-1]])
    low, high = found.step_time_interval_s
    assert 0 < low <= step <= high
    assert 0 < found.mfu <= found.hfu and found.bound_s <= step
    assert 0 <= found.bubble < 1
    for held in found.memory:
        assert held.peak_bytes == pytest.approx(sum(held.alive.values())) and min(held.alive.values()) >= 0


@settings(max_examples=25)
@given(legal_plans(), st.sampled_from([1.0, 2.0]))
def test_what_is_allocated_is_freed_and_the_peak_is_that_of_the_trace(question, copies):
    plan, model, where, train = question
    framework = Framework(name="keeps", activation_copies=copies)
    found = predict(model, where, train, plan, costs=standard(framework))
    for rank, (trace, held) in enumerate(zip(found.timeline.memory, found.memory)):
        moving = ("activations", "workspace", "logits")
        static = sum(b[0] for c, b in zip(trace.categories, trace.num_bytes) if c not in moving)
        peak, at, alive = trace.peak()
        assert trace.total[-1] == pytest.approx(static, rel=1e-9), rank
        assert (trace.num_bytes >= -1e-3).all()
        for category in moving:
            assert held.alive[category] == pytest.approx(alive[category])
        assert (held.peak_bytes, held.at_s) == pytest.approx((peak, at))


def hidden_and_exposed():
    """2 s of compute, 3 s of exchange that starts with it, then 1 s of compute that needs both."""
    builder = GraphBuilder(("r",))
    first = builder.add("op", "two", builder.stream(0, "compute"))
    exchange = builder.add("all_reduce", "three", builder.stream(0, "dp"))
    builder.add("op", "one", builder.stream(0, "compute"), [first, exchange])
    graph = builder.build()
    return from_times(graph, *times(graph, np.array([2.0, 3.0, 1.0])))


def test_exposed_communication_is_what_no_compute_runs_beside():
    line = hidden_and_exposed()
    assert line.makespan_s == 4.0
    assert line.exposed_comm(0) == {"dp": 1.0}
    assert line.busy_s(0) == 3.0
    assert [line.names([s])[0] for s in line.critical_path()] == ["all_reduce", "op"]


def test_a_collective_is_one_task_with_a_span_on_every_member():
    builder = GraphBuilder(("a", "b"))
    early = builder.add("op", "one", builder.stream(0, "compute"))
    late = builder.add("op", "two", builder.stream(1, "compute"))
    both = [builder.stream(0, "dp"), builder.stream(1, "dp")]
    builder.add("all_reduce", "one", both, [early, late])
    graph = builder.build()
    line = from_times(graph, *times(graph, np.array([1.0, 2.0])))
    spans = np.flatnonzero(line.task == 2)
    assert line.rank[spans].tolist() == [0, 1]
    assert line.start_s[spans].tolist() == [2.0, 2.0]  # when the slower member is ready
    assert line.rank[line.critical_path()[0]] == 1


def test_the_critical_path_follows_the_order_that_ran_not_the_order_of_the_graph():
    # On a stream that chooses, the second task runs first: it is ready at 0, the first only at 4 s.
    builder = GraphBuilder(("0", "1"))
    late = builder.add("op", "slow", builder.stream(1, "compute"))
    builder.add("op", "fast", builder.stream(0, "compute"), [late])
    builder.add("op", "long", builder.stream(0, "compute"))
    graph = builder.build()
    spans = events.times(graph, np.array([4.0, 1.0, 5.0]), policies=("priority", "priority"))
    line = from_times(graph, *spans)
    path = line.critical_path()
    assert [line.keys[line.cost_key[s]] for s in path] == ["long", "fast"]
    np.testing.assert_array_equal(line.start_s[path[1:]], line.end_s[path[:-1]])


def test_peak_memory_is_the_hand_counted_one():
    # two tasks of 1 s: the first allocates 10 at its start, the second 5, the first's are freed when the second ends
    builder = GraphBuilder(("r",))
    a = builder.add("op", "one", builder.stream(0, "compute"))
    b = builder.add("op", "one", builder.stream(0, "compute"))
    builder.memory([a], 0, False, 10.0, "activations")
    builder.memory([b], 0, False, 5.0, "workspace")
    builder.memory([b], 0, True, -10.0, "activations")
    builder.memory([b], 0, True, -5.0, "workspace")
    graph = builder.build()
    start, end = times(graph, np.array([1.0]))
    at, alive = memory.peaks(graph, start, end, 1)
    assert at.tolist() == [1.0] and alive.tolist() == [[10.0, 5.0]]
    (trace,) = memory.traces(graph, start, end, ({"parameters": 100.0},), {})
    assert trace.time_s.tolist() == [0.0, 1.0, 2.0]
    assert trace.total.tolist() == [110.0, 115.0, 100.0]
    assert trace.peak() == (115.0, 1.0, {"parameters": 100.0, "activations": 10.0, "workspace": 5.0})


def test_what_is_freed_and_allocated_at_one_instant_is_not_counted_twice():
    builder = GraphBuilder(("r",))
    a = builder.add("op", "one", builder.stream(0, "compute"))
    b = builder.add("op", "one", builder.stream(0, "compute"))
    for task in (a, b):
        builder.memory([task], 0, False, 8.0, "workspace")
        builder.memory([task], 0, True, -8.0, "workspace")
    graph = builder.build()
    assert memory.peaks(graph, *times(graph, np.array([1.0])), 1)[1].tolist() == [[8.0]]


@pytest.mark.parametrize("overlap", ["none", "dp", "dp,tp"])
@pytest.mark.parametrize("words", ["dp8", "dp8 zero1", "tp2 dp4 zero2", "fsdp dp8", "hsdp2 dp8", "cp2 dp4 zero1"])
def test_without_a_pipeline_nothing_is_waited_for_but_exchange(words, overlap):
    found = predict(LLAMA, of_size(8), TRAIN, parse(f"{words} overlap={overlap}"), detail=False)
    assert found.attribution["dp"] > 0
    assert found.attribution["bubble"] == pytest.approx(0, abs=1e-9 * found.step_time_s)


def test_exchange_beside_which_nothing_runs_is_charged_whole():
    # forward 1 s, backward 2 s, two exchanges of 1 s each after it, update 1 s: 2 s of the 6 are exchange
    builder = GraphBuilder(("r",))
    builder.add("F", "one", builder.stream(0, "compute"))
    backward = builder.add("BW", "two", builder.stream(0, "compute"))
    builder.add("all_reduce", "sum", builder.stream(0, "dp"), [backward])
    last = builder.add("all_reduce", "sum", builder.stream(0, "dp"), [backward])
    builder.add("optimizer", "update", builder.stream(0, "compute"), [last])
    graph = builder.build()
    seconds = {"one": 1.0, "two": 2.0, "sum": 1.0, "update": 1.0}
    cause = {"one": "gemm", "two": "gemm", "sum": "dp", "update": "optimizer"}
    parts = np.zeros((len(graph.keys), len(PRICED)))
    for i, key in enumerate(graph.keys):
        parts[i, CAUSE[cause[key]]] = seconds[key]
    line = from_times(graph, *times(graph, parts.sum(axis=1)))
    found = {name: value for name, value in attribution(line, parts).items() if value}
    assert found == {"gemm": 3.0, "dp": 2.0, "optimizer": 1.0}


def test_a_microbatch_freed_the_instant_the_next_is_allocated_does_not_meet_it():
    # whatever the order in which the events were given: here what is allocated comes first
    builder = GraphBuilder(("r",))
    tasks = [builder.add("op", "one", builder.stream(0, "compute")) for _ in range(3)]
    builder.memory(tasks, 0, False, 8.0, "activations")
    builder.memory(tasks, 0, True, -8.0, "activations")
    graph = builder.build()
    assert memory.peaks(graph, *times(graph, np.array([1.0])), 1)[1].tolist() == [[8.0]]


def test_what_is_outside_of_busy_intervals_is_what_adding_up_pair_by_pair_gives():
    rng = np.random.default_rng(15)
    for _ in range(200):
        edges = np.sort(rng.choice(60, 2 * rng.integers(0, 9), replace=False)).astype(float)
        busy_start, busy_end = edges[::2], edges[1::2]
        start = rng.integers(0, 60, rng.integers(1, 9)).astype(float)
        end = start + rng.integers(0, 12, len(start))
        inside = sum(max(0.0, min(e, b) - max(s, a)) for s, e in zip(start, end) for a, b in zip(busy_start, busy_end))
        assert _outside(start, end, busy_start, busy_end) == (end - start).sum() - inside  # whole numbers: exact


@settings(max_examples=20)
@given(legal_plans())
def test_the_key_of_every_span_is_its_own_and_its_occurrences_come_in_order_of_start(question):
    plan, model, where, train = question
    line = predict(model, where, train, plan, detail=False).timeline
    columns = line.key_columns()
    assert tuple(columns) == KEY
    seen: dict[tuple, int] = {}
    rows = list(zip(*(columns[name].tolist() for name in KEY[:-1])))
    for span in np.argsort(line.start_s, kind="stable").tolist():  # a slow count, one span after the other
        assert columns["occurrence"][span] == seen.setdefault(rows[span], 0)
        seen[rows[span]] += 1


def test_a_packed_timeline_comes_back_to_its_last_bit():
    question = parse("tp2 pp2 dp2 mb1"), LLAMA, of_size(8), TRAIN
    line = predict(question[1], question[2], question[3], question[0]).timeline
    line = msgspec.structs.replace(
        line,
        steps=StepBounds.of([1], [(0.0, 2.0)]),
        counters=(Counter(name="loss", unit="", time_s=np.array([1.0]), value=np.array([2.5])),),
        instants=Instants.of([(0.5, "failure")]),
        records={"request": {"why": np.array(["a", "b"], object), "n": np.array([1, 2])}},
    )
    back = unpack(pack(line))
    assert pack(back) == pack(line)
    assert (back.ranks, back.keys, back.identity) == (line.ranks, line.keys, line.identity)
    for name in ("task", "rank", "queue", "kind", "attributes", "start_s", "end_s", "waited_for", "cost_key"):
        assert np.array_equal(getattr(back, name), getattr(line, name)), name
        assert getattr(back, name).dtype == getattr(line, name).dtype, name
    assert back.records["request"]["why"].tolist() == ["a", "b"] and back.peak_memory() == line.peak_memory()


def test_a_timeline_of_a_job_has_instants_and_records_and_no_spans():
    line = Timeline.bare(instants=Instants.of([(2.0, "failure")]), records={"event": {"at_s": np.array([2.0])}})
    assert line.num_spans == 0 and line.makespan_s == 0.0 and len(line.critical_path()) == 0
    assert line.instants.names == ("failure",)


def test_spans_and_records_are_data_frames():
    pytest.importorskip("pandas", reason="data frames need pandas")
    line = msgspec.structs.replace(hidden_and_exposed(), records={"event": {"at_s": np.array([2.0, 3.0])}})
    frame = line.to_dataframe()
    assert list(frame.columns) == [*KEY, "multiplicity", "start_s", "end_s"] and len(frame) == line.num_spans
    assert frame["rank"].tolist() == ["r"] * 3 and frame["occurrence"].tolist() == [0, 0, 1]  # the second op is alike
    assert line.to_dataframe("event")["at_s"].tolist() == [2.0, 3.0]
    with pytest.raises(KeyError):
        line.to_dataframe("request")
