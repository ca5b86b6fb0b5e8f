"""Clients whose rate and burstiness change from window to window, as ServeGen publishes them (Xiang et al., ServeGen,
2025, arXiv 2505.09999).

A table has a row for each client and window in which it asks: ``client, window_start_s, window_length_s, rate_req_s,
cv, family`` (Gamma or Weibull). Lengths may be in a table of quantiles, a row for each client, block of time and field
(``input_tokens``, ``output_tokens``): ``client, block_start_s, field, p5, p25, p50, p75, p90, p95, p99, max`` and, if
it has them, ``mean``.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec import request_catalog
from meshwright.spec.request_gaps import gaps
from meshwright.spec.request_limits import FASTEST, LONGEST, MOST_REQUESTS
from meshwright.spec.request_tables import RowTable, table
from meshwright.spec.requests import Requests, numbered

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve

#: Columns of quantiles, and what share of the lengths is below each.
QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
FIELDS = {"input_tokens": 0.0, "output_tokens": 1.0}
FAMILIES = {"gamma": 0.0, "weibull": 1.0}
_HELP = (
    "client, window_start_s, window_length_s, rate_req_s, cv, family; or quantiles of lengths: meshwright explain W011"
)


class ClientWindows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows [n] of clients' windows, in order of their start: who, from when, how long, requests a second, variation
    of their gaps, and whether these are Weibull's."""

    client: np.ndarray
    start_s: np.ndarray
    length_s: np.ndarray
    rate: np.ndarray
    cv: np.ndarray
    weibull: np.ndarray
    source: str

    def of(self, rows: np.ndarray) -> ClientWindows:
        """Return those rows."""
        columns = [name for name in self.__struct_fields__ if name != "source"]
        return msgspec.structs.replace(self, **{name: getattr(self, name)[rows] for name in columns})


