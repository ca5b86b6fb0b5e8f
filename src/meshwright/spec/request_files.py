"""Requests of files: recorded traces, and tables of lengths.

These forms of traces are read: the table ``arrival_s,prompt_tokens,output_tokens[,block_hashes]``, and the published
files of Azure (TIMESTAMP,ContextTokens,GeneratedTokens; Patel et al., Splitwise, 2311.18677), BurstGPT (Timestamp,
Session ID, Request tokens, Response tokens; 2401.17644), Vidur (arrived_at,num_prefill_tokens,num_decode_tokens;
2405.05465) and Mooncake (JSON lines with timestamp in ms, input_length, output_length, hash_ids; 2407.00079). Lengths
also come from ShareGPT's conversations. Arrivals count from the first request.

A table may also say ``tenant`` and ``adapter`` (names, or numbers from 0), ``priority``, ``program`` (the session or
query that a request is of) and ``after`` (the row, from 0, whose answer starts the request's clock).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.request_catalog import HASH_BLOCK
from meshwright.spec.request_limits import LONGEST, MOST_OF_A_KIND
from meshwright.spec.request_tables import CHARACTERS_PER_TOKEN, HELP, RowTable, table
from meshwright.spec.requests import Requests, nobody, numbered
from meshwright.spec.serve_values import Population

ARRIVALS = ("arrival_s", "TIMESTAMP", "Timestamp", "timestamp", "arrived_at")
PROMPTS = ("prompt_tokens", "ContextTokens", "Request tokens", "input_length", "num_prefill_tokens")
OUTPUTS = ("output_tokens", "GeneratedTokens", "Response tokens", "output_length", "num_decode_tokens")
HASHES = ("block_hashes", "hash_ids")
PROGRAMS = ("program", "Session ID")
#: Numbers of a kind that a cell can hold: that of the int64 columns.
INT64 = range(-(1 << 63), 1 << 63)


def read(
    path: Path,
    *,
    timed: bool = True,
    known: Mapping[str, Population] | None = None,
    hash_block: int = 0,
) -> Requests:
    """Return the requests in a file; where it is not `timed`, for their lengths alone. `known` are the tenants and
    adapters that there are, `hash_block` how many tokens a block hash names.

    Raises:
        MeshwrightError: W011 when the file cannot be read or lacks a column, and for every wrong row, by its number.
    """
    rows, hash_block = table(path), hash_block or HASH_BLOCK
    wrong = [(why, np.array(numbers, np.int64)) for why, numbers in rows.wrong.items()]

    def checked(why: str, found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        values, bad = found
        wrong.append((why, rows.number[bad]))
        return values

    lengths = {}
    for name, heads, what in (("prompt", PROMPTS, "prompt"), ("output", OUTPUTS, "answer")):
        cells = _column(rows, heads, path, wrong)
        lengths[name] = checked(f"the {what} is no whole number of tokens from 1 to {LONGEST:,}", _whole(cells))
    count = len(lengths["prompt"])
    at, said = np.zeros(count), {}
    hashes, ptr = nobody(), np.zeros(1, np.int64)
    if timed:
        said = _said(rows, known or {}, checked)
        cells = _column(rows, ARRIVALS, path, wrong)
        at, late = _times(cells, milliseconds="input_length" in rows.columns)
        checked("the arrival is no time from 0 on", (at, late))
        alone = said["after"] < 0 if "after" in said else np.ones(count, bool)
        ordered = np.flatnonzero(~late & alone)
        back = np.zeros(count, bool)
        back[ordered[1:]] = np.diff(at[ordered]) < 0
        checked("it arrives before the row above it", (at, back))
        if len(ordered):
            at = np.where(alone, at - at[ordered[0]], at)
        cells = next((rows.columns[h] for h in HASHES if h in rows.columns), [])
        hashes, ptr, bad, long = _hashes(cells, lengths["prompt"], hash_block)
        checked("its block hashes are no whole numbers", (at, bad))
        checked(f"it has more block hashes than blocks of {hash_block} tokens in its prompt", (at, long))
    _refuse(wrong, path, "line" if rows.lined else "entry")
    if not count:
        raise MeshwrightError.one("W011", "the file has no requests", place=str(path), help=HELP)
    return Requests(
        arrival_s=at,
        **lengths,
        **said,
        hashes=hashes,
        hash_ptr=ptr,
        hash_block=hash_block,
        line=rows.number if rows.lined else nobody(),
        source=path.name if rows.lined else f"{path.name} (text, {CHARACTERS_PER_TOKEN} characters a token)",
    )


def _refuse(wrong: Iterable[tuple[str, np.ndarray]], path: Path, what: str) -> None:
    """Raise W011 for all that is wrong, the rows that are wrong in one way together."""
    found = [
        Diagnostic(
            code="W011", message=f"{why}: {numbered(lines, what)}" if len(lines) else why, place=str(path), help=HELP
        )
        for why, lines in wrong
        if len(lines) or why.startswith("no column")
    ]
    if found:
        raise MeshwrightError(found)


def _column(rows: RowTable, names: tuple[str, ...], path: Path, wrong: list[tuple[str, np.ndarray]]) -> Sequence:
    """Return the column that has one of the names; without one what is wrong so far is raised with it."""
    found = next((rows.columns[name] for name in names if name in rows.columns), None)
    if found is None and not (any(len(lines) for _, lines in wrong) and not len(rows.number)):
        wrong.append((f"no column {names[0]}; its columns: {', '.join(rows.columns) or 'none'}", nobody()))
    if found is None:
        _refuse(wrong, path, "line" if rows.lined else "entry")
    return found


def _said(
    rows: RowTable,
    known: Mapping[str, Population],
    checked: Callable[[str, tuple[np.ndarray, np.ndarray]], np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the columns that say whose a request is and what it waits for, as far as the file has them."""
    found, columns = {}, rows.columns
    for name in ("tenant", "adapter"):
        if name in columns:
            who = known.get(name)
            of = f"one of {who.text()}" if who else f"a name, or a number from 0 to {MOST_OF_A_KIND:,}"
            none = -1 if name == "adapter" else None
            found[name] = checked(f"its {name} is not {of}", _named(columns[name], who, none))
    if "priority" in columns:
        found["priority"] = checked("its priority is no whole number", _integers(columns["priority"], INT64))
    program = next((columns[name] for name in PROGRAMS if name in columns), None)
    if program is not None:
        found["program"] = _named(program, None, -1)[0]
    if "after" in columns:
        cells = [cell if str(cell).strip() else -1 for cell in columns["after"]]
        rows_before, bad = _integers(cells, range(-1, len(cells)))
        bad |= rows_before >= np.arange(len(cells))
        found["after"] = checked("the row that it comes after is not above it", (np.where(bad, -1, rows_before), bad))
    return found


