"""Hoist: let the last collective of a layer run beside the next layer's kernels.

Exact: what lands behind the collective (it adds or reads the sum) moves in front of the next layer's first kernel, and
all that read it still wait for it. Alone it changes no time; with parts, one lands while another travels.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.lower.entry import JOINS, Entry, Origin


def hoisted(entries: Sequence[Entry], ends: tuple[int, ...]) -> list[Entry]:
    """Return a pass that begins with what is behind the last collective of the layer before; `ends` are the entries
    that the next layer waits for."""
    last = max((i for i, e in enumerate(entries) if e.role == JOINS), default=-1)
    tail = range(last + 1, len(entries))
    if last < 0 or not tail or not all(end in tail for end in ends):
        return list(entries)
    number = {old: new for new, old in enumerate((*tail, *range(last + 1)))}
    out: list[Entry] = []
    for old in number:
        entry, behind = entries[old], int(old in tail)
        here = [a for a in entry.after if behind == int(a in tail)]
        late = [a for a in entry.after if behind and a not in tail]
        after = tuple(number[a] for a in (here if entry.after else () if behind else ends))
        origins = tuple(o._replace(behind=o.behind + behind) for o in (entry.origins or (Origin(old),)))
        out.append(entry._replace(after=after, late=tuple(number[a] for a in late), origins=origins))
    return out
