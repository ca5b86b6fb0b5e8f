"""Fully sharded parameters (ZeRO-3, FSDP; Zhao et al. 2304.11277) and hybrid sharding, by torch's ``fully_shard``.

Each layer is gathered before its forward and again before its backward, and its gradients are reduced after every
microbatch; embedding, final norm and head are one unit of their own. What torch leaves to its user is done here: sums
instead of means, sums over replicas (which torch can do too, unseen), gradients that tensor-parallel ranks have parts
of, and pieces for optimizer and checkpoints.

Every exchange is a span of the recorder. On a processor torch's calls return when it is over, so that the pass stands
still meanwhile and the spans say so; on a GPU it is overlapped with the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor

from meshwright.run.collect import all_gather_single, reduce_scatter_single
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.model import Stage
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.record import recorder
from meshwright.run.shards import Run, ShardCode
from meshwright.sync.fragments import GATHERED
from meshwright.sync.scoped import FAR, NEAR


class Gathering:
    """Duties of the buckets of ``sync`` that are alike in every stage whose layers gather themselves."""

    def __init__(self) -> None:
        #: The codes of all exchanges, and the step that they are in.
        self.codes: list[ShardCode] = []
        self.step = 0
        #: Whether the pass under way is the step's last.
        self.final = False

    def reset(self) -> None:
        """A step begins."""
        for code in self.codes:
            code.begin(self.step)

    @property
    def coded(self) -> bool:
        """Whether something is encoded."""
        return bool(self.codes)

    def advance(self) -> None:
        """Nothing is sent after a first message: codes of shards have one."""

    def settle(self, used: bool) -> None:
        """The gradients were used, or lost."""
        self.step += used

    def set_step(self, step: int) -> None:
        """Go on as after so many steps."""
        self.step = step

    def pieces(self) -> Iterable[TensorPiece]:
        """Nothing: these codes keep nothing."""
        return ()

    def ready(self) -> None:
        """Nothing to wait for: layers gather themselves."""


class Sharded(Gathering):
    """A stage with its parameters sharded; the same duties as the buckets of ``sync``. Gradients are summed over the
    ranks of `replica` with the same shard."""

    def __init__(
        self,
        stage: Stage,
        mesh: ProcessMesh,
        replica: AxisGroup,
        *,
        params: torch.dtype,
        grads: torch.dtype,
        codes: Mapping[str, str] | None = None,
        seed: int = 0,
        hops: bool = False,
    ):
        """`codes`: those in which parameters are gathered and gradients scattered, by what is exchanged; `seed` is that
        of codes that draw; `hops`: encoded gradients are scattered among neighbours, then on."""
        super().__init__()
        self.module, self.stage, self.mesh, self.replica = stage, stage.stage, mesh, replica
        self.about = {name: About(p) for name, p in stage.named_parameters() if p.requires_grad}
        units = sharded_units(stage, mesh["shard"], mesh, params, grads, codes or {}, seed, hops)
        for unit, said, mine in units:
            self.codes += mine
            if not replica.alone:
                unit.set_all_reduce_hook(_Replicas(replica, said | {"group": replica.ranks}))
        #: Sharded parameters this rank has some of, with what it updates and the ranks that sum its gradient.
        self._mine = [
            (parameter, held, self.about[name].sums)
            for name, parameter in stage.named_parameters()
            if name in self.about and (held := self._one(name, parameter)) is not None
        ]

    def held(self) -> Iterable[HeldElements]:
        """Yield the elements that this rank updates: its shard of every parameter. ``gradient`` is allocated once and
        refilled by :meth:`finish`."""
        return [h for _, h, _ in self._mine]

    def _one(self, name: str, parameter: nn.Parameter) -> HeldElements | None:
        about, local = self.about[name], local_values(parameter)
        if not local.numel():
            return None
        shape = parameter.shape
        row = parameter.numel() // shape[0]
        # torch cuts rows into chunks of equal size, the last ones short or empty
        start = -(-shape[0] // self.mesh["shard"].size) * self.mesh["shard"].index * row
        return HeldElements(
            parameter=about.info,
            start=start,
            stop=start + local.numel(),
            master=local.view(-1),
            gradient=torch.zeros_like(local).view(-1),
            copies=self.replica.size * about.copies,
            decays=len(shape) > 1,
            owner=self.replica.index == 0 and self.mesh["tp"].index % about.copies == 0,
        )

    def reset(self) -> None:
        """A step begins."""
        for parameter in self.module.parameters():
            parameter.grad = None
        super().reset()

    def finish(self) -> None:
        """The gradients are whole, and in what :meth:`held` gave out."""
        parts: list[tuple[int, torch.Tensor]] = []
        for parameter, h, sums in self._mine:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                h.gradient.zero_()
            else:
                h.gradient.copy_(local_values(gradient).view(-1))
            parts.append((sums, h.gradient))
        sum_parts(parts, self.mesh["tp"])

    def publish(self) -> None:
        """Nothing to do: the optimizer wrote into the shards themselves."""


def sharded_unit(module: nn.Module, group: AxisGroup) -> FSDPModule:
    """A module whose parameters are fully sharded as those of a stage's layers are."""
    ranks = _mesh_of(group, next(module.parameters()).device.type)
    return fully_shard(module, mesh=ranks, reshard_after_forward=True)


