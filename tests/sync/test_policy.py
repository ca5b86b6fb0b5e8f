"""The record of synchronisation: its seven choices, its words, and that it does not change."""

import pytest

from meshwright.sync.policy import read
from meshwright.sync.record import Outer


def test_every_step_is_the_sum_of_gradients_among_all():
    policy = read("step")
    assert str(policy) == (
        "when every step | fragments reduce | group all | codec none | combine sum | outer taken | delay 0"
    )
    assert policy.exact and policy.text == "step"


def test_local_steps_are_the_mean_of_parameters_once_in_h():
    policy = read("local:codec=int8,h=8,moments=mean")
    assert (policy.when, policy.fragments, policy.codec, policy.combine) == (
        8,
        ("parameters", "moments"),
        "int8",
        "mean",
    )
    assert not policy.exact and policy.text == "local:h=8,codec=int8,moments=mean"


def test_an_outer_step_of_rate_one_without_momentum_takes_the_result_as_it_is():
    assert Outer().taken and not Outer(rate=0.7).taken and not Outer(momentum=0.9).taken
    assert str(Outer(rate=0.7, momentum=0.9, nesterov=True)) == "nesterov(rate=0.7, momentum=0.9)"


def test_a_policy_does_not_change():
    with pytest.raises(AttributeError):
        read("step").when = 2
