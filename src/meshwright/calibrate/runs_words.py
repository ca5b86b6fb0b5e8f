"""Words about software that a few of its runs may tell, which no constant says: what it overlaps, fuses and captures.

Software that nobody knows stands with the words that most stacks share. Each of these words is one that some stacks
have and others have not; whether the stack of some runs has it is for the runs to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from meshwright.cost.framework import Defaults, Framework
from meshwright.cost.unknown import Evidence, weighed_families

#: The word of a profile's name that says a generation of FlashAttention (``cost/unknown.py``).
FLASH = "flash"


def _first_flash(usual: Defaults) -> Defaults:
    return msgspec.structs.replace(usual, flash=1) if usual.attention == "flash" else usual


def _graphed(usual: Defaults) -> Defaults:
    return msgspec.structs.replace(usual, graphs=True)


def _overlapping(*exchanges: str) -> Callable[[Defaults], Defaults]:
    """Return what makes defaults run some exchanges beside compute."""

    def made(usual: Defaults) -> Defaults:
        return msgspec.structs.replace(usual, overlap=tuple(dict.fromkeys((*usual.overlap, *exchanges))))

    return made


def _sorting(usual: Defaults) -> Defaults:
    return msgspec.structs.replace(usual, fused=tuple(dict.fromkeys((*usual.fused, "permute"))))


#: The words by name, each with what it makes of a profile's defaults: the first FlashAttention (2205.14135); layers
#: issued as CUDA graphs, which of the known stacks those of 8 bits have, whose quantising adds kernels to launch; a
#: mixture's tokens sorted in one kernel; the exchange of experts beside compute where it leaves a scale-up domain, and
#: everywhere, as in domains of many devices it is long too; and the exchanges of tensor parallelism beside compute,
#: whether their products are sliced (Megatron-LM's tp-comm-overlap, nanotron's asynchronous linear layers).
WORDS: dict[str, Callable[[Defaults], Defaults]] = {
    "first FlashAttention": _first_flash,
    "CUDA graphs": _graphed,
    "tokens sorted in one kernel": _sorting,
    "experts' exchange between nodes beside compute": _overlapping("ep between nodes"),
    "experts' exchange beside compute": _overlapping("ep"),
    "tensor parallelism's exchanges beside compute": _overlapping("tp"),
}


def open_words(base: Framework, bits: int) -> tuple[str, ...]:
    """Return the words that a profile leaves open with operands of `bits`: those that would change it, but
    FlashAttention's where its name says a generation, and those that only stacks of 8 bits have."""
    closed = {_first_flash} if FLASH in base.name.split() else set()
    closed |= {_graphed} if bits > 8 else set()
    return tuple(word for word, made in WORDS.items() if made(base.defaults) != base.defaults and made not in closed)


def likely(word: str, base: Framework, bits: int, others: Iterable[Framework]) -> float:
    """Return how likely a stack with operands of `bits` has a word: the share of the families of `others` that have it,
    those that are unlike weighing little (``cost/unknown.py``), with one family more on either side (Laplace's rule of
    succession). The first FlashAttention, which names of profiles tell, is as likely as not."""
    made = WORDS[word]
    if made is _first_flash:
        return 0.5
    kind = Evidence(bits=bits, old=base.defaults.attention == "unfused")
    told = total = 0.0
    for family in weighed_families(kind, known=others).values():
        weight = max(one for one, _ in family)
        total += weight
        told += weight * any(made(one.defaults) == one.defaults for _, one in family)
    return (told + 1) / (total + 2)


def having(base: Framework, words: frozenset[str]) -> Framework:
    """Return the profile with some words."""
    usual = base.defaults
    for word, made in WORDS.items():
        usual = made(usual) if word in words else usual
    return msgspec.structs.replace(base, defaults=usual)
