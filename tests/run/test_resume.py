"""Training that is saved under one plan and goes on under another is training that was never interrupted."""

from functools import cache

import pytest

from meshwright.plan import parse
from meshwright.run.checkpoint import AsyncSaver, Meta, identity, load
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import small
from tests.run.processes import launch_kept as launch

#: With dropout: its random numbers are those of the step and the token, and none has to be kept.
TRAIN = Train(seq_len=16, global_batch=8, optimizer="adamw", dropout=True)
SETTINGS = Settings(precision="float64", lr=1e-2, warmup=3, dropout=0.2)
HALF = 2


def num_ranks(text):
    return parse(text).layout.num_ranks


def begun(model, text):
    plan = parse(text)
    plan = plan.on(plan.layout.num_ranks)
    return Trainer(model, plan, TRAIN, build(plan), settings=SETTINGS)


def steps(trainer, first, last, after=lambda step: None):
    """Losses and gradient norms of steps [first, last)."""
    out = []
    for step in range(first, last):
        dp = trainer.mesh["dp"]
        result = trainer.step(small.batch(TRAIN, trainer.model.vocab, step, dp.size, dp.index))
        out.append((result.loss, result.grad_norm))
        after(step)
    trainer.settle()
    return out


def uninterrupted(rank, model):
    return steps(begun(model, "dp1"), 0, 2 * HALF)


def saved(rank, model, text, root):
    """Two steps, a save that is under way during a third, and the third."""
    trainer = begun(model, text)
    saver = AsyncSaver(root, trainer.mesh["world"])
    trainer.before_update.append(saver.before_update)

    def after(step):
        saver.poll()
        if step + 1 == HALF:
            said = Meta(
                step=trainer.step_count, seed=0, model=model.name, model_hash=identity(model), plan=text, world=1
            )
            saver.begin(trainer.pieces(), said)

    out = steps(trainer, 0, HALF + 1, after)
    saver.wait()
    return out


def resumed(rank, model, text, root):
    trainer = begun(model, text)
    meta = load(root, trainer.pieces(), trainer.mesh["world"], model_hash=identity(model))
    trainer.set_step(meta.step)
    return steps(trainer, meta.step, 2 * HALF)


def close(got, expected):
    return all(a == pytest.approx(b, rel=1e-9, abs=0) for a, b in zip(got, expected, strict=True))


MODELS = {
    "llama": small.llama,
    "gpt": small.gpt,
    "tied": lambda: small.llama(tied_embeddings=True),
    "experts": lambda: small.llama(experts=4, top_k=2, moe_ffn=24, shared_ffn=16),
}


@cache
def reference(kind):
    return launch(1, uninterrupted, MODELS[kind]())[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ["kind", "before", "then"],
    [
        ("gpt", "dp1 mb4", "dp2 mb2"),
        ("gpt", "tp2 dp1 mb4", "pp2 dp1 mb2"),
        ("llama", "dp2 zero1 mb2", "tp2 dp2 zero2 mb2"),
        ("llama", "dp2 zero3 mb2", "dp4 zero3"),
        ("llama", "tp2 pp2 dp2 mb2", "dp2 zero3 mb2"),
        ("tied", "pp2 dp2 zero1 mb2", "cp2 dp1 mb4"),
        ("tied", "pp2 vpp2 dp1 mb2", "tp4 dp1 mb4"),
        ("tied", "dp2 zero3 mb2", "pp4 dp1 mb2"),
        ("tied", "pp4 dp1 chimera mb2", "dp2 zero1 mb2"),
        ("llama", "dp2 zero2 mb2", "pp4 dp1 dualpipe mb1"),
        ("experts", "dp4 ep2", "tp2 dp1 mb4"),
        ("experts", "pp2 dp2 ep2 mb2", "dp2 zero3 mb2"),
    ],
)
def test_losses_after_a_change_of_plan_are_those_of_one_process_that_was_never_stopped(tmp_path, kind, before, then):
    for got in launch(num_ranks(before), saved, MODELS[kind](), before, tmp_path):
        assert close(got, reference(kind)[: HALF + 1])
    for got in launch(num_ranks(then), resumed, MODELS[kind](), then, tmp_path):
        assert close(got, reference(kind)[HALF:])
