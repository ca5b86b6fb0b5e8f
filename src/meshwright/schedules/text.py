"""The reader of a schedule's text form (see `actions`): words to Actions, every mistake with line and column."""

from __future__ import annotations

import re
from itertools import chain

import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.schedules.actions import BW, Actions, B, F, W

WORD = re.compile(r"([FBW])([0-9]{1,9})(?:@([0-9]{1,9}))?")
KINDS = {"F": F, "B": B, "W": W}

Action = tuple[int, int, int]
"""(kind, stage, microbatch)."""


def parse_actions(text: str) -> Actions:
    """The actions written in `text`.

    Raises:
        MeshwrightError: S002 for every word that is not an action, S003 for every action written twice,
            S004 when there is no action at all, S005 for a number left out, S007 for a W without its B; each with
            its line and column.
    """
    name, rows, places, found = _read(text)
    full = _full_backwards(rows, places, found)
    if found:
        raise MeshwrightError(found)
    if not any(rows):
        raise MeshwrightError.one(
            "S004", "a schedule without actions", place="line 1", help="one line per rank: `F0 F1 B0 W0 B1 W1`"
        )
    found = _gaps(rows, places)
    if found:
        raise MeshwrightError(found)
    rows = [[(BW if (k, s, i) in full else k, s, i) for k, s, i in row] for row in rows]
    columns = [np.array(row, dtype=np.int64).reshape(-1, 3) for row in rows]
    everything = np.concatenate(columns)
    return Actions.of(
        name,
        *([c[:, field] for c in columns] for field in range(3)),
        num_stages=int(everything[:, 1].max()) + 1,
        num_microbatches=int(everything[:, 2].max()) + 1,
    )


def _read(text: str) -> tuple[str, list[list[Action]], list[list[str]], list[Diagnostic]]:
    """The name, a row of (kind, stage, microbatch) per rank, the place of each, and the words not understood."""
    name, rows, places, found = "custom", [], [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            if not rows and name == "custom" and line.strip("# \t"):
                name = line.strip("# \t")
            continue
        if not line.strip():
            continue
        row, row_places, rank = [], [], len(rows)
        for word in re.finditer(r"\S+", line):
            place = f"line {number}, column {word.start() + 1}"
            read = WORD.fullmatch(word.group())
            if read is None:
                found.append(_not_an_action(word.group(), place))
                continue
            letter, microbatch, stage = read.groups()
            row.append((KINDS[letter], rank if stage is None else int(stage), int(microbatch)))
            row_places.append(place)
        rows.append(row)
        places.append(row_places)
    return name, rows, places, found


def _not_an_action(word: str, place: str) -> Diagnostic:
    mended = word.upper()
    help = (
        f"did you mean {mended}?" if WORD.fullmatch(mended) else "F, B or W, a microbatch, and @stage if needed: F0@3"
    )
    return Diagnostic(code="S002", message=f"{word!r} is not an action", place=place, help=help)


def _full_backwards(rows: list[list[Action]], places: list[list[str]], found: list[Diagnostic]) -> set[Action]:
    """The B without a W. Adds S003 for what is written twice and S007 for a W without its B."""
    seen: dict[Action, str] = {}
    for row, row_places in zip(rows, places):
        for action, place in zip(row, row_places):
            if action in seen:
                kind, stage, microbatch = action
                found.append(
                    Diagnostic(
                        code="S003",
                        message=f"{'FBW'[kind]}{microbatch} of stage {stage} is written twice",
                        place=place,
                        help=f"first at {seen[action]}; each runs once",
                    )
                )
            seen.setdefault(action, place)
    for (kind, stage, microbatch), place in seen.items():
        if kind == W and (B, stage, microbatch) not in seen:
            found.append(
                Diagnostic(
                    code="S007",
                    message=f"W{microbatch} of stage {stage} has no B{microbatch}",
                    place=place,
                    help=f"the weight gradient needs the input gradient first: add B{microbatch} before it",
                )
            )
    return {(B, s, i) for k, s, i in seen if k == B and (W, s, i) not in seen}


def _gaps(rows: list[list[Action]], places: list[list[str]]) -> list[Diagnostic]:
    """S005 where stages or microbatches are not numbered 0, 1, 2 and so on: at the largest number."""
    place_of = dict(zip(chain(*rows), chain(*places)))
    found = []
    for word, field in (("stage", 1), ("microbatch", 2)):
        used = {action[field] for action in place_of}
        last = max(place_of, key=lambda action: action[field])
        if last[field] >= len(used):
            missing = next(number for number in range(len(used) + 1) if number not in used)
            found.append(
                Diagnostic(
                    code="S005",
                    message=f"no action is of {word} {missing}, though {word} {last[field]} is there",
                    place=place_of[last],
                    help=f"number every {word} from 0, without gaps",
                )
            )
    return found
