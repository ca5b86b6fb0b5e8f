"""Anchors and miners: rounds of FedAMD as by hand in float64, in the bytes that are predicted."""

from pathlib import Path

import msgspec
import pytest
import torch

from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.run.mesh import alone
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.sync.clients import Begun, Keep, Merge
from meshwright.sync.policy import read
from meshwright.world.crowd import Crowd
from tests.run import local
from tests.run.processes import launch_kept
from tests.run.small import differences
from tests.run.test_clients import MODEL, TRAIN, held, job, run

SGD = msgspec.structs.replace(TRAIN, optimizer="sgd")
H, LARGE, PERIOD, CLIENTS = 2, 2, 2, 3
WORDS = f"dp3 mb2 sync=fedamd:h={H},large={LARGE},period={PERIOD},rate=0.5"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def asked(corpus, steps):
    settings = {"precision": "float64", "weight_decay": 0.0}
    return msgspec.structs.replace(job(corpus, WORDS, steps, settings=settings), train=SGD)


def by_hand(rank, said, rounds):
    """2206.05891 as its authors' code has it, one client after the other: v is the mean of the anchors' last gradients;
    a miner's g begins as v, and is corrected by how its batch's gradient changes from one of its points to the next."""
    share = msgspec.structs.replace(SGD, global_batch=2)
    trainer = Trainer(MODEL, parse("tp1 mb2").on(1), share, alone(), settings=said.settings)
    text = data.load(Path(said.corpus), SGD, vocab=MODEL.vocab, seed=0, microbatch=2)
    views = [h.master for h in trainer.optimizer.held]
    model = [view.clone() for view in views]
    kept, taken = {}, [0] * CLIENTS

    def gradient(point, client, step):
        for view, values in zip(views, point):
            view.copy_(values)
        trainer.publish()
        trainer._gradients(trainer.passes(text.batch(step, client, CLIENTS)))
        return [h.gradient.clone() for h in trainer.optimizer.held]

    for number in range(rounds):
        anchors = number == 0 or number % PERIOD == 0
        toward = [torch.stack(same).mean(0) for same in zip(*kept.values())]
        found = []
        for client in range(CLIENTS):
            if anchors:
                every = [gradient(model, client, number * LARGE + i) for i in range(LARGE)]
                kept[client] = [sum(same) / LARGE for same in zip(*every)]
                continue
            point, before, g = model, model, toward
            for _ in range(H):
                now, then = (gradient(x, client, taken[client]) for x in (point, before))
                g = [a + b - c for a, b, c in zip(g, now, then)]
                before, point = point, [x - said.settings.lr_at(taken[client]) * a for x, a in zip(point, g)]
                taken[client] += 1
            found.append(point)
        if found:
            model = [x + 0.5 * (torch.stack(same).mean(0) - x) for x, same in zip(model, zip(*found))]
    for view, values in zip(views, model):
        view.copy_(values)
    return local.state(trainer)


def test_rounds_of_anchors_and_miners_are_those_by_hand(corpus):
    said = asked(corpus, 4)  # rounds 0 and 2 of anchors, 1 and 3 of miners
    (expected,) = launch_kept(1, by_hand, said, 4)
    for got in launch_kept(3, held, said, "clients"):
        apart = differences(local.whole([got], "param"), local.whole([expected], "param"))
        assert max(apart.values()) < 1e-12, max(apart, key=apart.get)


def test_directions_travel_with_the_model_in_the_bytes_that_are_predicted(corpus):
    said = msgspec.structs.replace(asked(corpus, 4), settings=job(corpus, WORDS, 4).settings)
    did = run(said, Crowd())["clients"]
    train = msgspec.structs.replace(SGD, tokens=4 * SGD.tokens_per_step)
    predicted = predict(MODEL, load("3x1xh100,10gbe"), train, said.plan, detail=False).clients
    assert (did["down_bytes"], did["up_bytes"]) == (predicted.down_bytes, predicted.up_bytes)
    anchors, miners = 3 * 2, 3 * 2  # two rounds of each end with the second of miners
    assert did["up_bytes"] == (anchors + miners) * 4 * MODEL.num_params
    assert did["down_bytes"] == (anchors + 2 * miners) * 4 * MODEL.num_params
    steps = [version.steps for version in predicted.versions]
    assert steps == [H * CLIENTS] * 2 and predicted.seconds > 0


def test_an_anchor_takes_as_many_passes_and_a_miner_two_a_step():
    one = read("fedamd:h=4,large=8,anchors=0.5")
    decider = one.rule.decider(one.values, 4)
    state, begun = decider.decide(decider.begin(), Begun())
    assert [(d.passes, d.anchor, d.directed, d.steps) for d in begun] == [(8, True, False, 1)] * 4
    state = msgspec.structs.replace(state, number=4, anchors=frozenset({1}), waiting=frozenset(), arrived=(0, 1, 3))
    _, done = decider._closed(state)
    assert [part.client for part in done[0].parts] == [0, 3] and isinstance(done[0], Merge)
    assert [part.client for part in done[1].parts] == [1] and isinstance(done[1], Keep)
    assert {(d.steps, d.passes) for d in done[2:]} <= {(4, 2), (1, 8)}


def test_a_period_without_miners_is_refused():
    with pytest.raises(MeshwrightError) as refused:
        predict(MODEL, load("3xh100"), SGD, parse("dp3 mb2 sync=fedamd:h=2,period=1"))
    assert any("period=2" in one.help for one in refused.value.diagnostics)
