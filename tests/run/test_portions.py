"""Layers, and head and loss, in portions of the sequence train as whole ones do, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from meshwright.run.activation import activate
from meshwright.run.emulate import slept
from meshwright.run.loss import cross_entropy
from meshwright.run.portions import cuts
from meshwright.run.record import Recorder, install
from meshwright.spec.workload import parse
from tests.run.processes import launch_kept as launch
from tests.run.small import assemble, differences, gpt, llama, train_steps

#: Relative to each tensor's largest element: sums in another order.
TOLERANCE = 1e-12
TRAIN = parse("batch=4,seq=16,dtype=fp32,optimizer=sgd")
SMALL = {"layers": 2, "hidden": 16, "ffn": 24}
MODELS = {
    "llama": llama(qk_norm=True, **SMALL),
    "tied": llama(tied_embeddings=True, window=5, **SMALL),
    "gpt": gpt(**SMALL),
}
ALONE = [
    ("llama", "full mb2 recompute_portions=3 loss_portions=5"),
    ("tied", "full mb4 recompute_portions=8 loss_portions=16"),
    ("gpt", "full mb2 recompute_portions=2 recompute_layers=1"),
]
TOGETHER = [
    ("gpt", "dp2 full mb1 recompute_portions=3 loss_portions=5"),
    ("tied", "dp2 zero3 full mb2 recompute_portions=3 loss_portions=5"),
    ("tied", "pp2 full mb1 recompute_portions=3 loss_portions=5"),
    ("llama", "tp2 nosp full mb2 recompute_portions=3 loss_portions=5"),
]
ZERO3 = 1


def steps(rank: int, name: str, words: str, **said):
    return train_steps(rank, MODELS[name], words, TRAIN, documents=True, **said)


def several(rank: int, cases: list) -> list:
    """Return what each case gives, and the bytes of its exchanges between replicas, by kind."""
    found = []
    for case in cases:
        recorder = Recorder(rank=rank)
        install(recorder)
        found.append((steps(rank, *case), recorder.exchanged))
    return found


@pytest.fixture(scope="module")
def whole():
    """Each model in one process that recomputes nothing."""
    return {name: steps(0, name, "mb4") for name in MODELS}


def same(got: list, whole) -> None:
    for loss, known in zip(got[0][0], whole[0]):
        assert loss == pytest.approx(known, rel=TOLERANCE)
    for which in (1, 2):
        found = differences(assemble(got, which), assemble([whole], which))
        assert max(found.values()) < TOLERANCE, max(found, key=found.get)


@pytest.mark.parametrize(("name", "words"), ALONE)
def test_portions_train_as_the_whole_does(whole, name, words):
    same([steps(0, name, words)], whole[name])


def test_portions_on_two_processes_train_as_one_whole_does(whole):
    got = launch(2, several, [*TOGETHER, ("tied", "dp2 zero3 full mb2")])
    for number, (name, _) in enumerate(TOGETHER):
        same([rank[number][0] for rank in got], whole[name])
    # a layer's parameters are gathered, and its gradients reduced, once a pass and not once a portion
    portions, once = (got[0][number][1] for number in (ZERO3, -1))
    assert portions == once and {kind for kind, _ in once} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("phase", ["pretrain", "lora,rank=4,targets=all"])
def test_elements_are_dropped_in_portions_where_they_are_in_the_whole(phase):
    """Those of hidden states, and of what enters adapters beside a frozen base."""
    train = parse(f"batch=4,seq=16,dtype=fp32,optimizer=sgd,dropout=yes,phase={phase}")
    plans = ("full mb4", "full mb4 recompute_portions=3")
    got = [train_steps(0, MODELS["llama"], words, train) for words in plans]
    same([got[1]], got[0])
    if phase == "pretrain":
        assert train_steps(0, MODELS["llama"], plans[0], TRAIN)[0] != got[0][0]  # something is dropped


def test_a_layer_is_never_recomputed_whole_and_scores_are_never_all_there(monkeypatch):
    """The widest MLP inside of a backward and the most scores at a time are those of the longest portion."""
    rows: dict[str, list[int]] = {"mlp": [], "loss": []}

    def activated(up, *rest):
        rows["mlp"].append(up.shape[0] if torch.is_grad_enabled() else 0)
        return activate(up, *rest)

    def entropy(logits, *rest):
        rows["loss"].append(logits.shape[0])
        return cross_entropy(logits, *rest)

    monkeypatch.setattr("meshwright.run.parts.activate", activated)
    monkeypatch.setattr("meshwright.run.parts.cross_entropy", entropy)
    steps(0, "llama", "full mb4 recompute_portions=3 loss_portions=5")
    longest = [max(b - a for a, b in cuts(16, count)) for count in (3, 5)]
    assert [max(rows["mlp"]), max(rows["loss"])] == longest == [6, 4]


def test_a_layer_that_sleeps_in_place_of_its_portions_brings_all_contributions():
    """An emulated bucket is exchanged behind its last layer, however many portions a real one has."""
    seen = []
    bucket = SimpleNamespace(arrived=lambda: seen.append("arrived"))
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.contributions, parameter.sink = 3, SimpleNamespace(bucket=bucket, add=lambda _: bucket.arrived())
    asleep = slept._Slept(slept._Device(), 0.0, 0.0, [parameter])
    slept._Pass.apply(torch.zeros(2, requires_grad=True), asleep).sum().backward()
    assert len(seen) == 3
