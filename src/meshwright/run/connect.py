"""The first message between every two ranks that send each other some, before a step needs one.

NCCL opens the connection of two ranks when both are at their first message, and the host of whichever comes first waits
there. A pipeline posts receives ahead of what it sends: two ranks that each wait for the other's first message would
wait for ever. So every rank goes through its connections once, in an order that all share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist


class Edge(NamedTuple):
    """Messages from one rank to another on the process group ``handle``, of a kind that both call ``way``."""

    way: str
    source: int
    target: int
    handle: dist.ProcessGroup


def connect(edges: Iterable[Edge], rank: int, device: torch.device) -> None:
    """Open the connections of this `rank`, one after the other; on a processor they are open."""
    if device.type != "cuda":
        return
    token = torch.zeros(1, device=device)
    for _, source, target, handle in in_order(edges):
        if source == rank:
            dist.send(token, target, group=handle)
        else:
            dist.recv(token, source, group=handle)
    torch.cuda.synchronize(device)


def in_order(edges: Iterable[Edge]) -> list[Edge]:
    """Return each of the edges once, in the order in which all ranks go through them: of all edges that are not yet
    open the first has both its ranks waiting for it, so that none waits for ever."""
    return [edge for _, edge in sorted({edge[:3]: edge for edge in edges}.items())]
