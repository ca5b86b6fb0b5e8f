"""A rank's parameters and their exchange: the plan's stages, their parameters by kind, and the fragments of these made
into buckets or fully sharded layers."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.lower.partition import segments, stage_layers
from meshwright.plan import Plan
from meshwright.run.fsdp import Sharded
from meshwright.run.host_memory import HostLink
from meshwright.run.host_update import by_host
from meshwright.run.lora.base import PackedMatrix
from meshwright.run.mesh import ProcessMesh, coordinates
from meshwright.run.model import Stage
from meshwright.run.parameters import drawn, initialise
from meshwright.run.parts import Lowering, Shared
from meshwright.run.scoped import Scoped
from meshwright.run.settings import DTYPES
from meshwright.run.sync import Bucket
from meshwright.schedules.actions import Actions
from meshwright.spec import naming
from meshwright.spec.model import Model
from meshwright.spec.parts import part_of
from meshwright.spec.workload import Train
from meshwright.sync.codecs import Tensor, codec
from meshwright.sync.fragments import (
    DENSE,
    EXPERT,
    GRADIENTS,
    HEADED,
    REPEATED,
    TIED,
    VECTOR,
    WHOLE,
    Fragment,
    by_units,
    encodes_apart,
    fragments,
    stored,
)
from meshwright.sync.policy import read
from meshwright.sync.record import NO_CODEC
from meshwright.sync.rounds import parted
from meshwright.sync.scoped import FAR

#: Parameters by where they are and of which kind: ((stage, segment), kind).
Parts = dict[tuple[tuple[int, int], str], list[torch.nn.Parameter]]


class Types(NamedTuple):
    """The types of a run: that it computes in, and those of the updated copy of parameters, of gradients and of the
    optimizer's moments."""

    compute: torch.dtype
    masters: torch.dtype
    grads: torch.dtype
    moments: torch.dtype

    @classmethod
    def of(cls, plan: Plan, train: Train, override: str) -> Types:
        """Return the types of a plan; `override` is what the run computes in instead."""
        compute = DTYPES[override or plan.precision.compute or train.dtype]
        half = compute in (torch.bfloat16, torch.float16)
        masters = torch.float32 if half and plan.precision.master == "fp32" else compute
        grads = torch.float32 if half and plan.precision.grads == "fp32" else compute
        return cls(compute, masters, grads, torch.float32 if half and plan.precision.moments == "fp32" else masters)

    def held(self, plan: Plan) -> torch.dtype:
        """Return the type of the copy of trained parameters that a rank holds between steps."""
        return self.masters if plan.layout.gathers_again and not plan.layout.scopes else self.compute


def built(shared: Shared, actions: Actions, part: tuple[int, int]) -> dict[int, Stage]:
    """The virtual stages that this rank holds of a `part` of the model's layers (first, end), by number, with their
    first values."""
    plan, model = shared.plan, shared.model
    shared = shared._replace(lowering=Lowering.of(plan, model))
    layers = [tuple(part[0] + i for i in some) for some in stage_layers(plan, part_of(model, *part))]
    me, last = shared.mesh["pp"].index, len(layers) - 1
    out: dict[int, Stage] = {}
    for number, ranks in enumerate(actions.stage_ranks):
        if me not in ranks:
            continue
        modes = tuple(plan.memory.mode(position) for position in range(len(layers[number])))
        tied = out[0].embedding if number == last and number and 0 in out and shared.model.tied_embeddings else None
        first, final = number == 0 and part[0] == 0, number == last and part[1] == model.num_layers
        out[number] = Stage(shared, number, layers[number], modes, first=first, last=final, tied=tied)
        initialise((p for p in out[number].parameters() if hasattr(p, "init")), shared.seed)
        for matrix in (m for m in out[number].modules() if isinstance(m, PackedMatrix)):
            matrix.fill(partial(drawn, seed=shared.seed, std=matrix.std), shared.mesh["self"])
    return out


def parts_of(stages: dict[int, Stage], model: Model, plan: Plan) -> Parts:
    """The trained parameters of every kind in every segment of the stages."""
    table = naming.names(model).embedding if model.tied_embeddings else None
    policy = read(plan.sync.policy)
    apart, vectors = encodes_apart(plan, policy), policy.rule.vectors_apart
    out: Parts = {}
    for number, stage in stages.items():
        headed = {id(p) for p in stage.head.parameters()} if policy.own_heads and stage.head is not None else set()
        if policy.taught is not None:  # they learn from other text than all else
            headed = {id(p) for p in stage.head.taught}
        for segment, modules in enumerate(_segments(stage)):
            for parameter in (p for module in modules for p in module.parameters() if p.requires_grad):
                kind = EXPERT if parameter.expert else TIED if parameter.info.name == table else DENSE
                if id(parameter) in headed:
                    kind = HEADED
                elif apart and kind == DENSE and parameter.copies > 1:
                    kind = WHOLE if parameter.copies == plan.layout.tp else REPEATED
                elif vectors and kind == DENSE and all(one.rows == 1 for one in tensors(parameter)):
                    kind = VECTOR
                out.setdefault(((number, segment), kind), []).append(parameter)
    return out


def _segments(stage: Stage) -> tuple[tuple[torch.nn.Module, ...], ...]:
    """Modules that are exchanged together."""
    before, after = ((m,) if m is not None else () for m in (stage.embedding, stage.head))
    return segments(tuple(stage.layers), before, after)


