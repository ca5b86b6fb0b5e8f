"""Predictions of a row of servers behind one power supply."""

import msgspec
import pytest

import meshwright as mw
from meshwright.answer.power import beyond_supply
from meshwright.answer.serving import predict_serving
from meshwright.cost.part import DevicePart, part_of
from meshwright.cost.power import draw
from meshwright.errors import MeshwrightError
from meshwright.spec.serve import parse

WORDS = "rate=6,prompt=1024,output=32,requests=24,power="


def asked(power, plan="dp4", on="4xh100", words=WORDS):
    question = mw.load_model("llama3-8b"), mw.load_cluster(on), parse(words + power), mw.parse_plan(plan)
    return predict_serving(*question, detail=False)


@pytest.fixture(scope="module")
def row():
    return asked("polca").power


def test_a_row_feeds_more_servers_than_at_their_rated_power(row):
    # an H100 of 700 W and its part of the host, 4.6 kW of eight
    assert row.budget_w == pytest.approx(4 * (700 + 575)) and row.rated_servers == row.servers == 4
    assert 4 * (70 + 575) < row.mean_w <= row.peak_w < row.budget_w
    low, high = row.most_interval
    assert 4 < low <= row.most_servers <= high
    assert row.most_peak_w <= row.budget_w and row.slower_low >= 1.0


def test_a_smaller_supply_feeds_fewer(row):
    less = asked("polca:budget=0.75").power
    assert less.rated_servers == 3 and less.most_servers < row.most_servers
    assert less.peak_w <= row.peak_w + 1e-6


def test_a_row_beyond_its_supply_is_warned_of(row):
    assert beyond_supply(row) == () and beyond_supply(None) == ()
    (warning,) = beyond_supply(msgspec.structs.replace(row, budget_w=row.peak_w / 2))
    assert f"{row.peak_w / 1e3:.4g} kW of the {row.peak_w / 2e3:.4g} kW" in warning


def test_a_lower_clock_leaves_the_memory_as_it_is():
    device = mw.load_cluster("1xh100").islands[0].device
    slow = part_of(device, DevicePart(clock=0.5))
    assert slow.memory_gb_s == device.memory_gb_s and slow.num_sms == device.num_sms
    assert slow.peak_flops["bf16"] == device.peak_flops["bf16"] / 2


def test_a_device_draws_its_rated_power_while_it_multiplies():
    found = draw(mw.load_cluster("1xh200").islands[0].device)
    assert (found.watts(0, 0), found.watts(1, 0), found.watts(1, 1)) == (75, 700, 700)
    # next tokens wait for memory: between the 137 and 300 W that are published of an H200
    assert 137 < found.watts(0, 1) < 300
    assert draw(mw.load_cluster("1xa100").islands[0].device).assumed


def test_what_a_row_does_not_go_with_is_said_at_once():
    with pytest.raises(MeshwrightError) as raised:
        asked("polcas,beside=gpt2:batch=1:seq=128,draft=ngram,accept=0.5")
    assert {one.code for one in raised.value.diagnostics} == {"W013", "W014"}
    for wrong in ("polca:low=2", "polca:budget=0", "polca:high=1"):
        with pytest.raises(MeshwrightError):
            parse(WORDS + wrong)
    words = WORDS.replace("rate=6", "rate=6.0") + "polca:budget=0.9:low=0.25"
    assert parse(parse(words).text()) == parse(words)