class LengthTable(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of lengths in tokens, ``knots`` [n, 9] from the smallest on, by client, start of their block of time
    and whether they are answers'; ``bend`` [n] is the power that bends the last piece so that the mean is the
    table's."""

    client: np.ndarray
    start_s: np.ndarray
    answer: np.ndarray
    knots: np.ndarray
    bend: np.ndarray


def by_windows(
    serve: Serve, rng: np.random.Generator, lengths: Callable[[int], tuple[np.ndarray, np.ndarray]]
) -> Requests:
    """Draw the requests of all clients of a workload's windows; `lengths` draws those that have no table of their own.

    Raises:
        MeshwrightError: W011 for every wrong row of the tables, and for clients without lengths; W015 for a name that
            the catalog does not have.
    """
    windows, quantiles = _tables(serve)
    end = serve.begin_s + serve.window_s if serve.window_s else np.inf
    within = (windows.start_s + windows.length_s > serve.begin_s) & (windows.start_s < end)
    if not within.any():
        message = f"no client asks between {serve.begin_s:g} and {end:g} s"
        raise MeshwrightError.one("W011", message, place=f"--serve windows={serve.windows}", help="another begin=")
    names = np.unique(windows.client)
    windows = windows.of(within)
    scale = serve.scale
    if serve.rate:
        from_s, to_s = max(serve.begin_s, windows.start_s[0]), min(end, (windows.start_s + windows.length_s).max())
        share = np.minimum(windows.start_s + windows.length_s, to_s) - np.maximum(windows.start_s, from_s)
        scale = serve.rate * (to_s - from_s) / float((windows.rate * share).sum())
    at, row = _arrivals(windows, rng, scale, serve.begin_s, end, serve.requests or MOST_REQUESTS)
    if not len(at):
        message = "at these rates nobody asks in that time"
        raise MeshwrightError.one("W011", message, place=f"--serve windows={serve.windows}", help="a longer window=")
    client = windows.client[row]
    if quantiles is None:
        prompt, output = lengths(len(at))
    else:
        prompt, output = _lengths(quantiles, client, at, rng, serve)
    tenant = np.searchsorted(names, client)
    return Requests(arrival_s=at - serve.begin_s, prompt=prompt, output=output, tenant=tenant, source=windows.source)


def _arrivals(
    windows: ClientWindows, rng: np.random.Generator, scale: float, begin: float, end: float, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw when requests arrive, in order, and the window of each: a renewal process by window, stationary from its
    start, so that a window has its rate however short it is. No more windows are drawn than `most` requests need."""
    times: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    open_windows: list[tuple[float, int]] = []  # (end, requests)
    sure = 0  # requests of windows that end before the one that is drawn
    for i, start in enumerate(windows.start_s.tolist()):
        while open_windows and open_windows[0][0] <= start:
            sure += heappop(open_windows)[1]
        if sure >= most:
            break
        at = start + _renewals(windows, i, rng, scale)
        at = at[(at >= begin) & (at < end)]
        times.append(at)
        rows.append(np.full(len(at), i))
        heappush(open_windows, (start + windows.length_s[i], len(at)))
    at, row = np.concatenate(times), np.concatenate(rows)
    order = np.argsort(at, kind="stable")[:most]
    return at[order], row[order]


def _renewals(windows: ClientWindows, row: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Draw the arrivals of one window, from its start."""
    mean, cv, length = 1.0 / (windows.rate[row] * scale), windows.cv[row], windows.length_s[row]
    family = "weibull" if windows.weibull[row] else "gamma"
    at = gaps(rng, mean, cv, family, 1, first=True)
    while at[-1] < length:
        left = (length - at[-1]) / mean
        more = gaps(rng, mean, cv, family, int(left + 4 * max(cv, 1.0) * left**0.5) + 8)
        at = np.concatenate([at, at[-1] + np.cumsum(more)])
    return at[at < length]


def _lengths(
    table: LengthTable, client: np.ndarray, at: np.ndarray, rng: np.random.Generator, serve: Serve
) -> tuple[np.ndarray, np.ndarray]:
    """Draw prompts and answers by client and time: of the client's last block that has begun, or its first."""
    found, lacking = [], set()
    for answer in (0, 1):
        row = np.full(len(at), -1, np.int64)
        for one in np.unique(client):
            mine = np.flatnonzero((table.client == one) & (table.answer == answer))
            if not len(mine):
                lacking.add(int(one))
                continue
            mine = mine[np.argsort(table.start_s[mine], kind="stable")]
            where = client == one
            block = np.searchsorted(table.start_s[mine], at[where], side="right") - 1
            row[where] = mine[block.clip(min=0)]
        if lacking:
            continue
        found.append(np.rint(_between(table, row, rng.random(len(at)))).astype(np.int64).clip(1, LONGEST))
    if lacking:
        who = ", ".join(map(str, sorted(lacking)))
        message = f"the table of lengths has no input_tokens or output_tokens of the clients {who}"
        raise MeshwrightError.one("W011", message, place=f"--serve lengths={serve.lengths}", help=_HELP)
    return found[0], found[1]


def _between(table: LengthTable, row: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return the lengths that a `share` is below, on straight lines between quantiles, the last one bent."""
    below = np.array([0.0, *QUANTILES.values()])
    piece = (np.searchsorted(below, share, side="right") - 1).clip(0, len(below) - 2)
    part = (share - below[piece]) / (below[piece + 1] - below[piece])
    part = np.where(piece == len(below) - 2, part ** table.bend[row], part)
    low = table.knots[row, piece]
    return low + (table.knots[row, piece + 1] - low) * part


def _knots(quantiles: list[np.ndarray]) -> np.ndarray:
    """Return quantiles [n, 9] with the smallest length in front: lengths are as dense below the first quantile as they
    are above it, and none is below 1."""
    first, second = quantiles[:2]
    least = np.maximum(1.0, first - (second - first) * QUANTILES["p5"] / (QUANTILES["p25"] - QUANTILES["p5"]))
    return np.stack([np.minimum(least, first), *quantiles], axis=1)


def with_bend(knots: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the power of the last piece of quantiles [n, 9], from 1/8 to 8, so that their mean comes nearest to that
    of the table [n]; 1 where it has none: v to the power of a has the mean 1 / (a + 1) over 0 to 1."""
    below = np.array([0.0, *QUANTILES.values()])
    width = np.diff(below)
    others = ((knots[:, :-2] + knots[:, 1:-1]) / 2) @ width[:-1]
    wanted = (mean - others) / width[-1] - knots[:, -2]
    span = knots[:, -1] - knots[:, -2]
    bend = span / np.where(wanted > 0, wanted, 1e-9) - 1
    return np.where(np.isnan(mean) | (span <= 0), 1.0, bend.clip(1 / 8, 8.0))


def _tables(serve: Serve) -> tuple[ClientWindows, LengthTable | None]:
    """Read the windows and, where there are any by client, the lengths."""
    if not request_catalog.is_name(serve.windows):
        windows = read_windows(serve.base / serve.windows)
        if not serve.lengths or request_catalog.is_name(serve.lengths):
            return windows, None
        rows = table(serve.base / serve.lengths)
        return windows, _quantiles(rows, serve.base / serve.lengths) if "field" in rows.columns else None
    entry = request_catalog.entry(serve.windows)
    if "window" not in entry.columns:
        message = f"{entry.name} has requests one by one, and no windows of clients"
        raise MeshwrightError.one("W015", message, place=f"--serve windows={serve.windows}", help=f"trace={entry.name}")
    c = request_catalog.columns(entry.name)
    length = 600.0
    order = np.argsort(c["window"], kind="stable")
    windows = ClientWindows(
        client=c["client"],
        start_s=c["window"] * length,
        length_s=np.full(entry.rows, length),
        rate=c["requests"] / length,
        cv=c["cv_milli"] / 1e3,
        weibull=c["weibull"],
        source=entry.label,
    ).of(order)
    if serve.lengths or serve.prompt:
        return windows, None
    knots = _knots([c[f"lengths.{q}"].astype(float) for q in QUANTILES])
    return windows, LengthTable(
        client=c["lengths.client"],
        start_s=c["lengths.block"] * 21600.0,
        answer=c["lengths.answer"],
        knots=knots,
        bend=with_bend(knots, c["lengths.mean"].astype(float)),
    )


def read_windows(path: Path) -> ClientWindows:
    """Return the windows in a file.

    Raises:
        MeshwrightError: W011 for a file that cannot be read, and for every wrong row.
    """
    rows = table(path)
    wanted = ("client", "window_start_s", "window_length_s", "rate_req_s", "cv")
    numbers, wrong = _numbers(rows, (*wanted, "family"), path)
    client, start, length, rate, cv = (numbers[name] for name in wanted)
    wrong["the client is no whole number from 0 on"] = ~((client >= 0) & (client == np.floor(client)))
    wrong["the window begins at no time from 0 on"] = ~((start >= 0) & (start < 1e12))
    wrong["the window has no length above 0"] = ~((length > 0) & (length < 1e12))
    wrong["the rate is none above 0 up to 1e6"] = ~((rate > 0) & (rate <= FASTEST))
    wrong["the variation is none above 0 up to 100"] = ~((cv > 0) & (cv <= 100))
    wrong["the family is neither Gamma nor Weibull"] = ~np.isin(numbers["family"], list(FAMILIES.values()))
    _refuse(wrong, rows, path)
    order = np.argsort(start, kind="stable")
    return ClientWindows(
        client=client.astype(np.int64),
        start_s=start,
        length_s=length,
        rate=rate,
        cv=cv,
        weibull=numbers["family"].astype(np.int64),
        source=path.name,
    ).of(order)


def _quantiles(rows: RowTable, path: Path) -> LengthTable:
    """Return the quantiles of lengths in a table; fields that are no lengths are left out."""
    kept = [i for i, field in enumerate(rows.columns["field"]) if str(field).strip() in FIELDS]
    columns = {name: [cells[i] for i in kept] for name, cells in rows.columns.items()}
    rows = msgspec.structs.replace(rows, columns=columns, number=rows.number[kept])
    numbers, wrong = _numbers(rows, ("client", "block_start_s", "field", *QUANTILES), path)
    knots = _knots([numbers[q] for q in QUANTILES])
    client, start = numbers["client"], numbers["block_start_s"]
    wrong["the client is no whole number from 0 on"] = ~((client >= 0) & (client == np.floor(client)))
    wrong["the block begins at no time from 0 on"] = ~((start >= 0) & (start < 1e12))
    inside = (knots[:, 1:] >= 1).all(1) & (knots[:, 1:] <= LONGEST).all(1) & (np.diff(knots[:, 1:], axis=1) >= 0).all(1)
    wrong[f"quantiles are no lengths from 1 to {LONGEST:,} in order"] = ~inside
    _refuse(wrong, rows, path)
    mean = _floats(rows.columns["mean"]) if "mean" in rows.columns else np.full(len(kept), np.nan)
    return LengthTable(
        client=client.astype(np.int64),
        start_s=start,
        answer=numbers["field"].astype(np.int64),
        knots=knots,
        bend=with_bend(knots, mean),
    )


def _numbers(rows: RowTable, names: tuple[str, ...], path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return columns as numbers, NaN where a cell is none, and an empty record of what is wrong; W011 without one."""
    lacking = [name for name in names if name not in rows.columns]
    if lacking:
        message = f"no column {', '.join(lacking)}; its columns: {', '.join(rows.columns) or 'none'}"
        raise MeshwrightError.one("W011", message, place=str(path), help=_HELP)
    return {name: _floats(rows.columns[name]) for name in names}, {}


def _floats(cells: list) -> np.ndarray:
    words = FAMILIES | FIELDS
    found = []
    for cell in cells:
        text = str(cell).strip().lower()
        try:
            found.append(words[text] if text in words else float(text))
        except ValueError:
            found.append(np.nan)
    return np.array(found, np.float64)


def _refuse(wrong: dict[str, np.ndarray], rows: RowTable, path: Path) -> None:
    """Raise W011 for every wrong row, those that are wrong in one way together."""
    lines = {why: rows.number[bad] for why, bad in wrong.items()}
    lines |= {why: np.array(numbers) for why, numbers in rows.wrong.items()}
    found = [
        Diagnostic(code="W011", message=f"{why}: {numbered(where)}", place=str(path), help=_HELP)
        for why, where in lines.items()
        if len(where)
    ]
    if not found and not len(rows.number):
        found = [Diagnostic(code="W011", message="the file has no rows", place=str(path), help=_HELP)]
    if found:
        raise MeshwrightError(found)
