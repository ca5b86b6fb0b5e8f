"""Espresso: the gradients of some layers are encoded in every step, of those alone where that makes it shorter.

Wang et al. 2205.14465 (sections 3 and 4): a code takes time on the device, and gradients that travel beside a backward
cost nothing, so that encoding everything may be slower than encoding nothing. Which layers are encoded is decided once,
before training, by the timeline of the step (``simulate/decide.py``), and written into the plan as ``coded=0-5+9``.
"""

from __future__ import annotations

from meshwright.sync.codecs import codecs
from meshwright.sync.options import RuleOption, numbers
from meshwright.sync.record import NO_CODEC
from meshwright.sync.rules import SyncRule, step


def _codecs() -> tuple[str, ...]:
    """Codes that a layer may have by itself: those that choose nothing by all of them."""
    return tuple(name for name, one in codecs().items() if name != NO_CODEC and not one.adapts)


ESPRESSO = SyncRule(
    name="espresso",
    title="gradients encoded where that is faster",
    paper="Wang et al., 2022, arXiv 2205.14465",
    exact=True,
    choices=lambda values: step.sums("layers", numbers(values["coded"])),
    fragments=step.fragments,
    options=(
        RuleOption(name="codec", what="the code of gradients that are encoded", example="dgc", choices=_codecs),
        RuleOption(
            name="coded",
            what="the layers whose gradients are encoded; left out, a prediction chooses them",
            default="",
            numbered=True,
        ),
    ),
    opens=("which layers are encoded", "coded=0-5+9"),
    together=step.STEP.together,
    wrong=step.wrong,
)

RULES = (ESPRESSO,)
