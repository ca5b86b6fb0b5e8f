"""Processors as devices of the catalog: peaks by hand, and the time of a token against what memory gives."""

import pytest

import meshwright as mw
from meshwright.answer.serving import predict_serving
from meshwright.spec.serve import parse


def test_a_socket_multiplies_what_its_cores_do_at_their_clock():
    device = mw.load_cluster("1xxeon").islands[0].device
    # 64 cores at 1.9 GHz: 1,024 operations a cycle in bf16, 64 in fp32; eight channels of 5,600 MT/s and eight bytes
    assert device.peak_flops["bf16"] == pytest.approx(64 * 1.9e9 * 1024, rel=1e-3)
    assert device.peak_flops["fp32"] == pytest.approx(64 * 1.9e9 * 64, rel=1e-3)
    assert device.memory_gb_s == pytest.approx(8 * 5.6 * 8)


def test_a_token_takes_as_long_as_both_sockets_read_the_weights():
    model, words = mw.load_model("llama2-7b"), parse("batch=1,prompt=64,output=16")
    found = predict_serving(model, mw.load_cluster("2xxeon"), words, mw.parse_plan("tp2"), detail=False)
    least = 2 * 6.6e9 / (2 * 358.4e9)  # without the table of tokens
    assert least < found.metrics.tpot_s.mean < 1.7 * least
