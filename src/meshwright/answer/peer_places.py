"""The peers of a plan, each with a run of a model's layers on devices of its own kind, and what becomes of requests
whose clients find chains through them (Petals: Borzunov et al., 2209.01188 and 2312.08361)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import msgspec
import numpy as np

from meshwright.answer.block_places import APART, MOST_BATCHES, USUAL_BUDGET
from meshwright.answer.latency import DRAWN_PLAINLY, LEAST_DRAWN, NUM_DRAWS, drawn, serving_metrics, spread_over
from meshwright.answer.place_links import PlaceLinks
from meshwright.answer.prediction import RankMemory
from meshwright.answer.replica import BuiltReplica, alone, built
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.errors import Diagnostic
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.serving.petals import Peer, no_peer, spans
from meshwright.simulate.serve_chains import ChainPlace
from meshwright.simulate.serve_peers import PeerPlaces, served_peers
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Tokens of the cache for which a peer keeps room beside its layers: Petals' default of a server (from memory).
CACHE_TOKENS = 16384


class PeersOfPlan:
    """The replicas of a plan as peers, those of each island with devices of its kind. They are laid out along the
    cluster; the client runs beside the first. Costs are `built_for` a cache that never is full."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        serve: Serve,
        plan: Plan,
        requests: Requests,
        costs: Costs,
        profile: EngineProfile,
        *,
        built_for: Serve,
    ):
        self.model, self.serve, self.plan, self.profile = model, serve, plan, profile
        self.words = serve.engine.peers
        assert self.words is not None
        self.links = PlaceLinks(cluster, plan.layout.tp, costs)
        self.requests = requests
        one = alone(plan)
        self.made: list[BuiltReplica] = []
        self.forwards: list[Forward] = []
        ends = np.cumsum([island.num_devices for island in cluster.islands])
        for island in cluster.islands:
            own = Cluster(name=island.name, islands=(island,))
            self.made.append(built(model, own, built_for, one, requests, costs, profile))
            self.forwards.append(Forward(model, one, Mesh(one, own), serve.engine.kv, routing=serve.expert_routing))
        firsts = np.arange(plan.layout.dp) * plan.layout.tp
        self.kind = np.searchsorted(ends, firsts, side="right").tolist()
        context = self.forwards[0].context(1)
        self.hidden = context.hidden * context.element
        self.replicas = [made.replica for made in self.made]
        self._hold()

    def _hold(self) -> None:
        """Give every peer its layers, and note what it has left for keys and values.

        Raises:
            MeshwrightError: W012 where some layer is nobody's.
        """
        words, layers = self.serve.engine, self.model.num_layers
        length = self.requests.prompt + self.requests.output
        mean, longest = float(length.mean()), int(length.max())
        self.block_bytes = [f.request_bytes(0, mean) * words.block / mean / layers for f in self.forwards]
        sizes, rates, self.room, self.beside = [], [], [], []
        for peer, kind in enumerate(self.kind):
            (rank,) = self.made[kind].memory
            beside = {n: b for n, b in rank.alive.items() if n not in ("weights", "keys and values")}
            room = rank.capacity_bytes * words.memory - sum(beside.values())
            layer = sum(self.forwards[kind].block_bytes(0)) / layers
            cache = -(-max(CACHE_TOKENS, longest) // words.block) * self.block_bytes[kind]
            fit = max(0, min(layers, int(room / (layer + cache))))
            sizes.append(self.words.most(peer, fit))
            rates.append(1.0 / self.layer_s(kind))
            self.room.append(room - sizes[-1] * layer)
            self.beside.append(beside)
        self.spans = spans(sizes, rates, layers)
        held = [0] * layers
        for first, end in self.spans:
            held[first:end] = [n + 1 for n in held[first:end]]
        if not all(held):
            without = held.index(0)
            raise no_peer(without, next((i for i in range(without, layers) if held[i]), layers))

    def layer_s(self, kind: int) -> float:
        """Return the seconds of a layer for one token."""
        costs = self.replicas[kind].costs
        return (costs.linear_s.item(1) + costs.decoding(1, float(costs.context_node[0]))) / self.model.num_layers

    def memory(self) -> tuple[RankMemory, ...]:
        """Return what the ranks of every peer hold."""
        found = []
        for peer, ((first, end), kind) in enumerate(zip(self.spans, self.kind)):
            weights = sum(self.forwards[kind].block_bytes(0)) / self.model.num_layers * (end - first)
            alive = {"weights": weights} | self.beside[peer] | {"keys and values": self.room[peer]}
            found.append(
                RankMemory(
                    rank=f"peer {peer}, layers {first} to {end - 1}",
                    multiplicity=self.plan.layout.tp,
                    capacity_bytes=self.made[kind].memory[0].capacity_bytes,
                    peak_bytes=sum(alive.values()),
                    at_s=0.0,
                    alive=alive,
                )
            )
        return tuple(found)

    @property
    def blocks(self) -> int:
        """Blocks of keys and values of the whole model that all peers have room for."""
        return int(sum(self.room) / (max(self.block_bytes) * self.model.num_layers))

    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests and what became of them.

        Raises:
            MeshwrightError: W012 where no peer that is left holds some layer.
        """
        return self._served(self.replicas, requests, 1.0)

    def _served(
        self, replicas: list[Replica], requests: Requests, slower: float
    ) -> tuple[list[Requests], list[ServedRequests]]:
        words = self.serve.engine
        said = PeerPlaces(
            places=tuple(
                ChainPlace(costs=replicas[kind].costs, host=replicas[kind].host, room_bytes=room)
                for kind, room in zip(self.kind, self.room)
            ),
            peers=tuple(Peer(*span, self.layer_s(kind)) for span, kind in zip(self.spans, self.kind)),
            layers=self.model.num_layers,
            send_s=lambda a, b, tokens: slower * self.links.seconds(max(a, 0), max(b, 0), tokens * self.hidden),
            block_bytes=max(self.block_bytes),
            find=self.words.find,
            lost=self.words.lost,
            most=words.max_batch,
            budget=words.budget if words.budget > 0 else USUAL_BUDGET,
            block=words.block,
        )
        done = served_peers(said, requests)
        return [requests], [done.seen(requests, replicas[0].host)]

    def with_intervals(self, metrics: ServingMetrics, requests: Requests, profile: EngineProfile) -> ServingMetrics:
        """The metrics with 80% intervals: the first requests served again under draws of the errors of costs, which
        are alike on all peers, and links."""
        first = requests.first(DRAWN_PLAINLY)
        batches = self._served(self.replicas, first, 1.0)[1][0].iterations
        first = first.first(max(min(LEAST_DRAWN, len(first)), len(first) * MOST_BATCHES // batches))
        normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
        links = np.exp(np.random.default_rng(1).permutation(normal) * self.links.sigma).tolist()
        draws = zip(*([one, *drawn(one, profile)] for one in self.replicas))
        found = [
            serving_metrics(self.serve, *self._served(list(some), first, factor))
            for some, factor in zip(draws, (1.0, *links), strict=True)
        ]
        return spread_over(metrics, found[0], found[1:])


def cannot_chain(plan: Plan, cluster: Cluster, model: Model, serve: Serve) -> Iterator[Diagnostic]:
    """Yield W014 for what chains of peers do not go with."""
    words = serve.engine
    if words.peers is None:
        return
    wrong, layout = [], plan.layout
    if plan.several or layout.pp * layout.cp * layout.adp > 1 or plan.serving.stream or plan.serving.divides:
        wrong.append(("peers are the replicas of one pool", "say dp and tp alone, such as dp6, or tp2 dp3"))
    if any(island.num_devices % layout.tp for island in cluster.islands):
        wrong.append((f"a peer of tp{layout.tp} lies on devices of one kind", "a tp that divides every island"))
    if len(words.peers.layers) not in (0, 1, layout.dp):
        message = f"layers of {len(words.peers.layers)} peers, and there are {layout.dp}"
        wrong.append((message, "one number for all, or one for each: layers=16+8+8"))
    if len(model.layers_by_kind) > 1:
        wrong.append((f"{model.name} has layers of several kinds, of which runs are unlike", "say another model"))
    wrong += [(f"peer {p} is lost, and there are {layout.dp}", f"0 to {layout.dp - 1}") for p, _ in words.peers.lost
              if p >= layout.dp]  # fmt: skip
    if serve.adapters or serve.certain or words.kv_blocks or words.zoo or words.budget < 0:
        wrong.append(("chains of peers and adapters=, certain=, kv_blocks=, zoo= or budget=auto", "drop them"))
    usual = msgspec.structs.asdict(type(words)())
    wrong += [
        (f"peers have queues of their own, and {name}= is of an engine that computes whole models", f"drop {name}=")
        for name in APART
        if getattr(words, name) != usual[name]
    ]
    for message, help in wrong:
        yield Diagnostic(code="W014", message=message, place=f"--serve peers={words.peers.text()}", help=help)
