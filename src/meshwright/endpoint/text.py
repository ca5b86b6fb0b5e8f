"""Text of a model, to token ids and back piece by piece, and cut where a stop string begins.

The ``tokenizer.json`` beside the weights says which ids a text has. A character may need several tokens, and a stop
string may begin in one token and end in another: text leaves only once no later token can change it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

#: The character that stands for bytes that are no character (yet).
LOST = "\ufffd"
#: Bytes of a UTF-8 character but one: so many replacement characters at the end may still become one character.
UNSURE = 3
#: Tokens of the prompt that an answer is decoded behind.
BEFORE = 8
#: Tokens that are decoded anew with each one that comes, at most; text that is none (random bytes) is cut there.
WINDOW = 64


class ModelText:
    """The tokenizer of a model's folder, and what its ``generation_config.json`` says about sampling.

    Raises:
        MeshwrightError: D004 when there is no tokenizer.json, or it is none.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.folder, path = folder, folder / "tokenizer.json"
        if not path.is_file():
            help = "name the folder of a published model, with its tokenizer.json"
            raise MeshwrightError.one("D004", "the folder has no tokenizer.json", place=str(folder), help=help)
        try:
            self._reader = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain exceptions of its own
            help = "take the model's own tokenizer.json"
            raise MeshwrightError.one("D004", f"not a tokenizer: {error}", place=str(path), help=help) from None
        self._reader.no_truncation()
        self._reader.no_padding()
        self.size = self._reader.get_vocab_size()
        self.usual = _usual_sampling(folder / "generation_config.json")

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Ids of a text, with the tokens that the model wants around a document where `special`."""
        return tuple(self._reader.encode_batch([text], add_special_tokens=special)[0].ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids, with the names of special tokens where `special`."""
        return self._reader.decode(ids, skip_special_tokens=not special)

    def token(self, id: int) -> str:
        """Return the text of one id, or its name where it is a part of a character alone."""
        text = self.decode((id,), special=True)
        return text if text and LOST not in text else self._reader.id_to_token(id) or ""


def _usual_sampling(file: Path) -> dict[str, Any]:
    """The sampling that the publisher recommends (``temperature``, ``top_p``, ``top_k``, ``repetition_penalty``).

    {} where nobody says."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or not found.get("do_sample", True):
        return {}
    kinds = {"temperature": int | float, "top_p": int | float, "top_k": int, "repetition_penalty": int | float}
    said = {name: found.get(name) for name in kinds}
    return {name: value for name, value in said.items() if isinstance(value, kinds[name]) and value >= 0}


class Detokeniser:
    """Token ids in, text out as soon as it is sure; what comes out in all is the text of all ids.

    A few of the last tokens, at first those ``before``, are kept and decoded with each new one, since a decoder may
    write a token otherwise at the beginning of a text than inside it."""

    def __init__(self, text: ModelText, before: Sequence[int] = (), *, special: bool = False):
        self._text, self._special = text, special
        self._ids = list(before[-BEFORE:])
        self._sent = len(self._decoded(self._ids))
        self._since = 0

    def add(self, id: int) -> str:
        """Take one more token; the text that is sure from now on, which may be empty."""
        self._ids.append(id)
        whole = self._decoded(self._ids)
        lost = len(whole) - len(whole.rstrip(LOST))
        self._since = self._since + 1 if lost else 0
        # where a decoder takes a run of bytes together, those of whole characters are lost too until the last one comes
        unsure = lost if self._since <= UNSURE else min(lost, UNSURE)
        sure = len(whole) - unsure
        new = whole[self._sent : sure]
        self._sent = max(self._sent, sure)
        if (new and not unsure) or len(self._ids) > WINDOW:
            self._shorten(unsure)
        return new

    def end(self) -> str:
        """Return the rest, once no token comes any more."""
        return self._decoded(self._ids)[self._sent :]

    def _shorten(self, unsure: int) -> None:
        """Keep the last tokens: enough to hold what is unsure and a text before it, and none from the middle of a
        character unless there are too many that are no text."""
        for count in (2, 4, 8, 16):
            if count >= len(self._ids):
                return
            kept = self._ids[-count:]
            whole = self._decoded(kept)
            cut = whole.startswith(LOST) and not (count == 16 and len(self._ids) > WINDOW)
            if len(whole) > unsure and not cut:
                self._ids, self._sent = kept, len(whole) - unsure
                return

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, special=self._special) if ids else ""


class StopCut:
    """Text in, and out what surely lies before the first of some stop strings; `keep` lets the string itself out too.

    What may be the beginning of a stop string waits for the text that follows. ``rest`` is the text behind the string
    that was found, as far as it came with it."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False):
        self._stops, self._keep, self._held = stops, keep, ""
        self.found = self.rest = ""

    def add(self, text: str) -> str:
        """Take more text; what may leave. Once a string is found (``found``) nothing leaves any more."""
        if not self._stops:
            return text
        if self.found:
            return ""
        self._held += text
        places = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        if there := [place for place in places if place[0] >= 0]:
            at, _, self.found = min(there)
            self.rest = self._held[at + len(self.found) :]
            out = self._held[: at + len(self.found)] if self._keep else self._held[:at]
            self._held = ""
            return out
        waits = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - waits], self._held[len(self._held) - waits :]
        return out

    def end(self) -> str:
        """Return what waited, once no text comes any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that a stop string begins with, and is not the whole of."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
