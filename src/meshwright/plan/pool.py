"""Pools: the parts of a plan that run on devices of their own, and the links over which they work together.

The usual plan is one pool. ``encoder=[dp2 mb4 on=0:2 part=0:8] + lm=[tp2 pp3 on=2:8 part=8:32]`` is two: each has its
devices, its part of the model and a plan of its own, and activations flow from one to the other, gradients back
(DistTrain, Zhang et al. 2024, 2408.04275, lays out encoder, language model and generator so).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.architecture import Model
from meshwright.spec.parts import part_of, read_part

if TYPE_CHECKING:
    from meshwright.plan.record import Plan

#: What flows over links: activations and their gradients in training, keys and values of requests in serving.
ACTIVATIONS = "activations"
KV = "kv"
FLOWS = (ACTIVATIONS, KV)


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that hold a part of the model and run it by a plan of their own.

    ``devices`` are the first and the one after the last on the cluster; () until they are known. ``part`` is what it
    holds, as it was said: a range of layers (``0:8``) or the name of a part (``vision``), "" for what its neighbours
    leave. A ``frozen`` part is run forward alone: it has no gradients and no optimizer.
    """

    name: str = ""
    devices: tuple[int, ...] = ()
    part: str = ""
    frozen: bool = False
    plan: Plan

    def __getattr__(self, name: str) -> Any:
        """A facet of the pool's own plan."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.plan, name)

    def settled(self, devices: tuple[int, int]) -> Pool:
        """The pool on these devices, which it fills with data-parallel replicas where it leaves ``dp`` open."""
        plan = self.plan.on(devices[1] - devices[0]) if devices[0] < devices[1] else self.plan
        return msgspec.structs.replace(self, devices=devices, plan=plan)


class PoolLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two pools, by their names: activations flow forward, and their gradients back unless the source is
    frozen; or the keys and values of the prompts that the source computes, with which the target goes on."""

    source: str
    target: str
    what: str = ACTIVATIONS

    def text(self) -> str:
        return f"{self.source}->{self.target}" + ("" if self.what == ACTIVATIONS else f":{self.what}")


class Elsewhere(msgspec.Struct, frozen=True):
    """A facet of a plan of several pools: each pool has its own, so that to ask the plan for it is an error."""

    pools: tuple[str, ...]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise several(self.pools)


def several(names: tuple[str, ...], what: str = "what was asked") -> MeshwrightError:
    """The error P046: a plan of pools where one pool is wanted."""
    return MeshwrightError.one(
        "P046",
        f"the plan has {len(names)} pools ({', '.join(names)}), and {what} is for plans of one",
        place="plan.pools",
        help="meshwright predict, run, whatif, diff and lower take several pools; here say the plan of one",
    )


def chain(pools: tuple[Pool, ...]) -> tuple[PoolLink, ...]:
    """The links of pools that follow one another as they were said."""
    return tuple(PoolLink(source=a.name, target=b.name) for a, b in itertools.pairwise(pools))


def settled(pools: tuple[Pool, ...], num_devices: int) -> tuple[Pool, ...]:
    """The pools on devices of a cluster: one that does not say which begins where the one before it ends, the last
    one takes what is left, and ``dp`` fills what was given. Who says neither devices nor ``dp`` stays without, and so
    do those that come after; so does a last one for which none is left."""
    out: list[Pool] = []
    first: int | None = 0
    for number, pool in enumerate(pools):
        devices, size = pool.devices, pool.plan.layout.num_ranks
        if not devices and first is not None and (size or number == len(pools) - 1):
            end = first + size if size else num_devices
            devices = (first, end) if first < end else ()
        first = devices[1] if devices else None
        out.append(pool.settled((devices[0], devices[1])) if devices else pool)
    return tuple(out)


def held(pools: tuple[Pool, ...], model: Model) -> tuple[tuple[int, int] | None, ...]:
    """The layers (first, end) that every pool holds; None where a pool's part says none of the model's, or nothing."""
    said = [read_part(pool.part, model) if pool.part else None for pool in pools]
    out = list(said)
    for i, pool in enumerate(pools):
        if pool.part:
            continue
        before = 0 if i == 0 else said[i - 1][1] if said[i - 1] else None
        after = model.num_layers if i == len(pools) - 1 else said[i + 1][0] if said[i + 1] else None
        out[i] = (before, after) if before is not None and after is not None and before < after else None
    return tuple(out)


def models(pools: tuple[Pool, ...], model: Model) -> tuple[Model, ...]:
    """The part of the model that every pool of a legal plan holds."""
    return tuple(part_of(model, *layers) for layers in held(pools, model) if layers)
