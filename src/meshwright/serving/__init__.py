"""Serving policies: pure deciders of what an engine computes next and where a request goes, one file a policy.

A policy is found by its axis (``batching``, ``order``, ``routing``) and its name. One of one's own is a record with a
``name`` and the method of its axis, and a call of :func:`register`; the simulator then runs it like the shipped ones.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from meshwright.errors import MeshwrightError, nearest

#: The files of this package that define policies, by axis, each as ``POLICY``: a new one is a file and its name here.
MODULES = {
    "batching": ("static", "orca", "vllm_v0", "vllm_v1", "sarathi", "past_future"),
    "order": ("fcfs", "priority"),
    "speculation": ("speculative", "dsi", "pipeinfer", "eqspec", "exspec"),
    "kv_budget": ("h2o", "scalekv", "shadowkv", "instinfer"),
    "routing": ("round_robin", "least_loaded", "power_of_two"),
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
    """The policy of that name.

    Raises:
        MeshwrightError: W013 when there is none; names the nearest.
    """
    found = policies(axis).get(name)
    if found is None:
        help = nearest(name, list(names(axis)))
        raise MeshwrightError.one(
            "W013", f"no {axis} policy {name!r}", place=f"--serve {WORDS.get(axis, axis)}={name}", help=help
        )
    return found
