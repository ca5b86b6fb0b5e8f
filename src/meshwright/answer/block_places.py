"""The places of a plan that holds blocks of tuned models: what lies where, what is between, and what becomes of
requests (BlockLLM, Hu et al. 2024, 2404.18322)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import NormalDist

import msgspec
import numpy as np

from meshwright.answer.latency import DRAWN_PLAINLY, LEAST_DRAWN, NUM_DRAWS, drawn, serving_metrics, spread_over
from meshwright.answer.place_links import PlaceLinks
from meshwright.answer.prediction import RankMemory
from meshwright.answer.replica import alone
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.serving.blockllm import BlockLoad, placed
from meshwright.simulate.serve_blocks import BlockPlaces, served_blocks
from meshwright.simulate.serve_chains import ChainPart, ChainPlace
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.serve_values import AUTO_BUDGET

#: Tokens of a batch of one block where nobody says: what a policy with chunks has by default.
USUAL_BUDGET = 8192
#: The share of a place's room that instances beyond the first of each block may fill.
MOST_WEIGHTS = 0.5
#: Batches of each draw of the errors, as far as they are not those of the least requests.
MOST_BATCHES = 4000
#: Words of an engine that blocks do not know.
APART = (
    "borrow", "pairs", "prefix_cache", "chunk_cache", "kv_budget", "draft", "preempt", "beside", "power", "poll",
    "batch_wait", "fill", "settle", "routing", "order", "policy", "lora", "adapter_slots", "adapter_pool",
)  # fmt: skip


class PlacedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks at the places: which blocks lie at each, their bytes there, and the bytes that are left for keys and
    values, by place."""

    blocks: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    room: tuple[float, ...]


