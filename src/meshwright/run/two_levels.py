"""An all-to-all of rows in two levels: inside runs of neighbouring ranks, then between ranks at one place of all runs.

Rank (p, i) gives every rank (p, j) of its run what goes to place j of any run; that one passes it on to (q, j). Each
rank sends one message to a node and not one to each of its ranks (SE-MoE, Shen et al. 2205.10034; Tutel's 2DH,
2206.03382), and rows arrive in the order in which they would have all at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.exchange import swap
from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder


class TwoLevels(NamedTuple):
    """Rows that this rank sends (``to`` [runs, places]), passes on for its run (``passed`` [places, runs]) and receives
    (``back`` [runs, places]), with the indices that put them in order before each step."""

    inner: AxisGroup
    outer: AxisGroup
    to: torch.Tensor
    passed: torch.Tensor
    back: torch.Tensor
    by_place: torch.Tensor
    by_run: torch.Tensor

    @staticmethod
    def agree(to: list[int], back: list[int], inner: AxisGroup, outer: AxisGroup, device: torch.device) -> TwoLevels:
        """Return how rows travel of which this rank has `to` for, and gets `back` from, every rank of both levels; the
        ranks of a run tell each other what they will pass on."""
        sent = torch.tensor(to).view(outer.size, inner.size)
        mine = sent.T.contiguous().to(device)
        passed = torch.empty_like(mine)
        with recorder().span("all_to_all", "ep"):
            dist.all_to_all_single(passed, mine, group=inner.handle)
        passed = passed.cpu()
        got = torch.tensor(back).view(outer.size, inner.size)
        order = [turned(counts).to(device) for counts in (sent, passed)]
        return TwoLevels(inner, outer, sent, passed, got, *order)

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """[t, h] in the order of the ranks they go to; what arrives, in the order of those it is from."""
        near = swap(rows[self.by_place], self.inner, *_both(self.to.sum(0), self.passed.sum(1)), queue="ep")
        return swap(near[self.by_run], self.outer, *_both(self.passed.sum(0), self.back.sum(1)), queue="ep")

    def back_again(self, rows: torch.Tensor) -> torch.Tensor:
        """The way back of :meth:`there`."""
        near = swap(rows, self.outer, *_both(self.back.sum(1), self.passed.sum(0)), queue="ep")
        near = swap(near[self.by_run.argsort()], self.inner, *_both(self.passed.sum(1), self.to.sum(0)), queue="ep")
        return near[self.by_place.argsort()]


def turned(counts: torch.Tensor) -> torch.Tensor:
    """Return the index that puts blocks of rows, as many as `counts` [a, b] in this order, into the order [b, a]."""
    blocks = torch.arange(counts.numel())
    later = blocks.view(counts.shape).T.flatten().argsort()  # where each block comes in the new order
    return later[blocks.repeat_interleave(counts.flatten())].argsort(stable=True)


def _both(sent: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    return sent.tolist(), received.tolist()
