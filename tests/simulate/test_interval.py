"""How far apart the draws of a step's time are."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.intervals import LEAST_SIGMA, class_sigma, interval_draws
from meshwright.cost import Framework, standard
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec import cluster, model
from meshwright.spec.workload import Train

TRAIN = Train(global_batch=64, seq_len=4096)


def draws(sigma, *, flagged):
    framework = Framework(name="x", step_sigma=sigma, flagged=flagged)
    where, plan = cluster.load("8xh100"), parse("tp2 dp4 mb1")
    return simulate(plan, model.load("llama3-8b"), where, TRAIN, standard(framework))


def spread(run):
    return float(np.std(np.log(interval_draws(run))))


@pytest.mark.parametrize("sigma", [0.0, 0.05, 0.1, 0.3])
def test_steps_that_were_measured_hold_their_parts_errors_and_others_add_theirs(sigma):
    """A fitted profile's error is of whole steps: it is the step's, unless the parts are surer to err by more. What
    nobody fitted comes on top."""
    parts = spread(msgspec.structs.replace(draws(0.0, flagged=True), step_sigma=0.0))
    assert 0.01 < parts < max(class_sigma(draws(0.0, flagged=True)).values())  # not all of a step is one class
    fitted, alone = spread(draws(sigma, flagged=False)), spread(draws(sigma, flagged=True))
    # stratified draws of two factors are not quite independent: a tenth
    assert fitted == pytest.approx(max(sigma, np.hypot(parts, LEAST_SIGMA)), rel=0.1)
    assert alone == pytest.approx(np.hypot(parts, sigma), rel=0.1)
