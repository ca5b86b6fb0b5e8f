"""Small models and batches for real training, and the whole state of a job put together from its ranks' pieces."""

from __future__ import annotations

import torch

from meshwright.plan import parse
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.pieces import Parameter, Part
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

DIMS = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 67, "ffn": 48, "max_seq_len": 64}


def llama(**over):
    return transformer(**(DIMS | {"gated": True, "kv_heads": 2} | over))


def gpt(**over):
    return transformer(**(DIMS | over))


def batch(train: Train, vocab: int, step: int, dp: int = 1, index: int = 0, *, documents: bool = False) -> Batch:
    """This rank's part of a global batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (train.global_batch, train.seq_len + 1)
    tokens = torch.randint(0, vocab, shape, generator=generator)
    cuts = None
    if documents:
        cuts = (
            (torch.rand(shape[0], train.seq_len, generator=generator) < 0.15).to(torch.int32).cumsum(1).to(torch.int32)
        )
    count = train.global_batch // dp
    mine = slice(index * count, (index + 1) * count)
    return Batch(tokens[mine], None if cuts is None else cuts[mine])


def train_steps(
    rank: int,
    model,
    plan_text: str,
    train: Train,
    steps: int = 1,
    documents: bool = False,
    schedule_params: dict | None = None,
    **settings,
):
    """What one process of a job saw: losses and gradient norms, and gradients and parameters as (what, start, stop,
    values)."""
    plan = parse(plan_text)
    plan = (
        plan.on(plan.layout.num_ranks or 1)
        if plan.layout.dp
        else plan.on(plan.layout.tp * plan.layout.pp * plan.layout.cp)
    )
    mesh = build(plan)
    known = Settings(**({"precision": "float64", "lr": 1e-3} | settings))
    trainer = Trainer(model, plan, train, mesh, settings=known, schedule_params=schedule_params)
    seen, gradients = [], []

    def keep() -> None:
        if len(seen) == 0:
            gradients.extend(
                (plain(h.parameter), h.start, h.stop, h.gradient.clone().double()) for h in trainer.optimizer.held
            )

    trainer.before_update.append(keep)
    for step in range(steps):
        result = trainer.step(batch(train, model.vocab, step, plan.layout.dp, mesh["dp"].index, documents=documents))
        seen.append((result.loss, result.grad_norm))
    trainer.settle()
    parameters = [(plain(p.parameter), p.start, p.stop, p.values.clone()) for p in trainer.pieces() if p.key == "param"]
    return seen, gradients, parameters


def plain(parameter: Parameter) -> tuple:
    """A parameter as plain values."""
    return parameter.name, parameter.shape, tuple(tuple(part) for part in parameter.parts)


def assemble(ranks: list, which: int) -> dict[str, torch.Tensor]:
    """Every published tensor, from the pieces of all ranks; copies must agree."""
    locals_: dict[tuple[int, str], torch.Tensor] = {}
    infos = {}
    for rank, got in enumerate(ranks):
        for (name, shape, parts), start, stop, values in got[which]:
            parameter = Parameter(name, shape, tuple(Part(*part) for part in parts))
            key = (rank, name)
            if key not in locals_:
                locals_[key] = torch.full(parameter.shape, float("nan"), dtype=torch.float64).view(-1)
            locals_[key][start:stop] = values
            infos[key] = parameter
    out: dict[str, torch.Tensor] = {}
    for key, flat in locals_.items():
        parameter = infos[key]
        local = flat.view(parameter.shape)
        for part in parameter.parts:
            whole = out.setdefault(part.name, torch.full(part.shape, float("nan"), dtype=torch.float64))
            block = part.view(local)
            target = whole[part.region(tuple(block.shape))]
            known = ~block.isnan()
            both = known & ~target.isnan()
            assert torch.allclose(target[both], block[both], rtol=1e-9, atol=1e-12), f"copies of {part.name} differ"
            target[known] = block[known]
    for name, whole in out.items():
        assert not whole.isnan().any(), f"{name} is incomplete"
    return out


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference of every tensor relative to its largest element."""
    assert a.keys() == b.keys()
    return {n: float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-30)) for n in a}
