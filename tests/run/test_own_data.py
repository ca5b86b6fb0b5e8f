"""Replicas with text of their own: each from its run alone, and their averages those of replicas by hand."""

import msgspec
import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.answer.predict import simulate
from meshwright.cost import standard
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.data.corpus import Corpus
from meshwright.run.judge import own_of
from meshwright.run.mesh import alone, build
from meshwright.run.record import Off, Recorder, install
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.workload import Train
from tests.run import local
from tests.run.processes import launch_kept as launch
from tests.run.small import differences, llama

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
MODEL = llama(layers=1, vocab=64)


def corpus():
    """Eight sequences, whose tokens say which half they are of: below 32 in the first."""
    tokens = np.random.default_rng(0).integers(0, 32, 8 * 16 + 1)
    tokens[4 * 16 + 1 :] += 32
    starts = np.zeros(1, np.int64)
    return Corpus(tokens=tokens, starts=starts, largest=63, seq_len=16, global_batch=4, boundaries=False)


def test_a_replica_sees_all_of_its_own_run_before_any_of_it_again_and_nothing_else():
    for part in (0, 1):
        seen = [corpus().own(step, part, 2, among, 2) for step in (0, 1) for among in (0, 1)]
        firsts = sorted(int(batch.tokens[0, 1:].sum()) for batch in seen)
        run = corpus().tokens[part * 64 + 1 : part * 64 + 65].reshape(4, 16)
        assert firsts == sorted(run.sum(1).tolist())


def trained(rank, text):
    trainer = Trainer(MODEL, parse(text), TRAIN, build(parse(text)), settings=local.SETTINGS)
    for step in range(4):
        trainer.step(own_of(trainer, corpus(), step))
    trainer.settle()
    return local.state(trainer)


def by_hand(rank, fused=lambda name: True):
    share = msgspec.structs.replace(TRAIN, global_batch=2)
    trainers = [Trainer(MODEL, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(2)]
    for step in range(4):
        for part, trainer in enumerate(trainers):
            trainer.step(corpus().own(step, part, 2, rows=2))
        if step % 2:
            for same in zip(*(t.optimizer.held for t in trainers)):
                if not fused(same[0].parameter.parts[0].name):
                    continue
                mean = torch.stack([h.master for h in same]).mean(0)
                for h in same:
                    h.master.copy_(mean)
            for trainer in trainers:
                trainer.publish()
    return [local.state(trainer) for trainer in trainers]


def shared(name):
    return name not in ("lm_head.weight", "model.norm.weight")


def test_replicas_on_runs_of_their_own_are_fused_as_by_hand():
    ((expected, _),) = launch(1, by_hand)
    for held in launch(2, trained, "dp2 mb1 sync=cold-fusion:h=2"):
        apart = differences(local.whole([held], "param"), local.whole([expected], "param"))
        assert max(apart.values()) < 1e-12, max(apart, key=apart.get)


def test_heads_of_their_own_are_what_each_replica_made_of_them_and_nothing_of_them_is_sent():
    (expected,) = launch(1, by_hand, shared)
    got = launch(2, sending, "dp2 mb1 sync=cold-fusion:h=2,heads=own")
    for (held, sent), want in zip(got, expected):
        apart = differences(local.whole([held], "param"), local.whole([want], "param"))
        assert max(apart.values()) < 1e-12, max(apart, key=apart.get)
        run = simulate(parse("dp2 mb1 sync=cold-fusion:h=2,heads=own"), MODEL, load("2xh100"), TRAIN, standard())
        programs = [run.lowered.programs[k] for k in run.lowered.graph.cost_key]
        told = sorted(2 * m.num_bytes for p in programs for m in p.moves if p.rare)
        assert sorted(sent) == sorted(2 * told)  # numbers of 8 bytes in place of 4, in two rounds
    model = llama(layers=1, vocab=64, tied_embeddings=True)
    with pytest.raises(MeshwrightError) as refused:
        mw.predict(model, load("2xh100"), TRAIN, parse("dp2 mb1 sync=cold-fusion:h=2,heads=own"))
    assert any("heads=fused" in one.help for one in refused.value.diagnostics)


def sending(rank, text):
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=4)
    install(recorder)
    held = trained(rank, text)
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    return held, [one.num_bytes for one in labels if one.num_bytes]


def test_a_text_that_is_divided_otherwise_is_refused():
    with pytest.raises(MeshwrightError) as refused:
        train = mw.parse_train("batch=8,seq=16,optimizer=momentum,clusters=2")
        mw.predict(llama(layers=2), mw.load_cluster("2xh100"), train, mw.parse_plan("dp2 mb1 sync=cold-fusion:h=2"))
    assert any("sync=local:h=2" in one.help for one in refused.value.diagnostics)