def sharded_units(
    stage: Stage,
    group: AxisGroup,
    mesh: ProcessMesh,
    params: torch.dtype,
    grads: torch.dtype,
    codes: Mapping[str, str],
    seed: int,
    hops: bool = False,
) -> list[tuple[FSDPModule, dict[str, Any], list[ShardCode]]]:
    """Shard a stage layer by layer over a group, and what belongs to none as a unit of its own: the units, what a
    recorder is told of each, and the codes in which it is exchanged. `hops`: gradients are scattered in two."""
    policy = MixedPrecisionPolicy(param_dtype=params, reduce_dtype=grads, cast_forward_inputs=False)
    ranks, waits = _mesh_of(group, mesh.device.type), mesh.device.type == "cpu"  # nothing runs beside a pass's calls
    units = (*stage.layers, stage)
    for unit in units:
        fully_shard(unit, mesh=ranks, mp_policy=policy)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    near = mesh[NEAR] if mesh.plan.layout.hpz else None
    out = []
    for number, unit in enumerate(units):
        # what belongs to no layer is exchanged with the first, for whoever reads the spans
        said = {"stage": stage.stage, "layer": 0 if unit is stage else number, "inside": waits}
        told, mine = said | {"group": group.ranks}, []
        again = None
        if near is not None:
            _keep_copy(unit, group, near, mesh[FAR], mesh.device.type)
            again = _Gather(said | {"group": near.ranks})
        unit.set_custom_all_gather(_Gather(told, again=again))
        unit.set_custom_reduce_scatter(_Reduce(told))
        for what, text in codes.items():
            runs, place = runs_of(unit, group), f"{stage.stage}.{number}{what}"
            if what != GATHERED and hops:
                both = _Hops(said, mesh[NEAR], mesh[FAR], runs, text, seed, place)
                mine += both.codes
                unit.set_custom_reduce_scatter(both)
                continue
            code = ShardCode(text, group, runs, seed, place)
            mine.append(code)
            if what == GATHERED:
                unit.set_custom_all_gather(_CodedGather(told, code, again=again))
            else:
                unit.set_custom_reduce_scatter(_CodedReduce(told, code))
        out.append((unit, said, mine))
    return out


def sum_parts(some: Iterable[tuple[int, torch.Tensor]], tp: AxisGroup) -> None:
    """Sum gradients of which several tensor-parallel ranks have parts: as many as stand beside each."""
    parts: dict[int, list[torch.Tensor]] = {}
    for sums, gradient in some:
        if sums > 1:
            parts.setdefault(sums, []).append(gradient)
    for sums, views in parts.items() if not tp.alone else ():
        flat = torch.cat(views)
        every = [torch.empty_like(flat) for _ in range(tp.size)]
        dist.all_gather(every, flat, group=tp.handle)
        first = tp.index // sums * sums
        total = torch.stack(every[first : first + sums]).sum(0)
        for view, part in zip(views, total.split([v.numel() for v in views])):
            view.copy_(part)


def _mesh_of(group: AxisGroup, kind: str) -> DeviceMesh:
    return DeviceMesh.from_group(group.handle, kind, mesh_dim_names=("shard",))


def _keep_copy(unit: FSDPModule, group: AxisGroup, near: AxisGroup, far: AxisGroup, kind: str) -> None:
    """Let a unit leave a second copy of its parameters behind a forward, sharded over the group `near`, which its
    backward gathers. What torch makes of a number for ``reshard_after_forward``, but of groups that there are: it would
    make new ones for every unit, and one of them on each rank of the job."""
    ranks = torch.tensor(group.ranks).view(far.size, near.size)
    info = HSDPMeshInfo(
        DeviceMesh.from_group([far.handle, near.handle], kind, mesh=ranks, mesh_dim_names=(FAR, NEAR)),
        shard_mesh_dim=1,
        replicate_mesh_dim=0,
    )
    unit._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info = info
    for one in fsdp_parameters(unit):
        one.post_forward_mesh_info = info
        one._init_sharded_post_forward_param_metadata(torch.empty(one._orig_size, device="meta"))


