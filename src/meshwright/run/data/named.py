"""Several texts by one name: ``a.jsonl=0.7,b.parquet=0.3``, each with its weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError


class NamedText(NamedTuple):
    """A text of a mixture, and its share of the sequences."""

    name: str
    share: float


#: The option that names what is trained on.
DATA = "--data"


@contextmanager
def said_by(option: str) -> Iterator[None]:
    """Have what is wrong with data that another `option` names said of that one."""
    try:
        yield
    except MeshwrightError as error:
        found = []
        for one in error.diagnostics:
            own, name = one.place.startswith(f"{DATA} "), one.place.removeprefix(DATA)
            found.append(msgspec.structs.replace(one, place=option + name) if own else one)
        raise MeshwrightError(found) from None


#: How far apart weights may be: a text with less has no sequence in a run.
MOST_APART = 10**9


def mixture(name: str) -> tuple[NamedText, ...]:
    """Return the texts that a name is made of with their shares, () where it names one text. A file or folder that is
    there is itself, whatever its name.

    Raises:
        MeshwrightError: D009 with everything that is wrong.
    """
    beginning = name.rpartition("#")[0] or name
    if "=" not in name or Path(name).exists() or Path(beginning).exists():
        return ()
    wrong, weights = [], {}

    def bad(message: str, place: str, help: str) -> None:
        wrong.append(Diagnostic(code="D009", message=message, place=f"--data {place}", help=help))

    for item in name.split(","):
        text, mark, said = item.strip().rpartition("=")
        if not mark or not text:
            bad(
                f"{item.strip()!r} has no weight",
                item.strip(),
                "every text of a mixture has one: a.jsonl=0.7,b.txt=0.3",
            )
            continue
        try:
            weight = Fraction(said.strip())
        except (ValueError, ZeroDivisionError):
            bad(f"the weight {said.strip()!r} is no number", item.strip(), "write a number above 0, such as 0.7")
            continue
        if weight <= 0:
            bad(f"the weight {said.strip()} is not above 0", item.strip(), "leave the text out, or give it a weight")
        elif text in weights:
            bad(f"{text} is named twice", item.strip(), "name it once, with both weights added")
        weights[text] = weight
    if not wrong and max(weights.values()) / min(weights.values()) > MOST_APART:
        bad("the weights are too far apart", name, "leave out the text that is next to nothing")
    if wrong:
        raise MeshwrightError(wrong)
    total = sum(weights.values())
    return tuple(NamedText(text, float(weight / total)) for text, weight in weights.items())
