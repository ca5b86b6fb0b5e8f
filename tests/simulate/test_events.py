"""The event engine against hand calculations, its plain reference and the in-order engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import Costs
from meshwright.graph import GraphBuilder
from meshwright.simulate import engine, events
from meshwright.simulate.events import Transfers
from meshwright.simulate.step import simulate
from tests.random_graphs import DURATIONS, graphs
from tests.random_plans import legal_plans

ONE_EACH = np.ones(1)


def apart(count, *, stream_of=None):
    """`count` tasks without edges, each on its own rank's compute stream (or on the one given), one key."""
    builder = GraphBuilder([f"rank {i}" for i in range(count)])
    for i in range(count):
        rank = i if stream_of is None else stream_of[i]
        builder.add("send", "key", builder.stream(rank, "compute"), microbatch=i)
    return builder.build()


def ends(count, capacity, flows, latency=0.0):
    graph = apart(count)
    transfers = Transfers.of(count, capacity, flows)
    return events.times(graph, np.array([latency]), transfers=transfers)[1].tolist()


def test_two_equal_flows_on_one_link_take_twice_as_long():
    assert ends(1, [10.0], {0: (100.0, [0])}) == [10.0]
    assert ends(2, [10.0], {0: (100.0, [0]), 1: (100.0, [0])}) == [20.0, 20.0]


def test_a_flow_speeds_up_when_the_other_ends():
    # both at 5 B/s until the short one's 50 B are through at 10 s; the long one's last 50 B then take 5 s
    assert ends(2, [10.0], {0: (50.0, [0]), 1: (100.0, [0])}) == [10.0, 15.0]


def test_latency_comes_before_the_bytes_and_uses_no_link():
    # flow 0 starts to move at 2 s, as does flow 1
    assert ends(2, [10.0], {0: (100.0, [0]), 1: (100.0, [0])}, latency=2.0) == [22.0, 22.0]


def test_a_transfer_without_links_costs_its_latency():
    assert ends(1, [10.0], {0: (100.0, [])}, latency=2.0) == [2.0]


def test_a_link_passed_twice_gives_half_the_rate():
    assert ends(1, [10.0], {0: (100.0, [0, 0])}) == [20.0]


def test_max_min_shares_are_those_of_the_line_network():
    # Bertsekas and Gallager's line: one flow over both links, one more on the first, two more on the second.
    # The second link (capacity 1) has three flows: a third each. The first (capacity 1) then leaves 2/3.
    crossed = {0: [0, 1], 1: [0], 2: [1], 3: [1]}
    assert events.fair_rates(crossed, [1.0, 1.0]) == pytest.approx({0: 1 / 3, 1: 2 / 3, 2: 1 / 3, 3: 1 / 3})
    assert ends(4, [1.0, 1.0], {f: (6.0, links) for f, links in crossed.items()}) == pytest.approx([18, 9, 18, 18])


def test_a_fat_link_gives_what_the_thin_one_does_not_let_through():
    # link 0 carries 10, link 1 carries 2: the flow over both gets 2, the other 8
    assert ends(2, [10.0, 2.0], {0: (20.0, [0, 1]), 1: (80.0, [0])}) == [10.0, 10.0]


@given(st.data())
def test_rates_fill_the_links_and_no_one_can_gain_without_a_slower_one_losing(data):
    # the definition of max-min fairness: every flow has a full link on which nobody is faster
    num_links, num_flows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    capacity = data.draw(st.lists(st.floats(0.5, 100), min_size=num_links, max_size=num_links))
    links = st.lists(st.integers(0, num_links - 1), min_size=1, max_size=3, unique=True)
    crossed = {f: data.draw(links) for f in range(num_flows)}
    rates = events.fair_rates(crossed, capacity)
    load = [sum(rates[f] for f in crossed if link in crossed[f]) for link in range(num_links)]
    assert all(used <= have * (1 + 1e-9) for used, have in zip(load, capacity))
    for flow, own in crossed.items():
        assert any(
            load[link] == pytest.approx(capacity[link])
            and all(rates[f] <= rates[flow] * (1 + 1e-9) for f in crossed if link in crossed[f])
            for link in own
        )


def two_ranks():
    """Rank 0 runs x (1 s) and y (2 s); z (3 s) on rank 1 waits for y."""
    builder = GraphBuilder(("0", "1"))
    x = builder.add("op", "x", builder.stream(0, "compute"))
    y = builder.add("op", "y", builder.stream(0, "compute"))
    builder.add("op", "z", builder.stream(1, "compute"), [y])
    assert (x, y) == (0, 1)
    return builder.build(), np.array([1.0, 2.0, 3.0])


