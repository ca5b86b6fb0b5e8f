"""Sums divided among replicas by a linear program of the widths of their links, and the steps that come of it."""

import itertools

import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.lower.meeting import meeting
from meshwright.lower.place import Mesh
from meshwright.plan import check, parse
from meshwright.simulate.divide import shares
from meshwright.sync import divided
from meshwright.sync.policy import read

MODEL = mw.load_model("llama3.2-1b")


def ports(widths) -> np.ndarray:
    """Seconds for a gigabyte through each of n ports where one replica sums all: 1 + (n - 2) part_i, over the width."""
    n = len(widths)
    return (np.ones((n, n)) + (n - 2) * np.eye(n)) / np.array(widths)[:, None]


def predicted(where: str, words: str):
    cluster = mw.load_cluster(where)
    asked = mw.parse_train(f"batch={cluster.num_devices},seq=2048")
    return mw.predict(MODEL, cluster, asked, parse(f"mb1 full sync={words}"), detail=False)


def test_equal_peers_sum_alike_and_one_as_wide_as_all_others_sums_all():
    assert shares(ports([1, 1, 1, 1]))[0] == pytest.approx([0.25] * 4)
    assert shares(ports([100, 1, 1, 1, 1]))[0] == pytest.approx([1, 0, 0, 0, 0], abs=1e-6)
    assert shares(ports([8, 8]))[0] == pytest.approx([0.5, 0.5])  # either way as many bytes: the largest part is least


def test_no_division_of_a_grid_is_better_than_the_programs():
    """All divisions by twelfths among four ports of unequal widths."""
    through = ports([5, 3, 2, 1])
    grid = [np.array(p) / 12 for p in itertools.product(range(13), repeat=4) if sum(p) == 12]
    parts, best = shares(through)
    assert best <= min((through @ p).max() for p in grid) + 1e-9
    assert (through @ parts).max() == pytest.approx(best, rel=1e-6)
    assert best == pytest.approx(1.0)  # the narrowest sends its values and gets the sums, and sums nothing


def test_a_prediction_says_who_sums_and_the_wide_port_shortens_the_step():
    """Of five replicas behind 10 Gbit/s and one of them 100: equal parts would pass 8/5 of the values, a server 1."""
    chosen = predicted("1x1xh100,100gbe + 4x1xh100,10gbe", "dedloc")
    assert "sync=dedloc:sums=1/0x4" in chosen.plan.text() and chosen.choice.trainers == 4
    assert chosen.choice.bound_s == pytest.approx(0.8) and chosen.choice.gb_s == chosen.choice.server_s == 0.8
    assert chosen.choice.even_s == pytest.approx(1.6 * 0.8)
    even = predicted("1x1xh100,100gbe + 4x1xh100,10gbe", "dedloc:sums=1x5")
    assert chosen.step_time_s < even.step_time_s


def test_between_equal_peers_messages_are_those_of_an_all_reduce():
    """2 (n - 1) / n of the bytes through every port, the eighth that goes before and after others apart."""
    n, size = 4, 8 * divided.PIECE_BYTES
    sent = np.zeros(n)
    for num_bytes, parts in divided.rounds(size, (1,) * n):
        for source, _, share in parts.messages():
            sent[source] += share * num_bytes
    assert sent == pytest.approx([2 * (n - 1) / n * size] * n)


def test_a_server_receives_from_all_and_then_sends_to_all():
    """Three whole messages at its port each way, whoever prices the link; each other replica has one."""
    cluster = mw.load_cluster("4x1xh100,10gbe")
    mesh = Mesh(parse("dp4"), cluster)
    rounds = [parts for _, parts in divided.rounds(1e6, (1, 0, 0, 0))]
    met = [meeting(mesh, mesh.among("data"), 0, list(parts.messages())) for parts in rounds]
    assert [(one.fan, one.hops[-1].messages) for one in met] == [(3, 3), (3, 3)]


def test_parts_are_words_that_read_back():
    assert divided.read("3/1x2/0") == (3, 1, 1, 0) and divided.written((3, 1, 1, 0)) == "3/1x2/0"
    assert divided.read("0x4") is None and divided.read("1//2") is None
    assert divided.read("1x0/1") is None and divided.read("1x99999/1") is None  # no copies, and too many
    assert divided.rounded([0.5, 0.25, 0.25, 0]) == (2, 1, 1, 0)
    assert divided.bounds(10, (3, 1, 1, 0)) == (0, 6, 8, 10, 10)
    assert read("dedloc:sums=3/1/1/0").text == "dedloc:sums=3/1x2/0" and read("dedloc:sums=1x2").exact
    assert "group all in parts 3/1x2/0" in str(read("dedloc:sums=3/1/1/0"))
    with pytest.raises(MeshwrightError, match="a part for each replica"):
        read("dedloc:sums=x")


@pytest.mark.parametrize(
    ["plan", "said"],
    [
        ("dp4 mb1 sync=dedloc:sums=1x3", "the parts of 3 replicas, and the plan has 4"),
        ("dp4 mb1 zero1 sync=dedloc", "ranks of sharded states"),
        ("tp4 mb1 sync=dedloc", "the plan has one"),
    ],
)
def test_sums_that_cannot_be_divided_are_refused(plan, said):
    found = check(parse(plan).on(4), MODEL, mw.load_cluster("4x1xh100"), mw.parse_train("batch=4,seq=512"))
    assert [one.code for one in found] == ["Y003"] and said in found[0].message
