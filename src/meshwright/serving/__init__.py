"""Serving policies: pure deciders of what an engine computes next and where a request goes, one file a policy.

A policy is found by its axis (``batching``, ``order``, ``routing``) and its name. One of one's own is a record with a
``name`` and the method of its axis, and a call of :func:`register`; the simulator then runs it like the shipped ones.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec

from meshwright import catalog
from meshwright.errors import MeshwrightError, nearest

#: The files of this package that define policies, by axis, each as ``POLICY``: a new one is a file and its name here.
MODULES = {
    "batching": ("static", "orca", "vllm_v0", "vllm_v1", "sarathi", "trtllm", "past_future", "flover"),
    "order": ("fcfs", "priority", "sjf", "deadline", "vtc", "lpm", "dlpm", "batchllm", "dynasor"),
    "speculation": ("speculative", "dsi", "pipeinfer", "eqspec", "exspec"),
    "kv_budget": ("h2o", "scalekv", "shadowkv", "instinfer", "flexgen"),
    "routing": ("round_robin", "least_loaded", "power_of_two", "prefix_aware", "d2lpm"),
    "sharing": ("muxflow", "fixed_share"),
    "power": ("polca", "uncapped"),
}

#: Words of a serving workload that name a policy, where they are not the axis.
WORDS = {"batching": "policy"}

_OWN: dict[str, dict[str, Any]] = {axis: {} for axis in MODULES}


def policies(axis: str) -> dict[str, Any]:
    """Every policy of an axis by name."""
    shipped = [import_module(f"meshwright.serving.{module}").POLICY for module in MODULES[axis]]
    return {policy.name: policy for policy in shipped} | _OWN[axis]


def names(axis: str) -> tuple[str, ...]:
    """The names of the policies of an axis, which are those of their files."""
    return (*(module.replace("_", "-") for module in MODULES[axis]), *_OWN[axis])


def register(axis: str, policy: Any) -> Any:
    """Make a policy of one's own known, in place of one with the same name; returns it."""
    _OWN[axis][policy.name] = policy
    return policy


def get(axis: str, name: str) -> Any:
    """The policy of that name; ``dlpm:4096`` is the one called dlpm with that ``number``.

    Raises:
        MeshwrightError: W013 when there is none, and names the nearest; or when it has no number.
    """
    said, (name, _, number) = name, name.partition(":")
    found = policies(axis).get(name)
    place = f"--serve {WORDS.get(axis, axis)}={said}"
    if found is None:
        help = nearest(name, list(names(axis)))
        if axis == "batching" and name.lower() in catalog.names("engines"):
            help = f"engine={name.lower()} has that software's times, beside a policy; {help}"
        raise MeshwrightError.one("W013", f"no {axis} policy {name!r}", place=place, help=help)
    if not number:
        return found
    if not hasattr(found, "number"):
        raise MeshwrightError.one(
            "W013", f"the {axis} policy {name!r} has no number", place=place, help=f"write {name}"
        )
    return msgspec.structs.replace(found, number=float(number))
