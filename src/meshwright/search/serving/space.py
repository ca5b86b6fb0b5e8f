"""The space of serving plans as data: layouts of one replica, words of the engine, and how many replicas there are.

A candidate is a list of phases (one where every replica computes prompts and answers), each a layout of a replica and
a number of them, and the words of the engine. Sizes and precisions are the fields of a plan that serving takes, so that
a facet that it learns to take is searched by itself. Nothing that changes the numbers of a model (the precision of
weights or of the cache) is in the default space: it is allowed by a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import msgspec

from meshwright import serving
from meshwright.answer.serving_check import refused
from meshwright.lower.served_experts import Spread
from meshwright.plan import Plan, parse
from meshwright.plan.facet import Field, Form, count, names
from meshwright.plan.facets import fields
from meshwright.search.space import DEVICES, Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.engine_words import KV_BYTES, EngineWords
from meshwright.spec.model import Model
from meshwright.spec.serve import Serve
from meshwright.spec.workload import Train

#: The number of replicas, worked out from the devices.
REPLICAS = "dp"
#: Whether every replica computes prompts and answers, or some compute prompts and others go on with them.
ROLES, TOGETHER, APART = "roles", "together", "apart"
#: Words of the engine that are searched; the others are as the workload says them.
ENGINE = ("policy", "budget", "kv", "max_batch", "block")
#: Tokens of an iteration that are tried besides a policy's usual budget (0).
BUDGETS = (0, 512, 1024, 2048, 4096, 8192)


class Phase(NamedTuple):
    """Replicas that do the same: the plan of one of them, and how many there are."""

    plan: Plan
    replicas: int

    @property
    def num_devices(self) -> int:
        """Devices of all of them."""
        return self.plan.layout.num_ranks * self.replicas


class ServingCandidate(msgspec.Struct, frozen=True):
    """A point of the space: its phases, the words of the engine, and which of the searched clusters it is on. The plan
    of several phases is ``pools`` on devices."""

    phases: tuple[Phase, ...]
    engine: EngineWords
    where: int = 0
    pools: Plan | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all phases."""
        return sum(phase.num_devices for phase in self.phases)

    @property
    def replicas(self) -> int:
        """Replicas of all phases."""
        return sum(phase.replicas for phase in self.phases)

    @property
    def family(self) -> tuple:
        """The layouts, whatever their number and their engine."""
        return (self.where, tuple(phase.plan for phase in self.phases))

    @property
    def plan(self) -> Plan:
        """The plan as ``predict`` takes it."""
        if self.pools is not None:
            return self.pools
        (phase,) = self.phases
        layout = msgspec.structs.replace(phase.plan.layout, dp=phase.replicas)
        return msgspec.structs.replace(phase.plan, layout=layout)

    def over(self, serve: Serve) -> Serve:
        """Return the workload with the engine's words of this candidate."""
        return msgspec.structs.replace(serve, engine=self.engine)


def forms() -> dict[str, Form]:
    """Return how the values of every facet of the space are written: fields of plans, and words of the engine."""
    engine = {
        "policy": names(*serving.names("batching")),
        "budget": count(0, 10**7),
        "kv": names(*KV_BYTES),
        "max_batch": count(1, 65536),
        "block": count(1, 4096),
        ROLES: names(TOGETHER, APART),
    }
    return {DEVICES: count()} | {name: field.form for name, field in _searched().items()} | engine


@cache
def _searched() -> dict[str, Field]:
    """Fields of plans that a serving search may have: sizes, and what layers are computed in."""
    return {name: f for name, f in fields().items() if f.size or f.serving or f.facet == "precision"}


#: Fields whose values follow from the others where nothing is said: ranks that split an expert.
_FOLLOWS = ("etp",)