def _named(cells: Sequence, who: Population | None, none: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers for names: their place in `who` where that has names, else their own where they are numbers, else
    in the order in which names come. An empty cell is `none`, and wrong where there is no such number."""
    texts = [str(cell).strip() for cell in cells]
    empty = np.array([text in ("", "none", "-1") for text in texts], bool)
    used = [text for text in texts if text not in ("", "none", "-1")]
    most = who.count if who else MOST_OF_A_KIND + 1
    if who is not None and who.names:
        places = {name: i for i, name in enumerate(who.names)}
    elif (any if who else all)(text.isdecimal() for text in used):
        numbers = [text for text in dict.fromkeys(used) if text.isdecimal() and len(text) < 18]
        places = {text: int(text) for text in numbers if int(text) < most}
    else:
        places = {name: i for i, name in enumerate(list(dict.fromkeys(used))[:most])}
    values = np.array([places.get(text, -1) for text in texts], np.int64)
    bad = (values < 0) & ~empty
    return np.where(empty, -1 if none is None else none, values), bad | (empty & (none is None))


def _integers(cells: Sequence, within: range) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers, and which cells are none, or are not `within`."""
    values, bad = np.zeros(len(cells), np.int64), np.zeros(len(cells), bool)
    for i, cell in enumerate(cells):
        try:
            value = cell if isinstance(cell, int) and not isinstance(cell, bool) else int(str(cell).strip())
        except ValueError:
            value = None
        bad[i] = value is None or value not in within
        values[i] = 0 if bad[i] else value
    return values, bad


def _numbers(cells: Iterable) -> np.ndarray:
    """Return cells as numbers, NaN where one is none."""
    try:
        return np.array(cells, np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.array([_number(cell) for cell in cells], np.float64)


def _number(cell: object) -> float:
    try:
        return math.nan if isinstance(cell, bool | list | dict) else float(cell)  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError):
        return math.nan


def _whole(cells: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths in tokens, and which of them are none."""
    values = _numbers(cells)
    bad = ~((values >= 1) & (values <= LONGEST) & (values == np.floor(values)))
    return np.where(bad, 1, values).astype(np.int64), bad


def _times(cells: Sequence, *, milliseconds: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds, and which of them are no times; dates count from the first of them."""
    text = next((c for c in cells if isinstance(c, str) and c.strip()), "")
    if "-" in text[1:] and ":" in text:
        values = np.array([_date(str(cell)) for cell in cells], "datetime64[us]")
        bad = np.isnat(values)
        known = values[~bad]
        seconds = (values - (known[0] if len(known) else values[:1])).astype(np.int64) / 1e6
        return np.where(bad, 0.0, seconds), bad
    values = _numbers(cells) * (1e-3 if milliseconds else 1.0)
    bad = ~((values >= 0) & (values < 1e12))
    return np.where(bad, 0.0, values), bad


def _date(text: str) -> np.datetime64:
    """Return ``2023-11-16 18:15:46.6805900`` to microseconds; a time zone behind it is left out, as all rows have
    one. What is no date is none."""
    clock = text.strip().partition("+")[0].removesuffix("Z").replace(" ", "T")
    day, _, time = clock.partition("T")
    head, _, digits = time.partition(".")
    try:
        return np.datetime64(f"{day}T{head}.{digits[:6] or '0'}", "us") if time else np.datetime64("NaT", "us")
    except (ValueError, OverflowError):
        return np.datetime64("NaT", "us")


def _hashes(cells: Sequence, prompt: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the block hashes of all rows one after the other, where each begins, which rows have some that are none,
    and which have more than their prompt has blocks."""
    bad, long = np.zeros(len(prompt), bool), np.zeros(len(prompt), bool)
    if not len(cells) or not any(cells):
        return nobody(), np.zeros(1, np.int64), bad, long
    found: list[int] = []
    ptr = [0]
    for i, cell in enumerate(cells):
        try:
            mine = [int(part) for part in cell.split()] if isinstance(cell, str) else list(cell)
            bad[i] = not all(type(one) is int and one in INT64 for one in mine)
        except (ValueError, TypeError):
            mine, bad[i] = [], True
        found += [] if bad[i] else mine
        ptr.append(len(found))
    begins = np.array(ptr, np.int64)
    return np.array(found, np.int64), begins, bad, np.diff(begins) > -(-prompt // block)
