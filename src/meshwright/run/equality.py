"""Whether a plan trains as one process does: the same losses, gradients and parameters, compared on every rank.

Each rank trains the whole model by itself on the global batch (the reference, which exchanges nothing), then its part
of the same model under the plan, and compares what it holds. Every element of the model must be held by some rank.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.lower.filling import FrozenOrder
from meshwright.plan import Plan
from meshwright.plan.facets.feedback import CHAIN
from meshwright.plan.slices import Portions
from meshwright.run import mesh
from meshwright.run.data import Batch
from meshwright.run.launch import start
from meshwright.run.microbatches import own_rows
from meshwright.run.pieces import Parameter
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.spec.encoded import entry_of, image_channels, is_encoded
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: A difference that is no number, as a number.
FAR = 1e300
#: What a tensor's largest element is at least taken for: one of zeros differs from another of them by nothing.
TINY = 1e-30


class EqualityCase(msgspec.Struct, frozen=True, kw_only=True):
    """A legal, executable plan with as many ranks as all other cases of a job, and what it trains on. ``portions``:
    what every replica has of a step where they differ; ``frozen_order``: what each rank runs of frozen layers."""

    model: Model
    plan: Plan
    train: Train
    steps: int = 2
    portions: Portions = Portions()
    frozen_order: FrozenOrder | None = None


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """The largest differences from one process, relative to the largest element of each tensor: of the losses and of
    the parameters after all steps, of the gradients of the first. ``whole``: every element was held by some rank."""

    loss: float
    gradient: float
    parameter: float
    whole: bool

    @property
    def most(self) -> float:
        """The largest of them; infinite where elements are missing."""
        return max(self.loss, self.gradient, self.parameter) if self.whole else float("inf")


class _Seen(NamedTuple):
    """The results of one rank: losses, and (parameter, start, stop, values) of the first gradients and the last
    parameters."""

    losses: list[float]
    gradients: list[tuple]
    parameters: list[tuple]


def apart(cases: Sequence[EqualityCase], *, device: str = "cpu") -> list[Apart]:
    """Return the largest difference of each case from one process, all of them in one job in float64.

    Raises:
        RankDied: L001 when a process ends before its time.
    """
    found = start(_compare, tuple(cases), num_ranks=cases[0].plan.num_ranks, device=device, timeout_s=120.0)
    return [msgspec.convert(one, Apart) for one in found]


def _compare(world: World, cases: tuple[EqualityCase, ...]) -> list[dict[str, Any]]:
    known: dict[tuple, _Seen] = {}
    out = []
    for case in cases:
        learns = CHAIN if case.plan.several else case.plan.feedback.way
        key = (case.model.name, case.train.text(), case.steps, _stored(case), learns)
        if key not in known:
            whole = msgspec.structs.replace(case, plan=_alone(case), frozen_order=None)
            known[key] = _trained(whole, mesh.alone(device=world.device))
        place = mesh.build(case.plan, device=world.device)
        seen = _trained(case, place)
        out.append(msgspec.to_builtins(_differences(seen, known[key], world)))
        mesh.end(place)
        del place, seen
        gc.collect()  # what holds a group holds its thread
    return out


def _alone(case: EqualityCase) -> Plan:
    """One rank that takes the whole batch as one microbatch, and stores a frozen base as the plan does."""
    plan = Plan().on(1)
    return msgspec.structs.replace(
        plan,
        feedback=(Plan() if case.plan.several else case.plan).feedback,
        pipeline=msgspec.structs.replace(plan.pipeline, microbatch=case.train.global_batch),
        precision=msgspec.structs.replace(plan.precision, params=_stored(case)),
    )


def _stored(case: EqualityCase) -> str:
    """How a frozen base is stored; pools have none."""
    return (Plan() if case.plan.several else case.plan).precision.params


def _trained(case: EqualityCase, place: mesh.ProcessMesh) -> _Seen:
    settings = Settings(precision="float64", lr=1e-2)
    shared = not case.plan.several and (case.plan.layout.shares or case.plan.kinds.any)
    portions = case.portions if shared else None  # the one process it is compared with has no replicas
    how = {"settings": settings, "portions": portions, "frozen_order": case.frozen_order}
    trainer = Trainer(case.model, case.plan, case.train, place, **how)
    losses: list[float] = []
    gradients: list[tuple] = []

    def keep() -> None:
        if not gradients:
            held = trainer.optimizer.held
            gradients.extend((h.parameter, h.start, h.stop, h.gradient.double().clone()) for h in held)

    trainer.before_update.append(keep)
    for step in range(case.steps):
        looks = trainer.encoder is not None and trainer.encoder.ahead and step + 1 < case.steps
        following = _batch(case, step + 1, trainer) if looks else None
        losses.append(trainer.step(_batch(case, step, trainer), following).loss)
    trainer.settle()
    parameters = [(p.parameter, p.start, p.stop, p.values.clone()) for p in trainer.pieces() if p.key == "param"]
    return _Seen(losses, gradients, parameters)


def _batch(case: EqualityCase, step: int, trainer: Trainer) -> Batch:
    """This rank's part of a global batch of random tokens, in documents of random lengths, that depends on the step
    alone; of random images and classes for a model that encodes them."""
    draw = torch.Generator().manual_seed(1000 + step)
    rows, length = case.train.global_batch, case.train.seq_len
    if is_encoded(case.model):
        sizes = image_channels(case.model), case.train.image, case.train.image
        images = torch.randn(rows, *sizes, generator=draw, dtype=torch.float64)
        classes = torch.randint(0, max(1, entry_of(case.model).classes - 1), (rows,), generator=draw)
        at, parts = trainer.mesh["dp"].index, trainer.mesh["dp"].size
        some = slice(at * rows // parts, (at + 1) * rows // parts)
        return Batch(images[some], None, classes[some])
    tokens = torch.randint(0, case.model.vocab, (rows, length + 1), generator=draw)
    begins = torch.rand(rows, length, generator=draw) < 0.15
    documents = begins.to(torch.int32).cumsum(1).to(torch.int32)
    if case.train.pack:
        return _packed(tokens, documents)
    dp, chosen = trainer.mesh["dp"], own_rows(trainer)
    mine = range(dp.index * rows // dp.size, (dp.index + 1) * rows // dp.size) if chosen is None else chosen
    return Batch(tokens, documents).taking(mine)


def _packed(tokens: torch.Tensor, documents: torch.Tensor) -> Batch:
    """The batch with documents as a packing has them: positions begin in each anew, and nothing is learnt from its
    last token."""
    targets, positions = tokens[:, 1:].clone(), torch.zeros_like(tokens[:, 1:])
    last = torch.ones_like(documents, dtype=torch.bool)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    targets[last] = -1
    for column in range(1, documents.shape[1]):
        positions[:, column] = torch.where(last[:, column - 1], 0, positions[:, column - 1] + 1)
    return Batch(tokens, documents, targets, positions, int((targets >= 0).sum()))


def _differences(seen: _Seen, reference: _Seen, world: World) -> Apart:
    """Collective: the largest on any rank."""
    loss = max(_relative(a, b) for a, b in zip(seen.losses, reference.losses, strict=True))
    worst, missing = [loss], 0
    for mine, theirs in ((seen.gradients, reference.gradients), (seen.parameters, reference.parameters)):
        whole: dict[str, torch.Tensor] = {}
        for name, block, (region, _), shape in _blocks(theirs):  # a matrix may be several blocks below each other
            whole.setdefault(name, block.new_zeros(shape))[region] = block
        held = {name: torch.zeros(block.shape, dtype=torch.uint8) for name, block in whole.items()}
        most = 0.0
        for name, block, (region, known), _ in _blocks(mine):
            held[name][region] |= known.to(torch.uint8).cpu()
            wanted = whole[name]
            difference = (block - wanted[region]).abs()[known]
            if difference.numel():
                # not max(): a difference that is no number must not be lost
                share = difference.max().cpu() / wanted.abs().max().clamp_min(TINY).cpu()
                most = float(torch.stack((torch.tensor(most), share)).max())
        flat = torch.cat([h.flatten() for h in held.values()])
        missing += int((_most(flat, world) == 0).sum())
        worst.append(most)
    numbers = torch.nan_to_num(torch.tensor(worst, dtype=torch.float64), nan=FAR, posinf=FAR)
    loss, gradient, parameter = _most(numbers, world).tolist()
    return Apart(loss=loss, gradient=gradient, parameter=parameter, whole=missing == 0)


def _most(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the largest of each value on any rank, on the CPU; NCCL exchanges what is on a GPU alone."""
    if dist.is_initialized():
        values = values.to(world.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.cpu()


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def _blocks(
    pieces: list[tuple],
) -> Iterator[tuple[str, torch.Tensor, tuple[tuple[slice, ...], torch.Tensor], tuple[int, ...]]]:
    """(published name, block, (its region, which elements are known), published shape) of what a rank holds."""
    values: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    infos: dict[str, Parameter] = {}
    for parameter, first, last, part in pieces:
        if parameter.name not in values:
            numel = torch.Size(parameter.shape).numel()
            values[parameter.name] = part.new_zeros(numel)
            known[parameter.name] = torch.zeros(numel, dtype=torch.bool, device=part.device)
            infos[parameter.name] = parameter
        values[parameter.name][first:last] = part
        known[parameter.name][first:last] = True
    for title, parameter in infos.items():
        for part in parameter.parts:
            block = part.view(values[title].view(parameter.shape))
            mask = part.view(known[title].view(parameter.shape))
            yield part.name, block, (part.region(tuple(block.shape)), mask), tuple(part.shape)
