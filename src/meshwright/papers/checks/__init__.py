"""The checks, by name. Each carries out its recipe, simulated or for real, and compares with its paper."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from meshwright.papers.outcome import Check

MODULES = (
    "zero_bubble",
    "data_parallel",
    "layouts",
    "relational",
    "faults",
    "sequence",
    "merging",
    "iterations",
    "scheduling",
    "bandwidth",
    "codecs",
    "decoding",
    "dispatch",
    "checkpoints",
    "replayed",
    "served_plans",
    "tables",
    "rollouts",
    "feeding",
    "choices",
    "federated",
    "images",
    "ensembles",
    "image_clients",
)
"""The files of this package that define checks, each as ``CHECKS``: a new check is a function and its name there."""


@cache
def checks() -> dict[str, Check]:
    """Every check by its name."""
    found: dict[str, Check] = {}
    for module in MODULES:
        found |= import_module(f"meshwright.papers.checks.{module}").CHECKS
    return found
