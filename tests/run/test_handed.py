"""Scans whose states ranks hand on train as on one process, in float64."""

from __future__ import annotations

import pytest
import torch

from meshwright.run.handed import mine
from meshwright.run.mesh import AxisGroup
from meshwright.spec.model import from_config
from meshwright.spec.workload import parse
from tests.run import small_kinds
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, differences, train_steps

#: Relative to each tensor's largest element: sums in another order.
TOLERANCE = 1e-10
TRAIN = parse("batch=2,seq=16,dtype=fp32,optimizer=sgd")
#: Model, plan, and whether rows hold documents; keys and decays of the one are those of Mamba-2, of the other of the
#: gated delta rule, with attention between.
CASES = [
    ("mamba2", "cp2 mb2 full scans=handed", True),
    ("qwen3_5", "cp2 mb2 ulysses scans=handed", False),
]
#: What tokens add to states goes round, over any number of ranks.
RINGS = [("mamba2", "cp2 mb2 full scans=ringed", True), ("mamba2", "cp4 mb2 scans=ringed", False)]


def steps(rank: int, name: str, words: str, documents: bool):
    few = (
        {"num_hidden_layers": 2}
        if name == "mamba2"
        else {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    )
    model = from_config(small_kinds.CONFIGS[name] | few, name=name)
    return train_steps(rank, model, words, TRAIN, documents=documents)


def several(rank: int) -> list:
    return [steps(rank, *case) for case in CASES]


@pytest.mark.parametrize("case", RINGS)
def test_keys_and_values_that_go_round_train_as_one_process(case):
    name, words, documents = case
    whole, ours = steps(0, name, "mb2", documents), launch(int(words[2]), steps, *case)
    for loss, known in zip(ours[0][0], whole[0], strict=True):
        assert loss == pytest.approx(known, rel=TOLERANCE)
    for which in (1, 2):
        found = differences(assemble(ours, which), assemble([whole], which))
        assert max(found.values()) < TOLERANCE, (words, max(found, key=found.get))


def test_states_that_are_handed_on_train_as_one_process():
    got = launch(2, several)
    for number, (name, words, documents) in enumerate(CASES):
        whole, ours = steps(0, name, "mb2", documents), [rank[number] for rank in got]
        for loss, known in zip(ours[0][0], whole[0], strict=True):
            assert loss == pytest.approx(known, rel=TOLERANCE)
        for which in (1, 2):
            found = differences(assemble(ours, which), assemble([whole], which))
            assert max(found.values()) < TOLERANCE, (words, max(found, key=found.get))


def test_a_rank_has_its_tokens_documents_and_those_before():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]])
    groups = [AxisGroup(name="cp", ranks=(0, 1, 2), index=i) for i in range(3)]
    assert [mine(documents, 2, group, 1).tolist() for group in groups] == [[[-1, 0, 0]], [[0, 1, 1]], [[1, 1, 2]]]
