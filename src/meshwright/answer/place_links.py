"""The links between the places of a plan, priced as messages between their first ranks."""

from __future__ import annotations

from meshwright.cost import Costs
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.spec.cluster import Cluster
from meshwright.work import Collective

#: Bytes of a long message, by which the seconds of each byte are told from the latency.
LONG = 1 << 20


class PlaceLinks:
    """The links between places of so many ranks each; each rank sends its own part. ``sigma`` is the largest relative
    error of those that were asked for."""

    def __init__(self, cluster: Cluster, ranks: int, costs: Costs):
        self.ranks, self.costs, self.sigma = ranks, costs, 0.0
        self.devices = [island.device for island in cluster.islands]
        self.mesh = Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster)
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def line(self, first: int, second: int) -> tuple[float, float]:
        """Return the latency between two places in seconds, and the seconds of each byte."""
        way = first * self.ranks, second * self.ranks
        if way not in self._known:
            group = self.mesh.pair(*way)

            def price(num_bytes: float):
                work = Collective(op="send", num_bytes=num_bytes, group=group)
                return max((self.costs.price(work, device) for device in self.devices), key=lambda one: one.seconds)

            short, long = price(1.0), price(float(LONG))
            self.sigma = max(self.sigma, long.sigma)
            self._known[way] = short.seconds, max(0.0, long.seconds - short.seconds) / LONG
        return self._known[way]

    def seconds(self, first: int, second: int, num_bytes: float) -> float:
        """Return the seconds of a message between two places, 0 within one."""
        if first == second:
            return 0.0
        latency, each = self.line(first, second)
        return latency + num_bytes * each
