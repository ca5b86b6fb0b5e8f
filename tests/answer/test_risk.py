"""The chance that a plan fits, against the normal distribution's own table."""

from math import exp

import pytest

from meshwright.answer.predict import predict
from meshwright.answer.risk import fit_probability, peak_interval, room_bytes
from meshwright.plan import parse as plan
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import parse as workload


@pytest.mark.parametrize(("sigmas", "chance"), [(-1.0, 0.1587), (0.0, 0.5), (1.0, 0.8413), (1.6449, 0.95)])
def test_a_peak_some_deviations_below_the_capacity_fits_as_the_normal_table_says(sigmas, chance):
    assert fit_probability(80e9 * exp(-0.2 * sigmas), 80e9, 0.2) == pytest.approx(chance, abs=1e-4)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_a_plan_that_leaves_the_room_of_a_risk_runs_out_of_memory_so_often(risk):
    left = room_bytes(risk, 80e9, 0.15)
    assert fit_probability(80e9 - left, 80e9, 0.15) == pytest.approx(1 - risk)


def test_no_error_is_no_doubt_and_a_risk_of_a_half_needs_no_room():
    assert (fit_probability(79e9, 80e9, 0.0), fit_probability(81e9, 80e9, 0.0)) == (1.0, 0.0)
    assert room_bytes(0.5, 80e9, 0.2) == 0.0


def test_the_interval_of_a_peak_is_the_central_80_percent():
    low, high = peak_interval(50e9, 0.2)
    assert (low, high) == pytest.approx((50e9 * exp(-0.2563), 50e9 * exp(0.2563)), rel=1e-4)


def test_a_prediction_says_how_likely_it_fits_and_the_fullest_rank_decides():
    found = predict(model("llama3-8b"), cluster("8xh100"), workload("batch=64,seq=4096"), plan("fsdp mb1 full"))
    tight, sigma = found.tightest, found.memory_sigma
    assert sigma == 0.3  # of the default profile
    assert found.p_fit == fit_probability(tight.needed_bytes, tight.capacity_bytes, sigma)
    said = found.to_json()
    assert (said["p_fit"], said["peak_memory_interval_bytes"]) == (
        found.p_fit,
        list(peak_interval(found.peak_memory_bytes, sigma)),
    )
