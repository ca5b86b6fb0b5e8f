"""Codecs: exact sizes on the wire, and errors within what their formats allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.sync.codecs import Factors, Tensor, codec, codecs
from meshwright.sync.codecs.powersgd import begun, summed


def in_blocks(x, size=256):
    """The largest magnitude of each value's block."""
    return np.repeat([np.abs(b).max() for b in np.split(x, range(size, len(x), size))], size)[: len(x)]


def spans(x, size=1024):
    """The range of each value's bucket."""
    ranges = [np.ptp(np.append(b, [0.0] * (len(b) < size))) for b in np.split(x, range(size, len(x), size))]
    return np.repeat(ranges, size)[: len(x)]


#: How far a value may come back from what was encoded: bfloat16 keeps 8 bits of a number, int8 steps of 1/127 of a
#: block's largest, sigma8 half of one of 256 levels over 12 standard deviations, fp4 a power of two that is nearest in
#: logarithm, or half of the smallest in logarithm, 2^-6.5 of the largest, where that becomes zero.
ERRORS = {
    "none": lambda x: 0 * np.abs(x),
    "bf16": lambda x: np.abs(x) * 2.0**-8,
    "int8": lambda x: in_blocks(x) * 0.5 / 127,
    "sigma8": lambda x: np.full(len(x), 6 * x.std() / 256) + 1e-6 * np.abs(x).max(),
    "fp4": lambda x: np.maximum(np.abs(x) * (2**0.5 - 1), np.abs(x).max() * 2.0**-6.5),
    # half of 2^-10 of a number, or, below 2^-14, of 2^-24; four bits of fraction with the leading one, and steps of
    # 2^-9 of the scale below 2^-6 of it; half of 1/7 of a block's largest
    "fp16": lambda x: np.maximum(np.abs(x) * 2.0**-11, 2.0**-25),
    "fp8": lambda x: np.maximum(np.abs(x) * 2.0**-4, in_blocks(x) / 448 * 2.0**-10),
    "int4": lambda x: in_blocks(x, 128) * 0.5 / 7,
    # one level of the last power of ten for a number is nine tenths of it, 64 levels of the first an 140th at most
    "dynamic8": lambda x: np.maximum(np.abs(x) * 0.82, np.abs(x).max() * 0.55e-6),
    # a whole level, and half of one, of 255 between a bucket's lowest and highest; zeros fill the last bucket
    "qsgd": lambda x: spans(x) / 255 + 1e-5,
    "lattice": lambda x: 0.5 * spans(x) / 255 + 1e-5,
    "terngrad": lambda x: np.full(len(x), np.abs(x).max()),
    "sign": lambda x: np.maximum(np.abs(x), np.abs(x).mean()),
    "bit": lambda x: 1 + np.abs(x),
    # what is not sent is zero, and what is sent itself
    "topk": np.abs,
    "randomk": np.abs,
    "dgc": np.abs,
    "dct": lambda x: np.full(len(x), np.linalg.norm(x)),
    # a projection is no longer than what is projected
    "powersgd": lambda x: np.full(len(x), np.linalg.norm(x)),
    "mgard": lambda x: np.full(len(x), 0.01 * np.abs(x).max()),
    "l-greco": lambda x: np.full(len(x), np.linalg.norm(x)),
}


@pytest.mark.parametrize("name", list(codecs()))
@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_encoded_values_are_as_many_bytes_as_the_codec_says_and_come_back_within_its_error(name, n):
    one, x = codec(name), np.random.default_rng(n).normal(0, 3, n).astype(np.float32)
    wire = one.encoded(x, 7)
    assert wire.dtype == np.uint8 and (one.varies or len(wire) == one.wire_bytes(n, 4) == sum(one.messages(n, 4)))
    back = one.decoded(wire, n, x.dtype, 7)
    assert back.dtype == x.dtype and back.shape == x.shape
    assert np.all(np.abs(back - x) <= ERRORS[name](x) * (1 + 1e-6))
    assert one.exact == (name == "none")


