"""Where a group of ranks lies on the tree, against an oracle that walks explicit rank lists."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.spec.cluster import Cluster, Island, Level, load, load_device

H100 = load_device("h100")


def island(name, arities):
    levels = tuple(
        Level(name=f"l{i}", arity=a, gb_s=100, latency_us=1, topology="switch") for i, a in enumerate(arities)
    )
    return Island(name=name, device=H100, levels=levels, node=H100.node)


def cluster(trees, joins=()):
    levels = tuple(Level(name=f"j{i}", arity=a, gb_s=10, latency_us=9, topology="switch") for i, a in enumerate(joins))
    return Cluster(name="t", islands=tuple(island(str(i), t) for i, t in enumerate(trees)), interconnect=levels)


def places(trees, joins):
    """Every rank's child numbers, inner to outer, written out: the slow way the product code avoids."""
    depth = max(len(tree) for tree in trees)
    for number, tree in enumerate(trees):
        outer, rest = [], number
        for arity in joins:
            outer.append(rest % arity)
            rest //= arity
        for coordinates in itertools.product(*(range(a) for a in reversed(tree))):
            yield (*reversed(coordinates), *(0 for _ in range(depth - len(tree))), *outer)


def oracle(trees, joins, start, stride, size):
    """Largest number of distinct children under one parent, level by level."""
    everywhere = list(places(trees, joins))
    group = [everywhere[start + k * stride] for k in range(size)]
    shape = []
    for level in range(len(group[0])):
        children = {}
        for place in group:
            children.setdefault(place[level + 1 :], set()).add(place[level])
        shape.append(max(len(found) for found in children.values()))
    return tuple(shape)


arities = st.lists(st.integers(1, 6), min_size=1, max_size=4)
tree_sets = st.one_of(
    arities.map(lambda tree: ([tree], ())),
    st.tuples(st.lists(arities, min_size=2, max_size=3)).map(lambda drawn: (drawn[0], (len(drawn[0]),))),
    st.lists(arities, min_size=4, max_size=4).map(lambda trees: (trees, (2, 2))),
)


@settings(max_examples=400, deadline=None)
@given(tree_sets, st.data())
def test_group_shape_equals_counting_over_explicit_ranks(tree_set, data):
    trees, joins = tree_set
    built = cluster(trees, joins)
    start = data.draw(st.integers(0, built.num_devices - 1))
    stride = data.draw(st.integers(1, max(1, built.num_devices)))
    size = data.draw(st.integers(1, (built.num_devices - 1 - start) // stride + 1))
    assert built.group_shape(start, stride, size) == oracle(trees, joins, start, stride, size)


@settings(max_examples=100, deadline=None)
@given(tree_sets)
def test_location_numbers_ranks_innermost_first_island_by_island(tree_set):
    trees, joins = tree_set
    built = cluster(trees, joins)
    expected = [
        (*reversed(coordinates), number)
        for number, tree in enumerate(trees)
        for coordinates in itertools.product(*(range(a) for a in reversed(tree)))
    ]
    assert [built.location(rank) for rank in range(built.num_devices)] == expected


def test_the_documented_shapes_on_8_device_nodes():
    nodes = load("64xh100")
    assert nodes.group_shape(0, 1, 16) == (8, 2)
    assert nodes.group_shape(0, 8, 4) == (1, 4)
    assert nodes.group_shape(3, 1, 1) == (1, 1)
    assert nodes.location(19) == (3, 2, 0)


def test_a_group_across_a_node_boundary_counts_the_fuller_node():
    # ranks 6..13 on nodes of 8: two on the first node, six on the second
    assert load("64xh100").group_shape(6, 1, 8) == (6, 2)


def test_group_levels_names_only_levels_that_join_members():
    fabric = load("1024xh100")
    used = fabric.group_levels(0, 8, 64)
    assert [(level.name, members) for level, members in used] == [("rail", 32), ("spine", 2)]
    assert fabric.group_levels(5, 1, 1) == ()


def test_group_levels_across_islands_take_the_slower_island():
    joined = load("16xa100 + 16xh100")
    used = joined.group_levels(0, 1, 32)
    assert [(level.name, members) for level, members in used] == [("nvlink", 8), ("rail", 2), ("interconnect", 2)]
    assert [level.gb_s for level, _ in used[:2]] == [300, 200]
    assert [level.gb_s for level, _ in joined.group_levels(16, 1, 16)] == [450, 400]


def test_the_levels_above_a_rank_match_the_group_shape_where_islands_differ_in_depth():
    joined = load("8xa100 + 16xh100")
    assert [level.name for level in joined.levels_of(0)] == ["nvlink", "none", "interconnect"]
    assert [level.name for level in joined.levels_of(8)] == ["nvlink", "rail", "interconnect"]
    assert len(joined.group_shape(0, 1, 24)) == joined.depth == 3
    assert [(level.name, n) for level, n in joined.group_levels(0, 1, 24)] == [
        ("nvlink", 8),
        ("rail", 2),
        ("interconnect", 2),
    ]


def test_a_cluster_of_100000_devices_costs_no_more_than_its_levels():
    built = load("100000xh100")
    assert built.num_devices == 100_000
    assert built.group_shape(0, 8, 12_500) == (1, 12_500)
    assert built.group_shape(1, 7, 14_000) == oracle([[8, 12_500]], (), 1, 7, 14_000)
    assert len(msgspec.json.encode(built)) < 20_000


@pytest.mark.parametrize("rank", [-1, 64])
def test_a_rank_outside_the_cluster_is_refused(rank):
    with pytest.raises(MeshwrightError) as caught:
        load("64xh100").device_of(rank)
    assert "C010" in str(caught.value) and "ranks are 0 to 63" in str(caught.value)


def test_a_group_that_ends_outside_the_cluster_is_refused():
    with pytest.raises(MeshwrightError, match="rank 64 is not on cluster"):
        load("64xh100").group_shape(0, 8, 9)


@pytest.mark.parametrize(("stride", "size"), [(0, 2), (1, 0)])
def test_an_empty_group_is_refused(stride, size):
    with pytest.raises(MeshwrightError, match=r"error\[C011\]"):
        load("64xh100").group_shape(0, stride, size)
