"""Relax: a part of a layer (attention, MLP) reads the stream of residuals before the sum of the part before is in it.

Approximate: it drops the edge from what lands behind a part's collective to the part behind it, so the collective of
one runs beside the kernels of the next (Ladder Residual, Zhang et al., 2501.06589). A model has to be trained so.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.lower.entry import LANDS, Entry, Origin


def relaxed(entries: Sequence[Entry], ends: tuple[int, ...]) -> list[Entry]:
    """Return a pass whose parts each wait for what the part before the last one added; what lands behind a part comes
    after the next part's kernels. `ends` are the entries that the next layer waits for."""
    landings = [i for i, e in enumerate(entries) if _lands(entries, e)]
    if not landings or landings[-1] not in ends:
        return list(entries)
    count, begins = len(landings), [0, *(i + 1 for i in landings)]
    bodies = [list(range(begins[s], landings[s])) for s in range(count)]
    bodies[-1] += range(landings[-1] + 1, len(entries))
    order: list[int] = []  # each part, then what lands behind the part before it
    for s in range(count):
        order += [*bodies[s], landings[s - 1]]
    number = {old: new for new, old in enumerate(order)}
    out: list[Entry] = []
    for s in range(count):
        read = number[landings[(s - 2) % count]]  # the last landing that is over when the part begins
        for old in bodies[s]:
            entry = entries[old]
            origins = entry.origins or (Origin(old),)
            if s == 0 and not entry.after:
                out.append(entry._replace(late=(read,), origins=origins))
            else:
                after = tuple(read if a in landings else number[a] for a in entry.after)
                out.append(entry._replace(after=after, origins=origins))
        entry = entries[landings[s - 1]]
        origins = entry.origins or (Origin(landings[s - 1]),)
        waits = tuple(number[a] for a in entry.after)
        if s == 0:  # of the layer before
            origins = tuple(o._replace(behind=o.behind + 1) for o in origins)
            out.append(entry._replace(after=(), late=waits, origins=origins))
        else:
            out.append(entry._replace(after=waits, origins=origins))
    return out


def _lands(entries: Sequence[Entry], entry: Entry) -> bool:
    """Whether an entry is the first behind a collective over tensor-parallel ranks."""
    return entry.role == LANDS and any(entries[a].queue == "tp" for a in entry.after)
