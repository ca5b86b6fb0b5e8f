"""Tasks merged and split: rounds of clients on several heads as by hand in float64, in the bytes that are predicted."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

import meshwright as mw
from meshwright.answer.predict import predict
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.run.mesh import alone
from meshwright.run.parameters import drawn
from meshwright.run.pieces import Part
from meshwright.run.trainer import Trainer
from meshwright.run.weights import export_weights
from meshwright.spec.cluster import load
from meshwright.world.crowd import Crowd
from tests.run import local
from tests.run.processes import launch_kept
from tests.run.small import differences
from tests.run.test_clients import MODEL, TRAIN, job, run

SGD = msgspec.structs.replace(TRAIN, optimizer="sgd")
H, TASKS, ROUNDS, CLIENTS = 2, 3, 2, 3
WORDS = f"dp3 mb2 sync=mas:h={H},tasks={TASKS},rounds={ROUNDS},groups=2,turn=1"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(data.build("sample", tokenizer.Bytes(), tmp_path_factory.mktemp("corpus")))


def asked(corpus, steps, words=WORDS, **said):
    settings = {"precision": "float64", "weight_decay": 0.0, "clip": 0.0}
    return msgspec.structs.replace(job(corpus, words, steps, settings=settings), train=SGD, **said)


def by_hand(rank, said, rounds):
    """2307.11285, one client after the other, of parameters by name: losses of heads k on tokens k + 1 ahead, in the
    mean over the tokens that have one; affinities in every merged round; three tasks in two by all ways."""
    share = msgspec.structs.replace(SGD, global_batch=2)
    trainer = Trainer(MODEL, parse("tp1 mb2").on(1), share, alone(), settings=said.settings)
    text = data.load(Path(said.corpus), SGD, vocab=MODEL.vocab, seed=0, microbatch=2)
    stage, held_ = trainer.stages[0], trainer.optimizer.held
    names = [h.parameter.name for h in held_]
    size = (MODEL.vocab, MODEL.hidden)

    def first(k):
        part = Part(f"taught_heads.{k}.lm_head.weight", size, (0, 0), (slice(None),))
        return drawn(part, said.settings.seed, 0.02).double()

    merged = {name: h.master.clone() for name, h in zip(names, held_)}
    heads = ["lm_head.weight", *(f"taught_heads.{k}.lm_head.weight" for k in range(TASKS - 1))]
    merged |= {name: first(k).flatten() for k, name in enumerate(heads[1:])}
    taken = [0] * CLIENTS

    def losses(at, client, tasks, wanted=None):
        """The losses of tasks, and the gradient of one of them, or of all together."""
        for name, h in zip(names, held_):
            h.master.copy_(at[name])
        trainer.publish()
        for exchange in trainer.exchanges:
            exchange.reset()
        (p,) = trainer.passes(text.batch(taken[client], client, CLIENTS))
        weights = [at[heads[k]].view(size).clone().requires_grad_() for k in range(TASKS)]
        hidden = stage.head.norm(stage.hidden(None, p))  # [S, b, H]
        found = []
        for k in tasks:
            logits = hidden[: len(hidden) - k] @ weights[k].T
            found.append(F.cross_entropy(logits.flatten(0, 1), p.targets.T[k:].flatten()))
        if wanted is None:
            return [float(one.detach()) for one in found], None
        sum(found).backward()
        for exchange in trainer.exchanges:
            exchange.finish()
        gradient = {name: h.gradient.clone() for name, h in zip(names, held_)}
        zero = torch.zeros(size).double()
        gradient |= {name: (zero if w.grad is None else w.grad).flatten() for name, w in zip(heads, weights)}
        return [float(one.detach()) for one in found], gradient

    measured, groups, models = [], None, {}
    current = -1
    for number in range(rounds):
        job_ = -1 if number < ROUNDS else (number - ROUNDS) % 2
        if job_ != current:
            if groups is None:
                both = sum(measured) / len(measured)
                both = both + both.T  # two tasks are worth what they are to each other, one the mean of four affinities
                ways = {((0, 1), (2,)): (0, 1, 2), ((0, 2), (1,)): (0, 2, 1), ((0,), (1, 2)): (1, 2, 0)}
                worth = {way: both[a][b] + (both[a][c] + both[b][c]) / 4 for way, (a, b, c) in ways.items()}
                groups = max(ways, key=worth.get)
                models = {0: merged, 1: merged}
            current = job_
        start = merged if job_ < 0 else models[job_]
        tasks = range(TASKS) if job_ < 0 else groups[job_]
        ends = []
        for client in range(CLIENTS):
            point = dict(start)
            if job_ < 0:
                rate, before = said.settings.lr, losses(point, client, range(TASKS))[0]
                table = torch.zeros(TASKS, TASKS).double()
                for i in range(TASKS):
                    _, along = losses(point, client, [i], wanted=True)
                    moved = {n: v if n in heads else v - rate * along[n] for n, v in point.items()}
                    after = losses(moved, client, range(TASKS))[0]
                    table[i] = torch.tensor([1 - a / b for a, b in zip(after, before)], dtype=torch.float64)
                measured.append(table)
            for _ in range(H):
                _, gradient = losses(point, client, tasks, wanted=True)
                rate = said.settings.lr_at(taken[client])
                point = {name: values - rate * gradient[name] for name, values in point.items()}
                taken[client] += 1
            ends.append(point)
        mean_of = {name: torch.stack([one[name] for one in ends]).mean(0) for name in start}
        if job_ < 0:
            merged = mean_of
        else:
            models[job_] = mean_of
    ends = []
    for model in models.values():
        for name, h in zip(names, held_):
            h.master.copy_(model[name])
        found = local.whole([local.state(trainer)], "param")
        ends.append(found | {name: model[name].view(size) for name in heads})
    return groups, (sum(measured) / len(measured)).tolist(), ends


def test_merged_rounds_affinities_and_groups_are_those_by_hand(corpus, tmp_path):
    """The split is that of three tasks in two; every job is published with the heads of its tasks."""
    said = asked(corpus, 5 * H, out=str(tmp_path / "run"))  # two merged rounds, and three of jobs in turn
    ((groups, affinity, models),) = launch_kept(1, by_hand, said, 5)
    found = run(said, Crowd())["clients"]
    assert np.allclose(found["affinity"], affinity, rtol=1e-9, atol=1e-13)
    assert sorted(map(tuple, found["groups"])) == sorted(groups)
    for tasks, model in zip(groups, models):
        for task in tasks:
            export_weights(tmp_path / "run", tmp_path / f"task-{task}", head=task)
            with safe_open(tmp_path / f"task-{task}" / "model.safetensors", "pt") as read:
                mine = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118
            heads = {"lm_head.weight": model[f"taught_heads.{task - 1}.lm_head.weight"]} if task else {}
            apart = differences(mine, {name: (model | heads)[name] for name in mine})
            assert len(mine) == 21 and max(apart.values()) < 1e-12, max(apart, key=apart.get)


def test_heads_that_are_trained_travel_and_affinities_with_them_in_the_bytes_that_are_predicted(corpus):
    said = msgspec.structs.replace(asked(corpus, 4 * H), settings=job(corpus, WORDS, 4).settings)
    did = run(said, Crowd())["clients"]
    train = msgspec.structs.replace(SGD, tokens=4 * H * SGD.tokens_per_step)
    predicted = predict(MODEL, load("3x1xh100,10gbe"), train, said.plan, detail=False).clients
    head, width = MODEL.vocab * MODEL.hidden, 4
    whole, trunk = MODEL.num_params + 2 * head, MODEL.num_params - head
    both = CLIENTS * width * (2 * whole + (trunk + head) + (trunk + 2 * head))
    assert predicted.down_bytes == did["down_bytes"] == both
    assert predicted.up_bytes == did["up_bytes"] == did["simulated_up_bytes"] == both + CLIENTS * 2 * 8 * TASKS**2


def test_fewer_heads_take_less_time_and_measuring_more():
    """Six rounds, all merged, with one measurement or six, or split after one; a job for each of four tasks would take
    four times what one does."""
    train = msgspec.structs.replace(SGD, tokens=6 * H * SGD.tokens_per_step)

    def busy_s(words):
        found = predict(MODEL, load("3x1xh100,10gbe"), train, parse(f"dp3 mb2 sync={words}"), detail=False)
        return sum(found.clients.busy_s)

    words = ("fedavg:h=2", "mas:h=2,rounds=1,turn=3", "mas:h=2,rounds=6,every=6", "mas:h=2,rounds=6")
    found = [busy_s(one) for one in words]
    assert found == sorted(found) and found[2] < 4 * found[0]


def test_a_model_with_heads_is_held_by_every_client():
    """In fp32 a parameter takes 4 bytes, and 8 of AdamW's moments; to measure, clients hold three copies of all."""
    words, asked_ = ("fedavg:h=2", "mas:h=2,rounds=6,tasks=3"), (MODEL, load("3x1xh100,10gbe"), TRAIN)
    one, more = (predict(*asked_, parse(f"dp3 mb2 sync={w}")).memory[0].alive for w in words)
    heads = 2 * MODEL.vocab * MODEL.hidden
    assert more["optimizer"] - one["optimizer"] == 8 * heads
    assert more["parameters"] - one["parameters"] == 4 * heads + 3 * 4 * (MODEL.num_params + heads)
    assert more["logits"] == 3 * one["logits"]


@pytest.mark.parametrize(
    ["words", "help"],
    [
        ("mb2 sync=mas:h=2,rounds=2,tasks=1", "2 to 10"),
        ("mb2 sync=mas:h=2,rounds=2,tasks=3,groups=4", "groups=3"),
        ("mb2 sync=mas:h=2,rounds=2 loss_portions=2", "drop portions"),
        ("mb2 tp2 sync=mas:h=2,rounds=2", "drop tp2"),
    ],
)
def test_tasks_that_are_not_to_be_split_are_refused(words, help):
    with pytest.raises(MeshwrightError) as refused:
        predict(MODEL, load("3xh100" if "tp" not in words else "6xh100"), SGD, parse(f"dp3 {words}"))
    assert any(help in one.help for one in refused.value.diagnostics)


def test_heads_that_are_tables_of_the_trunk_are_refused():
    with pytest.raises(MeshwrightError, match="table of its own"):
        predict(mw.load_model("llama3.2-1b"), load("3xh100"), SGD, parse("dp3 mb2 sync=mas:h=2,rounds=2"))
