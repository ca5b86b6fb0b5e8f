"""Slice: cut entries of a pass into parts, so that one part's collective runs beside another part's kernels.

Exact: every part computes rows or columns of the whole's result, and what reads the whole waits for all its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from meshwright.lower.entry import JOINS, PRODUCT, WEIGHT, Entry, Origin
from meshwright.work import (
    AttentionCore,
    Collective,
    Convolution,
    Elementwise,
    Gemm,
    GroupedGemm,
    Scan,
    VarlenAttention,
    Work,
)

ROWS, COLUMNS, PHASE = "rows", "columns", "phase"


class Rewriter:
    """Collects entries that stand for those of a pass before: ``at[i]`` are the ones to wait for instead of entry i."""

    def __init__(self, before: Sequence[Entry]) -> None:
        self.before, self.entries = before, list[Entry]()
        self.at: dict[int, tuple[int, ...]] = {}

    def waits(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """The entries to wait for instead of some of those before."""
        return tuple([new for a in after for new in self.at[a]])

    def put(self, i: int, *, cut: tuple[str, int, int] | None = None, also: tuple[Origin, ...] = (), **changed) -> int:
        """Append entry `i` of those before, or the part of it that `cut` leaves, and return its number."""
        entry = self.before[i]
        origins = tuple(_cut(o, cut) for o in (entry.origins or (Origin(i),))) + also
        if cut is not None:
            changed.setdefault("name", f"{entry.name} {cut[1] + 1}/{cut[2]}")
        changed.setdefault("after", ())
        self.entries.append(entry._replace(origins=origins, **changed))
        return len(self.entries) - 1


def _cut(origin: Origin, cut: tuple[str, int, int] | None) -> Origin:
    return origin if cut is None else origin._replace(cuts=(*origin.cuts, cut))


def tiled(entries: Sequence[Entry], *, triggered: bool = False) -> list[Entry]:
    """Slice each product with the gather before it or the reduction behind it into the steps of a ring: one part
    travels to the neighbour while another is multiplied (Wang et al., ASPLOS 2023).

    A rank's own part does not travel: of a gather it is the first multiplied, of a reduction the last. A reduction that
    every rank needs whole is gathered again behind its steps. ``triggered``: each step is started by what watches the
    product's stores, and sums are taken at memory (T3, 2401.16677)."""
    pairs = dict(pairs_of(entries))
    if not pairs:
        return list(entries)
    out, seconds = Rewriter(entries), set(pairs.values())
    for i, entry in enumerate(entries):
        if i in pairs:
            (_gathered if isinstance(entry.work, Collective) else _reduced)(out, i, pairs[i], triggered)
        elif i not in seconds:
            out.at[i] = (out.put(i, after=out.waits(entry.after)),)
    return out.entries


