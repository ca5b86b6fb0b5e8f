"""Prices of placed tensors: seconds of work and of the exchanges between two placements, on a mesh over a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import msgspec

from meshwright.cost import Costs
from meshwright.layers.algebra import AxisMesh, Placement, transfers
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import Collective, Work

#: Operations of the algebra that send nothing.
ALONE = ("slice", "keep")


class PlacedMove(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of a step: of which tensor, in which pass, how often, over which axis, and its price once."""

    tensor: str
    gradient: bool
    op: str
    axis: str
    num_bytes: float
    times: int
    seconds: float


def cut(shape: Sequence[int], place: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of the largest part."""
    out = list(shape)
    for p, size in zip(place, sizes):
        if p >= 0:
            out[p] = -(-out[p] // size)
    return tuple(out)


class PlacedPrices:
    """Seconds of operators and exchanges on a cluster."""

    def __init__(self, mesh: AxisMesh, cluster: Cluster, dtype: str, costs: Costs):
        self.mesh, self.costs, self.device = mesh, costs, cluster.islands[0].device
        self.dtype, self.element = dtype, DTYPE_BYTES[dtype]
        places = Mesh(Plan(layout=Layout(dp=prod(mesh.sizes))), cluster)
        stride, self.groups = 1, {}
        for name, size in reversed(mesh.axes):
            self.groups[name] = places.along(stride, size)
            stride *= size
        self._known: dict[Work, float] = {}

    def price(self, work: Work) -> float:
        if work not in self._known:
            self._known[work] = self.costs.price(work, self.device).seconds
        return self._known[work]

    def exchanges(
        self, mesh: AxisMesh, source: Placement, target: Placement, shape: Sequence[int], each: float
    ) -> Iterator[tuple[str, str, float, float]]:
        """Operation, axis, bytes and seconds of what turns one placement into another; ``each`` numbers lie at every
        place of a shape."""
        sizes = dict(mesh.axes)
        for one in transfers(mesh, source, target, shape):
            size = one.elements * each * self.element * (sizes[one.axis] if one.op == "all_gather" else 1)
            work = Collective(op=one.op, num_bytes=size, group=self.groups[one.axis])
            yield one.op, one.axis, size, 0.0 if one.op in ALONE else self.price(work)
