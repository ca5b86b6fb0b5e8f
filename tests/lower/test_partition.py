"""Which layers a stage holds when nobody says: evenly, or as nanotron's thresholds have it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.lower.partition import by_thresholds, even
from meshwright.spec.architecture import stack
from meshwright.spec.dimensions import transformer


def model(layers, **more):
    return transformer(layers=layers, hidden=64, heads=4, vocab=128, ffn=128, gated=True, **more)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        # eight shares of three: the third layer meets the first share and does not pass it, so a fourth goes there
        (24, 8, (4, 3, 3, 3, 3, 3, 3, 2)),
        (16, 2, (9, 7)),
        # shares of 2.5: 3 layers pass the first, 5 meet the second, 6 pass it
        (10, 4, (3, 3, 2, 2)),
        (4, 4, (2, 1, 1, 0)),
        (7, 1, (7,)),
    ],
)
def test_a_stage_is_full_once_its_layers_cost_more_than_its_share(layers, stages, counts):
    assert by_thresholds(model(layers), stages) == counts


def test_a_layer_counts_by_its_matrices():
    # a layer costs 4 * 64 * 64 + 3 * ffn * 64; the first has an MLP four times as wide as the others
    wide, thin = transformer(layers=1, hidden=64, heads=4, vocab=128, ffn=512, gated=True), model(1)
    blocks, pattern = stack([wide.block(0), *[thin.block(0)] * 5])
    mixed = msgspec.structs.replace(thin, blocks=blocks, pattern=pattern)
    # 114,688 and five of 40,960: 319,488 in all, half of it 159,744: reached by the first three (196,608)
    assert by_thresholds(mixed, 2) == (3, 3)
    assert by_thresholds(model(6), 2) == (4, 2)


SIZES = st.integers(1, 32).flatmap(lambda stages: st.tuples(st.integers(stages, 96), st.just(stages)))


@given(SIZES)
def test_every_layer_is_held_once_and_the_first_stage_holds_the_most(drawn):
    layers, stages = drawn
    counts = by_thresholds(model(layers), stages)
    assert sum(counts) == layers and len(counts) == stages
    assert counts[0] == max(counts) == min(layers, layers // stages + 1)
    # equal layers: stage s ends behind the first layer that passes s + 1 shares
    ends = [min(layers, layers * (s + 1) // stages + 1) for s in range(stages)]
    assert [sum(counts[: s + 1]) for s in range(stages)] == ends


@given(SIZES)
def test_even_stages_differ_by_a_layer_and_the_ends_are_the_light_ones(drawn):
    layers, stages = drawn
    counts = even(layers, stages)
    assert sum(counts) == layers and max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
