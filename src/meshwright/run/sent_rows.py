"""Rows of tokens on their way to the ranks of their experts and back: who sends how many, and in which order they lie.

Rows arrive in the order of the ranks they are from, and are put in that of this rank's experts; ranks that share an
expert gather each other's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.collect import all_gather, gather_dim, scatter_dim
from meshwright.run.exchange import swap
from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder
from meshwright.run.two_levels import TwoLevels


class SentRows(NamedTuple):
    """Where rows go: ``to`` and ``back`` of them to and from each expert-parallel rank, ``totals`` on each rank of an
    expert's split, ``groups`` for each local expert, and ``order``: which of the rows that arrive, each rank's padded
    to the longest, makes each row of the experts' input. ``path``: how they travel, where not all at once."""

    to: list[int]
    back: list[int]
    totals: list[int]
    groups: list[int]
    order: torch.Tensor
    path: TwoLevels | None = None

    @staticmethod
    def agree(
        counts: torch.Tensor, ep: AxisGroup, etp: AxisGroup, steps: tuple[AxisGroup, AxisGroup] | None = None
    ) -> list[SentRows]:
        """Return the rows to send and receive of every portion, from this rank's rows for each expert, int64 [portions,
        experts]. The one place that waits for the device."""
        portions, local = len(counts), counts.shape[1] // ep.size
        mine = counts.view(portions, ep.size, local).transpose(0, 1).contiguous()  # [ep, portions, local]
        arriving = mine
        if not ep.alone:
            arriving = torch.empty_like(mine)
            with recorder().span("all_to_all", "ep"):
                dist.all_to_all_single(arriving, mine, group=ep.handle)
        table = all_gather(arriving.unsqueeze(0), etp)  # [etp, ep, portions, local]
        host = torch.cat([mine.sum(2).flatten(), table.flatten()]).tolist()
        cut = ep.size * portions
        to = torch.tensor(host[:cut]).view(ep.size, portions)
        cells = torch.tensor(host[cut:]).view(etp.size, ep.size, portions, local)
        found = [SentRows._of(to[:, i].tolist(), cells[:, :, i], etp.index, counts.device) for i in range(portions)]
        if steps is None:
            return found
        return [one._replace(path=TwoLevels.agree(one.to, one.back, *steps, counts.device)) for one in found]

    @staticmethod
    def _of(to: list[int], lengths: torch.Tensor, index: int, device: torch.device) -> SentRows:
        """Build the rows of one portion from their `lengths` [etp, ep, local experts] on the host."""
        local = lengths.shape[2]
        totals = lengths.sum((1, 2)).tolist()
        experts = torch.arange(local).expand(lengths.shape).reshape(-1).repeat_interleave(lengths.flatten())
        longest = max(totals)
        places = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(totals)])
        return SentRows(
            to=to,
            back=lengths[index].sum(1).tolist(),
            totals=totals,
            groups=lengths.sum((0, 1)).tolist(),
            order=places[experts.sort(stable=True).indices].to(device),
        )


def dispatch(rows: torch.Tensor, sent: SentRows, ep: AxisGroup, etp: AxisGroup) -> torch.Tensor:
    """Rows [t, h] in the order of their experts, to the ranks of those; what arrives, in the order of this rank's."""
    if sent.path is not None:
        return arranged(sent.path.there(rows), sent, etp)
    return arranged(swap(rows, ep, sent.to, sent.back, queue="ep"), sent, etp)


def arranged(rows: torch.Tensor, sent: SentRows, etp: AxisGroup) -> torch.Tensor:
    """Rows that arrived, with those of the ranks that split the experts, in the order of this rank's experts."""
    if not etp.alone:
        rows = gather_dim(_padded(rows, max(sent.totals)), etp, 0)
    return rows[sent.order]


def combine(rows: torch.Tensor, sent: SentRows, ep: AxisGroup, etp: AxisGroup) -> torch.Tensor:
    """The way back of :func:`dispatch`; what the ranks of an expert's split have, each a part, is added."""
    rows = unarranged(rows, sent, etp)
    return swap(rows, ep, sent.back, sent.to, queue="ep") if sent.path is None else sent.path.back_again(rows)


def unarranged(rows: torch.Tensor, sent: SentRows, etp: AxisGroup) -> torch.Tensor:
    """The way back of :func:`arranged`."""
    longest = max(sent.totals)
    arrived = rows.new_zeros((longest * etp.size, rows.shape[1])).index_copy(0, sent.order, rows)
    return arrived if etp.alone else scatter_dim(arrived, etp, 0)[: sent.totals[etp.index]]


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros((length - len(rows), rows.shape[1]))])
