"""Lengths of documents: ``512:0.5;2048:0.5``, ``lognormal:mean=2048;sigma=1`` or a file, as shares of lengths.

A file has one length a line, or a table: ``.csv`` with a header, or ``.jsonl`` with an object a line. Of a table with
several columns the wanted one is named behind a hash, ``requests.csv#prompt_tokens``; several joined by ``+`` are added
(prompt and answer of a fine-tuning example are one document). A name that ends in ``.gz`` is read through gzip.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.quantity import parse_count

#: Largest length that is read, in tokens.
LONGEST = 10**9
#: Equally likely lengths that stand for a log-normal distribution.
QUANTILES = 1024
#: How far shares may sum from 1: what rounding to two digits leaves.
SHARE_SLACK = 0.006
#: Characters of a file of lengths that are read.
MOST_CHARACTERS = 1 << 28
SUFFIXES = (".csv", ".jsonl", ".txt")
LOGNORMAL = "lognormal"
#: Words of a log-normal distribution; ``mean`` or ``median`` in tokens, ``sigma`` of the logarithm.
PARAMETERS = ("mean", "median", "sigma")
#: Lines that an error names.
NAMED = 5


class Lengths(msgspec.Struct, frozen=True):
    """Document lengths in tokens, ascending, with their share of the documents; shares sum to 1. ``said`` is how a user
    wrote them where that is shorter than the pairs: a file, or a distribution by its name."""

    tokens: tuple[int, ...]
    share: tuple[float, ...]
    said: str = ""

    @property
    def mean(self) -> float:
        return sum(t * s for t, s in zip(self.tokens, self.share))

    @property
    def attended(self) -> float:
        """E[l^2] / E[l]: the context an average token's document has, in tokens."""
        return sum(t * t * s for t, s in zip(self.tokens, self.share)) / self.mean

    def text(self) -> str:
        """Return the form that :func:`read` reads back."""
        return self.said or ";".join(f"{t}:{s:.6g}" for t, s in zip(self.tokens, self.share))


def of_counts(counts: dict[int, int], said: str = "") -> Lengths:
    """Return the lengths of documents that were counted, by length."""
    total, ordered = sum(counts.values()), sorted(counts)
    return Lengths(tuple(ordered), tuple(counts[t] / total for t in ordered), said)


def of_shares(shares: dict[int, float]) -> Lengths:
    """Return lengths of which each has a part of the documents, by length; the parts are in proportion."""
    total, ordered = sum(shares.values()), sorted(shares)
    return Lengths(tuple(ordered), tuple(shares[t] / total for t in ordered))


def read(value: str, base: Path = Path()) -> Lengths | None:
    """Return the lengths that a text says, None where it has none of the three forms; files lie in `base`.

    Raises:
        MeshwrightError: W004 for a file that cannot be read or has wrong lines, and for shares or parameters that make
            no distribution.
    """
    name, _, column = value.partition("#")
    if is_file(value):
        return of_counts(Counter(length for _, length in rows(base / name, column)), value)
    if value.partition(":")[0].strip().lower() == LOGNORMAL:
        return _lognormal(value)
    return _pairs(value)


def is_file(value: str) -> bool:
    """Return whether a text names a file of lengths."""
    return Path(value.partition("#")[0].strip().removesuffix(".gz")).suffix in SUFFIXES


def beyond(lengths: Lengths, limit: int, base: Path = Path()) -> str:
    """Return where the lengths above `limit` are: lines of a file, or the pairs; "" when there are none."""
    if lengths.tokens[-1] <= limit:
        return ""
    name, _, column = lengths.said.partition("#")
    if is_file(lengths.said):
        found = [f"{name}:{line}: {length:,}" for line, length in rows(base / name, column) if length > limit]
        return _some(found)
    return _some([f"{length:,}" for length in lengths.tokens if length > limit])


def _some(found: list[str]) -> str:
    return "; ".join(found[:NAMED]) + (f" and {len(found) - NAMED:,} more" if len(found) > NAMED else "")


def _bad(message: str, place: str, help: str) -> MeshwrightError:
    return MeshwrightError.one("W004", message, place=place, help=help)


def _pairs(value: str) -> Lengths | None:
    """Read ``512:0.5;2048:0.5``, or lengths without shares, which are equally likely."""
    pairs = [p.partition(":") for p in value.split(";")]
    tokens = [parse_count(t, binary_k=True) for t, _, _ in pairs]
    if any(t is None or not 1 <= t <= LONGEST for t in tokens):
        return None
    if not any(colon for _, colon, _ in pairs):
        share = [1.0 / len(tokens)] * len(tokens)
    else:
        share = [_number(w) for _, _, w in pairs]
        wrong = [":".join((t, w)) for (t, _, w), s in zip(pairs, share) if s is None or s <= 0]
        if wrong:
            help = "each length has its share, above 0, or none has one: 512:0.5;2048:0.5"
            raise _bad(f"no share of the documents: {_some(wrong)}", f"lengths={value}", help)
        if abs(sum(share) - 1.0) > SHARE_SLACK:
            help = "shares of the documents sum to 1: 512:0.25;2048:0.75; without shares all are equally likely"
            raise _bad(f"the shares sum to {sum(share):.6g}, not to 1", f"lengths={value}", help)
    total, merged = sum(share), dict.fromkeys(sorted(tokens), 0.0)
    for length, one in zip(tokens, share):
        merged[length] += one / total
    return Lengths(tuple(merged), tuple(merged.values()))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _lognormal(value: str) -> Lengths:
    """Read ``lognormal:mean=2048;sigma=1``: exp of a normal variable, its lengths at equally likely quantiles."""
    given: dict[str, float | None] = {}
    for part in filter(None, (p.strip() for p in value.partition(":")[2].split(";"))):
        key, _, text = part.partition("=")
        given[key.strip().lower()] = _number(text)
    wrong = [key for key in given if key not in PARAMETERS]
    wrong += [key for key in PARAMETERS if key in given and not 0 < (given[key] or 0.0) <= LONGEST]
    if wrong or "sigma" not in given or ("mean" in given) == ("median" in given):
        said = f"not parameters above 0: {', '.join(wrong)}" if wrong else "it needs sigma, and mean or median"
        help = f"write lengths={LOGNORMAL}:mean=2048;sigma=1 (or median=; tokens, and sigma of their logarithm)"
        raise _bad(f"no log-normal distribution: {said}", f"lengths={value}", help)
    sigma = given["sigma"]
    if sigma > 10:
        raise _bad(f"sigma={sigma:g} spreads lengths over more than all texts", f"lengths={value}", "at most 10")
    middle = math.log(given["mean"]) - sigma**2 / 2 if "mean" in given else math.log(given["median"])
    normal = NormalDist(middle, sigma)
    drawn = (normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES))
    counts = Counter(min(LONGEST, max(1, round(math.exp(min(x, 50.0))))) for x in drawn)
    return of_counts(counts, f"{LOGNORMAL}:" + ";".join(f"{key}={given[key]:g}" for key in PARAMETERS if key in given))