def fragments_of(
    parts: Parts, plan: Plan, model: Model, train: Train, actions: Actions, types: Types
) -> tuple[Fragment, ...]:
    """Return the fragments of these parameters."""
    sizes: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
    for (units, kind), parameters in parts.items():
        count = sum(p.numel() for p in parameters)
        sizes.setdefault(units, {})[kind] = count, count
    weights, masters, grads, moments = (t.itemsize for t in types)
    of = stored(plan, train)._replace(grads=grads, weights=weights, masters=masters, moments=moments)
    policy = read(plan.sync.policy)
    by_tensors, fused = codec(policy.codec).factors is not None, policy.rule.vectors_apart
    shapes = {}
    if by_tensors or fused:
        shapes = {key: tuple(one for p in some for one in tensors(p, fused=fused)) for key, some in parts.items()}
    found = fragments(plan, model, actions, sizes, of, policy, shapes)
    first = [layers[0] if layers else 0 for layers in stage_layers(plan, model)]
    return parted(found, policy, lambda stage, segment: first[stage] + segment, model.num_layers)


def tensors(parameter: torch.nn.Parameter, *, fused: bool = False) -> tuple[Tensor, ...]:
    """The matrices of a parameter in the order of its values: parts of a `fused` one each for itself unless they are to
    stay one, and those of every expert; a vector, or what is none of these, is one row."""
    shape = tuple(parameter.shape)
    if len(shape) == 3 and parameter.expert:
        return (Tensor(shape[1], shape[2], shape[0]),)
    if len(shape) == 4:  # a convolution: outputs times what each reads
        return (Tensor(shape[0], parameter.numel() // shape[0]),)
    if len(shape) != 2:
        return (Tensor(1, parameter.numel()),)
    rows = [part.select[0] for part in parameter.info.parts]
    widths = [one.stop - one.start for one in rows if isinstance(one, slice) and one.stop is not None]
    if not fused and len(widths) > 1 and sum(widths) == shape[0]:
        return tuple(Tensor(width, shape[1]) for width in widths)
    return (Tensor(*shape),)


def begin_alike(exchanges: list[Bucket], mesh: ProcessMesh, dtypes: tuple[str, ...]) -> None:
    """Take the first values of parameters over from a replica of the widest of several precisions, as others have drawn
    them in fewer bits."""
    if mesh["data"].alone:
        return
    bits = {rank: -DTYPES[dtypes[coordinates(mesh.plan, rank)["dp"]]].itemsize for rank in mesh["data"].ranks}
    first = min(mesh["data"].ranks, key=bits.__getitem__)
    for bucket in exchanges:
        dist.broadcast(bucket.master, src=first, group=mesh["data"].handle)
        bucket.publish()


def exchanges_of(
    some: tuple[Fragment, ...],
    parts: Parts,
    stages: dict[int, Stage],
    mesh: ProcessMesh,
    types: Types,
    seed: int = 0,
    hold: tuple[int, ...] = (),
    link: HostLink | None = None,
) -> list[Sharded] | list[Scoped] | list[Bucket]:
    """The fragments as what exchanges them: one bucket for each kind of parameters in each segment, in the order of the
    forward; or, where parameters are gathered for every pass, one for each stage. `seed` is that of codes that draw,
    `hold` relative sizes of the shards of every data-parallel rank; `link` leads to the host's memory, where a plan
    has its processor update layers."""
    if mesh.plan.layout.gathers_again:
        *_, last = (f for f in some if f.what == GRADIENTS)
        codes = {f.what: f.within for f in some if f.within != NO_CODEC}
        if mesh.plan.layout.scopes:
            how = {"params": types.compute, "grads": types.grads, "masters": types.masters}
            return [Scoped(s, mesh, **how, codes=codes, seed=seed) for s in stages.values()]
        return [
            Sharded(
                s,
                mesh,
                mesh[last.replica.name],
                params=types.compute,
                grads=types.grads,
                codes=codes,
                seed=seed,
                hops=last.shard.name == FAR,
            )
            for s in stages.values()
        ]
    out, offload = [], mesh.plan.offload
    held = tuple(hold[coordinates(mesh.plan, rank)["dp"]] for rank in mesh["shard"].ranks) if hold else ()
    how = {"grads": types.grads, "masters": types.masters, "seed": seed, "hold": held}
    for (units, kind), found in by_units(some).items():
        if not kind:  # of no parameters
            continue
        segments = _segments(stages[units[0]])
        away = by_host(offload, units[1], len(segments))
        bucket = Bucket(parts[units, kind], found, mesh, **how, link=link if away else None)
        for module in segments[units[1]]:
            module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.ready())
        out.append(bucket)
    return out


def in_step(plan: Plan) -> Plan:
    """Return the plan; raise L005 where replicas are clients of a server, and have no steps in common, or ranks are
    peers that others ask."""
    if plan.asks_peers:
        raise MeshwrightError.one(
            "L005",
            f"ranks under passes={plan.passes.policy} are peers, which whoever trains asks for passes",
            place="plan.passes",
            help="meshwright run trains them; passes=fixed has ranks that exchange by themselves",
        )
    if not plan.several and read(plan.sync.policy).rule.decider is not None:
        raise MeshwrightError.one(
            "L005",
            f"replicas under sync={plan.sync.policy} are clients of a server, and have no steps in common",
            place="plan.sync",
            help="meshwright run trains them; another sync has steps in common",
        )
    return plan
