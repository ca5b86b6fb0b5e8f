"""Flat runs of local tensors and boxes of published ones are the same elements."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.blocks import blocks, boxes, cover, overlaps, whole
from meshwright.run.pieces import Parameter, Part
from tests.run import shards


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_flat_run_is_its_boxes_in_order_and_they_are_few(shape, data):
    numel = torch.Size(shape).numel()
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    found = list(boxes(tuple(shape), start, stop))
    got = [numbers[tuple(map(slice, low, high))].reshape(-1) for low, high in found]
    assert torch.cat([torch.arange(0), *got]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_views_of_a_run_are_the_published_elements(seed, num_ranks):
    state = shards.values(seed)
    for held in shards.sharding(seed, num_ranks):
        for piece in shards.pieces(held, state):
            seen = 0
            for block in blocks(piece.parameter, piece.start, piece.stop):
                region = tuple(slice(o, o + n) for o, n in zip(block.low, block.size))
                view = block.view(piece.values, block.low, block.size)
                assert torch.equal(view, state[piece.key, block.name][region])
                seen += view.numel()
            assert seen == int((piece.values != -7).sum())


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_owners_hold_every_element_once_and_without_one_of_them_not(seed, num_ranks):
    held = [h for rank in shards.sharding(seed, num_ranks) for h in rank if h.owner]
    for name, shape in shards.NAMES.items():
        found = [b for h in held for b in blocks(h.parameter, h.start, h.stop) if b.name == name]
        assert cover(shape, found) == ""
        assert "elements held of" in cover(shape, found[1:])
        assert "twice" in cover(shape, [*found, found[seed % len(found)]])


def test_as_many_elements_as_there_are_but_some_twice_are_not_all():
    a = whole("a", (4,))
    halves = [a._replace(low=(0,), size=(2,)), a._replace(low=(1,), size=(2,))]
    assert cover((4,), halves) == "4 elements held of 4, some of them twice"
    assert cover((3,), [a]) == "a block lies outside [3]"


@given(st.integers(0, 10_000))
def test_overlaps_are_the_common_elements(seed):
    numbers = {n: torch.arange(torch.Size(s).numel()).view(s) for n, s in shards.NAMES.items()}
    one, other = (
        [b for r in shards.sharding(s, 2) for h in r for b in blocks(h.parameter, h.start, h.stop)]
        for s in (seed, seed + 1)
    )

    def elements(name, low, size):
        return set(numbers[name][tuple(slice(o, o + n) for o, n in zip(low, size))].reshape(-1).tolist())

    for target in one[:10]:
        sources = [b for b in other if b.name == target.name]
        found = {i: elements(target.name, low, size) for i, low, size in overlaps(target, sources)}
        for i, source in enumerate(sources):
            both = elements(target.name, target.low, target.size) & elements(source.name, source.low, source.size)
            assert found.get(i, set()) == both


def test_a_part_is_a_box():
    part = Part("a", (4,), (0,), (slice(0, 8, 2),))
    with pytest.raises(ValueError, match="not every 2th element"):
        blocks(Parameter("a", (8,), (part,)), 0, 8)


def test_a_fused_transposed_run_by_hand():
    # a 2 x 3 local tensor whose second column and third are the published 2 x 2, transposed
    part = Part("a", (2, 2), (0, 0), (slice(None), slice(1, 3)), True)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])  # elements 1..4 of [[0, 1, 2], [3, 4, 5]]
    found = blocks(Parameter("p", (2, 3), (part,)), 1, 5)
    got = {}
    for block in found:
        for place in itertools.product(*(range(o, o + n) for o, n in zip(block.low, block.size))):
            got[place] = block.view(values, place, (1, 1)).item()
    assert got == {(0, 0): 1.0, (1, 0): 2.0, (0, 1): 4.0}