def pairs_of(entries: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """Yield a gather and the product of what it gathers, or a product and the collective that sums it."""
    taken = -1
    for i, entry in enumerate(entries):
        if i <= taken or entry.role not in (JOINS, PRODUCT):
            continue
        k = next((k for k in range(i + 1, len(entries)) if entries[k].role != WEIGHT), None)
        if k is None or entries[k].after != (i,):
            continue
        ops = [getattr(e.work, "op", "") for e in (entry, entries[k])]
        there = entry.role == JOINS and ops[0] == "all_gather" and entries[k].role == PRODUCT
        back = entry.role == PRODUCT and entries[k].role == JOINS and ops[1] in ("reduce_scatter", "all_reduce")
        if there or back:
            taken = k
            yield i, k


def _gathered(out: Rewriter, gather: int, product: int, triggered: bool) -> None:
    first, second = out.before[gather], out.before[product]
    count, start = first.work.group.size, out.waits(first.after)
    sent = share = ()
    for part in range(count):
        cut, own = (ROWS, part, count), ()
        if part:
            sent = (
                out.put(gather, cut=cut, after=start, work=_step(first.work, triggered), role=_offloaded(triggered)),
            )
        else:
            own = tuple(_cut(o, cut) for o in (first.origins or (Origin(gather),)))
        work, role = _tile(second.work, count), _watched(triggered)
        share = (out.put(product, cut=cut, also=own, after=sent or start, work=work, role=role),)
    out.at[gather], out.at[product] = sent or start, share


def _reduced(out: Rewriter, product: int, reduction: int, triggered: bool) -> None:
    first, second = out.before[product], out.before[reduction]
    count, start = second.work.group.size, out.waits(first.after)
    again = second.work.op == "all_reduce"
    sent = share = ()
    for part in range(count):
        cut, last = (ROWS, part, count), part + 1 == count
        own = tuple(_phase(_cut(o, cut), 0, again) for o in (second.origins or (Origin(reduction),)))
        work, role = _tile(first.work, count), _watched(triggered)
        share = (out.put(product, cut=cut, also=own if last else (), after=start, work=work, role=role),)
        if not last:
            sent = (
                out.put(
                    reduction, cut=cut, after=share, work=_step(second.work, triggered), role=_offloaded(triggered)
                ),
            )
            out.entries[-1] = out.entries[-1]._replace(origins=own)
    out.at[product], out.at[reduction] = share, (*sent, *share)
    if again:
        # memory has summed its part where the whole is to be
        whole = msgspec.structs.replace(second.work, op="gather_in_place" if triggered else "all_gather")
        at = out.put(reduction, name=f"{second.name} gather", after=out.at[reduction], work=whole)
        out.entries[at] = out.entries[at]._replace(origins=tuple(_phase(o, 1, again) for o in out.entries[at].origins))
        out.at[reduction] = (at,)


def _phase(origin: Origin, phase: int, again: bool) -> Origin:
    """Mark one of the two phases of an all-reduce: it is scattered, and gathered again."""
    return _cut(origin, (PHASE, phase, 2)) if again else origin


#: The roles of an exchange that takes no multiprocessor from the kernels beside it and that no host issues, and of a
#: part of the product whose stores start it: all parts are one kernel.
OFFLOADED, WATCHED = "offloaded", "watched"


def _offloaded(triggered: bool) -> str:
    return OFFLOADED if triggered else JOINS


def _watched(triggered: bool) -> str:
    return WATCHED if triggered else PRODUCT


def _step(work: Collective, triggered: bool) -> Collective:
    """One step of the ring that a collective is: a part for the neighbour, as a message of the library or pushed by
    what watches stores."""
    op = "pushed" if triggered else "send"
    return msgspec.structs.replace(work, op=op, num_bytes=work.num_bytes / work.group.size)


def _tile(work: Gemm, count: int) -> Gemm:
    return msgspec.structs.replace(work, m=-(-work.m // count), slices=count)


def by_rows(entries: Sequence[Entry], parts: int) -> list[Entry]:
    """Slice a whole pass by sequences of the batch: up to each collective all parts are computed one after the other,
    so that a part's collective runs beside the kernels of the next (Domino, 2409.15241, section 3.2)."""
    if parts == 1:
        return list(entries)
    outs = [Rewriter(entries) for _ in range(parts)]
    together: list[Entry] = []
    for segment in segments(entries):
        for part, out in enumerate(outs):
            out.entries = together
            for i in segment:
                entry = entries[i]
                work = part_of(entry.work, parts, summed=entry.role == WEIGHT)
                cut = (ROWS, part, parts)
                out.at[i] = (out.put(i, cut=cut, after=out.waits(entry.after), late=(), work=work),)
    for out in outs:  # entries of the layer before have numbers when all are there
        for i, entry in enumerate(entries):
            if entry.late:
                (new,) = out.at[i]
                together[new] = together[new]._replace(late=out.waits(entry.late))
    return together


def segments(entries: Sequence[Entry]) -> list[list[int]]:
    """Return the entries up to and with each collective that may be sliced, and those behind the last one."""
    found: list[list[int]] = [[]]
    for i, entry in enumerate(entries):
        found[-1].append(i)
        if entry.role == JOINS:
            found.append([])
    return [segment for segment in found if segment]


def by_columns(entries: Sequence[Entry], parts: int) -> list[Entry]:
    """Slice each product in front of an all-reduce by columns of its weight: a part's sum travels while the next is
    multiplied (Domino, section 3.3)."""
    if parts == 1:
        return list(entries)
    pairs = {i: k for i, k in pairs_of(entries) if getattr(entries[k].work, "op", "") == "all_reduce"}
    out, seconds = Rewriter(entries), set(pairs.values())
    for i, entry in enumerate(entries):
        if i in seconds:
            continue
        if i not in pairs:
            out.at[i] = (out.put(i, after=out.waits(entry.after), late=entry.late),)
            continue
        k, shares, sums = pairs[i], [], []
        for part in range(parts):
            cut = (COLUMNS, part, parts)
            n = -(-entry.work.n // parts)
            after = out.waits(entry.after)
            shares.append(out.put(i, cut=cut, after=after, work=msgspec.structs.replace(entry.work, n=n)))
            size = entries[k].work.num_bytes / parts
            work = msgspec.structs.replace(entries[k].work, num_bytes=size)
            sums.append(out.put(k, cut=cut, after=(shares[-1],), work=work))
        out.at[i], out.at[k] = tuple(shares), tuple(sums)
    return [e._replace(late=out.waits(e.late)) if e.late else e for e in out.entries]


def part_of(work: Work, parts: int, *, summed: bool = False) -> Work:
    """Return one of equal parts of the work of a batch, by its sequences; a weight gradient is ``summed`` over them."""
    replace = msgspec.structs.replace
    match work:
        case Gemm() if summed:
            return replace(work, k=-(-work.k // parts))
        case Gemm() if work.batch > 1:
            return replace(work, batch=-(-work.batch // parts))
        case Gemm():
            return replace(work, m=-(-work.m // parts))
        case GroupedGemm():
            return replace(work, rows=-(-work.rows // parts))
        case AttentionCore():
            return replace(work, batch=work.batch / parts)
        case VarlenAttention():
            return replace(work, groups=tuple(part_of(one, parts) for one in work.groups))
        case Scan() | Convolution():
            return replace(work, batch=-(-work.batch // parts))
        case Collective(routed=None) | Elementwise():
            return replace(work, num_bytes=work.num_bytes / parts)
        case Collective():
            routed = replace(work.routed, tokens=-(-work.routed.tokens // parts))
            return replace(work, num_bytes=work.num_bytes / parts, routed=routed)
    raise TypeError(f"{type(work).__name__} has no parts by sequence")
