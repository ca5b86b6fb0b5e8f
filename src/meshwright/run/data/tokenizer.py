"""Text to token ids: by bytes, or as a Hugging Face ``tokenizer.json`` says.

A tokenizer has an ``identity`` (equal texts and identities give equal tokens), ``num_tokens`` (ids are below it), and
``end``, the id that closes every document.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError

#: What published tokenizers call the end of a document, where no ``tokenizer_config.json`` says it.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
#: Characters of documents that are encoded together.
TOGETHER = 1 << 22


class Tokenizer(Protocol):
    """The interface that a corpus uses of a tokenizer."""

    identity: str
    num_tokens: int
    end: int

    def encode(self, documents: Iterable[Iterable[bytes]]) -> Iterator[Iterable[NDArray[Any]]]:
        """Ids of every document, in consecutive runs and without its end; a document is consecutive blocks of UTF-8,
        read through before the next is asked for."""


class Bytes:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document."""

    identity, num_tokens, end = "bytes", 257, 256

    def encode(self, documents: Iterable[Iterable[bytes]]) -> Iterator[Iterable[NDArray[Any]]]:
        return ((np.frombuffer(block, np.uint8) for block in blocks) for blocks in documents)


class HuggingFace:
    """A ``tokenizer.json``, read with the package ``tokenizers``; no special tokens are added inside a document.

    A document is encoded as one text: what a tokenizer merges across a line's end stays merged.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Reader

        data = _content(path)
        try:
            self._reader = Reader.from_str(data.decode())
        except Exception as error:  # the package raises plain exceptions of its own
            raise MeshwrightError.one("D004", f"not a tokenizer: {error}", place=str(path)) from None
        self.num_tokens = self._reader.get_vocab_size()
        self.end = _end(self._reader, path)
        self.folder = path.parent
        self.identity = f"tokenizer.json {hashlib.sha256(data).hexdigest()} end {self.end}"

    def encode(self, documents: Iterable[Iterable[bytes]]) -> Iterator[Iterable[NDArray[Any]]]:
        waiting: list[str] = []
        size = 0
        for blocks in documents:
            waiting.append(b"".join(blocks).decode())
            size += len(waiting[-1])
            if size >= TOGETHER:
                yield from self._encode(waiting)
                waiting, size = [], 0
        yield from self._encode(waiting)

    def spans(self, texts: list[str]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Ids of each text, and the characters [n, 2] that each id stands for."""
        found = self._reader.encode_batch(texts, add_special_tokens=False)
        return [(np.array(one.ids, np.uint32), np.array(one.offsets, np.int64).reshape(-1, 2)) for one in found]

    def _encode(self, texts: list[str]) -> Iterator[Iterable[NDArray[Any]]]:
        """Several documents at once, on all cores."""
        for found in self._reader.encode_batch(texts, add_special_tokens=False):
            yield [np.array(found.ids, np.uint32)]


def load(name: str) -> Tokenizer:
    """``bytes`` (or ""), the path of a ``tokenizer.json``, or of the folder that holds one.

    Raises:
        MeshwrightError: D004 when it cannot be read, or names no token that ends a document.
    """
    if name in ("", "bytes"):
        return Bytes()
    path = Path(name)
    return HuggingFace(path / "tokenizer.json" if path.is_dir() else path)


def _content(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MeshwrightError.one(
            "D004",
            f"cannot read the tokenizer: {reason}",
            place=str(path),
            help="name a tokenizer.json, the folder that holds one, or bytes",
        ) from None
    return data


def _end(reader: Any, path: Path) -> int:
    """The end-of-document id: what the ``tokenizer_config.json`` beside it says, else the first usual name it has."""
    said: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # many tokenizers come without one
        said = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    if isinstance(said, dict):
        said = said.get("content")
    names = [said] if isinstance(said, str) else list(ENDS)
    found = [token for name in names if (token := reader.token_to_id(name)) is not None]
    if not found:
        raise MeshwrightError.one(
            "D004",
            f"the tokenizer has no token {' or '.join(names)} to end a document with",
            place=str(path),
            help="put a tokenizer_config.json beside it that names its eos_token",
        )
    return found[0]
