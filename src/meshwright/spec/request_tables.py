"""Files as columns of cells: tables (.csv), an object a line (.jsonl), and conversations (.json); .gz in front of them.

What cannot be a row at all is returned beside the rows, by its number, so that everything that is wrong with a file is
said at once.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError

#: Characters of a file that are read.
MOST_CHARACTERS = 1 << 30
#: Characters of a token of English text, where a file has text and no lengths (OpenAI help centre, "What are tokens").
CHARACTERS_PER_TOKEN = 4
HELP = "columns arrival_s (seconds, in order), prompt_tokens and output_tokens; meshwright explain W011"


class RowTable(msgspec.Struct, frozen=True, kw_only=True):
    """The cells of a file by column, the number of every row in it, and numbers of what is no row, by why. Rows are
    lines, but for conversations, which have no number of a line."""

    columns: dict[str, Sequence]
    number: np.ndarray
    wrong: dict[str, list[int]]
    lined: bool = True


def table(path: Path) -> RowTable:
    """Return the rows of a file, by the ending of its name.

    Raises:
        MeshwrightError: W011 where it cannot be read.
    """
    text = _text(path)
    name = path.name.removesuffix(".gz")
    if name.endswith(".json"):
        return _conversations(text, path)
    return _objects(text) if name.endswith(".jsonl") else _cells(text, path)


def _text(path: Path) -> str:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        message = f"cannot read the requests: {reason}"
        raise MeshwrightError.one("W011", message, place=str(path), help=HELP) from None
    if len(text) > MOST_CHARACTERS:
        message = f"the file has more than {MOST_CHARACTERS:,} characters"
        raise MeshwrightError.one("W011", message, place=str(path), help="a part of it does")
    return text


def _cells(text: str, path: Path) -> RowTable:
    """Read a table with a header; "" where a row has too few cells."""
    reader = csv.reader(io.StringIO(text))
    rows, lines, long = [], [], []
    try:
        header = [cell.strip() for cell in next(reader, [])]
        width = len(header)
        for row in reader:
            if not any(row):
                continue
            if len(row) > width:
                long.append(reader.line_num)
            rows.append(row if len(row) >= width else [*row, *[""] * (width - len(row))])
            lines.append(reader.line_num)
    except csv.Error as error:
        message = f"a line is no table: {error}"
        raise MeshwrightError.one("W011", message, place=f"{path}:{reader.line_num}", help=HELP) from None
    twice = sorted({name for name in header if header.count(name) > 1 and name})
    if twice:
        message = f"the columns {', '.join(twice)} are there twice"
        raise MeshwrightError.one("W011", message, place=str(path), help="keep one of each")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    return RowTable(
        columns=columns,
        number=np.array(lines, np.int64),
        wrong={"the row has more cells than the table has columns": long},
    )


def _objects(text: str) -> RowTable:
    """Read a file with a JSON object a line."""
    rows, lines, bad = [], [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row = _json(line)
        if isinstance(row, dict):
            rows.append(row)
            lines.append(number)
        else:
            bad.append(number)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name, "") for row in rows] for name in names}
    return RowTable(columns=columns, number=np.array(lines, np.int64), wrong={"no JSON object": bad})


def _conversations(text: str, path: Path) -> RowTable:
    """Read a list of conversations as ShareGPT's: the first question is a prompt and what is said to it the answer, as
    serving benchmarks take them. A conversation without the two is left out, as it is there."""
    found = _json(text)
    if not isinstance(found, list):
        message = "the file is no JSON list of conversations"
        raise MeshwrightError.one("W011", message, place=str(path), help="an object a line is a .jsonl file")
    prompt, output, number, bad = [], [], [], []
    for place, one in enumerate(found, 1):
        said = one.get("conversations", one.get("messages")) if isinstance(one, dict) else None
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
            bad.append(place)
            continue
        texts = [message.get("value", message.get("content")) for message in said[:2]]
        if len(texts) == 2 and all(isinstance(part, str) and part for part in texts):
            ask, answer = (-(-len(part) // CHARACTERS_PER_TOKEN) for part in texts)
            prompt.append(ask)
            output.append(answer)
            number.append(place)
    return RowTable(
        columns={"prompt_tokens": prompt, "output_tokens": output},
        number=np.array(number, np.int64),
        wrong={"no conversation": bad},
        lined=False,
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
