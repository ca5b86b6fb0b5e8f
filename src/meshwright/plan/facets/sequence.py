"""Sequence: how context parallelism exchanges keys, values and heads."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.facet import ALONE, KEYED, LAYER, NUMBERED, Facet, Field, count, listed, names, unrun, wrong
from meshwright.spec.mixers import GatedDelta
from meshwright.sync.record import USUAL

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


#: Two rings around whole rows of scores, which are stored.
STORING = "ring-self-attention"
#: Ranks share whichever dim of a video the next block does not attend over.
SWITCHING = "dsp"
CP_ALGORITHMS = ("ring", "ulysses", "allgather", "burstattention", "tokenring", STORING, SWITCHING)
#: Under these a rank has one piece of the sequence, also where tokens see no later one.
ONE_PIECE = ("ulysses", STORING)
#: Of these, blocks that circulate while others are worked on; and those that a search tries by itself.
RINGS, SEARCHED = ("ring", "burstattention", "tokenring"), ("ring", "ulysses", "allgather")
#: Ways in which layers with a state work on a sequence that is cut: heads swapped for tokens, the state handed on, or
#: keys and values of all tokens passed round a ring; in the last two a rank has one piece of the sequence.
SWAPPED, HANDED, RINGED = SCANS = ("swapped", "handed", "ringed")
PIECED = (HANDED, RINGED)
#: Groups of the plan's own size, and the ways of forming others for every batch (``assign/groups.py``).
STATIC = "static"
GROUPS = (STATIC, "flexsp", "flexsp-ilp", "bytescale", "zeppelin")
#: The way that gives each document as few ranks as hold it.
FEWEST = "bytescale"


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """How context parallelism exchanges: ``ring`` (Ring Attention, Liu et al. 2310.01889, balanced zigzag), ``ulysses``
    (all-to-all over heads, Jacobs et al. 2309.14509), ``allgather`` of keys and values (Llama 3, 2407.21783);
    ``burstattention`` is a ring whose backward passes on queries with their gradients (BurstAttention, Sun et al.
    2403.09347), ``tokenring`` one in which queries go round one way and results return the other (2412.20501);
    ``ring-self-attention`` stores whole rows of scores, for which keys and then values go round (2105.13120). ``dsp``
    shares the dim of a video that a block does not attend over, and swaps it for the other between blocks (Dynamic
    Sequence Parallelism, Zhao et al. 2403.10266).
    ``ulysses`` > 1: so many neighbouring ranks swap heads inside a ring or gather between such groups (the union of
    both, Fang & Zhao 2405.07719). ``groups``: the ranks that share documents are others for every batch, groups of any
    power of two; a rank holds as many tokens as it would in groups of ``cp``, and ``long`` times as many of documents
    whose activations are moved to the host while they are passed forward (ByteScale, Ge et al. 2502.21231). ``scans``:
    layers with a state have their heads ``swapped`` for tokens (as in Megatron-LM), or each rank scans its own tokens
    and the state is ``handed`` on from rank to rank (LASP, Sun et al. 2404.02882), or what every token adds to a state
    is passed round a ring of ranks and met by all later tokens, as keys and values of Ring Attention are (``ringed``,
    with which LASP is compared)."""

    algorithm: str = "ring"
    ulysses: int = 1
    groups: str = STATIC
    long: int = 1
    scans: str = SWAPPED

    @property
    def one_piece(self) -> bool:
        """Whether each rank has one piece of the sequence, also where tokens see no later one."""
        return self.algorithm in (*ONE_PIECE, SWITCHING) or self.scans in PIECED

    @property
    def switches(self) -> bool:
        """Whether the dim of a video that ranks share is switched between blocks."""
        return self.algorithm == SWITCHING


def _context(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    cp, algorithm, swap = plan.layout.cp, plan.sequence.algorithm, plan.sequence.ulysses
    if swap > 1 and (algorithm in ("ulysses", SWITCHING) or cp % swap or swap >= cp):
        inner = [n for n in range(2, cp) if cp % n == 0]
        yield wrong(
            "P015",
            f"ulysses{swap} swaps heads among {swap} ranks inside a ring or an allgather of cp={cp} / {swap}"
            + (f", and {algorithm} is neither" if algorithm in ("ulysses", SWITCHING) else ""),
            f"sequence.ulysses = {swap}",
            f"valid inside cp{cp}: {', '.join(f'ulysses{n}' for n in inner) or 'none'}"
            + (f"; or ulysses alone for all {cp}" if cp > 1 else ""),
        )
        return
    if cp == 1:
        return
    whole = [a for a in model.attentions if not a.over]
    if algorithm == SWITCHING and (whole or not model.attentions or any(b.mixer is not None for b in model.blocks)):
        message = f"dsp shares the dim of a video that a block does not attend over, and {model.name} attends over all"
        help = (
            "say ring, ulysses or allgather; dsp is for blocks over space and over time in turn, such as latte-xl-2's"
        )
        yield wrong("P015", message, f"sequence.algorithm = {algorithm}", help)
        return
    if train.frames and len(whole) < len(model.attentions):
        yield from _film(plan, model, cluster, train)
    outer = cp // swap
    pieces = lcm(2 * outer, cp) if not plan.sequence.one_piece and train.causal else cp
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
    if plan.memory.attention == "unfused" and algorithm in RINGS:
        yield wrong(
            "P016",
            "ring attention merges partial softmaxes, which the unfused kernels do not give",
            "memory.attention = unfused",
            "say flash, or ulysses instead of ring",
        )


def _film(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """P015 for ranks that share a video in other than whole frames, or with ``dsp`` whole frames and whole places."""
    cp, shared = plan.layout.cp, {"frames": train.frames}
    if plan.sequence.switches:
        shared["places of a frame"] = train.seq_len // train.frames
    for what, size in shared.items():
        if size % cp:
            message = f"cp={cp} does not divide a video's {size} {what} ({model.name})"
            yield wrong("P015", message, f"layout.cp = {cp}", f"valid cp: {listed(size, cluster.num_devices)}")


def _grouped(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield everything that keeps groups from being formed anew for every batch."""
    word, layout, long = plan.sequence.groups, plan.layout, plan.sequence.long
    if long > 1:
        why, help = "", ""
        if word != FEWEST:
            why, help = f"groups={word} does not give documents as few ranks as hold them", f"say groups={FEWEST}"
        elif not plan.offload.activations:
            why, help = "activations stay on the device, which then has no room for more", "add offload=activations"
        if why:
            message = f"long={long} has ranks hold more of documents whose activations are moved, and {why}"
            yield wrong("P060", message, f"sequence.long = {long}", f"{help}, or drop long=")
    if word == STATIC:
        return
    cp, ranks = layout.cp, layout.cp * layout.dp
    found = []
    if not train.packing:
        found.append(
            (f"sequences are whole, and groups={word} forms groups for documents of other lengths", "say lengths=")
        )
    schedule = plan.pipeline.schedule
    if layout.pp > 1 and not _any_rounds(plan):
        found.append(
            (
                f"{schedule} orders some numbers of microbatches alone, and documents take as many rounds as they need",
                "say 1f1b or gpipe",
            )
        )
    if ranks & (ranks - 1):
        found.append((f"dp*cp={ranks} is no power of two, as its groups are", "a cluster with a power of two of ranks"))
    if plan.sequence.ulysses > 1:
        found.append(
            (f"ulysses{plan.sequence.ulysses} is inside of groups of one size", "ring, allgather or ulysses alone")
        )
    if plan.experts.ep > 1:
        found.append((f"ep={plan.experts.ep}: experts are spread over ranks with other tokens", "say ep1"))
    if layout.shares or len(cluster.islands) > 1:
        found.append(("ranks on unequal devices have shares of their own", "an island of equal devices"))
    if plan.sync.policy != USUAL:
        found.append((f"sync={plan.sync.policy}: replicas do not take the same step", "drop sync="))
    if train.grow or train.clusters:
        found.append(("grow= and clusters= lay out the data by themselves", "drop them"))
    if model.streams or any(block.attention is None for block in model.blocks):
        found.append((f"{model.name} is more than attention over one stream of tokens", "drop groups="))
    heads = min((a.heads // layout.tp for a in model.attentions), default=1)
    if plan.sequence.algorithm == "ulysses" and cp > 1 and heads % cp:
        found.append((f"a rank's {heads} heads are split over groups of cp={cp} at least", "say ring"))
    for message, help in found:
        yield wrong("P060", message, f"sequence.groups = {word}", help)


def _any_rounds(plan: Plan) -> bool:
    """Whether the plan's schedule orders any number of microbatches, by a rule that asks for no times of passes."""
    family, pipeline = schedules.get(plan.pipeline.schedule), plan.pipeline
    if "t_f" in family.params:
        return False
    return not any(family.legality(plan.layout.pp, count, pipeline.vpp) for count in range(1, 2 * plan.layout.pp + 2))


def _handed(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """P075 for everything that keeps ranks from scanning a piece of the sequence each."""
    sequence, cp = plan.sequence, plan.layout.cp
    if sequence.scans not in PIECED or cp == 1:
        return
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]
    found = []
    if sequence.scans == RINGED and any(isinstance(mixer, GatedDelta) for mixer in mixers):
        found.append(
            (
                "what a token of the gated delta rule writes goes by the state before it, so that it cannot go round",
                "say scans=handed",
            )
        )
    if not mixers:
        found.append((f"{model.name} has no layer whose state goes on from token to token", "drop scans="))
    if model.attentions and sequence.algorithm not in ONE_PIECE:
        found.append(
            (
                f"{sequence.algorithm} gives a rank an early and a late piece, and a state goes on through one",
                f"say {' or '.join(ONE_PIECE)} for the layers with attention",
            )
        )
    if sequence.groups != STATIC:
        found.append((f"groups={sequence.groups} shares documents among other ranks every time", "drop groups="))
    least = max((getattr(mixer, "kernel", 1) for mixer in mixers), default=1) - 1
    if mixers and train.seq_len // cp < least:
        found.append(
            (
                f"a rank's {train.seq_len // cp} tokens are fewer than the {least} that a convolution looks back",
                "a smaller cp",
            )
        )
    for message, help in found:
        yield wrong("P075", message, f"sequence.scans = {sequence.scans}", help)


def _split(plan: Plan) -> bool:
    return plan.layout.cp > 1


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Yield what the executor does not do with groups of ranks."""
    if plan.sequence.groups == "flexsp-ilp":
        message = "an integer program ends when its time is over, and ranks would not all find the same groups"
        yield unrun("P033", message, plan, "sequence", "groups = flexsp-ilp", groups="flexsp")
    if plan.sequence.groups != STATIC and train.packing == "concat":
        message = "groups share whole documents, and pack=concat cuts them"
        yield unrun("P033", message, plan, "sequence", f"groups = {plan.sequence.groups}", groups=STATIC)


def _searched(model: Model, cluster: Cluster, train: Train) -> tuple[str, ...]:
    """The ways that a search tries; a video's dims are switched where the model attends over one at a time."""
    return (*SEARCHED, SWITCHING) if model.attentions and all(a.over for a in model.attentions) else SEARCHED


FIELDS = (
    Field(
        name="algorithm",
        help="how context parallelism exchanges",
        form=names(*CP_ALGORITHMS),
        spelled=ALONE,
        place=160,
        decides=(LAYER,),
        seen={LAYER: lambda plan: plan.layout.cp > 1 and plan.sequence.algorithm},
        domain=_searched,
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
    Field(
        name="groups",
        help="groups of context-parallel ranks, formed anew for every batch",
        form=names(*GROUPS),
        spelled=KEYED,
        place=165,
        decides=(LAYER,),
        with_sizes=True,
    ),
    Field(
        name="long",
        help="times as many tokens that a rank holds of long documents, whose activations are moved meanwhile",
        form=count(1, 64),
        spelled=KEYED,
        place=167,
        decides=(LAYER,),
        useful=lambda plan: plan.sequence.groups == FEWEST and bool(plan.offload.activations),
        with_sizes=True,
    ),
    Field(
        name="scans",
        help="how layers with a state work on a sequence that is cut: heads swapped, the state handed on, or a ring",
        form=names(*SCANS),
        domain=lambda model, cluster, train: (SWAPPED, HANDED),
        spelled=KEYED,
        place=166,
        decides=(LAYER,),
        seen={LAYER: lambda plan: plan.layout.cp > 1 and plan.sequence.scans},
        useful=_split,
        with_sizes=True,
    ),
)
FACET = Facet(
    name="sequence",
    help="how context parallelism exchanges",
    record=Sequence,
    fields=FIELDS,
    rules=(_context, _grouped, _handed),
    unexecutable=_unexecutable,
)