def default(model: Model, cluster: Cluster, serve: Serve, said: Collection[str] = ()) -> Space:
    """Everything exact: the layouts of a replica that serving takes and the cluster has devices for, every policy that
    the fast simulator knows, of those of one engine its own, and budgets of tokens. Words of the engine that were
    `said` are kept."""
    stub = Train(global_batch=cluster.num_devices, seq_len=cluster.num_devices, causal=True)
    domains: dict[str, tuple | None] = {DEVICES: (cluster.num_devices,)}
    for name, field in _searched().items():
        values = field.served(model, cluster) if field.served else field.values(model, cluster, stub)
        if name == REPLICAS:
            domains[name] = None
        elif values is None or name in _FOLLOWS or field.facet == "precision":
            domains[name] = (field.usual,)
        else:
            domains[name] = tuple(v for v in values if v == field.usual or _taken(field, v, model, cluster, serve))
    for name in ENGINE:
        domains[name] = (getattr(serve.engine, name),)
    if "policy" not in said:
        known = serving.policies("batching").values()
        mine = ("", serve.engine.profile)
        domains["policy"] = tuple(p.name for p in known if p.code and getattr(p, "engine", "") in mine)
    if "budget" not in said:
        domains["budget"] = BUDGETS
    domains[ROLES] = (TOGETHER, APART)
    return Space(domains=domains)


def _taken(field: Field, value: object, model: Model, cluster: Cluster, serve: Serve) -> bool:
    """Whether serving has a use for a value of a field."""
    plan = _with(Plan(), {field.name: value, REPLICAS: 1})
    return not any(d.code == "W014" for d in refused(plan, model, cluster, serve))


def _with(plan: Plan, values: dict[str, object]) -> Plan:
    """Return a plan with values of fields."""
    for name, value in values.items():
        field = fields()[name]
        record = msgspec.structs.replace(getattr(plan, field.facet), **field.sets(value))
        plan = msgspec.structs.replace(plan, **{field.facet: record})
    return plan


def layouts(space: Space, model: Model, cluster: Cluster, serve: Serve) -> Iterator[Plan]:
    """Yield every legal plan of one replica that the cluster has devices for, what is spelled twice once."""
    names = [name for name in _searched() if name != REPLICAS]
    seen = set()
    for values in product(*(space[name] or (_searched()[name].usual,) for name in names)):
        plan = _with(Plan(), dict(zip(names, values)) | {REPLICAS: 1})
        if plan.layout.num_ranks > cluster.num_devices or refused(plan, model, cluster, serve):
            continue
        same = msgspec.structs.replace(plan, experts=msgspec.structs.replace(plan.experts, dispatch="", etp=0))
        if (same, Spread.of(plan)) not in seen:
            seen.add((same, Spread.of(plan)))
            yield plan


def engines(space: Space, serve: Serve) -> Iterator[EngineWords]:
    """Yield the words of every engine; a budget that a policy has no use for or usually has appears once."""
    seen = set()
    for values in product(*(space[name] for name in ENGINE)):
        words = dict(zip(ENGINE, values))
        usual = serving.get("batching", words["policy"]).budget
        if words["budget"] and not usual:
            words["budget"] = 0
        if words["budget"] == usual and 0 in space["budget"]:
            words["budget"] = 0
        found = msgspec.structs.replace(serve.engine, **words)
        if found not in seen:
            seen.add(found)
            yield found


def most_replicas(plan: Plan, cluster: Cluster) -> int:
    """Return how many replicas a cluster has room for: they share a node where they fit into one, and have whole nodes
    to themselves where they do not."""
    size, node = plan.layout.num_ranks, cluster.islands[0].domain_size
    if size > cluster.num_devices:
        return 0
    node = min(node, cluster.num_devices)
    if size <= node:
        return cluster.num_devices // node * (node // size) + cluster.num_devices % node // size
    return cluster.num_devices // (-(-size // node) * node)


def words(plan: Plan) -> str:
    """Return the fewest words that say a plan: without those that are meant anyway."""
    if plan.several:
        pools = (f"{one.name}=[{words(one.plan)} on={one.devices[0]}:{one.devices[1]}]" for one in plan.pools)
        return " ".join([" + ".join(pools), *(link.text() for link in plan.links)])
    kept = plan.text().split()
    for word in list(kept):
        fewer = [one for one in kept if one is not word]
        if fewer and parse(" ".join(fewer)) == plan:
            kept = fewer
    return " ".join(kept)


def engine_words(engine: EngineWords, serve: Serve) -> str:
    """Return the words of the engine that differ from the workload's: ``policy=sarathi,budget=2048``."""
    said = [("policy", engine.policy), *((n, getattr(engine, n)) for n in ENGINE[1:])]
    return ",".join(f"{n}={v}" for n, v in said if n == "policy" or v != getattr(serve.engine, n))
