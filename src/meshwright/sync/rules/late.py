"""Rounds whose result comes a round late, so that an exchange has all the steps of one to itself.

Eager DiLoCo (Kale et al. 2502.12996) has a replica's own part of the mean at once, and the others' of the round before;
parts of the layers may be due at different steps of a round, as in Streaming DiLoCo (2501.18512).
CO2 (Sun et al. 2401.16265) starts every round from parameters that all have in common, and moves those by the round
before, with a momentum whose elements are limited; the penalty on how far replicas have gone on meanwhile divides the
change, by a constant, as in the authors' code (fairscale-CO2).
"""

from __future__ import annotations

from typing import Any

from meshwright.sync.fragments import PARAMETERS
from meshwright.sync.options import RuleOption
from meshwright.sync.record import Outer
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.diloco import STRIDED, H, coded, divided, outer
from meshwright.sync.rules.local import fragments, together, wrong


def eager(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of eager rounds."""
    step = Outer(rate=values["rate"], momentum=values["momentum"], nesterov=True, eager=True)
    parts = {"parts": values["parts"], "strided": values["pattern"] == STRIDED}
    return _late(values, step) | parts


def co2(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of rounds that move by the one before."""
    step = Outer(rate=values["rate"], momentum=values["momentum"], clip=values["clip"], penalty=values["penalty"])
    return _late(values, step)


def _late(values: dict[str, Any], step: Outer) -> dict[str, Any]:
    return {
        "when": values["h"],
        "fragments": (PARAMETERS,),
        "codec": values["codec"],
        "combine": "mean",
        "outer": step,
        "delay": values["h"],
    }


EAGER = SyncRule(
    name="eager-diloco",
    title="rounds whose others' changes come a round late",
    paper="Kale et al., 2025, arXiv 2502.12996",
    exact=False,
    options=(H, coded(), *outer(0.7, 0.9), *divided(1)),
    choices=eager,
    fragments=fragments,
    together=together,
    wrong=wrong,
)
CO2 = SyncRule(
    name="co2",
    title="rounds that move by the one before",
    paper="Sun et al., 2024, arXiv 2401.16265",
    exact=False,
    options=(
        H,
        coded(),
        *outer(1.0, 0.0),
        RuleOption(
            name="clip",
            what="the most that an element of the outer momentum may be, 0 for any",
            default=0.0,
            share=True,
            least=0,
            most=1e6,
        ),
        RuleOption(
            name="penalty",
            what="what the change of a round is divided by, as it comes late",
            default=1.0,
            share=True,
            most=1e6,
        ),
    ),
    choices=co2,
    fragments=fragments,
    together=together,
    wrong=wrong,
)

RULES = (EAGER, CO2)