class _Exchange:
    """Memory and collectives for the exchange of a unit, which torch calls (its ``Comm``). `again`: that for the second
    copy of its weights."""

    def __init__(self, said: dict[str, Any], again: _Gather | None = None):
        self.said, self.again = said, again

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Exchange):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.again is not None and group.size() == len(self.again.said["group"]):
            return self.again(output_tensor, input_tensor, group, async_op)
        record = recorder()
        token = record.start("all_gather", "dp_gather", num_bytes=output_tensor.nbytes, **self.said)
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return _ended(record, work, token)


class _Reduce(_Exchange):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        record = recorder()
        token = record.start("reduce_scatter", "dp", num_bytes=input_tensor.nbytes, **self.said)
        work = reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return _ended(record, work, token)


class _CodedGather(_Exchange):
    def __init__(self, said: dict[str, Any], code: ShardCode, again: _Gather | None = None):
        super().__init__(said, again)
        self.code = code

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.again is not None and group.size() == len(self.again.said["group"]):
            return self.again(output_tensor, input_tensor, group, async_op)
        self.code.gather(output_tensor, input_tensor, **self.said).wait()
        return None


class _CodedReduce(_Exchange):
    def __init__(self, said: dict[str, Any], code: ShardCode, again: _Gather | None = None):
        super().__init__(said, again)
        self.code = code

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self.code.scatter(output_tensor, input_tensor.view(-1), **self.said).wait()


class _Hops(_Exchange):
    """Scatters encoded gradients among neighbours, and their sums, encoded anew, on among those with the same part."""

    def __init__(
        self,
        said: dict[str, Any],
        near: AxisGroup,
        far: AxisGroup,
        runs: Sequence[Run],
        text: str,
        seed: int,
        place: str,
    ):
        super().__init__(said)
        self.near, self.far, self.runs = near, far, list(runs)
        # a tensor's parts for all of the far group lie together on the first hop, as one run
        wide = [Run(r.start * far.size, r.end * far.size, r.coded) for r in runs]
        self.codes = [ShardCode(text, near, wide, seed, place + NEAR), ShardCode(text, far, runs, seed, place + FAR)]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        near, far = self.near.size, self.far.size
        rows = input_tensor.view(far, near, -1).transpose(0, 1)
        given = torch.cat([rows[..., r.start : r.end].reshape(near, -1) for r in self.runs], dim=1).view(-1)
        part = given.new_empty(len(given) // near)
        first, second = self.codes
        first.scatter(part, given, **self.said, group=self.near.ranks).wait()
        on = torch.cat([part[r.start * far : r.end * far].view(far, -1) for r in self.runs], dim=1)
        second.scatter(output_tensor, on.view(-1), **self.said, group=self.far.ranks).wait()


def fsdp_parameters(unit: FSDPModule) -> list[Any]:
    """Torch's records of a unit's sharded parameters, in the order in which it lays them one after the other."""
    return unit._get_fsdp_state()._fsdp_param_group.fsdp_params


def runs_of(unit: FSDPModule, shard: AxisGroup) -> list[Run]:
    """The values of a unit's shard by tensors, in the order in which torch lays them one after the other: rows, as many
    on every rank as on that with the most."""
    runs, at = [], 0
    for parameter in fsdp_parameters(unit):
        shape = parameter._orig_size
        width = -(-shape[0] // shard.size) * (shape.numel() // shape[0])
        runs.append(Run(at, at + width, len(shape) == 2 or (len(shape) == 3 and shape[1] > 1)))
        at += width
    return runs


class _Replicas:
    """Sums a unit's scattered gradients over the replicas (torch calls it for them, on a stream for that)."""

    def __init__(self, group: AxisGroup, said: dict[str, Any]):
        self.group, self.said = group, said

    def __call__(self, reduced: torch.Tensor) -> None:
        with recorder().span("all_reduce", "dp", num_bytes=reduced.nbytes, **self.said):
            dist.all_reduce(reduced, group=self.group.handle)
        if reduced.is_cuda:
            # made on another stream: nobody may have its memory before this one is done with it
            reduced.record_stream(torch.cuda.current_stream())


def _ended(record, work: dist.Work | None, token: int) -> dist.Work | None:
    """The span is over with the call, or with the work that it began."""
    if work is None:
        record.stop(token)
    else:
        record.watch(work, token)
    return work


class About:
    """The attributes of a parameter before torch replaced it."""

    def __init__(self, parameter: nn.Parameter):
        self.info, self.copies, self.sums = parameter.info, parameter.copies, parameter.sums


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, without a gradient."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def let_go(stages: Mapping[int, Stage]) -> None:
    """Free parameters that were gathered: those of a unit without a backward would be taken for the next step's."""
    for stage in stages.values():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
