"""Sequence: how context parallelism exchanges keys, values and heads."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import ALONE, LAYER, NUMBERED, Facet, Field, count, listed, names, wrong

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


CP_ALGORITHMS = ("ring", "ulysses", "allgather")


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """How context parallelism exchanges: ``ring`` (Ring Attention, Liu et al. 2310.01889, balanced zigzag),
    ``ulysses`` (all-to-all over heads, Jacobs et al. 2309.14509), ``allgather`` of keys and values (Llama 3,
    2407.21783). ``ulysses`` > 1: so many neighbouring ranks swap heads inside a ring or gather between such groups
    (the union of both, Fang & Zhao 2405.07719)."""

    algorithm: str = "ring"
    ulysses: int = 1


def _context(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    cp, algorithm, swap = plan.layout.cp, plan.sequence.algorithm, plan.sequence.ulysses
    if swap > 1 and (algorithm == "ulysses" or cp % swap or swap >= cp):
        inner = [n for n in range(2, cp) if cp % n == 0]
        yield wrong(
            "P015",
            f"ulysses{swap} swaps heads among {swap} ranks inside a ring or an allgather of cp={cp} / {swap}"
            + (", and ulysses is neither" if algorithm == "ulysses" else ""),
            f"sequence.ulysses = {swap}",
            f"valid inside cp{cp}: {', '.join(f'ulysses{n}' for n in inner) or 'none'}"
            + (f"; or ulysses alone for all {cp}" if cp > 1 else ""),
        )
        return
    if cp == 1:
        return
    outer = cp // swap
    pieces = lcm(2 * outer, cp) if algorithm != "ulysses" and train.causal else cp
    if train.seq_len % pieces:
        why = (
            "balanced causal attention takes an early and a late piece a rank"
            if pieces > cp
            else "each rank takes one piece"
        )
        yield wrong(
            "P015",
            f"a sequence of {train.seq_len} tokens does not divide into {pieces} pieces ({why})",
            f"layout.cp = {cp}",
            f"choose a cp such that {'2 * cp' if pieces > cp else 'cp'} divides {train.seq_len}",
        )
    if plan.head_swap > 1:
        word = "cp" if algorithm == "ulysses" else "ulysses"
        for attention in model.attentions:
            heads = attention.heads // plan.layout.tp
            if heads % plan.head_swap:
                yield wrong(
                    "P015",
                    f"ulysses splits a rank's {heads} heads over {word}={plan.head_swap}, which does not divide",
                    f"layout.cp = {cp}" if word == "cp" else f"sequence.ulysses = {swap}",
                    f"valid {word}: {listed(heads, cluster.num_devices)}; or ring",
                )
    if plan.memory.attention == "unfused" and algorithm == "ring":
        yield wrong(
            "P016",
            "ring attention merges partial softmaxes, which the unfused kernels do not give",
            "memory.attention = unfused",
            "say flash, or ulysses instead of ring",
        )


def _split(plan: Plan) -> bool:
    return plan.layout.cp > 1


FIELDS = (
    Field(
        name="algorithm",
        help="how context parallelism exchanges",
        form=names(*CP_ALGORITHMS),
        spelled=ALONE,
        place=160,
        decides=(LAYER,),
        seen={LAYER: lambda plan: plan.layout.cp > 1 and plan.sequence.algorithm},
        domain=lambda model, cluster, train: CP_ALGORITHMS,
        useful=_split,
        with_sizes=True,
    ),
    Field(
        name="ulysses",
        help="neighbouring context-parallel ranks that swap heads inside a ring or gather",
        form=count(),
        spelled=NUMBERED,
        place=90,
        decides=(LAYER,),
        seen={LAYER: lambda plan: plan.layout.cp > 1 and plan.sequence.ulysses},
        with_sizes=True,
    ),
)
FACET = Facet(
    name="sequence",
    help="how context parallelism exchanges",
    record=Sequence,
    fields=FIELDS,
    rules=(_context,),
)
