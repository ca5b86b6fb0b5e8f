"""Devices for open pools against every plan that says them."""

from itertools import product

import pytest

from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import check, parse
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.random_plans import LLAMA

WHERE, TRAIN = load("8xh100"), Train(global_batch=16, seq_len=128)
LAYERS = LLAMA.num_layers


def plan(first="", second=""):
    return parse(
        f"a=[{first} mb1 part=0:1] + b=[tp2 {second} mb2 part=1:{LAYERS - 1}] + c=[dp2 mb4 part={LAYERS - 1}:]"
    )


def test_open_pools_get_the_devices_with_which_the_step_is_shortest():
    seconds = {}
    for first, second in product(range(1, 7), range(1, 4)):
        said = plan(f"dp{first}", f"dp{second}")
        if first + 2 * second == 6 and not check(said, LLAMA, WHERE, TRAIN):
            seconds[first, second] = predict(LLAMA, WHERE, TRAIN, said, detail=False).step_time_s
    assert len(seconds) > 1
    found = predict(LLAMA, WHERE, TRAIN, plan(), detail=False)
    assert found.step_time_s == min(seconds.values())
    assert any(f"of {len(seconds)} ways" in one for one in found.cautions)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a=[mb3 part=0:1] + b=[mb3 part=1:]", "no numbers of replicas of a and b fill 8xh100"),
        ("a=[mb1 part=0:1] + b=[mb1 part=2:]", "no pool holds layers 1:2"),
    ],
)
def test_pools_that_no_replicas_make_legal_are_refused_with_what_is_wrong(words, said):
    with pytest.raises(MeshwrightError, match=said):
        predict(LLAMA, WHERE, TRAIN, parse(words))
