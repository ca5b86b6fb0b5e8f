"""Checks that train on digits: what their figures are judged by, and what they say where a mechanism is broken."""

import math

import pytest

from meshwright.papers import learnt
from meshwright.papers.checks import image_clients, images
from meshwright.papers.record import papers
from meshwright.run import trials
from meshwright.run.by_clock import JudgedVersion
from meshwright.world.crowd import Crowd


def test_a_loss_of_accuracy_is_held_to_what_the_images_can_tell():
    """The standard error of 0.9 on 360 images: the root of 0.9 * 0.1 / 360, 1.58 points."""
    assert learnt.resolution([0.9, 0.9, 0.9]) == pytest.approx(100 * math.sqrt(0.9 * 0.1 / 360))
    near, far = (learnt.lost("", [0.9 - a] * 3, [0.9] * 3) for a in (0.0155, 0.0165))
    assert near.ok and not far.ok and far.ours == pytest.approx(1.65)


def test_a_gain_is_held_to_twice_the_error_of_the_seeds_too():
    sure, unsure = (learnt.gained("", some, [0.8] * 3) for some in ([0.83, 0.831, 0.829], [0.83, 0.90, 0.76]))
    assert sure.ok and not unsure.ok and sure.ours == pytest.approx(unsure.ours)
    assert "by seed +3.00, +3.10, +2.90 points" in sure.why and sure.supports and not sure.loose


def test_a_time_to_an_accuracy_is_none_of_a_lucky_version():
    def run(*shares):
        return [JudgedVersion(10.0 * n, n, 1.0, share) for n, share in enumerate(shares, 1)]

    lucky, steady = run(0.1, 0.75, 0.3, 0.4, 0.7, 0.8, 0.8), run(0.1, 0.8, 0.8, 0.8)
    assert (learnt.first_at(lucky, 0.7).at_s, learnt.first_at(steady, 0.7).at_s) == (50, 20)
    assert learnt.first_at(run(0.1, 0.2, 0.3), 0.7) is None
    twice = image_clients.faster("time", [steady, steady], [lucky, lucky])
    assert twice.ours == pytest.approx(2.5) and twice.ok and twice.loose
    never = image_clients.faster("time", [run(0.1, 0.1)] * 2, [steady] * 2)
    assert never.ours == 0 and not never.ok


def test_a_run_that_diverges_classifies_nothing_rightly():
    found = trials.trained(learnt.jobs("dp1 mb36", "batch=36,optimizer=sgd", 1e300, 3, seeds=(0,)))
    assert found == [trials.FinishedTrial(math.inf, 0.0, 0, 0)]
    (versions,) = trials.clocked(learnt.jobs("dp2 mb12 sync=fedavg:h=2", "batch=24", 1e300, 4, seeds=(0,)), Crowd())
    assert versions[-1].loss == math.inf and versions[-1].accuracy == 0


def test_equal_jobs_are_trained_once(monkeypatch):
    monkeypatch.setattr(learnt, "_found", {})
    asked = []
    monkeypatch.setattr(
        trials, "trained", lambda jobs: asked.append(len(jobs)) or [trials.FinishedTrial(1.0, 0.5, 9, 3) for _ in jobs]
    )
    some, others = (learnt.jobs("dp1 mb36", "batch=36,optimizer=sgd", rate, 3) for rate in (0.1, 0.2))
    assert learnt.accuracies({"a": some, "b": [*some, *others]}) == {"a": [0.5] * 3, "b": [0.5] * 6}
    assert learnt.accuracies({"a": some}) == {"a": [0.5] * 3} and sum(asked) == 6  # a twice


def test_a_flag_aggregator_that_adds_up_is_not_robust(monkeypatch):
    from meshwright.run import combine

    monkeypatch.setattr(learnt, "_found", {})
    monkeypatch.setitem(combine.FAST, "flag", combine.FAST["mean"])
    over_the_sum, *_ = images.flag_aggregator().figures
    assert not over_the_sum.ok


def test_what_is_trained_here_is_not_said_to_be_missing(outcomes):
    """Rows with a check that is all training say what they lack themselves."""
    for name in ("flag-aggregator", "feddip", "discover-vr"):
        row = papers()[name]
        assert outcomes[name].missing[0] == row.missing and "no check here has them" not in row.missing
        assert outcomes[name].executed and outcomes[name].baseline
    assert len(outcomes["favano"].missing) == 1  # said once, by its figures
