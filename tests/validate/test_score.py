"""The scorer's definitions, each on rows small enough to be worked out by hand."""

from statistics import correlation

import numpy as np
import pytest

from meshwright.validate.faults import FAULTS
from meshwright.validate.measured import measured
from meshwright.validate.ops import OpAnswer
from meshwright.validate.score import (
    Scored,
    Unsupported,
    faulty,
    metrics,
    regret,
    score_op,
    score_step,
    spearman,
    summary,
)
from meshwright.validate.steps import StepAnswer
from tests.validate.samples import step


def timed(measured_s, predicted_s, *, group=(), key="a/b", faulty=False, **more):
    return Scored(id="x", key=key, group=group, faulty=faulty, time=(measured_s, predicted_s), **more)


def answer(**changed):
    usual = {"step_s": 1.0, "low_s": 0.8, "high_s": 1.2, "trivial_s": 0.7, "allocated_bytes": 30e9}
    return StepAnswer(id="x", plan="dp8", reserved_bytes=33e9, **(usual | changed))


def scored(row, **changed):
    return score_step(row, measured(row), answer(**changed))


def test_errors_are_relative_to_what_was_measured():
    # predicted/measured - 1: +0.1, -0.2, +0.6, 0.0
    rows = [timed(1.0, 1.1), timed(10.0, 8.0), timed(5.0, 8.0), timed(2.0, 2.0)]
    found = metrics(rows)
    assert found["rows"] == found["timed_rows"] == 4
    assert found["mean_ape"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.0) / 4)
    assert found["median_ape"] == pytest.approx(0.15)
    assert found["bias"] == pytest.approx((0.1 - 0.2 + 0.6) / 4)
    # linear between the third and fourth of the sorted 0, 0.1, 0.2, 0.6: at 0.9 * 3 = 2.7
    assert found["p90_ape"] == pytest.approx(0.2 + 0.7 * 0.4)


def test_the_trivial_formula_is_scored_on_the_same_rows():
    found = metrics([timed(2.0, 2.0, trivial=1.0), timed(4.0, 4.0, trivial=5.0)])
    assert found["trivial_mean_ape"] == pytest.approx((0.5 + 0.25) / 2)


def test_coverage_is_the_share_of_rows_inside_their_interval():
    rows = [timed(1.0, 1.0, inside=inside) for inside in (True, True, False, True)]
    assert metrics(rows)["coverage80"] == 0.75


def test_metrics_that_do_not_apply_are_absent():
    assert metrics([Scored(id="x", key="a/b")]) == {"rows": 1, "unsupported": 0}


@pytest.mark.parametrize(
    ("a", "b"),
    [([1, 2, 3, 4], [10, 20, 30, 40]), ([1, 2, 2, 4], [4, 3, 3, 1]), ([3, 1, 2, 2, 5], [1, 1, 2, 7, 7])],
)
def test_spearman_is_the_correlation_of_mean_ranks(a, b):
    def ranks(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    assert spearman(np.array(a), np.array(b)) == pytest.approx(correlation(ranks(a), ranks(b)))


def test_spearman_by_hand_gives_ties_their_mean_rank():
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, squares 4.5 and 5
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 2, 3, 4])) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_spearman_of_a_constant_prediction_is_zero():
    assert spearman(np.array([1.0, 2.0]), np.array([3.0, 3.0])) == 0.0


def test_regret_is_what_the_row_predicted_fastest_really_took_over_the_best():
    assert regret(np.array([2.0, 1.0, 4.0]), np.array([0.5, 0.9, 0.8])) == pytest.approx(1.0)


def test_of_rows_predicted_equally_fast_regret_takes_their_mean():
    assert regret(np.array([2.0, 1.0, 4.0]), np.array([0.5, 0.5, 0.8])) == pytest.approx(0.5)


def test_groups_need_five_timed_rows():
    four = [timed(i, i, group=("g",)) for i in (1.0, 2.0, 3.0, 4.0)]
    assert "groups" not in metrics(four)
    found = metrics([*four, timed(5.0, 5.0, group=("g",))])
    assert (found["groups"], found["spearman"], found["regret_mean"]) == (1, pytest.approx(1.0), 0.0)


def test_spearman_and_regret_are_means_over_groups():
    up = [timed(i, i, group=("up",)) for i in (1.0, 2.0, 3.0, 4.0, 5.0)]
    down = [timed(i, 6 - i, group=("down",)) for i in (1.0, 2.0, 3.0, 4.0, 5.0)]
    found = metrics(up + down)
    assert found["groups"] == 2
    assert found["spearman"] == pytest.approx(0.0)
    assert found["regret_mean"] == pytest.approx((0.0 + 4.0) / 2)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("framework", "nemo"),
        ("model", "other"),
        ("phase", "sft"),
        ("dtype", "fp8"),
        ("num_gpus", 16),
        ("seq_len", 4096),
        ("global_batch_seqs", 128),
        ("source", "other"),
        ("hardware", "a100_80gb_sxm"),
    ],
)
def test_a_group_is_one_source_hardware_framework_model_phase_dtype_devices_length_and_batch(column, value):
    assert scored(step(**{column: value})).group != scored(step()).group


def test_a_group_is_any_plan_and_its_numbers_compare_as_numbers():
    assert scored(step(tp=4, dp=2, num_gpus="8.0")).group == scored(step()).group


