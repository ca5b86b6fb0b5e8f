"""Requests as columns: drawn from a distribution with a fixed seed, or read from a recorded trace.

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
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.request_limits import LONGEST, MOST_REQUESTS, USUAL_REQUESTS

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve

ARRIVALS = ("arrival_s", "TIMESTAMP", "Timestamp", "timestamp")
PROMPTS = ("prompt_tokens", "ContextTokens", "Request tokens", "input_length")
OUTPUTS = ("output_tokens", "GeneratedTokens", "Response tokens", "output_length")
HASHES = ("block_hashes", "hash_ids")
#: Characters of a trace that are read.
MOST_CHARACTERS = 1 << 30


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a workload [n], in order of arrival: seconds from the first one, tokens of prompt and answer.

    ``concurrency`` > 0: a closed loop, in which so many requests are open at a time, the first so many arrive by
    themselves, and the next one when one is answered. ``hashes[hash_ptr[i]:hash_ptr[i + 1]]`` name the blocks of
    request i's prompt, equal names for equal prefixes, where the trace has them. ``line`` [n] is where a request stands
    in its file, 0 where it was drawn.
    """

    arrival_s: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    concurrency: int = 0
    hashes: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    hash_ptr: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(1, np.int64))
    line: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    source: str = ""

    def __len__(self) -> int:
        return len(self.prompt)

    def first(self, count: int) -> Requests:
        """Return the first `count` of them."""
        return self.chosen(np.arange(min(count, len(self))))

    def chosen(self, which: np.ndarray) -> Requests:
        """Return those of the given indices, without their hashes where only some are chosen."""
        return msgspec.structs.replace(
            self,
            arrival_s=np.ascontiguousarray(self.arrival_s[which]),
            prompt=np.ascontiguousarray(self.prompt[which]),
            output=np.ascontiguousarray(self.output[which]),
            line=np.ascontiguousarray(self.line[which]) if len(self.line) else self.line,
            hashes=self.hashes if len(which) == len(self) else np.empty(0, np.int64),
            hash_ptr=self.hash_ptr if len(which) == len(self) else np.zeros(1, np.int64),
        )


def draw(serve: Serve) -> Requests:
    """Return the requests of a workload: numpy's generator of its seed draws gaps first, then rows of lengths.

    Raises:
        MeshwrightError: W011 for a file that cannot be read, and for every row of it that is wrong.
    """
    if serve.trace:
        return _of_trace(serve)
    rng = np.random.default_rng(serve.seed)
    at = _arrivals(serve, rng)
    if serve.lengths:
        known = read(serve.base / serve.lengths, timed=False)
        rows = rng.integers(0, len(known), len(at))
        prompt, output = known.prompt[rows], known.output[rows]
    else:
        prompt, output = (np.full(len(at), length, np.int64) for length in (serve.prompt, serve.output))
    return Requests(arrival_s=at, prompt=prompt, output=output, concurrency=serve.concurrency)


def _arrivals(serve: Serve, rng: np.random.Generator) -> np.ndarray:
    """Draw when requests arrive, the first one at 0."""
    count = serve.requests or (serve.batch if serve.batch else USUAL_REQUESTS)
    if serve.ramp_s:
        return np.minimum(np.arange(count) * (serve.ramp_s / serve.concurrency), serve.ramp_s)
    if not serve.rate:
        return np.zeros(count)
    if not serve.window_s:
        gaps = _gaps(serve, rng, count)
        return np.cumsum(gaps) - gaps[0]
    mean = serve.rate * serve.window_s
    most = min(serve.requests or MOST_REQUESTS, MOST_REQUESTS)
    at = np.zeros(1)
    while at[-1] < serve.window_s and len(at) <= most:
        more = _gaps(serve, rng, max(16, int(min(mean + 4 * math.sqrt(mean) + 1, most))))
        at = np.concatenate([at, at[-1] + np.cumsum(more)])
    return at[at < serve.window_s][:most]


def _gaps(serve: Serve, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw gaps between arrivals whose mean is 1 / rate and whose standard deviation is cv / rate."""
    mean, cv = 1.0 / serve.rate, serve.cv
    if cv == 1.0:
        return rng.exponential(mean, count)
    if serve.burst == "gamma":
        return rng.gamma(1.0 / cv**2, mean * cv**2, count)
    shape = weibull_shape(cv)
    return rng.weibull(shape, count) * (mean / math.gamma(1.0 + 1.0 / shape))


def weibull_shape(cv: float) -> float:
    """Return the shape k of a Weibull distribution of that coefficient of variation: 1 + cv^2 is
    Gamma(1 + 2/k) / Gamma(1 + 1/k)^2, which falls as k rises."""
    low, high, wanted = 0.05, 1000.0, math.log1p(cv**2)
    for _ in range(200):
        middle = math.sqrt(low * high)
        over = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle) > wanted
        low, high = (middle, high) if over else (low, middle)
    return math.sqrt(low * high)


def _of_trace(serve: Serve) -> Requests:
    """Read a trace, as fast as the workload says, as much of it as the workload says."""
    found = read(serve.base / serve.trace)
    scale = serve.scale
    if serve.rate:
        span = float(found.arrival_s[-1])
        scale = serve.rate * span / (len(found) - 1) if span > 0 else 1.0
    at = found.arrival_s / scale
    kept = len(found) if not serve.window_s else int(np.searchsorted(at, serve.window_s, side="left"))
    found = msgspec.structs.replace(found, arrival_s=at)
    return found.first(min(kept, serve.requests or kept))


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
        arrival_s=at - at[0], prompt=prompt, output=output, hashes=hashes, hash_ptr=ptr, line=lines, source=path.name
    )


_HELP = "columns arrival_s (seconds, in order), prompt_tokens and output_tokens; meshwright explain W011"


def numbered(lines: np.ndarray) -> str:
    """Return line numbers as text, neighbours as a range: ``lines 3, 7-9``."""
    values = np.unique(lines)
    cuts = np.flatnonzero(np.diff(values) > 1) + 1
    runs = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in np.split(values, cuts)]
    return ("line " if len(values) == 1 else "lines ") + ", ".join(runs)


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
