"""Sync policies as communication hooks in a loop of a user's own: torch's DistributedDataParallel on gloo."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.plan import parse
from meshwright.run.exchanges import built
from meshwright.run.mesh import build
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.workload import Train
from tests.run import small
from tests.run.processes import launch_kept as launch

TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
SETTINGS = Settings(precision="float64", lr=1e-2, clip=0.0)


def network(rank: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    # buckets of 25 MB and a first one of 1 MB: two of them, laid anew after the first step
    made = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 600), nn.Tanh(), nn.Linear(600, 3)).double()
    torch.manual_seed(1 + rank)
    return made, torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


def stepped(ddp: DistributedDataParallel, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """A plain loop of a user: the gradients of every step, flat."""
    optimizer, out = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        out.append(torch.cat([p.grad.reshape(-1) for p in ddp.parameters()]))
        optimizer.step()
    return out


def both(rank: int, words: str):
    """Gradients of torch's own exchange, and of a hook."""
    out = []
    for hooked in (False, True):
        made, x, y = network(rank)
        ddp = DistributedDataParallel(made)
        if hooked:
            ddp.register_comm_hook(ddp, mw.sync.hook(words))
        out.append(torch.stack(stepped(ddp, x, y, 3)))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_usual_policy_is_torchs_own_exchange_bit_for_bit(ranks):
    for plain, hooked in launch(ranks, both, "step"):
        assert torch.equal(plain, hooked)


@pytest.mark.parametrize(["words", "error"], [("fp16", 2.0**-10), ("int8", 1 / 64), ("step:combine=median", None)])
def test_gradients_of_a_hook_are_alike_on_all_ranks_and_as_near_as_the_code(words, error):
    found = launch(2 if error else 3, both, words)
    assert all(torch.equal(found[0][1], hooked) for _, hooked in found)
    plain, hooked = found[0]
    apart = (plain[0] - hooked[0]).abs().max()
    assert apart > 0 and (error is None or apart <= error * plain[0].abs().max())


class Loss(nn.Module):
    """The executor's model as a module of a user's: its parameters, and the loss of a pass."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage

    def forward(self, one):
        return self.stage(None, one)


def beside(rank: int, words: str):
    """Parameters, and the bytes of exchanges, of the executor and of a loop with the hook, from one beginning: AdamW as
    the executor has it, and the loss's share of this rank times the ranks, as DDP takes the mean."""
    model, plan = small.gpt(), parse(f"dp2 mb2 sync={words}")
    trainer = Trainer(model, plan, TRAIN, build(plan), settings=SETTINGS)
    stage = trainer.stages[0]
    values = {p.info.name: p.detach().clone() for p in stage.parameters()}
    (copied,) = built(stage.layers[0].shared, trainer.place.actions, trainer.place.layers).values()
    ddp = DistributedDataParallel(Loss(copied))
    assert all(torch.equal(p, values[p.info.name]) for p in ddp.parameters())
    ddp.register_comm_hook(ddp, mw.sync.hook(words))
    groups = [
        {"params": [p for p in ddp.parameters() if (p.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, SETTINGS.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)
    sent = []
    for step in range(4):
        batch = small.batch(TRAIN, model.vocab, step, 2, rank)
        (one,) = trainer.passes(batch)

        def theirs(one=one):
            optimizer.zero_grad()
            (ddp(one) * 2).backward()
            optimizer.step()

        sent.append([exchanged(rank, work) for work in (lambda batch=batch: trainer.step(batch), theirs)])
    trainer.settle()
    ours = {p.info.name: p.detach().clone() for p in stage.parameters()}
    return ours, {p.info.name: p.detach().clone() for p in ddp.parameters()}, sent


def exchanged(rank: int, work) -> int:
    """Bytes of the exchanges of some work."""
    recorder = Recorder(rank=rank)
    install(recorder)
    work()
    install(Off())
    return sum(recorder.exchanged.values())


@pytest.mark.parametrize("words", ["powersgd:rank=2", "bf16"])
def test_a_loop_with_a_hook_goes_the_way_of_the_executor_and_sends_as_many_bytes(words):
    for ours, theirs, sent in launch(2, beside, words):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(theirs[name], ours[name], rtol=1e-9, atol=1e-9)
        assert all(executor == hook > 0 for executor, hook in sent)


def resumed(rank: int, words: str):
    """Gradients of four steps, and of the last two in a new loop with a new hook that goes on from the state."""
    made, x, y = network(rank)
    ddp, hook = DistributedDataParallel(made), mw.sync.hook(words)
    ddp.register_comm_hook(ddp, hook)
    stepped(ddp, x, y, 2)
    kept, weights = hook.state_dict(), {name: p.detach().clone() for name, p in made.named_parameters()}
    on = stepped(ddp, x, y, 2)
    again, _, _ = network(rank)
    again.load_state_dict(weights)
    other, new = DistributedDataParallel(again), mw.sync.hook(words)
    new.load_state_dict(kept)
    other.register_comm_hook(other, new)
    anew = stepped(other, x, y, 2)
    fresh, _, _ = network(rank)
    fresh.load_state_dict(weights)
    without = DistributedDataParallel(fresh)
    without.register_comm_hook(without, mw.sync.hook(words))
    return torch.stack(on), torch.stack(anew), torch.stack(stepped(without, x, y, 2))


@pytest.mark.parametrize("words", ["powersgd:rank=2", "step:codec=int4"])
def test_what_a_code_keeps_is_saved_and_loaded_and_lives_through_other_buckets(words):
    for on, anew, without in launch(2, resumed, words):
        # buckets of the first step are others than those of later ones, where codes of blocks cut elsewhere
        if words.startswith("powersgd"):
            assert torch.equal(on, anew)
        assert (on - anew).norm() < 0.5 * (on - without).norm()


def refused(rank: int):
    said = []
    for words in ("local:h=8", "int9", "dist-lion"):
        with pytest.raises(MeshwrightError) as found:
            mw.sync.hook(words)
        said.append(str(found.value))
    hook = mw.sync.hook("int4")
    for ask in (hook.state_dict, lambda: hook.load_state_dict({"policy": "int8", "steps": 1, "kept": {}})):
        with pytest.raises(MeshwrightError) as found:
            ask()
        said.append(str(found.value))
    return said


def test_a_policy_that_no_hook_can_be_is_refused():
    (local_steps, unknown, updates, unnamed, other), *_ = launch(1, refused_alone)
    assert "once in 8 steps" in local_steps and "meshwright run" in local_steps
    assert "int9" in unknown and "ddp.register_comm_hook(ddp, hook)" in unnamed
    assert "it sends updates of lion" in updates
    assert "that of int8, not of int4" in other


def refused_alone(rank: int):
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        return refused(rank)


def test_the_public_front_loads_torch_only_when_a_hook_is_asked_for():
    code = "import sys, meshwright as mw; mw.sync; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert mw.sync.hook.__module__ == "meshwright.run.hook"
    with pytest.raises(AttributeError, match="no attribute 'hooks'"):
        mw.sync.hooks  # noqa: B018
