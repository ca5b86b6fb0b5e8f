"""Sums of codes around a ring: each hop decodes what came, adds its own values and encodes the sum again.

Of n ranks each has a part of the values that it sums. A part goes round once, from the rank after its own to the rank
that it belongs to, and grows by each rank's values; that one encodes the sum, which goes round once more as it is, and
all, it too, take what is decoded of it: every rank ends with the same bits. A rank sends 2 (n - 1) parts, whatever n
is twice the code of its values at most, where a gather of all codes sends n - 1 times that (INTELLECT-1, Jaghouar et
al. 2412.01152).
"""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist

from meshwright.run.forms import OnTensors
from meshwright.run.mesh import AxisGroup


def ring_sum(values: torch.Tensor, form: OnTensors, group: AxisGroup) -> torch.Tensor:
    """The sum over a group of values [n], each part as it comes out of the code."""
    count, mine = group.size, group.index
    width = ceil(len(values) / count)
    parts = torch.cat((values, values.new_zeros(width * count - len(values)))).view(count, width)
    wire = form.encode(parts[mine - 1], 0)
    for hop in range(1, count):  # the part of the rank that is so many and one places behind comes
        here = (mine - 1 - hop) % count
        wire = form.encode(parts[here] + form.decode(_passed(wire, group), width, values.dtype, 0), 0)
    out = torch.empty_like(parts)
    for hop in range(count):
        out[(mine - hop) % count] = form.decode(wire, width, values.dtype, 0)
        wire = _passed(wire, group) if hop < count - 1 else wire
    return out.view(-1)[: len(values)]


def _passed(wire: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Send bytes to the next rank, and get those of the one before."""
    came = torch.empty_like(wire)
    after, before = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
    ways = ((dist.isend, wire, after), (dist.irecv, came, before))
    for work in dist.batch_isend_irecv([dist.P2POp(way, some, peer, group.handle) for way, some, peer in ways]):
        work.wait()
    return came