class ZooPlaces:
    """The replicas of a plan as places of blocks."""

    def __init__(self, model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs):
        self.replica, self.serve, self.plan = replica, serve, plan
        self.held = PlacedBlocks(blocks=(), weights=(), room=())
        zoo = serve.engine.zoo
        assert zoo is not None and serve.adapters is not None
        self.zoo = zoo
        one, self.device = alone(plan), cluster.islands[0].device
        self.forward = Forward(model, one, Mesh(one, cluster), serve.engine.kv, routing=serve.expert_routing)
        self.layers = [len(part) for part in np.array_split(np.arange(model.num_layers), zoo.blocks)]
        self.tuned = range(serve.adapters.count)
        self.chains = [zoo.chain(number) for number in (-1, *self.tuned)]
        share, each = serve.adapters.share, serve.adapters.shares()
        asked = [1.0 - share, *(share * one for one in each)]
        self.names = list(dict.fromkeys(name for chain, part in zip(self.chains, asked) if part for name in chain))
        self.work = dict.fromkeys(self.names, 0.0)
        for chain, part in zip(self.chains, asked):
            for name in chain if part else ():
                self.work[name] += part * self.layers[name[1]] / model.num_layers
        self.num_bytes = self._block_bytes()
        self.links, one = PlaceLinks(cluster, plan.layout.tp, costs), self.forward.context(1)
        self.hidden = one.hidden * one.element
        self.cache = self.forward.request_bytes(0, 1024.0) / 1024.0 / zoo.blocks

    def _block_bytes(self) -> list[float]:
        """Bytes on a rank of each block of a chain: its layers, and the embedding and the head at its ends."""
        layers = self.forward.block_bytes(0)
        ends = self.forward.weight_bytes(0) - sum(layers)
        found = [float(part.sum()) for part in np.array_split(np.array(layers), self.zoo.blocks)]
        found[0] += ends / 2
        found[-1] += ends / 2
        return found

    def _held(self, memory: tuple[RankMemory, ...], requests: Requests) -> PlacedBlocks | None:
        """The blocks that the places hold, beside what ranks hold otherwise; None where there is no room for all blocks
        and the longest request."""
        (rank,) = memory
        beside = sum(num_bytes for name, num_bytes in rank.alive.items() if name not in ("weights", "keys and values"))
        room = rank.capacity_bytes * self.serve.engine.memory - beside
        parts = self._parts(requests)
        longest = -(-int((requests.prompt + requests.output).max()) // self.serve.engine.block)
        least = longest * sum(parts[name].block_bytes for name in self.chains[0])
        before = {name: [] for name in self.names}
        for chain in self.chains:
            for first, second in pairwise(chain):
                if first in before and second in before:
                    before[second].append(self.names.index(first))
        loads = [BlockLoad(self.num_bytes[n[1]], self.work[n], tuple(dict.fromkeys(before[n]))) for n in self.names]
        for most in (MOST_WEIGHTS * room, room - least):
            blocks = placed(loads, self.plan.layout.dp, min(most, room - least))
            if blocks:
                weights = tuple(sum(self.num_bytes[self.names[b][1]] for b in some) for some in blocks)
                return PlacedBlocks(blocks=blocks, weights=weights, room=tuple(room - taken for taken in weights))
        return None

    def _parts(self, requests: Requests) -> dict[tuple[int, int], ChainPart]:
        """The parts by name."""
        mean, block = float((requests.prompt + requests.output).mean()), self.serve.engine.block
        each = self.forward.request_bytes(0, mean) * block / mean / self.forward.model.num_layers
        layers = self.forward.model.num_layers
        return {
            (owner, at): ChainPart(
                (owner, at), self.layers[at] / layers, each * self.layers[at], at == self.zoo.blocks - 1
            )
            for owner, at in dict.fromkeys(name for chain in self.chains for name in chain)
        }

    def lies(self, memory: tuple[RankMemory, ...], requests: Requests) -> None:
        """Place the blocks, and keep where they are.

        Raises:
            MeshwrightError: W012 where they and the longest request do not fit.
        """
        found = self._held(memory, requests)
        if found is None:
            whole = sum(self.num_bytes[name[1]] for name in self.names)
            message = (
                f"{len(self.names)} blocks of {whole / 2**30:.3g} GiB a rank and the longest request do not fit into "
                f"{self.plan.layout.dp} places of {memory[0].capacity_bytes * self.serve.engine.memory / 2**30:.3g} GiB"
            )
            help = "more replicas (dp), more ranks of each (tp), fewer own blocks (zoo=8:own=1), or shorter requests"
            raise MeshwrightError.one("W012", message, place=f"--serve zoo={self.zoo.text()}", help=help)
        self.held = found

    def memory(self, memory: tuple[RankMemory, ...]) -> tuple[RankMemory, ...]:
        """Return what the ranks of every place hold."""
        (rank,) = memory
        beside = {n: b for n, b in rank.alive.items() if n not in ("weights", "keys and values")}
        return tuple(
            RankMemory(
                rank=f"place {place}",
                multiplicity=self.plan.layout.tp,
                capacity_bytes=rank.capacity_bytes,
                peak_bytes=sum(beside.values()) + weights + room,
                at_s=0.0,
                alive={"weights": weights} | beside | {"keys and values": room},
            )
            for place, (weights, room) in enumerate(zip(self.held.weights, self.held.room))
        )

    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests and what became of them."""
        return [requests], [self._served(self.replica, requests, 1.0).seen(requests, self.replica.host)]

    def _served(self, replica: Replica, requests: Requests, slower: float) -> ServedRequests:
        parts, words = self._parts(requests), self.serve.engine
        where = dict.fromkeys(self.names, ())
        for place, some in enumerate(self.held.blocks):
            for block in some:
                where[self.names[block]] += (place,)
        places = tuple(ChainPlace(costs=replica.costs, host=replica.host, room_bytes=room) for room in self.held.room)
        blocks = BlockPlaces(
            places=places,
            chains=tuple(tuple(parts[name] for name in chain) for chain in self.chains),
            where=where,
            send_s=lambda a, b, tokens: slower * self.links.seconds(a, b, tokens * self.hidden),
            move_s=lambda a, b, tokens: slower * self.links.seconds(a, b, tokens * self.cache),
            most=words.max_batch,
            budget=words.budget if words.budget > 0 else USUAL_BUDGET,
            block=words.block,
        )
        model = requests.adapter.tolist() if len(requests.adapter) else [-1] * len(requests)
        whole = sum(parts[name].block_bytes for name in self.chains[0])
        return served_blocks(blocks, model, requests, whole)

    @property
    def blocks(self) -> int:
        """Blocks of keys and values of whole chains that all places have room for."""
        mean = self.forward.request_bytes(0, 1024.0) * self.serve.engine.block / 1024.0
        return int(sum(self.held.room) / mean)

    def with_intervals(self, metrics: ServingMetrics, requests: Requests, profile: EngineProfile) -> ServingMetrics:
        """The metrics with 80% intervals: the first requests served again under draws of the errors of costs and
        links."""
        first = requests.first(DRAWN_PLAINLY)
        batches = self._served(self.replica, first, 1.0).iterations
        first = first.first(max(min(LEAST_DRAWN, len(first)), len(first) * MOST_BATCHES // batches))
        found = [serving_metrics(self.serve, *served) for served in self.under_errors(first, profile)]
        return spread_over(metrics, found[0], found[1:])

    def under_errors(
        self, requests: Requests, profile: EngineProfile
    ) -> Iterator[tuple[list[Requests], list[ServedRequests]]]:
        """Yield what becomes of requests without any error, then under each draw of the errors."""
        normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
        links = np.exp(np.random.default_rng(1).permutation(normal) * self.links.sigma).tolist()
        for one, factor in zip((self.replica, *drawn(self.replica, profile)), (1.0, *links), strict=True):
            yield [requests], [self._served(one, requests, factor).seen(requests, one.host)]


def roomy(serve: Serve, requests: Requests) -> Serve:
    """Return the workload with a cache that never is full: what there is room for depends on where blocks lie."""
    words = serve.engine
    longest = -(-int((requests.prompt + requests.output).max()) // words.block)
    return msgspec.structs.replace(serve, engine=msgspec.structs.replace(words, kv_blocks=longest * words.max_batch))


def cannot_cut(plan: Plan, model: Model, serve: Serve) -> Iterator[Diagnostic]:
    """Yield W014 for what blocks of tuned models do not go with."""
    words = serve.engine
    if words.zoo is None:
        return
    wrong = []
    layout = plan.layout
    if plan.several or layout.pp * layout.cp * layout.adp > 1 or plan.serving.stream or plan.serving.divides:
        wrong.append(("blocks lie on replicas of one pool", "say dp and tp alone, such as tp2 dp4"))
    if len(model.layers_by_kind) > 1:
        wrong.append(
            (f"{model.name} has layers of several kinds, of which blocks would be unlike", "say another model")
        )
    elif words.zoo.blocks > model.num_layers:
        wrong.append((f"{words.zoo.blocks} blocks of {model.num_layers} layers", f"zoo={model.num_layers} at most"))
    if serve.adapters is None:
        wrong.append(("zoo= does not say how many tuned models there are", "say adapters=, such as adapters=20:zipf=1"))
    if serve.certain or words.kv_blocks or words.budget == AUTO_BUDGET:
        wrong.append(("blocks and certain=, kv_blocks= or budget=auto", "drop them"))
    usual = msgspec.structs.asdict(type(words)())
    wrong += [
        (f"blocks have queues of their own, and {name}= is of an engine that computes whole models", f"drop {name}=")
        for name in APART
        if getattr(words, name) != usual[name]
    ]
    try:
        if engine_profile(words.profile).iterations:
            wrong.append((f"engine={words.profile} has published times of whole models alone", "say another engine="))
    except MeshwrightError:
        pass  # it is said where profiles are looked up
    for message, help in wrong:
        yield Diagnostic(code="W014", message=message, place=f"--serve zoo={words.zoo.text()}", help=help)
