"""Fitting network constants: recovered from curves made of them, the same every time, held to targets on data."""

import msgspec
import numpy as np
import pytest

from meshwright.calibrate import network
from meshwright.calibrate.network.report import predict, scores
from meshwright.calibrate.network.rows import Series, read_series
from meshwright.calibrate.network.solve import START
from meshwright.cost.collectives import envelope, lines
from meshwright.cost.fabric import profile_text, shipped
from meshwright.spec.cluster import load_device
from meshwright.work import Group, Hop

TRUE = msgspec.structs.replace(
    START, start_ll_us=8.0, start_simple_us=30.0, step_ll=2.0, all_gather=0.6, reduce_scatter=0.5, all_reduce=0.65
)


def made(op: str, ranks: int, constants=TRUE, **changes) -> Series:
    """A series as the constants make it, from 1 KiB to 1 GiB, on NVLink 4."""
    hop = Hop(name="nvlink", members=ranks, gb_s=450.0, latency_us=0.6, below=1, topology="switch")
    group = Group(size=ranks, hops=(hop,))
    sizes = [2.0**i for i in range(10, 31)]
    seconds = [envelope(lines(op, group, (constants,)), b) for b in sizes]
    series = Series("made", "h100_sxm", op, "nccl", False, load_device("h100_sxm"), group, "", sizes, seconds)
    return series._replace(**changes)


ALL = [made(op, n) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for n in (2, 4, 8)]


def test_curves_made_of_constants_are_predicted_from_what_was_fitted_to_them():
    profiles = network.fit_series(ALL)
    errors = [abs(row.predicted_s / row.measured_s - 1) for row in predict(profiles, ALL)]
    assert np.quantile(errors, 0.9) < 0.05


def test_a_group_size_left_out_is_predicted_from_the_others():
    profiles = network.fit_series([s for s in ALL if s.group.size != 4])
    score = scores(predict(profiles, [s for s in ALL if s.group.size == 4]), lambda row: "all")["all"]
    assert score.median_ape < 0.05


def test_a_fit_is_the_same_every_time():
    assert network.fit_series(ALL) == network.fit_series(ALL)


def test_what_a_fabric_does_not_tell_stays_its_kinds():
    profiles = {p.name: p for p in network.fit_series([made("all_reduce", 8)])}
    assert profiles["nvlink4"].constants.send == pytest.approx(START.send)
    assert profiles["nvlink4"].ranks == (8,)


def test_known_faults_and_unstable_series_are_not_fitted():
    slow = made("all_gather", 8, flag="suspect_slow_network")
    jumpy = made("all_gather", 8, seconds=[1.0, 0.1] * 10 + [1.0])
    assert not network.usable(slow)
    assert not network.usable(jumpy)
    assert network.usable(made("all_gather", 8))


def test_a_holdout_takes_whole_groups_and_about_its_share():
    many = [made("all_reduce", 8, source=f"s{i}") for i in range(400)]
    taken = [network.held_out(s, 0.2) for s in many]
    assert 0.14 < np.mean(taken) < 0.26
    assert taken == [network.held_out(s._replace(library="vllm", eager=True), 0.2) for s in many]


def test_profiles_are_written_one_a_file_and_read_back(tmp_path):
    profiles = network.fit_series([made("all_reduce", 8)])
    network.write(profiles, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"{p.name}.json" for p in profiles}
    assert (tmp_path / "nvlink4.json").read_bytes() == profile_text({p.name: p for p in profiles}["nvlink4"])


@pytest.mark.slow
def test_groups_held_out_of_the_measurements_are_predicted_within_fifteen_percent(data_dir):
    series = read_series(data_dir)
    profiles = network.fit_series([s for s in series if not network.held_out(s, 0.2)])
    score = scores(predict(profiles, [s for s in series if network.held_out(s, 0.2)]), lambda row: "all")["all"]
    assert score.rows > 1000
    assert score.median_ape <= 0.15


def test_the_shipped_profiles_predict_the_measurements_they_were_fitted_to(data_dir):
    score = scores(predict(tuple(shipped().profiles.values()), read_series(data_dir)), lambda row: "all")["all"]
    assert score.median_ape <= 0.08
    assert 0.7 <= score.coverage80 <= 0.95
