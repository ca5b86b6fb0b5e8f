"""The task graph: order, deadlocks, text, hash, difference, and the rules a step graph must keep."""

import msgspec
import numpy as np
import pytest
from hypothesis import given

from meshwright.errors import MeshwrightError
from meshwright.graph import GraphBuilder, diff
from meshwright.lower.rules import broken as verify
from tests.random_graphs import graphs


def chain(key="forward"):
    """F on rank 0, a message, B on rank 1 that waits for both."""
    builder = GraphBuilder(("first", "second"))
    f = builder.add("F", key, builder.stream(0, "compute"), stage=0, microbatch=0)
    send = builder.add("send", "message", builder.stream(0, "pp_forward"), [f], stage=0, microbatch=0)
    builder.add("B", "backward", builder.stream(1, "compute"), [f, send], stage=0, microbatch=0)
    return builder


def test_tasks_come_out_in_topological_order_whatever_order_they_were_added_in():
    builder = GraphBuilder(("r",))
    last = builder.add("op", "last", builder.stream(0, "tp"))
    first = builder.add("op", "first", builder.stream(0, "compute"))
    builder.depend([last], [first])
    graph = builder.build()
    assert [graph.keys[k] for k in graph.cost_key] == ["first", "last"]
    assert verify(graph) == []


@given(graphs(lags=True))
def test_every_edge_without_lag_points_backwards_and_streams_keep_the_order_of_addition(case):
    graph, _ = case
    owner = np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr))
    assert (graph.dep[graph.dep_lag == 0] < owner[graph.dep_lag == 0]).all()
    added, task = graph.attribute("microbatch"), np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))
    for stream in range(len(graph.streams)):
        assert (np.diff(added[task[graph.member == stream]]) > 0).all()


def test_a_deadlock_is_found_when_the_graph_is_built_and_names_its_tasks():
    builder = GraphBuilder(("r",))
    stream = builder.stream(0, "compute")
    early = builder.add("B", "b", stream, stage=1, microbatch=7)
    late = builder.add("F", "f", stream, stage=1, microbatch=7)
    builder.depend([early], [late])
    with pytest.raises(MeshwrightError, match="2 of 2 tasks can never start") as caught:
        builder.build()
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.code == "G001"
    assert "B(stage 1, microbatch 7), F(stage 1, microbatch 7)" in diagnostic.place


def test_a_lagged_edge_may_point_forward():
    builder = GraphBuilder(("r",))
    compute = builder.add("op", "compute", builder.stream(0, "compute"))
    sync = builder.add("op", "sync", builder.stream(0, "dp"), [compute])
    builder.depend([compute], [sync], lag=1)
    assert builder.build().has_lag


def test_the_text_says_kind_place_attributes_key_and_edges():
    assert chain().build().text().splitlines() == [
        "0 F compute@first s0 mb0 [forward]",
        "1 send pp_forward@first s0 mb0 [message] <- 0",
        "2 B compute@second s0 mb0 [backward] <- 0 1",
    ]


def test_equal_graphs_have_equal_digests_and_no_difference():
    assert chain().build().digest() == chain().build().digest()
    assert diff(chain().build(), chain().build()) == []


def test_a_difference_names_the_lines():
    a, b = chain().build(), chain(key="slower forward").build()
    assert a.digest() != b.digest()
    assert diff(a, b) == ["-0 F compute@first s0 mb0 [forward]", "+0 F compute@first s0 mb0 [slower forward]"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dep": np.array([2, 0, 1], np.int32)}, "an edge without lag points forward"),
        ({"member_ptr": np.array([0, 1, 1, 2], np.int32), "member": np.array([0, 2])}, "a task occupies no stream"),
        ({"member_ptr": np.array([0, 2, 3, 4], np.int32), "member": np.array([0, 0, 1, 2])}, "one stream twice"),
        ({"kind": np.array([0, 5, 0], np.uint8)}, "a forward has no backward"),
    ],
)
def test_a_broken_step_graph_is_caught(change, rule):
    graph = chain().build()
    assert verify(graph) == []
    broken = verify(msgspec.structs.replace(graph, **change))
    assert len(broken) == 1 and rule in broken[0]


def test_memory_events_follow_their_tasks_through_the_sort():
    builder = GraphBuilder(("r",))
    last = builder.add("op", "last", builder.stream(0, "tp"))
    first = builder.add("op", "first", builder.stream(0, "compute"))
    builder.depend([last], [first])
    builder.memory([last], 0, True, -8.0, "activations")
    memory = builder.build().memory
    assert (memory.task.tolist(), memory.num_bytes.tolist(), memory.categories) == ([1], [-8.0], ("activations",))
