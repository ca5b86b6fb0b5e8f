"""The campaign of texts: nearly right ones of every kind through their readers and `check`."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from fuzz import corpus, mutate
from fuzz.readers import Readers, temporary

#: How often each kind comes: the cheap and the crowded ones more.
WEIGHTS = {
    "plan": 20,
    "plan.toml": 12,
    "workload": 14,
    "lengths.csv": 6,
    "cluster": 10,
    "cluster.toml": 10,
    "config.json": 14,
    "model": 3,
    "question.toml": 8,
    "trace.json": 3,
}
#: Example -> a plain value that a file can hold.
Example = dict[str, Any]


class Texts:
    """Mutated texts; an example is a ``kind`` and a ``text``, or ``hex`` where the bytes are no UTF-8."""

    target, chunk = 1_000_000, 100_000

    def __init__(self) -> None:
        self.readers = Readers(temporary())

    def example(self, rng: Random) -> Example:
        kind = rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
        seeds = corpus.seeds()[kind]
        return written(kind, mutate.text(rng, rng.choice(seeds), seeds))

    def look(self, example: Example) -> str:
        return f"{example['kind']}: {self.readers.look(example['kind'], data(example))}"

    def smaller(self, example: Example) -> Iterator[Example]:
        for less in shorter(data(example)):
            yield written(example["kind"], less)


def written(kind: str, content: bytes) -> Example:
    """The example of a text."""
    try:
        return {"kind": kind, "text": content.decode()}
    except UnicodeDecodeError:
        return {"kind": kind, "hex": content.hex()}


def data(example: Example) -> bytes:
    """The bytes of an example."""
    return example["text"].encode() if "text" in example else bytes.fromhex(example["hex"])


def shorter(content: bytes) -> Iterator[bytes]:
    """The content without a part of it: first without large parts, then without small ones."""
    size = len(content)
    while size > 1:
        size = (size + 1) // 2
        for start in range(0, len(content), size):
            yield content[:start] + content[start + size :]
        if size == 1:
            return
