"""Requests to an exporter of serving engines: model, cluster, serving workload and a plan, and what follows."""

from __future__ import annotations

import msgspec

from meshwright import serving
from meshwright.answer.drafting import USUAL
from meshwright.answer.prediction import RankMemory
from meshwright.plan import Layout, Plan
from meshwright.serving.batching import BatchPolicy
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.serve import EngineWords, Serve
from meshwright.spec.workload import Train


def printable(line: str) -> str:
    """Return a line without what would end a comment."""
    return "".join(c if c.isprintable() and c not in '"\\' else "_" for c in line)


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The four nouns of a serving question, ``plan.layout.dp`` filled in, and what was predicted of it: the tightest
    rank's ``memory``, the cache ``blocks`` of a replica (0: there is no room), the ``longest`` prompt in tokens and the
    low-rank ``adapters`` that requests need."""

    model: Model
    cluster: Cluster
    serve: Serve
    plan: Plan
    memory: RankMemory
    blocks: int
    longest: int
    adapters: int = 0

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def engine(self) -> EngineWords:
        return self.serve.engine

    @property
    def replicas(self) -> int:
        return self.layout.dp

    @property
    def devices(self) -> int:
        """Devices of a replica."""
        return self.layout.tp * self.layout.pp

    @property
    def world(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.devices

    @property
    def devices_per_node(self) -> int:
        return self.cluster.islands[0].devices_per_node

    @property
    def processes_per_node(self) -> int:
        return min(self.world, self.devices_per_node)

    @property
    def num_nodes(self) -> int:
        return -(-self.world // self.devices_per_node)

    @property
    def nodes_per_replica(self) -> int:
        return -(-self.devices // self.devices_per_node)

    @property
    def replicas_per_node(self) -> int:
        """Replicas of a full node; 1 where a replica has several nodes."""
        return min(self.replicas, max(1, self.devices_per_node // self.devices))

    @property
    def policy(self) -> BatchPolicy:
        return serving.get("batching", self.engine.policy)

    @property
    def budget(self) -> int:
        """Most tokens of an iteration: the words', else the policy's; where it has none, those of the longest prompt
        beside everybody's next token."""
        return self.engine.budget or self.policy.budget or self.longest + self.engine.max_batch

    @property
    def compute(self) -> str:
        """Precision of the matrix products."""
        return self.plan.precision.compute or Train(global_batch=1, seq_len=1).dtype

    @property
    def guesses(self) -> int:
        """Tokens that are guessed ahead, 0 without a draft."""
        return (self.engine.guesses or USUAL) if self.engine.draft else 0

    @property
    def cache_share(self) -> float:
        """Share of the device's memory that keys and values take."""
        return self.memory.alive.get("keys and values", 0.0) / self.memory.capacity_bytes

    @property
    def static_share(self) -> float:
        """Share of the device's memory that weights, keys and values take."""
        return self.memory.alive.get("weights", 0.0) / self.memory.capacity_bytes + self.cache_share

    @property
    def free_share(self) -> float:
        """Share of the memory that keys and values take of what everything else leaves."""
        others = self.memory.peak_bytes / self.memory.capacity_bytes - self.cache_share
        return self.cache_share / (1.0 - others)

    @property
    def name(self) -> str:
        """The question in a line, for headers: no name in it ends a comment."""
        return printable(f"{self.model.name} on {self.cluster.name}, {self.serve.text()}, plan {self.plan.text()}")

    @property
    def label(self) -> str:
        """The model's name as Kubernetes takes one: small letters, digits and hyphens, at most 40."""
        plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.model.name.lower())
        return "-".join(filter(None, plain.split("-")))[:40].strip("-") or "model"


class ServedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of a plan whose pools serve requests in turn: its name, its role and its replicas as a deployment."""

    name: str
    role: str
    deployment: Deployment
