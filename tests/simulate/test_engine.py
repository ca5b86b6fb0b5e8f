"""The in-order engine against its plain reference, hand calculations and unrolled graphs."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.graph import GraphBuilder
from meshwright.simulate.engine import makespans, reference_times, steady_state, times
from tests.random_graphs import DURATIONS, graphs


@given(graphs(lags=True))
def test_the_compiled_pass_equals_the_plain_reference(case):
    graph, durations = case
    fast, plain = times(graph, np.array(durations)), reference_times(graph, np.array(durations))
    np.testing.assert_array_equal(fast[0], plain[0])
    np.testing.assert_array_equal(fast[1], plain[1])


@given(graphs(), st.data())
def test_a_batch_of_draws_gives_the_makespan_of_each(case, data):
    graph, _ = case
    row = st.lists(DURATIONS, min_size=len(graph.keys), max_size=len(graph.keys))
    draws = np.array(data.draw(st.lists(row, min_size=1, max_size=4)))
    assert makespans(graph, draws).tolist() == [times(graph, draw)[1].max() for draw in draws]


def replica(lag):
    """One step of a replica: compute, then synchronise on another queue; compute uses what was synchronised `lag`
    steps ago. Lag 1 waits for the last step's result; lag 2 is a delay of one step."""
    builder = GraphBuilder(("replica",))
    compute = builder.add("op", "compute", builder.stream(0, "compute"))
    sync = builder.add("all_reduce", "sync", builder.stream(0, "dp"), [compute])
    builder.depend([compute], [sync], lag)
    return builder.build()


@pytest.mark.parametrize(("compute", "sync"), [(3.0, 2.0), (3.0, 5.0), (3.0, 3.0)])
def test_a_delay_of_one_step_hides_the_shorter_of_compute_and_exchange(compute, sync):
    for lag, period in ((1, compute + sync), (2, max(compute, sync))):
        ends = steady_state(replica(lag), np.array([compute, sync]), 12)
        assert ends[0] == compute + sync  # the cold step hides nothing
        np.testing.assert_allclose(np.diff(ends)[2:], period)


def test_a_checkpoint_every_step_that_may_fall_one_behind_costs_its_longest_part():
    # copy out (1 s) then write (4 s); the next step's copy waits until the last write is done: period 1 + 4
    builder = GraphBuilder(("r",))
    step = builder.add("op", "step", builder.stream(0, "compute"))
    copy = builder.add("copy", "copy", builder.stream(0, "copy"), [step])
    write = builder.add("host", "write", builder.stream(0, "host"), [copy])
    builder.depend([copy], [write], 1)
    ends = steady_state(builder.build(), np.array([2.0, 1.0, 4.0]), 8)
    np.testing.assert_allclose(np.diff(ends), 5.0)


@given(graphs(lags=True), st.integers(1, 6))
def test_a_template_runs_as_its_unrolled_graph(case, num_steps):
    graph, durations = case
    durations = np.array(durations)
    n = graph.num_tasks
    unrolled = msgspec.structs.replace(
        graph,
        member_ptr=_repeat_ptr(graph.member_ptr, num_steps),
        member=np.tile(graph.member, num_steps),
        cost_key=np.tile(graph.cost_key, num_steps),
        **_unrolled_edges(graph, num_steps),
        kind=np.tile(graph.kind, num_steps),
    )
    _, end = reference_times(unrolled, durations)
    np.testing.assert_allclose(steady_state(graph, durations, num_steps), end.reshape(num_steps, n).max(axis=1))


def _repeat_ptr(ptr, times):
    return np.concatenate([[0], np.cumsum(np.tile(np.diff(ptr), times))]).astype(np.int32)


def _unrolled_edges(graph, num_steps):
    """Edges of every step; those that reach before the first step are dropped."""
    dep, ptr = [], [0]
    for step in range(num_steps):
        for task in range(graph.num_tasks):
            for edge in range(graph.dep_ptr[task], graph.dep_ptr[task + 1]):
                if step >= graph.dep_lag[edge]:
                    dep.append((step - graph.dep_lag[edge]) * graph.num_tasks + graph.dep[edge])
            ptr.append(len(dep))
    return {"dep": np.array(dep, np.int32), "dep_ptr": np.array(ptr, np.int32), "dep_lag": np.zeros(len(dep), np.int32)}
