"""Rounds with an outer step: replicas step apart, and the mean of what a round changed is the gradient of one more
optimizer's step, which all take alike (DiLoCo, Douillard et al. 2311.08105).

Streaming DiLoCo (2501.18512) has parts of the layers due at different steps of a round, applies what arrives some steps
later while training goes on, keeps a share of a replica's own parameters beside it, and sends four bits.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.sync.codecs import RING, YES, codecs
from meshwright.sync.combines import ways
from meshwright.sync.fragments import PARAMETERS
from meshwright.sync.options import RuleOption
from meshwright.sync.record import Outer
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.local import fragments, together, wrong

STRIDED, SEQUENTIAL = "strided", "sequential"
UPDATE, BACKWARD = "update", "backward"

H = RuleOption(name="h", what="local steps of a round, from one exchange of a parameter to the next", example=100)


ROUND = RuleOption(name="h", what=H.what, default=100)
COMBINED = RuleOption(name="combine", what="how changes become one", default="mean", choices=lambda: ways("mean"))


def coded(default: str = "none") -> RuleOption:
    """The option that says the code of what is exchanged."""
    return RuleOption(
        name="codec", what="the code of the changes of a round", default=default, choices=lambda: tuple(codecs())
    )


def outer(rate: float, momentum: float) -> tuple[RuleOption, ...]:
    """The options of an outer step."""
    return (
        RuleOption(name="rate", what="the learning rate of the outer step", default=rate, share=True, most=10.0),
        RuleOption(
            name="momentum", what="the momentum of the outer step", default=momentum, share=True, least=0, most=0.9999
        ),
    )


def divided(parts: int) -> tuple[RuleOption, ...]:
    """The options of parts of the layers that are exchanged at different times."""
    return (
        RuleOption(name="parts", what="parts of the layers, due at different steps of a round", default=parts),
        RuleOption(
            name="pattern",
            what="whether a part has every so manieth layer, or neighbours",
            default=STRIDED,
            choices=lambda: (STRIDED, SEQUENTIAL),
        ),
    )


def streamed(parts: int, delay: int, mix: float) -> tuple[RuleOption, ...]:
    """The options of parts that are exchanged at different times, beside the steps."""
    return (
        *divided(parts),
        RuleOption(name="delay", what="steps after which a part that was sent is applied", default=delay, least=0),
        RuleOption(
            name="mix",
            what="the share of its own parameters that a replica keeps when the result comes",
            default=mix,
            share=True,
            least=0,
            most=0.9999,
        ),
        RuleOption(
            name="start",
            what="whether layers are sent after the update that ends a step, or updated and sent within its backward",
            default=UPDATE,
            choices=lambda: (UPDATE, BACKWARD),
        ),
    )


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of rounds with an outer Nesterov step."""
    return {
        "when": values["h"],
        "fragments": (PARAMETERS,),
        "parts": values["parts"],
        "strided": values["pattern"] == STRIDED,
        "early": values["start"] == BACKWARD,
        "codec": values["codec"],
        "outer": Outer(rate=values["rate"], momentum=values["momentum"], nesterov=True, mix=values["mix"]),
        "delay": values["delay"],
    }


DILOCO = SyncRule(
    name="diloco",
    title="rounds with an outer Nesterov step",
    paper="Douillard et al., 2023, arXiv 2311.08105",
    exact=False,
    options=(H, coded(), COMBINED, *outer(0.7, 0.9), *streamed(1, 0, 0.0)),
    choices=choices,
    fragments=fragments,
    together=together,
    wrong=wrong,
)
STREAMING = msgspec.structs.replace(
    DILOCO,
    name="streaming-diloco",
    title="rounds whose parts are exchanged one after the other beside the steps",
    paper="Douillard et al., 2025, arXiv 2501.18512",
    # eight parts, five steps of overlap, half of a replica's own kept, four bits: sections 2.2, 2.3 and 4.1
    options=(H, coded("fp4"), COMBINED, *outer(0.7, 0.9), *streamed(8, 5, 0.5)),
)

INTELLECT = msgspec.structs.replace(
    DILOCO,
    name="intellect",
    title="rounds of a hundred steps in eight bits, with an outer Nesterov step",
    paper="Jaghouar et al., 2024, arXiv 2412.01152",
    # rounds of 100 steps, changes in eight bits around their mean, added hop by hop: sections 2 and 3
    options=(ROUND, coded("sigma8"), COMBINED, *outer(0.7, 0.9), *streamed(1, 0, 0.0)),
    usual={RING: YES},
)

RULES = (DILOCO, STREAMING, INTELLECT)
