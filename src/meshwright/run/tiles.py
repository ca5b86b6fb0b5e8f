"""Products in the steps of a ring, so that one part travels while another is multiplied.

What asynchronous tensor parallelism, Flux (2406.06858) and collective matmul (Wang et al., ASPLOS 2023) do on a GPU: a
gather and the product of what it gathers, or a product and the sum that scatters it, become one part a rank, and parts
go round the ranks. ``lower/rewrites/slice.py`` prices the same steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder


def _sent(x: torch.Tensor, group: AxisGroup) -> tuple[torch.Tensor, tuple[dist.Work, ...]]:
    """Start sending `x` to the next rank of the ring, and receiving as much from the one before."""
    me, out = group.index, torch.empty_like(x)
    target, source = group.ranks[(me + 1) % group.size], group.ranks[me - 1]
    token = recorder().start("send", "tp", group=(group.ranks[me], target), num_bytes=x.nbytes)
    sending = dist.isend(x, dst=target, group=group.handle)
    coming = dist.irecv(out, src=source, group=group.handle)
    recorder().watch(coming, token)
    return out, (sending, coming)


def gathered_product(x: torch.Tensor, weight: torch.Tensor, group: AxisGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``whole @ weight.T`` and ``whole``, the shards x [s, ..., k] of all ranks one below the other, for weight
    [n, k]: [S, ..., n] and [S, ..., k]. A shard is multiplied while it is passed on."""
    here, length, size = x.contiguous(), x.shape[0], group.size
    whole = x.new_empty((length * size, *x.shape[1:]))
    out = x.new_empty((length * size, *x.shape[1:-1], weight.shape[0]))
    for step in range(size):
        coming, works = _sent(here, group) if step + 1 < size else (here, ())
        at = (group.index - step) % size
        rows = slice(at * length, (at + 1) * length)
        whole[rows] = here
        torch.matmul(here, weight.T, out=out[rows])
        for work in works:
            work.wait()
        here = coming
    return out, whole


def scattered_product(x: torch.Tensor, weight: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Return this rank's rows [s, ..., n] of the sum over the group of ``x @ weight.T``, for x [S, ..., k] and weight
    [n, k]. A part is multiplied while the sum that it is added to travels; a rank's own part comes last."""
    length, size = x.shape[0] // group.size, group.size
    coming, works = None, ()
    for step in range(size):
        at = (group.index - 1 - step) % size
        part = x[at * length : (at + 1) * length] @ weight.T
        for work in works:
            work.wait()
        if coming is not None:
            part += coming
        if step + 1 < size:
            coming, works = _sent(part.contiguous(), group)
    return part
