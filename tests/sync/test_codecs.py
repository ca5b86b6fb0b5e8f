"""Codecs: exact sizes on the wire, and errors within what their formats allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.sync.codecs import codec, codecs


def in_blocks(x):
    """The largest magnitude of each value's block of 256."""
    return np.repeat([np.abs(b).max() for b in np.split(x, range(256, len(x), 256))], 256)[: len(x)]


#: How far a value may come back from what was encoded: bfloat16 keeps 8 bits of a number, int8 steps of 1/127 of a
#: block's largest, sigma8 half of one of 256 levels over 12 standard deviations, fp4 a power of two that is nearest in
#: logarithm, or half of the smallest in logarithm, 2^-6.5 of the largest, where that becomes zero.
ERRORS = {
    "none": lambda x: 0 * np.abs(x),
    "bf16": lambda x: np.abs(x) * 2.0**-8,
    "int8": lambda x: in_blocks(x) * 0.5 / 127,
    "sigma8": lambda x: np.full(len(x), 6 * x.std() / 256) + 1e-6 * np.abs(x).max(),
    "fp4": lambda x: np.maximum(np.abs(x) * (2**0.5 - 1), np.abs(x).max() * 2.0**-6.5),
}


@pytest.mark.parametrize("name", list(codecs()))
@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_encoded_values_are_as_many_bytes_as_the_codec_says_and_come_back_within_its_error(name, n):
    one, x = codec(name), np.random.default_rng(n).normal(0, 3, n).astype(np.float32)
    wire = one.encode(x)
    assert wire.dtype == np.uint8 and len(wire) == one.wire_bytes(n, 4)
    back = one.decode(wire, n, x.dtype)
    assert back.dtype == x.dtype and back.shape == x.shape
    assert np.all(np.abs(back - x) <= ERRORS[name](x) * (1 + 1e-6))
    assert one.exact == (name == "none")


def test_sizes_on_the_wire_by_hand():
    assert codec("none").wire_bytes(1000, 8) == 8000
    assert codec("bf16").wire_bytes(1000, 4) == 2000
    assert codec("int8").wire_bytes(1000, 4) == 1000 + 4 * 4  # four blocks of 256, the last one short
    assert codec("sigma8").wire_bytes(1000, 4) == 1000 + 8  # the lowest level and the width
    assert codec("fp4").wire_bytes(1001, 4) == 501 + 4  # two a byte, and the largest


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_rounds_as_torch_does(value):
    import torch

    want = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16).to(torch.float32).numpy()
    one = codec("bf16")
    assert one.decode(one.encode(np.array([value], np.float32)), 1, np.dtype(np.float32)) == want


def test_bf16_keeps_what_is_no_number():
    one = codec("bf16")
    back = one.decode(one.encode(np.array([np.nan, np.inf, -np.inf], np.float32)), 3, np.dtype(np.float32))
    assert np.isnan(back[0]) and back[1] == np.inf and back[2] == -np.inf


@pytest.mark.parametrize("name", ["int8", "fp4"])
def test_a_block_of_zeros_stays_zero(name):
    one = codec(name)
    assert not one.decode(one.encode(np.zeros(300, np.float32)), 300, np.dtype(np.float32)).any()


def test_an_unknown_codec_is_named_with_the_nearest():
    with pytest.raises(MeshwrightError, match=r"Y001.*int9"):
        codec("int9")


def test_four_bits_are_signed_powers_of_two_below_the_largest():
    one, x = codec("fp4"), np.array([-8.0, 4.1, 3.0, -1.0, 0.125, 0.05, 0.0])
    # by hand: 3 is nearer to 4 in logarithm; 8 / 2^6 is the smallest, and 0.05 rounds to a smaller one
    assert one.decode(one.encode(x), 7, x.dtype).tolist() == [-8.0, 4.0, 4.0, -1.0, 0.125, 0.0, 0.0]


def test_what_lies_beyond_six_deviations_is_clipped():
    one, x = codec("sigma8"), np.append(np.tile([-1.0, 1.0], 500), 100.0)
    back = one.decode(one.encode(x), len(x), x.dtype)
    edge = x.mean() + 6 * x.std()
    assert x[-1] > edge and edge * 0.9 < back[-1] < edge
