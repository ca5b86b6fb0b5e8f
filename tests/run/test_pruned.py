"""Clients of a pruned model: rounds as by hand in float64, and masks in the bytes that are predicted."""

from pathlib import Path

import msgspec
import numpy as np
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
from meshwright.sync.clients import Answered, Begun, CutMask, TrainOn
from meshwright.sync.policy import read
from meshwright.sync.pruning import densities, drawn
from meshwright.world.crowd import Crowd
from tests.run import local
from tests.run.processes import launch_kept
from tests.run.small import differences
from tests.run.test_clients import MODEL, TRAIN, held, job, run

H, CLIENTS, ROUNDS = 2, 3, 4
WORDS = f"dp3 mb2 sync=feddip:h={H},rounds=20,first=0.5,last=0.9,every=2,penalty=0.01"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def by_hand(rank, said, rounds):
    """2309.06805 as its authors' code has it, one client after the other, tensor by tensor: gradients of masked values
    are taken by all, with those of a penalty of 0 in the first twentieth of 20 rounds and then from 5e-4 on."""
    share = msgspec.structs.replace(TRAIN, global_batch=2)
    settings = msgspec.structs.replace(said.settings, clip=0.0)
    text = data.load(Path(said.corpus), TRAIN, vocab=MODEL.vocab, seed=0, microbatch=2)
    trainers = [Trainer(MODEL, parse("tp1 mb2").on(1), share, alone(), settings=settings) for _ in range(CLIENTS)]
    views = [[h.master for h in trainer.optimizer.held] for trainer in trainers]
    shapes = [tuple(h.parameter.shape) for h in trainers[0].optimizer.held]
    matrix = [len(shape) > 1 for shape in shapes]
    model, mask = [view.clone() for view in views[0]], None
    count = sum(len(view) for view, one in zip(model, matrix) if one)
    for number in range(rounds):
        found = []
        for client, trainer in enumerate(trainers):
            mine = mask
            if number == 0:
                flat = torch.from_numpy(drawn([s for s, one in zip(shapes, matrix) if one], 0.5, (0, client)))
                parts = iter(flat.split([len(view) for view, one in zip(model, matrix) if one]))
                mine = [next(parts) if one else torch.ones(len(view), dtype=bool) for view, one in zip(model, matrix)]
            dense = [values.clone() for values in model]
            for step in range(number * H, number * H + H):
                for view, values, kept in zip(views[client], dense, mine):
                    view.copy_(values * kept)
                trainer.publish()
                trainer._gradients(trainer.passes(text.batch(step, client, CLIENTS)))
                strength = 0.0 if number == 0 else 5e-4 + (0.01 - 5e-4) / 19 * (number - 1)
                for h, view, values, one in zip(trainer.optimizer.held, views[client], dense, matrix):
                    if one and strength:
                        h.gradient.add_(strength * view / view.norm())
                    view.copy_(values)
                trainer.optimizer.update(step, 0.0)
                dense = [view.clone() for view in views[client]]
            found.append(dense)
        model = [torch.stack(same).mean(0) for same in zip(*found)]
        model = model if mask is None else [values * kept for values, kept in zip(model, mask)]
        if number % 2 == 0:
            zeros = round((0.9 - 0.4 * (1 - number / 20) ** 3) * count)
            large = torch.cat([values.abs() for values, one in zip(model, matrix) if one])
            least = large.sort().values[zeros]
            mask = [
                values.abs() >= least if one else torch.ones_like(values, dtype=bool)
                for values, one in zip(model, matrix)
            ]
            model = [values * kept for values, kept in zip(model, mask)]
    for view, values in zip(views[0], model):
        view.copy_(values)
    return local.state(trainers[0])


def asked(corpus, steps):
    settings = {"precision": "float64", "clip": 0.0}
    return job(corpus, WORDS, steps, settings=settings)


def test_rounds_of_a_model_that_is_pruned_are_those_by_hand(corpus):
    said = asked(corpus, ROUNDS * H)
    (expected,) = launch_kept(1, by_hand, said, ROUNDS)
    want = local.whole([expected], "param")
    for got in launch_kept(3, held, said, "clients"):
        mine = local.whole([got], "param")
        apart = differences(mine, want)
        assert max(apart.values()) < 1e-12, max(apart, key=apart.get)
    zeros = sum(int((one == 0).sum()) for one in want.values() if one.dim() > 1)
    assert zeros / sum(one.numel() for one in want.values() if one.dim() > 1) == pytest.approx(0.6084, abs=1e-3)


def test_a_model_travels_as_what_its_mask_keeps_and_the_mask_when_it_is_another(corpus):
    said = msgspec.structs.replace(asked(corpus, ROUNDS * H), settings=job(corpus, WORDS, 4).settings)
    did = run(said, Crowd())["clients"]
    train = msgspec.structs.replace(TRAIN, tokens=ROUNDS * H * TRAIN.tokens_per_step)
    predicted = predict(MODEL, load("3x1xh100,10gbe"), train, said.plan, detail=False).clients
    assert (did["down_bytes"], did["up_bytes"]) == (predicted.down_bytes, predicted.up_bytes)
    others = MODEL.hidden * (2 * 2 + 1)  # norms
    matrices = MODEL.num_params - others
    kept = [matrices - round(part * matrices) for part in (0.5, 0.9 - 0.4 * 0.9**3)]
    rounds = [4 * MODEL.num_params, 4 * (others + kept[0]) + -(-matrices // 8), 4 * (others + kept[0])]
    rounds.append(4 * (others + kept[1]) + -(-matrices // 8))
    assert did["down_bytes"] == 3 * sum(rounds)


def test_a_client_that_sat_out_is_told_the_mask_when_it_comes_back():
    one = read("feddip:h=1,rounds=20,every=4,clients=1")
    decider = one.rule.decider(one.values, 3)
    state, decisions = decider.decide(decider.begin(), Begun())
    known = {}
    for number in range(12):
        (task,) = (d for d in decisions if isinstance(d, TrainOn))
        assert task.mask == (number - 1) // 4 * 4 * (number > 0) - (number == 0)
        assert task.told == (known.get(task.client, -1) != task.mask)
        known[task.client] = task.mask
        state, decisions = decider.decide(state, Answered(task.client, task.task, number, 1, 0.0, 1.0))
        assert [d.number for d in decisions if isinstance(d, CutMask)] == [number]


def test_small_matrices_keep_more_of_their_values_and_all_keep_what_is_asked():
    shapes = [(4, 4), (64, 64), (8, 128)]
    parts = densities(shapes, 0.2)
    assert parts[0] == 1.0 > parts[2] > parts[1]
    assert sum(part * np.prod(shape) for part, shape in zip(parts, shapes)) == pytest.approx(0.2 * (16 + 4096 + 1024))


def test_a_mask_that_is_not_cut_further_is_refused():
    with pytest.raises(MeshwrightError) as refused:
        predict(MODEL, load("3xh100"), TRAIN, parse("dp3 mb2 sync=feddip:h=2,rounds=20,first=0.9,last=0.5"))
    assert any("last=0.9" in one.help for one in refused.value.diagnostics)
