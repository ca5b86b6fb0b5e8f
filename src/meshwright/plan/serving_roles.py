"""Roles of pools that serve: which of them compute prompts, which go on with them, and which do both.

A link ``prefill->decode:kv`` says that the keys and values of a prompt go from one pool to the other, where the answer
is generated. A pool without links serves requests from end to end (the mixed pool of Splitwise, 2311.18677).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import Diagnostic, nearest
from meshwright.plan.pool import KV
from meshwright.plan.pool_rules import places
from meshwright.plan.record import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut

#: Roles of a pool.
PREFILL, DECODE, BOTH = "prefill", "decode", "prefill and decode"


def role(plan: Plan, name: str) -> str:
    """Return the role of a pool of a legal serving plan."""
    if any(link.source == name for link in plan.links):
        return PREFILL
    return DECODE if any(link.target == name for link in plan.links) else BOTH


def serving_pools(plan: Plan, cluster: Cluster) -> Iterator[Diagnostic]:
    """Yield what keeps the pools of a plan on devices from serving together: their devices, their words, their links.
    Devices may be left free."""
    yield from places(plan, cluster)
    for pool in plan.pools:
        own = cut(cluster, *pool.devices) if pool.devices else None
        if own is not None and len(own.islands) > 1:
            message = f"{pool.name} is on devices of {len(own.islands)} kinds"
            help = "a pool for each kind of device, with links between them"
            yield _wrong("P041", message, f"{pool.name}.on = {pool.devices[0]}:{pool.devices[1]}", help)
        for word in (*((f"part={pool.part}",) if pool.part else ()), *(("frozen",) if pool.frozen else ())):
            message = f"{pool.name} says {word}, and each pool that serves holds the whole model"
            yield _wrong("P042", message, f"{pool.name}.{word}", f"drop {word}")
    yield from _links(plan)


def _links(plan: Plan) -> Iterator[Diagnostic]:
    names = [pool.name for pool in plan.pools]
    for link in dict.fromkeys(plan.links):
        for name in (link.source, link.target):
            if name not in names:
                yield _wrong("P043", f"the link {link.text()} is of a pool {name!r}", "links", nearest(name, names))
        if link.what != KV:
            message = f"nothing that requests need flows over {link.text()}"
            help = (
                f"write {link.source}->{link.target}:kv where {link.target} goes on with the prompts of {link.source}"
            )
            yield _wrong("P043", message, "links", help)
        elif link.source == link.target:
            yield _wrong("P043", f"the link {link.text()} leads nowhere", "links", "name two pools")
        elif any(other.source == link.target for other in plan.links):
            message = f"{link.target} goes on with prompts of {link.source}, and gives its own to others"
            yield _wrong("P043", message, "links", "a pool is the source of links, or their target")
        if plan.links.count(link) > 1:
            yield _wrong("P043", f"the link {link.text()} is there twice", "links", "say it once")


def _wrong(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=f"plan.{place}", help=help)
