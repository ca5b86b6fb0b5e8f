"""Requests of files: recorded traces, and tables of lengths.

Four forms of traces are read: the table ``arrival_s,prompt_tokens,output_tokens[,block_hashes]``, and the published
files of Azure (TIMESTAMP,ContextTokens,GeneratedTokens; Patel et al., Splitwise, 2311.18677), BurstGPT (Timestamp,
Request tokens, Response tokens; 2401.17644) and Mooncake (JSON lines with timestamp in ms, input_length, output_length,
hash_ids; 2407.00079). Arrivals count from the first request. A name that ends in ``.gz`` is read through gzip.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.request_limits import LONGEST
from meshwright.spec.requests import Requests, numbered

ARRIVALS = ("arrival_s", "TIMESTAMP", "Timestamp", "timestamp")
PROMPTS = ("prompt_tokens", "ContextTokens", "Request tokens", "input_length")
OUTPUTS = ("output_tokens", "GeneratedTokens", "Response tokens", "output_length")
HASHES = ("block_hashes", "hash_ids")
#: Tokens of a block that a hash of a trace names (Mooncake's).
HASH_BLOCK = 512
#: Characters of a trace that are read.
MOST_CHARACTERS = 1 << 30


def read(path: Path, *, timed: bool = True) -> Requests:
    """Return the requests in a file; where it is not `timed`, for their lengths alone.

    Raises:
        MeshwrightError: W011 when the file cannot be read or lacks a column, and for every wrong row, by its number.
    """
    name = path.name.removesuffix(".gz")
    text = _text(path)
    lines, columns = _objects(text, path) if name.endswith(".jsonl") else _table(text, path)
    wrong: list[tuple[str, np.ndarray]] = []
    prompt, bad = _whole(_column(columns, PROMPTS, path))
    wrong.append((f"the prompt is no whole number of tokens from 1 to {LONGEST:,}", bad))
    output, bad = _whole(_column(columns, OUTPUTS, path))
    wrong.append((f"the answer is no whole number of tokens from 1 to {LONGEST:,}", bad))
    at = np.zeros(len(prompt))
    if timed:
        at, bad = _times(_column(columns, ARRIVALS, path), milliseconds="input_length" in columns)
        wrong.append(("the arrival is no time from 0 on", bad))
        known = np.flatnonzero(~bad)
        back = np.zeros(len(at), bool)
        back[known[1:]] = np.diff(at[known]) < 0
        wrong.append(("it arrives before the row above it", back))
    hashes, ptr, bad = _hashes(next((columns[h] for h in HASHES if h in columns), []), len(prompt))
    wrong.append(("its block hashes are no whole numbers", bad))
    found = [
        Diagnostic(code="W011", message=f"{why}: {numbered(lines[bad])}", place=str(path), help=_HELP)
        for why, bad in wrong
        if bad.any()
    ]
    if found:
        raise MeshwrightError(found)
    if not len(prompt):
        raise MeshwrightError.one("W011", "the file has no requests", place=str(path), help=_HELP)
    return Requests(
        arrival_s=at - at[0],
        prompt=prompt,
        output=output,
        hashes=hashes,
        hash_ptr=ptr,
        hash_block=HASH_BLOCK,
        line=lines,
        source=path.name,
    )


_HELP = "columns arrival_s (seconds, in order), prompt_tokens and output_tokens; meshwright explain W011"


def _text(path: Path) -> str:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        message = f"cannot read the requests: {reason}"
        raise MeshwrightError.one("W011", message, place=str(path), help=_HELP) from None
    if len(text) > MOST_CHARACTERS:
        message = f"the file has more than {MOST_CHARACTERS:,} characters"
        raise MeshwrightError.one("W011", message, place=str(path), help="a part of it does")
    return text


def _table(text: str, path: Path) -> tuple[np.ndarray, dict[str, Sequence]]:
    """Return the line number of every row and its cells by column, "" where a row has too few."""
    reader = csv.reader(io.StringIO(text))
    rows, lines = [], []
    try:
        header = [cell.strip() for cell in next(reader, [])]
        for row in reader:
            if any(row):
                rows.append(row if len(row) >= len(header) else [*row, *[""] * (len(header) - len(row))])
                lines.append(reader.line_num)
    except csv.Error as error:
        message = f"a line is no table: {error}"
        raise MeshwrightError.one("W011", message, place=f"{path}:{reader.line_num}", help=_HELP) from None
    columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    return np.array(lines, np.int64), columns


def _objects(text: str, path: Path) -> tuple[np.ndarray, dict[str, Sequence]]:
    """Return the same of a file with a JSON object a line."""
    rows, lines, bad = [], [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        (rows if isinstance(row, dict) else bad).append(row if isinstance(row, dict) else number)
        if isinstance(row, dict):
            lines.append(number)
    if bad:
        message = f"no JSON object: {numbered(np.array(bad))}"
        raise MeshwrightError.one("W011", message, place=str(path), help=_HELP)
    names = dict.fromkeys(name for row in rows for name in row)
    return np.array(lines, np.int64), {name: [row.get(name, "") for row in rows] for name in names}


def _column(columns: dict[str, Sequence], names: tuple[str, ...], path: Path) -> Sequence:
    """Return the column that has one of the names."""
    found = next((columns[name] for name in names if name in columns), None)
    if found is None:
        message = f"no column {names[0]}; its columns: {', '.join(columns) or 'none'}"
        raise MeshwrightError.one("W011", message, place=str(path), help=_HELP)
    return found


def _numbers(cells: Iterable) -> np.ndarray:
    """Return cells as numbers, NaN where one is none."""
    try:
        return np.array(cells, np.float64)
    except (ValueError, TypeError):
        return np.array([_number(cell) for cell in cells], np.float64)


def _number(cell: object) -> float:
    try:
        return math.nan if isinstance(cell, bool | list | dict) else float(cell)  # type: ignore[arg-type]
    except (ValueError, TypeError):
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
        values = np.array([_date_s(str(cell)) for cell in cells])
        known = values[~np.isnan(values)]
        values = values - (known[0] if len(known) else 0.0)
        return np.nan_to_num(values), np.isnan(values)
    values = _numbers(cells) * (1e-3 if milliseconds else 1.0)
    bad = ~((values >= 0) & (values < 1e12))
    return np.where(bad, 0.0, values), bad


def _date_s(text: str) -> float:
    """Return ``2023-11-16 18:15:46.6805900`` in seconds; a time zone behind it is left out, as all rows have one."""
    clock = text.strip().partition("+")[0].removesuffix("Z").replace(" ", "T")
    try:
        return float(np.datetime64(clock, "ns").astype(np.int64)) / 1e9
    except ValueError:
        return math.nan


def _hashes(cells: Sequence, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the block hashes of all rows one after the other, where each begins, and which rows are wrong."""
    bad = np.zeros(count, bool)
    if not len(cells) or not any(cells):
        return np.empty(0, np.int64), np.zeros(1, np.int64), bad
    found: list[int] = []
    ptr = [0]
    for i, cell in enumerate(cells):
        try:
            found += [int(part) for part in (cell.split() if isinstance(cell, str) else cell)]
        except (ValueError, TypeError):
            bad[i] = True
        ptr.append(len(found))
    try:
        return np.array(found, np.int64), np.array(ptr, np.int64), bad
    except OverflowError:
        return np.empty(0, np.int64), np.zeros(1, np.int64), np.ones(count, bool)
