"""Networks as their own measurements tell them: what was measured is predicted, and smaller rings take its steps."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Costs, load_framework
from meshwright.cost.network import Network
from meshwright.lower.place import Mesh
from meshwright.plan import parse
from meshwright.spec import cluster as clusters
from meshwright.work import REACHED_BYTES, Collective

NODES, RANKS = 64, 512


def measured(name=f"{NODES}xp5", **busbw):
    return clusters.load(name).reaching(busbw)


def priced(cluster, op, plan=f"dp{RANKS}", axis="dp", num_bytes=REACHED_BYTES):
    work = Collective(op=op, num_bytes=num_bytes, group=Mesh(parse(plan), cluster).group(axis))
    return Network()(work, cluster.islands[0].device)


def busbw(op, seconds, ranks=RANKS):
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks * REACHED_BYTES / seconds / 1e9


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@given(reached=st.floats(0.5, 120))
def test_a_gather_reaches_what_was_measured(op, reached):
    assert busbw(op, priced(measured(**{op: reached}), op).seconds) == pytest.approx(reached, rel=0.02)


@given(reached=st.floats(0.5, 250))
def test_an_all_reduce_reaches_what_was_measured_by_rings_or_by_trees(reached):
    cluster = measured(all_reduce=reached, all_gather=max(0.5, reached / 2))
    assert busbw("all_reduce", priced(cluster, "all_reduce").seconds) == pytest.approx(reached, rel=0.05)


def test_without_a_measurement_the_catalogs_fabric_answers_as_before():
    assert priced(measured(), "all_gather") == priced(clusters.load(f"{NODES}xp5"), "all_gather")
    assert "as measured" not in priced(measured(), "all_gather").source
    assert "as measured on this cluster over 512: all_gather 6.5 GB/s" in (
        priced(measured(all_gather=6.5), "all_gather").source
    )


def test_a_ring_of_fewer_ranks_takes_as_many_of_the_steps():
    """A step's own time is 79 us: 512 ranks take 511 of them for 40.6 ms, 64 ranks one on each node 63, 16 ranks 15."""
    step = (REACHED_BYTES / 6.5e9 - REACHED_BYTES / 0.8 / 400e9) / RANKS
    slow = measured(all_gather=6.5)
    for plan, axis, ranks in (("tp8 dp64", "dp", 64), ("tp16 dp32", "tp", 16)):
        small = priced(slow, "all_gather", plan, axis, num_bytes=1.0)
        assert small.seconds == pytest.approx((ranks - 1) * step, rel=0.15)


def test_slow_rings_say_nothing_of_what_stays_inside_a_node():
    slow, usual = measured(all_gather=1.0, all_reduce=2.0), measured()
    for op in ("all_gather", "all_reduce"):
        assert priced(slow, op, "tp8 dp64", "tp") == priced(usual, op, "tp8 dp64", "tp")


@pytest.mark.parametrize("known", [("all_reduce",), ("all_gather", "all_reduce"), ("all_gather",)], ids="+".join)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("64xa100-80", (20.0, 80.0)),
        ("512xh100", (30.0, 150.0)),
        (f"{NODES}xp5", (13.0, 100.0)),
        ("16xp5", (40.0, 160.0)),
    ],
)
def test_other_networks_and_partial_measurements_are_reached_too(name, values, known):
    """Within 7%: a tree's latency and a protocol's start are the fabric's own."""
    ranks = clusters.load(name).num_devices
    for value in values:
        cluster = measured(name, **dict.fromkeys(known, value))
        for op in known:
            told = busbw(op, priced(cluster, op, f"dp{ranks}").seconds, ranks)
            assert told == pytest.approx(value, rel=0.07), op


def test_what_was_measured_says_nothing_of_operations_it_does_not_tell_of():
    """An all-reduce tells nothing of messages; gathers and scatters tell of each other."""
    told, usual = measured(all_reduce=100.0), measured()
    for op in ("send", "all_to_all"):
        asked, plain = (priced(c, op, "tp8 dp64", "dp") for c in (told, usual))
        assert asked.sigma == plain.sigma and "as measured" not in asked.source
    assert priced(told, "all_reduce").sigma < priced(usual, "all_reduce").sigma
    assert "as measured" in priced(measured(all_gather=20.0), "reduce_scatter").source


def test_a_level_without_latency_is_priced():
    cluster = measured(all_gather=20.0, all_reduce=40.0)
    (island,) = cluster.islands
    levels = (*island.levels[:-1], msgspec.structs.replace(island.levels[-1], latency_us=0))
    still = msgspec.structs.replace(cluster, islands=(msgspec.structs.replace(island, levels=levels),))
    assert priced(still, "all_gather").seconds > 0


def islands_apart(latency_us, **busbw):
    """Two islands of two EFA nodes each, joined by a link with a latency of its own."""
    cluster = clusters.load("2xp5 + 2xp5")
    (joined,) = cluster.interconnect
    joined = msgspec.structs.replace(joined, latency_us=latency_us)
    return msgspec.structs.replace(cluster.reaching(busbw), interconnect=(joined,))


@pytest.mark.parametrize("reached", [{}, {"all_gather": 150.0, "all_reduce": 300.0}], ids=("catalog", "measured"))
def test_a_link_beyond_what_was_measured_keeps_its_latency(reached):
    """The ring crosses the link between the islands once: 100 ms."""
    far, near = (islands_apart(latency, **reached) for latency in (100_000.0, 10.0))
    for op in ("all_gather", "all_reduce"):
        times = [priced(cluster, op, "dp32", num_bytes=1e6).seconds for cluster in (far, near)]
        assert times[0] > 0.1 > 10 * times[1]


def test_steps_are_slower_beside_training_where_they_were_measured_alone():
    framework = load_framework("nanotron")
    alone, beside = (Costs(f, (Network(),)) for f in (load_framework("default"), framework))
    for cluster, factor in ((measured(all_gather=10.0), framework.ring_steps), (measured(), 1.0)):
        group = Mesh(parse("tp16 dp32"), cluster).group("tp")
        work = Collective(op="all_gather", num_bytes=1.0, group=group)
        times = [costs.price(work, cluster.islands[0].device).seconds for costs in (alone, beside)]
        assert times[1] == pytest.approx(factor * times[0], rel=0.05)
