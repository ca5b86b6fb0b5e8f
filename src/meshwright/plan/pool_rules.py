"""Legality of a plan of several pools: devices, parts and links that fit together, and the plan of each pool for its
devices and its part of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic, nearest
from meshwright.plan.pool import KV, Pool, held
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.model import Model
from meshwright.spec.parts import named_parts, part_of
from meshwright.spec.workload import Train
from meshwright.sync.policy import read

Check = Callable[[Plan, Model, Cluster, Train], list[Diagnostic]]


def violations(plan: Plan, model: Model, cluster: Cluster, train: Train, check: Check) -> list[Diagnostic]:
    """All violations of a plan of several pools; `check` finds those of one pool."""
    plan = plan.on(cluster.num_devices)
    rules = (_devices(plan, cluster), _parts(plan, model), _links(plan, model), _frozen(plan, model))
    found = [*(one for rule in rules for one in rule), *_together(plan, model, cluster, train)]
    for pool, layers in zip(plan.pools, held(plan.pools, model)):
        own = cut(cluster, *pool.devices) if pool.devices else None
        if own is None or layers is None:
            continue
        for one in check(pool.plan, part_of(model, *layers), own, train):
            if one.code.startswith("W"):  # what the workload asks is asked of the whole model
                continue
            place = one.place.replace("plan.", f"plan.{pool.name}.", 1) if one.place.startswith("plan.") else one.place
            found.append(msgspec.structs.replace(one, place=place))
    return list(dict.fromkeys(found))


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=f"plan.{place}", help=help)


def _devices(plan: Plan, cluster: Cluster) -> Iterator[Diagnostic]:
    """Devices that two pools or none hold, that the cluster has not, and that a pool cannot be cut out of it at."""
    yield from places(plan, cluster)
    at = 0
    for pool in sorted((pool for pool in plan.pools if pool.devices), key=lambda pool: pool.devices):
        if pool.devices[0] > at:
            yield _left_out(at, pool.devices[0])
        at = max(at, pool.devices[1])
    if at < cluster.num_devices and all(pool.devices for pool in plan.pools):
        yield _left_out(at, cluster.num_devices)


def places(plan: Plan, cluster: Cluster) -> Iterator[Diagnostic]:
    """Yield P041 for devices that two pools hold, that the cluster has not, and that a pool cannot be cut out of it
    at."""
    have = cluster.num_devices
    for pool in plan.pools:
        where = f"{pool.name}.on"
        if not pool.devices:
            help = f"say dp or on= in {pool.name}; only the last pool takes what the others leave"
            unsaid = f"{pool.name} says neither how many devices it has nor which"
            left = plan.pools[-1] is pool and all(other.devices for other in plan.pools[:-1])
            yield _bad("P041", f"no device is left for {pool.name}" if left else unsaid, where, help)
            return
        first, end = pool.devices
        if not first < end <= have:
            problem = f"{pool.name} is on devices {first}:{end} and {cluster.name} has {have}"
            yield _bad("P041", problem, f"{where} = {first}:{end}", f"devices are 0:{have}")
        elif cut(cluster, first, end) is None:
            help = "begin and end a pool at a node (or rack), or keep it inside one"
            problem = f"{pool.name} on devices {first}:{end} lies across a node of {cluster.name} and no whole one"
            yield _bad("P041", problem, f"{where} = {first}:{end}", help)
    ordered = sorted(plan.pools, key=lambda pool: pool.devices)
    for before, pool in itertools.pairwise(ordered):
        if pool.devices[0] < before.devices[1]:
            shared = f"{pool.devices[0]}:{min(before.devices[1], pool.devices[1])}"
            problem = f"{before.name} and {pool.name} are both on devices {shared}"
            yield _bad("P041", problem, f"{pool.name}.on", f"let {pool.name} begin at {before.devices[1]}")


def _left_out(first: int, end: int) -> Diagnostic:
    help = "give them to a pool with on=, leave dp open in the last pool, or say a smaller cluster"
    return _bad("P041", f"no pool is on devices {first}:{end}", "pools", help)


def _parts(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Layers that two pools or none hold, and parts that the model has not."""
    found = held(plan.pools, model)
    known = f"0:{model.num_layers}" + "".join(f", {name}" for name in named_parts(model) if len(named_parts(model)) > 1)
    for pool, layers in zip(plan.pools, found):
        if layers is None and pool.part:
            problem = f"{pool.name} holds part={pool.part}, which {model.name} has not"
            yield _bad("P042", problem, f"{pool.name}.part = {pool.part}", f"layers and parts are {known}")
        elif layers is None:
            problem = f"{pool.name} does not say which part of {model.name} it holds, and its neighbours leave it none"
            yield _bad("P042", problem, f"{pool.name}.part", f"say part=; layers and parts are {known}")
    if None in found:
        return
    at = 0
    before: Pool | None = None
    for (first, end), pool in sorted(zip(found, plan.pools), key=lambda one: one[0]):
        if first > at:
            yield _bad("P042", f"no pool holds layers {at}:{first} of {model.name}", "pools", "say part= in each pool")
        elif first < at:
            problem = f"{before.name} and {pool.name} both hold layers {first}:{min(at, end)} of {model.name}"
            yield _bad("P042", problem, f"{pool.name}.part = {pool.part}", f"let {pool.name} begin at layer {at}")
        at, before = max(at, end), pool if end > at else before
    if at < model.num_layers:
        problem = f"no pool holds layers {at}:{model.num_layers} of {model.name}"
        yield _bad("P042", problem, "pools", "say part= in each pool")


