"""Replicas with text of their own: each from its run alone, and their averages those of replicas by hand."""

import msgspec
import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.data.corpus import Corpus
from meshwright.run.judge import own_of
from meshwright.run.mesh import alone, build
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import local
from tests.run.processes import launch
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


def by_hand(rank):
    share = msgspec.structs.replace(TRAIN, global_batch=2)
    trainers = [Trainer(MODEL, parse("tp1 mb1").on(1), share, alone(), settings=local.SETTINGS) for _ in range(2)]
    for step in range(4):
        for part, trainer in enumerate(trainers):
            trainer.step(corpus().own(step, part, 2, rows=2))
        if step % 2:
            for same in zip(*(t.optimizer.held for t in trainers)):
                mean = torch.stack([h.master for h in same]).mean(0)
                for h in same:
                    h.master.copy_(mean)
            for trainer in trainers:
                trainer.publish()
    return local.state(trainers[0])


def test_replicas_on_runs_of_their_own_are_fused_as_by_hand():
    (expected,) = launch(1, by_hand)
    for held in launch(2, trained, "dp2 mb1 sync=cold-fusion:h=2"):
        apart = differences(local.whole([held], "param"), local.whole([expected], "param"))
        assert max(apart.values()) < 1e-12, max(apart, key=apart.get)


def test_a_text_that_is_divided_otherwise_is_refused():
    with pytest.raises(MeshwrightError) as refused:
        train = mw.parse_train("batch=8,seq=16,optimizer=momentum,clusters=2")
        mw.predict(llama(layers=2), mw.load_cluster("2xh100"), train, mw.parse_plan("dp2 mb1 sync=cold-fusion:h=2"))
    assert any("sync=local:h=2" in one.help for one in refused.value.diagnostics)