def test_out_of_memory_accuracy_is_over_ok_and_oom_rows_and_recall_over_oom_rows():
    told = [(False, False), (False, True), (True, True), (True, False), (True, True)]
    found = metrics([Scored(id="x", key="a/b", oom=pair) for pair in told])
    assert found["oom_rows"] == 3
    assert found["oom_accuracy"] == pytest.approx(3 / 5)
    assert found["oom_recall"] == pytest.approx(2 / 3)


def test_a_row_that_neither_ran_nor_ran_out_of_memory_is_no_label():
    assert scored(step(outcome="timeout")).oom is None


def test_a_plan_that_nobody_ran_is_no_label():
    """Papers list what recompute modes would take of plans that no device holds."""
    assert scored(step(outcome="ok", flags="no_time_measured")).oom is None
    assert scored(step(outcome="ok")).oom == (False, False)


def test_recall_is_absent_without_rows_out_of_memory():
    assert "oom_recall" not in metrics([Scored(id="x", key="a/b", oom=(False, False))])


def test_memory_is_compared_with_the_kind_the_row_states():
    allocated, reserved = scored(step()), scored(step(memory_kind="reserved"))
    assert allocated.memory == (30e9, 30e9)
    assert reserved.memory == (30e9, 33e9)
    found = metrics([allocated, reserved])
    assert found["memory_rows"] == 2
    assert found["memory_allocated_mean_ape"] == 0.0
    assert found["memory_reserved_mean_ape"] == pytest.approx(0.1)
    assert found["memory_mean_ape"] == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["unknown", "published_analytic", ""])
def test_memory_of_other_kinds_is_not_scored(kind):
    assert scored(step(memory_kind=kind)).memory is None


def test_the_time_of_a_run_that_did_not_succeed_is_not_scored():
    assert scored(step(outcome="oom")).time is None


@pytest.mark.parametrize("flag", FAULTS["training_steps"])
def test_rows_with_a_known_fault_stand_apart_in_time_and_stay_in_memory_and_labels(flag):
    good, bad = scored(step()), scored(step(flags=f"era_A;{flag}", step_time_s=9))
    found = summary([good, bad])
    assert set(found) == {"hand/h100_sxm", "hand/h100_sxm/flagged", "all"}
    for key in ("hand/h100_sxm", "all"):
        assert (found[key]["rows"], found[key]["timed_rows"], found[key]["memory_rows"]) == (2, 1, 2)
        assert found[key]["mean_ape"] == pytest.approx(1.0)  # 1 s predicted, 0.5 s measured
        assert found[key]["oom_accuracy"] == 1.0
    assert found["hand/h100_sxm/flagged"]["timed_rows"] == 1
    assert found["hand/h100_sxm/flagged"]["mean_ape"] == pytest.approx(8 / 9)


@pytest.mark.parametrize("flag", ["near_memory_limit", "tp_crosses_nodes", "step_time_not_representative", "era_A"])
def test_no_other_flag_leaves_a_row_out(flag):
    assert not scored(step(flags=flag)).faulty


def test_the_flags_of_one_table_mean_nothing_in_another():
    assert faulty({"flag": "suspect_slow_network"}, "collectives", "flag")
    assert not faulty({"flag": "pp_before_fix"}, "collectives", "flag")
    assert not faulty(step(flags="suspect_slow_network"))


def test_rows_that_are_not_supported_are_counted_where_they_belong():
    lost = [
        Unsupported(id="y", key="a/b", faulty=True, reason="r"),
        Unsupported(id="z", key="c/d", faulty=False, reason="r"),
    ]
    found = summary([timed(1.0, 1.0)], lost)
    assert {key: m["unsupported"] for key, m in found.items()} == {"a/b": 1, "a/b/flagged": 1, "c/d": 1, "all": 2}
    assert found["c/d"]["rows"] == 0


def test_all_comes_last():
    assert list(summary([timed(1.0, 1.0, key="z/z"), timed(1.0, 1.0)]))[-1] == "all"


def test_an_ops_interval_is_the_central_80_percent_of_a_log_normal():
    # 1.2816 standard deviations of 0.1 reach from 0.8797 to 1.1367
    for seconds, inside in ((0.879, False), (0.881, True), (1.136, True), (1.138, False)):
        found = OpAnswer(2, "s", "h", "", "shape", measured=seconds, seconds=1.0, sigma=0.1)
        assert score_op("x", "s/h", found, False).inside is inside


def test_a_row_that_states_a_rate_alone_is_timed_by_it():
    """64 sequences of 2048 tokens on 8 devices: at 1024 tokens a second each 16 s; 1.6e16 FLOP at 100 TFLOP/s each are
    20 s; a time that is stated goes before both, and a run out of memory has none."""
    rate = step(step_time_s="", tokens_per_s_per_gpu=1024, global_batch_seqs=64, seq_len=2048, num_gpus=8)
    assert measured(rate).seconds == pytest.approx(16.0)
    flops = step(step_time_s="", tokens_per_s_per_gpu="", model_tflops_per_gpu=100, num_gpus=8)
    assert measured(flops, 1.6e16).seconds == pytest.approx(20.0)
    assert measured(flops).seconds is None
    assert measured(step(step_time_s=3.0, tokens_per_s_per_gpu=1)).seconds == 3.0
    assert measured(step(outcome="oom", step_time_s="", tokens_per_s_per_gpu=1024)).seconds is None