def test_sizes_on_the_wire_by_hand():
    assert codec("none").wire_bytes(1000, 8) == 8000
    assert codec("bf16").wire_bytes(1000, 4) == 2000
    assert codec("int8").wire_bytes(1000, 4) == 1000 + 4 * 4  # four blocks of 256, the last one short
    assert codec("sigma8").wire_bytes(1000, 4) == 1000 + 8  # the lowest level and the width
    assert codec("fp4").wire_bytes(1001, 4) == 501 + 4  # two a byte, and the largest
    assert codec("fp16").wire_bytes(1001, 4) == 2002
    assert codec("fp8").wire_bytes(1000, 4) == 1000 + 4 * 4  # as int8
    assert codec("int4").wire_bytes(1001, 4) == 501 + 4 * 8  # eight blocks of 128
    assert codec("dynamic8").wire_bytes(1000, 4) == 1004  # and the largest
    assert codec("qsgd:bits=3").wire_bytes(1025, 4) == 385 + 2 * 8  # 3075 bits, and two buckets' bounds
    assert codec("terngrad").wire_bytes(1001, 4) == 251 + 4  # four a byte, and the largest
    assert codec("sign").wire_bytes(1001, 4) == 126 + 4  # eight a byte, and the mean
    assert codec("bit").wire_bytes(1001, 4) == 126
    # 1001 values are 16 blocks of 8 x 8, of each 3 coefficients with two bytes for the place
    assert codec("dct:chunk=8,k=3").wire_bytes(1001, 4) == 16 * 3 * (2 + 4)
    assert codec("topk:share=0.01").wire_bytes(1001, 4) == 11 * (4 + 4)  # a place and a value each
    assert codec("dgc:share=0.001").wire_bytes(1001, 8) == 2 * (4 + 8)
    assert codec("randomk:share=0.1").wire_bytes(1001, 4) == 101 * 4
    # 1001 values are 32 rows of 32: two factors of rank 4, one message each
    assert codec("powersgd:rank=4").messages(1001, 4) == (32 * 4 * 4, 32 * 4 * 4)
    assert codec("powersgd:rank=4").messages(31 * 32, 4) == (31 * 4 * 4, 32 * 4 * 4)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_rounds_as_torch_does(value):
    torch = pytest.importorskip("torch")

    want = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16).to(torch.float32).numpy()
    one = codec("bf16")
    assert one.decode(one.encode(np.array([value], np.float32)), 1, np.dtype(np.float32)) == want


def test_bf16_keeps_what_is_no_number():
    one = codec("bf16")
    back = one.decode(one.encode(np.array([np.nan, np.inf, -np.inf], np.float32)), 3, np.dtype(np.float32))
    assert np.isnan(back[0]) and back[1] == np.inf and back[2] == -np.inf


@pytest.mark.parametrize(
    "name", [name for name in codecs() if name not in ("sigma8", "bit", "lattice")]
)  # no level at 0
def test_zeros_stay_zero(name):
    one = codec(name)
    assert not one.decoded(one.encoded(np.zeros(300, np.float32)), 300, np.dtype(np.float32)).any()


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


def test_the_options_of_a_codec_stand_behind_its_name():
    assert codec("topk:share=0.5").wire_bytes(10, 4) == 5 * 8
    with pytest.raises(MeshwrightError, match=r"Y002.*share=1.5 is not a number above 0 and up to 1"):
        codec("topk:share=1.5")
    with pytest.raises(MeshwrightError, match=r"Y002.*bound=1e-09 is below"):
        codec("mgard:bound=1e-9")
    with pytest.raises(MeshwrightError, match=r"Y002.*no option 'rank'"):
        codec("topk:rank=4")


@pytest.mark.parametrize("name", ["terngrad", "randomk:share=0.1,feedback=no", "qsgd:bits=2", "lattice:bits=3"])
def test_codes_that_draw_without_feedback_are_right_in_the_mean(name):
    """Their mean over n draws lies within five standard errors: a value's variance is at most value * largest for
    terngrad (a coin of |value| / largest), and value^2 (n / k - 1) for random places, k of n."""
    one, n, draws = codec(name), 60, 4000
    assert one.unbiased
    x = np.random.default_rng(3).normal(0, 1, n)
    got = np.mean([one.decoded(one.encoded(x, seed), n, x.dtype, seed) for seed in range(draws)], axis=0)
    variance = np.abs(x) * np.abs(x).max() if name == "terngrad" else x**2 * (60 / 6 - 1)
    if "bits" in name:  # a coin between two levels, a quarter of their distance squared at most, or a uniform shift
        variance = np.full(n, (np.ptp(x) / (2 ** int(name[-1]) - 1)) ** 2 / 4)
        inside = (x > np.sort(x)[9]) & (x < np.sort(x)[-10])  # a lattice has no level beyond the outermost
        got = np.where(inside | (name[0] == "q"), got, x)
    assert np.all(np.abs(got - x) <= 5 * np.sqrt(variance / draws) + 1e-6)


def test_no_other_code_says_that_its_mean_is_right():
    assert {one.name for one in codecs().values() if one.unbiased} == {
        "terngrad",
        "qsgd",
        "lattice",
    }  # randomk, with feedback=no


def test_the_same_seed_draws_the_same_places_everywhere():
    one, x = codec("randomk:share=0.2"), np.arange(1.0, 51.0)
    both = one.encoded(x, 5).view(np.float64) + one.encoded(2 * x, 5).view(np.float64)  # a sum on the way
    got = one.decoded(both.view(np.uint8), 50, x.dtype, 5)
    assert np.count_nonzero(got) == 10 and np.allclose(got[got != 0], 3 * x[got != 0])


def test_fp8_rounds_as_torch_does():
    torch = pytest.importorskip("torch")

    x = np.random.default_rng(1).normal(0, 3, 256).astype(np.float32)
    x[0] = 448.0  # the scale of the block is one
    want = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).to(torch.float32).numpy()
    one = codec("fp8")
    assert np.array_equal(one.decode(one.encode(x), 256, x.dtype), want)


