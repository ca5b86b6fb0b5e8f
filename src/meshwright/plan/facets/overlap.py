"""Overlap: the communication that is overlapped with compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan.facet import EXCHANGE, KEYED, LAYER, STRUCTURE, Facet, Field, Form, count, names, unrun, wrong
from meshwright.sync.record import USUAL

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


OVERLAPS = ("dp", "tp", "pp", "ep")
#: When parameters are gathered that a step gathers once: each ahead of its layer's first use, or all at once.
GATHERS = ("ahead", "after")
#: A mark in a search's value, beside the overlapped exchanges: for those schedules alone whose usual overlap that is.
AS_DECIDED = "usual"
#: Ways of overlapping the collectives inside a layer that are not said by a number of parts.
WAYS = ("ladder", "triggered")
#: Ways that change what is computed: a search never takes one by itself.
APPROXIMATE = ("ladder",)
#: Pieces of gradients' sums that a search tries, 1e6 bytes: those of Lina (2210.17223).
USUAL_MB = 30
#: Parts of a batch and of columns at most.
MOST_PARTS = 16


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """The communication overlapped with compute.

    Attributes:
        dp: gradient and parameter exchange.
        tp: inside a layer.
        pp: sends between stages.
        ep: the exchange of experts' tokens with another microbatch's layers (DeepSeek-V3, 2412.19437, section 3.2.1;
            Megatron-Core's 1F1B overlap of it).
        how: the way inside a layer. "": products and their collectives in the steps of a ring (collective matmul, Wang
            et al. ASPLOS'23; Flux, 2406.06858; asynchronous tensor parallelism of PyTorch). ``domino`` with the parts
            of a microbatch and of the columns (``domino2x1``): one part's sum beside another's kernels (Domino,
            2409.15241). ``triggered``: the steps of a ring, started and summed by memory (T3, 2401.16677). ``ladder``:
            a part of a layer does not wait for the sum of the part before (Ladder Residual, 2501.06589).
        gather: when the parameters are gathered that a step gathers once (ZeRO-1 and 2; ZeRO-3 in a pipeline), where
            ``dp`` overlaps: ``ahead`` of each layer's first forward, beside those before it (Megatron-Core's overlap of
            the parameter gather, FSDP), or all ``after`` the update, before any of the next step (DeepSpeed, nanotron,
            Megatron-LM unless told).
        yield_mb: sums of gradients let experts' tokens go first on a port that both use: they travel in pieces of so
            many 1e6 bytes, none of which begins while tokens are under way (Lina, 2210.17223; pieces of 30 there).
            0: whole, and beside tokens.
    """

    dp: bool = True
    tp: bool = False
    pp: bool = True
    ep: bool = False
    how: str = ""
    gather: str = "ahead"
    yield_mb: int = 0

    @property
    def pieces(self) -> tuple[int, int]:
        """The parts that a microbatch and that the columns of products are cut into inside a layer."""
        return _pieces(self.how) or (1, 1)

    @property
    def exact(self) -> bool:
        """Whether what is computed is that of the plain plan."""
        return not self.tp or self.how not in APPROXIMATE

    @property
    def gathers_ahead(self) -> bool:
        """Whether gathers of parameters run beside the forward."""
        return self.dp and self.gather == "ahead"


@cache
def _pieces(how: str) -> tuple[int, int] | None:
    """(parts of the microbatch, parts of the columns) of a way of slicing; None for other ways."""
    found = re.fullmatch(r"domino(?:(\d{1,2})(?:x(\d{1,2}))?)?", how)
    if found is None:
        return None
    rows, columns = int(found[1] or 2), int(found[2] or 1)
    return (rows, columns) if rows * columns > 1 and max(rows, columns) <= MOST_PARTS else None


def _way(text: str) -> str | None:
    """The way that a word says, as it is kept: ``tiles`` is the plain one, and parts of 1 are left out."""
    if text in ("", "tiles"):
        return ""
    parts = _pieces(text)
    if parts is None:
        return text if text in WAYS else None
    rows, columns = parts
    return "domino" + ("" if parts == (2, 1) else f"{rows}" if columns == 1 else f"{rows}x{columns}")


def gathers_once(zero: int, pp: int) -> bool:
    """Whether a stage of ZeRO gathers parameters once a step in a pipeline of `pp` stages."""
    return zero in (1, 2) or (zero == 3 and pp > 1)


def usual_of(ep: int, schedule: str) -> Overlap:
    """The overlap of plans whose words say none: the default, and the experts' exchange under a schedule made to hide
    it (DualPipe). Everything that leaves the overlap open asks this, predictions and searches alike."""
    return Overlap(ep=True) if ep > 1 and schedules.get(schedule).hides_experts else Overlap()


def usual(plan: Plan) -> Overlap:
    """The overlap of this plan if its words say none."""
    return usual_of(plan.experts.ep, plan.pipeline.schedule)


def _read(text: str) -> tuple[str, ...]:
    asked, ways = set(), set()
    for word in (word for word in text.split(",") if word and word != "none"):
        name, colon, how = word.partition(":")
        way = "" if not colon else _way(how) if name == "tp" and how else None
        if name not in OVERLAPS or way is None:
            help = f"choose among {', '.join(OVERLAPS)}, or none; tp:{', tp:'.join(('tiles', 'domino', *WAYS))}"
            help += f"; domino4 and domino2x2 say parts of a microbatch and of the columns, 2 to {MOST_PARTS}"
            raise MeshwrightError.one("P002", f"overlap={word} is unknown", help=help)
        asked.add(name if not way else f"tp:{way}")
        ways |= {way} if name == "tp" else set()
    if len(ways) > 1:
        said = " and ".join(sorted(f"tp:{way or 'tiles'}" for way in ways))
        raise MeshwrightError.one("P002", f"overlap= says {said}", help="say one way of overlapping inside a layer")
    return tuple(sorted(asked))


def _write(value: tuple[str, ...]) -> str:
    return ",".join(sorted(value, key=lambda word: OVERLAPS.index(word.partition(":")[0]))) or "none"


def _stored(value: tuple[str, ...]) -> dict[str, bool | str]:
    """The attributes of a search's value, which may have a mark."""
    words = dict(word.partition(":")[::2] for word in value)
    return {name: name in words for name in OVERLAPS} | {"how": words.get("tp", "")}


def inside(word: str) -> bool:
    """Whether a word of a search's value says how collectives inside layers are overlapped."""
    return word.partition(":")[0] == "tp"


def overlapped(overlap: Overlap) -> tuple[str, ...]:
    """Return the names of the overlapped exchanges, sorted, as a search writes them."""
    words = {"tp": f"tp:{overlap.how}"} if overlap.how else {}
    return tuple(sorted(words.get(name, name) for name in OVERLAPS if getattr(overlap, name)))


def _words(plan: Plan) -> list[str]:
    return (
        [] if overlapped(plan.overlap) == overlapped(usual(plan)) else [f"overlap={_write(overlapped(plan.overlap))}"]
    )


def otherwise(plan: Plan) -> tuple[str, ...]:
    """Return a caution where the plan's overlap changes what is computed."""
    plans = [pool.plan for pool in plan.pools] if plan.several else [plan]
    if all(one.overlap.exact or one.layout.tp == 1 for one in plans):
        return ()
    return (
        "overlap=tp:ladder is approximate: each part of a layer reads the stream without the sum of the part before, "
        "which is another model and has to be trained so",
    )


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    if plan.overlap.ep:
        message = "expert exchange overlapped with compute is priced and not run"
        yield unrun("P033", message, plan, "overlap", "ep", ep=False)
    if plan.overlap.tp:
        yield from _unrun_inside(plan, model)
    if plan.overlap.yield_mb:
        yield from _unrun_pieces(plan)


def _unrun_pieces(plan: Plan) -> Iterator[Diagnostic]:
    """Yield what keeps sums of gradients from being run in pieces that let tokens pass."""
    reasons = {
        "of parameters gathered for every pass": plan.layout.gathers_again,
        f"under sync={plan.sync.policy}": plan.sync.policy != USUAL,
        "in unequal shards": bool(plan.kinds.hold),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        message = f"yield_mb={plan.overlap.yield_mb} {reason} is priced and not run"
        yield unrun("P033", message, plan, "overlap", "yield_mb", yield_mb=0)


def _unrun_inside(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield what keeps the overlap inside layers from being run."""
    overlap, layout, tp = plan.overlap, plan.layout, plan.layout.tp
    shown = f"tp:{overlap.how or 'tiles'}"

    def other(message: str, place: str, **nearest: object) -> Diagnostic:
        return unrun("P033", f"overlap={shown} {message} is priced and not run", plan, place, shown, **nearest)

    if overlap.how == "triggered" or overlap.pieces[1] > 1:
        what = "by memory that starts exchanges" if overlap.how == "triggered" else "by columns"
        yield other(what, "overlap", tp=True, how="domino" if overlap.pieces[1] > 1 else "")
    if not overlap.how and tp > 1 and not layout.sp:
        yield other("without sequence parallelism", "layout", sp=True)
    if overlap.how in ("", "triggered"):
        return
    if tp > 1 and layout.sp:
        yield other("with sequence parallelism", "layout", sp=False)
    if model.mixtures:
        yield other("of mixtures of experts", "overlap", tp=False, how="")
    if layout.zero == 3:
        yield other("of fully sharded parameters", "layout", zero=2)
    if plan.memory.recompute == "full":
        yield other("with full recompute", "memory", recompute="selective")
    if not overlap.exact and layout.pp > 1:
        yield other("over stages, which pass on one stream,", "overlap", tp=False, how="")


def _pieces_pass(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Pieces of sums that have nothing to let pass."""
    overlap = plan.overlap
    if not overlap.yield_mb:
        return
    place = f"overlap.yield_mb = {overlap.yield_mb}"
    if plan.experts.ep == 1:
        yield wrong("P073", f"yield_mb={overlap.yield_mb} lets experts' tokens pass, and ep=1 sends none", place,
                    "say ep2 or more, or drop yield_mb")  # fmt: skip
    if not overlap.dp:
        yield wrong("P073", f"yield_mb={overlap.yield_mb} is of sums beside the backward", place, "say overlap=dp")
    if plan.overlap.ep:
        message = f"yield_mb={overlap.yield_mb} and overlap=ep: tokens that nothing waits for need no way cleared"
        yield wrong("P073", message, place, "drop one of them")


def _ways(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Ways of overlapping inside layers that do not go with the rest of the plan."""
    overlap, layout, mb = plan.overlap, plan.layout, plan.pipeline.microbatch
    place = f"overlap.how = {overlap.how}"
    if overlap.how and _way(overlap.how) != overlap.how:
        plain = _way(overlap.how)
        help = f"say how = {plain!r}" if plain is not None else f"say one of {', '.join(('domino', *WAYS))}"
        yield wrong("P058", f"{overlap.how!r} is no way of overlapping inside layers", place, help)
        return
    if overlap.how and not overlap.tp:
        yield wrong("P058", f"how = {overlap.how} without tp overlaps nothing", place, "say tp = true as well")
        return
    rows, columns = overlap.pieces
    if not overlap.tp or layout.tp == 1:
        return
    if mb % rows:
        help = f"say mb{-(-mb // rows) * rows}" + (
            f", or overlap=tp:domino1x{rows} by columns" if not layout.sp else ""
        )
        yield wrong("P058", f"a microbatch of mb={mb} cannot be cut into {rows} equal parts", place, help)
    if columns > 1 and layout.sp:
        message = "parts of columns are summed apart, and sequence parallelism scatters sums by rows"
        yield wrong("P058", message, place, "say nosp, or cut the microbatch alone")
    widths = [flow.hidden for flow in model.flows if flow.hidden % columns]
    if widths:
        yield wrong("P058", f"{widths[0]} columns are not cut into {columns} equal parts", place, "say a divisor")
    plain = sorted({i.device.name for i in cluster.islands if not i.device.triggers})
    if overlap.how == "triggered" and plain:
        message = f"the memory of {' and '.join(plain)} starts no exchange by itself"
        yield wrong("P058", message, place, "say overlap=tp, or devices that could, as 8xh100,triggers")


FIELDS = (
    Field(
        name="overlap",
        attribute=(*OVERLAPS, "how"),
        help="communication overlapped with compute (usual: as the schedule decides)",
        form=Form(
            read=_read,
            write=_write,
            wanted=f"some of {', '.join(OVERLAPS)}, or none; tp:domino, tp:triggered and tp:ladder say how",
            kind=tuple[str, ...],
        ),
        spelled=KEYED,
        place=290,
        decides=(STRUCTURE, LAYER, EXCHANGE),
        seen={LAYER: lambda plan: (plan.overlap.tp, plan.overlap.ep, plan.overlap.how)},
        stored=_stored,
        of=overlapped,
        domain=lambda model, cluster, train: ((*overlapped(Overlap()), AS_DECIDED),),
        say=_words,
    ),
    Field(
        name="gather",
        help="parameters that a step gathers once are gathered ahead of each layer's use, or all after the update",
        form=names(*GATHERS),
        spelled=KEYED,
        place=298,
        decides=(STRUCTURE, EXCHANGE),
        useful=lambda plan: gathers_once(plan.layout.zero, plan.layout.pp) and plan.overlap.dp,
    ),
    Field(
        name="yield_mb",
        help="sums of gradients travel in pieces of so many MB that let experts' tokens go first (0: whole)",
        form=count(0, 100_000),
        spelled=KEYED,
        place=299,
        decides=(EXCHANGE,),
        useful=lambda plan: plan.experts.ep > 1 and plan.overlap.dp,
        domain=lambda model, cluster, train: (0, USUAL_MB) if model.mixtures and cluster.shares_ports else (0,),
    ),
)
FACET = Facet(
    name="overlap",
    help="communication overlapped with compute",
    record=Overlap,
    fields=FIELDS,
    rules=(_ways, _pieces_pass),
    unexecutable=_unexecutable,
    usual=lambda plan: msgspec.structs.replace(usual(plan), gather=plan.overlap.gather, yield_mb=plan.overlap.yield_mb),
    beside=("gather", "yield_mb"),
)