def clipped(lengths: Lengths, limit: int) -> Lengths:
    """Return the lengths with those above `limit` cut to it."""
    if lengths.tokens[-1] <= limit:
        return lengths
    kept = [(t, s) for t, s in zip(lengths.tokens, lengths.share) if t < limit]
    tokens, share = [t for t, _ in kept], [s for _, s in kept]
    return msgspec.structs.replace(lengths, tokens=(*tokens, limit), share=(*share, 1.0 - sum(share)))


def rows(path: Path, column: str) -> Iterator[tuple[int, int]]:
    """Yield (line number, length) of a file.

    Raises:
        MeshwrightError: W004, naming every wrong line (the first five of them).
    """
    text, found, wrong = _text(path), [], []
    cells = (
        _objects(text, path, column) if path.name.removesuffix(".gz").endswith(".jsonl") else _table(text, path, column)
    )
    for number, parts in cells:
        lengths = [_length(part) for part in parts]
        if None in lengths:
            said = next(part for part, length in zip(parts, lengths) if length is None)
            wrong.append(f"{path}:{number}: {str(said)[:40]!r}")
        else:
            found.append((number, sum(lengths)))
    if wrong or not found:
        why = "document lengths must be positive whole numbers, one a line" if wrong else "the file has no lengths"
        raise MeshwrightError.one(
            "W004", why, place=_some(wrong) or str(path), help=f"lengths up to {LONGEST:,} tokens"
        )
    yield from found


def _length(cell: Any) -> int | None:
    """Return a cell as a length; None where it is none."""
    if isinstance(cell, str):
        cell = cell.strip()
        cell = int(cell) if cell.isdecimal() and len(cell) <= 18 else 0
    whole = isinstance(cell, int) and not isinstance(cell, bool)
    return cell if whole and 0 < cell <= LONGEST else None


def _text(path: Path) -> str:
    reader = gzip.open if path.name.endswith(".gz") else open
    try:
        with reader(path, "rt", encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text, a length a line"
        raise MeshwrightError.one(
            "W004",
            f"cannot read the document lengths: {reason}",
            place=f"lengths={path}",
            help="a file with a length in tokens a line, or lengths=lognormal:mean=2048,sigma=1",
        ) from None
    if len(text) > MOST_CHARACTERS:
        raise MeshwrightError.one(
            "W004",
            f"the file has more than {MOST_CHARACTERS:,} characters",
            place=f"lengths={path}",
            help="a sample does",
        )
    return text


def _table(text: str, path: Path, column: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, wanted cells) of every line that is not empty; a first line without a number is a header."""
    reader = csv.reader(text.splitlines())
    places: list[int] | None = None
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if places is None:
                first = [cell.strip() for cell in row]
                header = not any(_length(cell) is not None for cell in first) and not first[0][:1].isdigit()
                header = header and not first[0].startswith(("-", "+"))
                places = _places(first if header else [], len(row), column, path)
                if header:
                    continue
            yield reader.line_num, [row[i] if i < len(row) else "" for i in places]
    except csv.Error:
        raise MeshwrightError.one(
            "W004", "cannot read the document lengths: a line is no table", place=f"{path}:{reader.line_num}"
        ) from None


def _places(header: list[str], width: int, column: str, path: Path) -> list[int]:
    """Return the columns that are wanted."""
    if not column:
        if width == 1:
            return [0]
        help = f"name one, or several to add: {path.name}#{(header or ['COLUMN'])[0]}"
        raise _bad(f"the table has {width} columns: {', '.join(header) or 'without names'}", str(path), help)
    wanted = column.split("+")
    absent = [name for name in wanted if name not in header]
    if absent:
        raise _bad(f"no column {', '.join(absent)}", str(path), f"its columns: {', '.join(header) or 'without names'}")
    return [header.index(name) for name in wanted]


def _objects(text: str, path: Path, column: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield (line number, wanted values) of a file of JSON values, a line each."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = line
        if isinstance(value, dict):
            if not column:
                help = f"name one, or several to add: {path.name}#{next(iter(value), 'KEY')}"
                raise _bad(f"its lines have {len(value)} keys: {', '.join(value)}", f"{path}:{number}", help)
            yield number, [value.get(name, f"no {name}") for name in column.split("+")]
        else:
            yield number, [value if isinstance(value, int) else str(value)]
