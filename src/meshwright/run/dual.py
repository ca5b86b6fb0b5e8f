"""Parameters of replicas that keep prices of differing from those that they meet (``sync/rules/admm.py``): duals are
added to gradients, steps are pulled to the middle between neighbours, and duals gather what neighbours differ by.

The noise of a sampler is drawn for a whole parameter by its published name, so that ranks which hold the same values
move them alike, and those that hold other parts of it by the same draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import ceil, prod

import torch
import torch.distributed as dist

from meshwright.run.mesh import ProcessMesh
from meshwright.run.pieces import HeldElements, TensorPiece
from meshwright.run.record import recorder
from meshwright.sync.fragments import Fragment
from meshwright.sync.groups import graph

#: The prices of differing, and the middle between neighbours that a round's steps are pulled to: states, in
#: checkpoints.
DUAL, MIDDLE = "admm_dual", "admm_middle"


class PricedMean:
    """One fragment of what this rank holds: 1-D views of parameters, with the dual and the middle of each value. Like
    :class:`~meshwright.run.mixing.MixedMean`, which takes the mean."""

    def __init__(
        self,
        fragment: Fragment,
        held: Sequence[HeldElements],
        views: Sequence[torch.Tensor],
        mesh: ProcessMesh,
        seed: int = 0,
    ):
        self.fragment, self.held, self.views, self.part = fragment, list(held), list(views), fragment.part
        self.group, self.seed, self.mix = mesh[fragment.replica.name], seed, fragment.mix
        self.sources = [one.source for one in graph(self.mix.graph, self.group.size).turns[0][self.group.index]]
        self.length = max(ceil(fragment.num_elements / fragment.shard.size), sum(len(v) for v in views))
        #: Exchanges that have begun.
        self.step = 0
        self.state: dict[str, torch.Tensor] = {}
        self._sent: torch.Tensor | None = None
        self._arrives: list[torch.Tensor] = []
        self._works: list[dist.Work] = []
        self._token = -1
        self.begin()

    def _flat(self) -> torch.Tensor:
        flat = torch.cat([view.detach() for view in self.views])
        return torch.cat((flat, flat.new_zeros(self.length - len(flat))))

    def begin(self) -> None:
        """Take the values as they are for those of all neighbours: every replica has the same, and nothing to pay."""
        flat = self._flat()
        self.state = {DUAL: torch.zeros_like(flat), MIDDLE: flat + self._noise(flat)}

    def at(self, exchanges: int) -> None:
        """Go on as after so many exchanges."""
        self.step = exchanges

    def price(self) -> None:
        """Add the duals to the gradients of the step."""
        for h, part in zip(self.held, self._parts(self.state[DUAL])):
            h.gradient.add_(part.to(h.gradient.dtype))

    def pull(self, rate: float) -> None:
        """Pull values that took a step of a learning rate to the middle."""
        share = self.mix.pulled(rate, len(self.sources))
        with torch.no_grad():
            for view, part in zip(self.views, self._parts(self.state[MIDDLE])):
                view.lerp_(part, share)

    def send(self) -> None:
        """Start sending the values to all neighbours, and hearing theirs."""
        self._sent = self._flat()
        label = {"stage": self.fragment.units[0], "layer": self.fragment.units[1], "key": "average"}
        num_bytes = self._sent.nbytes * len(self.sources)
        self._token = recorder().start("neighbours", "dp", num_bytes=num_bytes, **label)
        self._arrives = [torch.empty_like(self._sent) for _ in self.sources]
        ranks, handle = self.group.ranks, self.group.handle
        # rank by rank in one order on both sides, as backends that know no tags need it
        ops = [dist.P2POp(dist.irecv, into, ranks[one], handle) for into, one in zip(self._arrives, self.sources)]
        ops += [dist.P2POp(dist.isend, self._sent, ranks[one], handle) for one in self.sources]
        self._works = dist.batch_isend_irecv(ops)
        self.step += 1

    def apply(self) -> None:
        """Wait for the neighbours: what they differ by, to the duals, and the middle of the round that begins."""
        for work in self._works:
            work.wait()
        recorder().stop(self._token)
        sent, many = self._sent, len(self._arrives)
        others = sum(self._arrives[1:], self._arrives[0])
        self.state[DUAL].add_(many * sent - others, alpha=self.mix.rho)
        self.state[MIDDLE].copy_(sent / 2 + others / (2 * many)).add_(self._noise(sent))
        self._sent, self._arrives, self._works = None, [], []

    def _parts(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes = [len(view) for view in self.views]
        return flat[: sum(sizes)].split(sizes)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """Draw what moves the middle of the round that follows so many exchanges."""
        out = torch.zeros_like(like)
        if self.mix.sampled:
            for h, part in zip(self.held, self._parts(out)):
                drawn = noise(self.seed, self.step, self.group.index, h, like)
                part.copy_(drawn).mul_(-self.mix.sampled)
        return out

    def pieces(self) -> Iterable[TensorPiece]:
        """Yield the states of this rank, live."""
        for key, values in self.state.items():
            for h, part in zip(self.held, self._parts(values)):
                yield TensorPiece(key, h.parameter, h.start, h.stop, part, h.owner)


def noise(seed: int, exchanges: int, replica: int, held: HeldElements, like: torch.Tensor) -> torch.Tensor:
    """Normal numbers of a replica for the elements of a parameter that are held, after so many exchanges."""
    first = held.parameter.parts[0]
    place = repr((seed, exchanges, replica, first.name, first.offset)).encode()
    number = int.from_bytes(blake2b(place, digest_size=8).digest(), "little") >> 1
    drawn = torch.Generator(like.device).manual_seed(number)
    every = torch.randn(prod(held.parameter.shape), generator=drawn, device=like.device, dtype=like.dtype)
    return every[held.start : held.stop]
