"""Codecs: exact sizes on the wire, and errors within what their formats allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.sync.codecs import codec, codecs

#: Half a unit in the last place: bfloat16 keeps 8 bits of a number, int8 steps of 1/127 of a block's largest.
ERRORS = {"none": 0.0, "bf16": 2.0**-8, "int8": 0.5 / 127}


@pytest.mark.parametrize("name", list(codecs()))
@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_encoded_values_are_as_many_bytes_as_the_codec_says_and_come_back_within_its_error(name, n):
    one, x = codec(name), np.random.default_rng(n).normal(0, 3, n).astype(np.float32)
    wire = one.encode(x)
    assert wire.dtype == np.uint8 and len(wire) == one.wire_bytes(n, 4)
    back = one.decode(wire, n, x.dtype)
    assert back.dtype == x.dtype and back.shape == x.shape
    scale = (
        np.abs(x) if name == "bf16" else np.repeat([np.abs(b).max() for b in np.split(x, range(256, n, 256))], 256)[:n]
    )
    assert np.all(np.abs(back - x) <= ERRORS[name] * scale * (1 + 1e-6))
    assert one.exact == (name == "none")


def test_sizes_on_the_wire_by_hand():
    assert codec("none").wire_bytes(1000, 8) == 8000
    assert codec("bf16").wire_bytes(1000, 4) == 2000
    assert codec("int8").wire_bytes(1000, 4) == 1000 + 4 * 4  # four blocks of 256, the last one short


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


def test_a_block_of_zeros_stays_zero():
    one = codec("int8")
    assert not one.decode(one.encode(np.zeros(300, np.float32)), 300, np.dtype(np.float32)).any()


def test_an_unknown_codec_is_named_with_the_nearest():
    with pytest.raises(MeshwrightError, match=r"Y001.*int9"):
        codec("int9")