def test_the_largest_values_are_sent_with_their_places():
    one, x = codec("topk:share=0.4"), np.array([0.1, -5.0, 0.2, 3.0, -0.3])
    wire = one.encode(x)
    assert wire[:8].view(np.uint32).tolist() == [1, 3] and wire[8:].view(np.float64).tolist() == [-5.0, 3.0]
    assert one.decode(wire, 5, x.dtype).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]


def test_frequencies_are_those_of_the_cosine_transform_and_all_of_them_are_the_values():
    """Against scipy's orthonormal DCT-II of a block of 4 x 4, by its definition."""
    block = np.random.default_rng(4).standard_normal((4, 4))
    turn = np.array([[np.cos(np.pi * f * (2 * i + 1) / 8) for i in range(4)] for f in range(4)])
    turn *= np.array([0.25, 0.5, 0.5, 0.5])[:, None] ** 0.5
    found = turn @ block @ turn.T
    wire = codec("dct:chunk=4,k=2").encode(block.reshape(-1))
    largest = sorted(np.argsort(-np.abs(found).reshape(-1))[:2])
    assert wire[:4].view(np.uint16).tolist() == largest
    assert np.allclose(wire[4:].view(np.float64), found.reshape(-1)[largest])
    whole, x = codec("dct:chunk=4,k=16"), np.random.default_rng(5).standard_normal(37)
    assert np.allclose(whole.decode(whole.encode(x), 37, x.dtype), x, atol=1e-12)


def test_a_matrix_of_low_rank_is_two_factors_exactly():
    rng, one = np.random.default_rng(0), codec("powersgd:rank=3")
    x = (rng.standard_normal((20, 3)) @ rng.standard_normal((3, 20))).reshape(-1)
    assert np.allclose(one.decode(one.encode(x), 400, x.dtype), x, atol=1e-10)


def test_the_factors_of_summed_matrices_are_of_their_sum():
    """Two ranks' messages added up, the first and the second: a power iteration on the sum, as one rank takes it."""
    rng, q = np.random.default_rng(2), begun(Factors(0, 12, 9, 3, 2))
    parts = rng.standard_normal((2, 3, 12, 9))  # three matrices of each
    ranks = [summed([m], [q]) for m in parts]
    p = sum(next(one)[0] for one in ranks)
    second = sum(one.send([p.copy()])[0] for one in ranks)
    alone = summed([parts.sum(0)], [q])
    assert np.allclose(alone.send(next(alone))[0], second)
    with pytest.raises(StopIteration) as done:
        alone.send([second])
    left, _ = np.linalg.qr(parts.sum(0) @ q)
    # the projection on what one step finds
    (p,), (q,) = done.value.value
    assert np.allclose(p @ q.swapaxes(-1, -2), left @ left.swapaxes(-1, -2) @ parts.sum(0))


def test_each_matrix_has_factors_of_its_own_and_vectors_travel_as_they_are():
    """By hand: 48 x 32 as 80 rows of two, 5 experts of 16 x 20 as 36 each; 4 x 4 is no larger than its factors."""
    tensors = (Tensor(48, 32), Tensor(1, 7), Tensor(16, 20, 5), Tensor(4, 4))
    n = 48 * 32 + 7 + 5 * 320 + 16
    first, second = codec("powersgd:rank=2").messages(n, 4, tensors)
    assert first == 4 * (2 * 48 + 5 * 2 * 16 + 7 + 16) and second == 4 * (2 * 32 + 5 * 2 * 20)
    assert codec("powersgd:rank=2").messages(n - 7, 4, (tensors[0], *tensors[2:]))[1] == second  # vectors left out
    assert codec("powersgd").messages(23, 4, (Tensor(1, 7), Tensor(4, 4))) == (4 * 23,)  # one message of no factors


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), max_size=40), st.sampled_from([0.001, 0.1, 0.5]))
def test_no_value_is_further_off_than_the_bound(values, bound):
    one, x = codec(f"mgard:bound={bound}"), np.array(values, np.float32)
    wire = np.append(one.encode(x), np.zeros(5, np.uint8))  # what stands behind is not read
    back = one.decode(wire, len(x), x.dtype)
    assert np.all(np.abs(back - x) <= bound * np.abs(x).max(initial=0.0))


@pytest.mark.parametrize("bound", [0.001, 0.01, 0.1])
def test_normal_numbers_take_the_bytes_that_are_expected_of_them_and_smooth_ones_fewer(bound):
    """Half of the spread of what the largest of so many numbers is, one deviation in 4.5, moves the entropy by less
    than two tenths of a bit of eight; packing takes a little more. A wave of 100000 values changes by next to nothing
    from one to the next: the mean of two whole numbers is half a step off at most, under a third of a byte each."""
    one, n = codec(f"mgard:bound={bound}"), 100_000
    got = len(one.encode(np.random.default_rng(0).normal(0, 2, n).astype(np.float32)))
    assert got == pytest.approx(one.wire_bytes(n, 4), rel=0.1)
    assert len(one.encode(np.sin(np.linspace(0, 20, n)))) < n / 3