def _links(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Links of pools that are not there, and those that the model needs and does not."""
    names = [pool.name for pool in plan.pools]
    unknown = [(link, name) for link in plan.links for name in (link.source, link.target) if name not in names]
    for link, name in unknown:
        yield _bad("P043", f"the link {link.text()} is of a pool {name!r}", "links", nearest(name, names))
    for link in plan.links:
        if link.what == KV:
            help = f"write {link.source}->{link.target}, or say requests with --serve"
            yield _bad(
                "P043", f"keys and values of requests flow over {link.text()}, and a step has none", "links", help
            )
    found = held(plan.pools, model)
    if unknown or None in found:
        return
    ordered = [name for _, name in sorted(zip(found, names))]
    needed = list(itertools.pairwise(ordered))
    said = [(link.source, link.target) for link in plan.links]
    for source, target in dict.fromkeys(pair for pair in said if pair not in needed or said.count(pair) > 1):
        problem = f"nothing flows over {source}->{target}: {target} does not hold the layers after {source}'s"
        if (source, target) in needed:
            problem = f"the link {source}->{target} is there twice"
        yield _bad("P043", problem, "links", "the model needs " + " ".join(f"{a}->{b}" for a, b in needed))
    for source, target in needed:
        if (source, target) not in said:
            problem = f"{target} holds the layers after {source}'s, and no link joins them"
            yield _bad("P043", problem, "links", f"add {source}->{target}, or leave all links out")


def _frozen(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Parts that are not trained behind parts that are, whose gradients would have to come through them."""
    found = held(plan.pools, model)
    if None in found:
        return
    ordered = [pool for _, pool in sorted(zip(found, plan.pools), key=lambda one: one[0])]
    trained: Pool | None = None
    for pool in ordered:
        if pool.frozen and trained is not None:
            problem = f"{pool.name} is frozen, and gradients for {trained.name} come through it"
            yield _bad("P044", problem, f"{pool.name}.frozen", f"freeze {trained.name} too, or train {pool.name}")
        trained = trained or (None if pool.frozen else pool)
    for pool, (first, _) in zip(plan.pools, found):
        if not pool.frozen and first < model.frozen:
            problem = f"{pool.name} trains encoders: the first {model.frozen} layers of {model.name} are not trained"
            help = f"put them in a pool that is frozen, with part=0:{model.frozen}"
            yield _bad("P044", problem, f"{pool.name}.part = {pool.part}", help)
    if trained is None:
        yield _bad("P044", "every pool is frozen: nothing is trained", "pools", "leave frozen out of the last pool")


def _together(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield the violations of a step of several pools: words of a pool's plan that one pool alone can have."""
    for pool in plan.pools:
        layout, placement = pool.plan.layout, schedules.get(pool.plan.pipeline.schedule).placement
        if layout.shares:
            problem = "uneven shares of the batch, and links of equal ones, do not fit together"
            yield _bad("P045", problem, f"{pool.name}.layout.shares = {layout.shares}", "one pool a kind of device")
        if pool.plan.pipeline.fill or pool.plan.pipeline.filling:
            problem = "layers that fill a pipeline's waits are no part of a pool: a frozen pool has devices of its own"
            yield _bad("P045", problem, f"{pool.name}.pipeline.fill", "one pool, or a pool that is frozen")
        if pool.plan.kinds.any:
            problem = "what kinds of replicas have of their own is worked out for one pool"
            yield _bad("P045", problem, f"{pool.name}.kinds", "one pool a kind of device")
        if placement == "bidirectional":
            problem = f"{pool.plan.pipeline.schedule} begins at both ends of its pipeline, and a link joins one"
            yield _bad("P045", problem, f"{pool.name}.pipeline.schedule", "another schedule, such as 1f1b")
        elif pool.frozen and "t_f" in schedules.get(pool.plan.pipeline.schedule).params:
            problem = f"{pool.plan.pipeline.schedule} is made of forward and backward times, and {pool.name} is frozen"
            yield _bad("P045", problem, f"{pool.name}.pipeline.schedule", "gpipe or 1f1b")
        if not read(pool.plan.sync.policy).exact:
            said = f"step apart or encode gradients (sync={pool.plan.sync.policy})"
            problem = f"replicas of {pool.name} {said}, and pools step together"
            yield _bad("P045", problem, f"{pool.name}.sync.policy = {pool.plan.sync.policy}", "leave sync= out")
        if not pool.plan.feedback.exact:
            problem = f"layers of {pool.name} learn from the output's error, which is sent inside one pool"
            yield _bad("P045", problem, f"{pool.name}.feedback.way = {pool.plan.feedback.way}", "leave feedback= out")
        if pool.plan.offload.any:
            problem = f"{pool.name} keeps state off its devices, which is worked out for one pool"
            yield _bad("P045", problem, f"{pool.name}.offload", "leave offload= out")
        part = layout.tp * layout.cp
        if train.seq_len % part and len(model.flows) == 1:
            problem = f"{train.seq_len} tokens do not divide among the {part} ranks that send and receive them"
            yield _bad("P045", problem, f"{pool.name}.layout.tp = {layout.tp}", "choose tp * cp that divides seq=")
    if train.lora is not None:
        yield _bad("P045", "adapters are trained in plans of one pool", "pools", "drop phase=lora, or say one pool")
    found = held(plan.pools, model)
    if model.tied_embeddings and None not in found and (0, model.num_layers) not in found:
        problem = f"the embedding of {model.name} is its head too, and they are in two pools"
        yield _bad("P045", problem, "pools", "a model whose embedding is not tied, or one pool")
    if cluster.shares_ports:
        help = "one pool, or a cluster without shared_ports"
        yield _bad("P045", "exchanges that share ports are worked out for one pool", f"cluster {cluster.name}", help)
