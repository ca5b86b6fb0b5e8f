"""Names of published checkpoints, read as the catalog's models that they are trained or stored from.

A checkpoint's name is its model's with words behind it: how it was tuned (``-Instruct``, ``-it``), when (``-2507``) and
how its weights are stored (``-FP8``, ``-AWQ``). None of them changes a dimension, so that
``nvidia/Llama-3.1-8B-Instruct-FP8`` is ``llama3.1-8b``. A word that is not known here (``Distill``, ``Nemotron``) may
be another model: such a name is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: Words of a name that say how a model was trained further; its layers stay as they are.
TUNED = frozenset(["instruct", "chat", "hf", "it", "pt", "thinking"])
#: Words of a name that say how weights are stored, which a plan says and a model does not.
STORED = frozenset(
    [
        "fp8",
        "fp4",
        "nvfp4",
        "mxfp4",
        "mxfp8",
        "int8",
        "int4",
        "awq",
        "gptq",
        "w4a16",
        "w8a8",
        "w8a16",
        "w4a8",
        "nf4",
        "bnb",
        "4bit",
        "8bit",
        "gguf",
        "quantized",
        "dynamic",
        "static",
        "pertensor",
        "perchannel",
        "block",
    ]
)
#: Words of a name that say the 16 bits in which weights are trained.
WHOLE = frozenset(["bf16", "fp16"])
_SIZE = re.compile(r"\d[bm]$")
_DATE = re.compile(r"2[0-9](0[1-9]|1[0-2])|(0[1-9]|1[0-2])[0-3][0-9]")  # a year and a month, or a month and a day


def parts(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the model that a checkpoint's name means, without its publisher and such words, and the words for
    how its weights are stored."""
    said = re.sub(r"(?<=\d)_(?=\d)", ".", name.lower().rpartition("/")[2]).replace("_", "-").removeprefix("meta-")
    words = re.sub(r"^([a-z]+)(?=\d)", r"\1-", said).split("-")
    sized = any(_SIZE.search(word) for word in words)
    dropped = TUNED | STORED | WHOLE | ({"base"} if sized else set())  # of bert-base it is the size
    kept = [w for w in words[1:] if w not in dropped and not _DATE.fullmatch(w)]
    return "-".join(words[:1] + kept), tuple(w for w in words[1:] if w in STORED)


def meanings(names: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Return the catalog entry of every model that names one entry alone; `names` are pairs of a name and its entry."""
    found: dict[str, set[str]] = {}
    for name, entry in names:
        found.setdefault(parts(name)[0], set()).add(entry)
    return {said: min(entries) for said, entries in found.items() if len(entries) == 1}


def note(name: str, stored: tuple[str, ...]) -> str:
    """Return the remark for the user of a name that was read as a catalog's model."""
    told = f"read from the name {name!r}: a further training has the layers of its model, and its context may be longer"
    if not stored:
        return told
    return f"{told}; weights are stored as {' '.join(stored)} only if the plan says so (meshwright explain precision)"