def test_the_makespan_depends_on_who_goes_first_as_counted_by_hand():
    graph, durations = two_ranks()
    policies = ("priority", "in_order")
    order = [graph.keys[k] for k in graph.cost_key]
    first_x = np.array([{"x": 1, "y": 0, "z": 0}[name] for name in order])
    first_y = np.array([{"x": 0, "y": 1, "z": 0}[name] for name in order])
    # x, y, z one after the other: 1 + 2 + 3; y first: 2 + 3 with x beside z
    assert events.times(graph, durations, policies=policies, priority=first_x)[1].max() == 6.0
    assert events.times(graph, durations, policies=policies, priority=first_y)[1].max() == 5.0
    assert events.times(graph, durations)[1].max() == 6.0


def test_a_priority_stream_takes_what_is_ready_and_an_in_order_stream_waits():
    builder = GraphBuilder(("0", "1"))
    late = builder.add("op", "slow", builder.stream(1, "compute"))
    builder.add("op", "fast", builder.stream(0, "compute"), [late])
    builder.add("op", "fast", builder.stream(0, "compute"))
    graph, durations = builder.build(), np.array([4.0, 1.0])
    assert events.times(graph, durations)[1].max() == 6.0
    assert events.times(graph, durations, policies=("priority", "priority"))[1].max() == 5.0


def test_nothing_is_preempted_or_reserved():
    # the urgent task becomes ready at 1 s, when the stream has just begun 5 s of something else
    builder = GraphBuilder(("0", "1"))
    first = builder.add("op", "one", builder.stream(1, "compute"))
    long = builder.add("op", "five", builder.stream(0, "compute"))
    urgent = builder.add("op", "one", builder.stream(0, "compute"), [first])
    graph = builder.build()
    start, _ = events.times(graph, np.array([1.0, 5.0]), policies=("priority",) * 2, priority=np.array([0, 0, 9]))
    assert (long, urgent) == (1, 2)
    assert sorted(start.tolist()) == [0.0, 0.0, 5.0]


def test_ties_go_to_the_lower_number():
    graph = apart(3, stream_of=[0, 0, 0])
    start, _ = events.times(graph, ONE_EACH, policies=("priority",))
    assert start.tolist() == [0.0, 1.0, 2.0]


@given(graphs(lags=True))
def test_in_order_without_transfers_it_is_the_in_order_engine_exactly(case):
    graph, durations = case
    durations = np.array(durations) / 3  # not binary fractions: equal to the last bit all the same
    for fast, plain in zip(events.times(graph, durations), engine.times(graph, durations)):
        np.testing.assert_array_equal(fast, plain)


@settings(max_examples=40)
@given(legal_plans())
def test_on_the_step_of_any_plan_it_is_the_in_order_engine_exactly(question):
    run = simulate(*question, Costs())
    found = events.times(run.lowered.graph, run.priced.durations)
    np.testing.assert_array_equal(found[0], run.start_s)
    np.testing.assert_array_equal(found[1], run.end_s)


@st.composite
def questions(draw):
    """A graph with policies, priorities and transfers."""
    graph, durations = draw(graphs())
    streams, n = len(graph.streams), graph.num_tasks
    policies = draw(st.lists(st.sampled_from(events.POLICIES), min_size=streams, max_size=streams))
    priority = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    capacity = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=4))
    links = st.lists(st.integers(0, len(capacity) - 1), max_size=3)
    flow = st.tuples(DURATIONS, links)
    flows = draw(st.dictionaries(st.integers(0, n - 1), flow))
    asked = {"policies": policies, "priority": np.array(priority), "transfers": Transfers.of(n, capacity, flows)}
    return graph, np.array(durations), asked


@settings(max_examples=300)
@given(questions())
def test_the_compiled_loop_equals_the_plain_reference_to_the_last_bit(question):
    graph, durations, asked = question
    fast, plain = events.times(graph, durations, **asked), events.reference_times(graph, durations, **asked)
    np.testing.assert_array_equal(fast[0], plain[0])
    np.testing.assert_array_equal(fast[1], plain[1])


@given(questions())
def test_no_stream_is_used_twice_and_no_task_starts_before_what_it_needs(question):
    graph, durations, asked = question
    start, end = events.times(graph, durations, **asked)
    task = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))
    for stream in range(len(graph.streams)):
        mine = task[graph.member == stream]
        mine = mine[np.lexsort((end[mine], start[mine]))]
        assert (start[mine][1:] >= end[mine][:-1]).all()
    owner = np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr))
    assert (start[owner] >= end[graph.dep]).all()
    assert (end - start >= durations[graph.cost_key] - 1e-9).all()


def test_many_flows_over_one_spine_take_what_the_spine_takes():
    # 200 senders with a port each behind one spine of a tenth of their sum: 20 times slower than alone
    count = 200
    flows = {i: (10.0, [i, count]) for i in range(count)}
    assert ends(count, [10.0] * count + [count * 10.0 / 20], flows) == pytest.approx([20.0] * count)
