"""Words of a small workload, ``key=value`` and commas between them, read with everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import Diagnostic, nearest

#: A key's reader, which returns None for a value that is none, and the values it takes in words.
Readers = Mapping[str, tuple[Callable[[str], Any], str]]


class SaidWords:
    """The ``values`` that a text says, by key, and all that is ``wrong`` with it: W001 unknown key, W002 bad value,
    W005 contradiction; :meth:`refuse` adds what is wrong between keys. ``keys`` are all that it has, right or wrong.
    `alien` says why a key that belongs to another workload is none here. The values of keys that are `cased`, such as
    paths, are read as they are written, and others in lower case."""

    def __init__(
        self,
        text: str,
        readers: Readers,
        *,
        place: str,
        of: str,
        alien: Mapping[str, str] | None = None,
        cased: frozenset[str] = frozenset(),
    ):
        self.text, self.place = text, place
        self.values: dict[str, Any] = {}
        self.wrong: list[Diagnostic] = []
        self.keys: list[str] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (part.strip() for part in item.partition("="))
            key = key.lower()
            value = value if key in cased else value.lower()
            self.keys.append(key)
            if key in (alien or {}):
                self.refuse("W001", (alien or {})[key], f"drop {key}=")
            elif key not in readers:
                self.refuse("W001", f"{of} has no key {key!r}", nearest(key, list(readers)))
            else:
                self._read(key, value, *readers[key])

    def _read(self, key: str, value: str, reader: Callable[[str], Any], wanted: str) -> None:
        read = reader(value)
        if read is None:
            self.refuse("W002", f"{key} = {value!r} is not {wanted}", f"write {key}=<{wanted}>")
        elif self.values.setdefault(key, read) != read:
            self.refuse("W005", f"{key} is said twice", "keep one of them")

    def refuse(self, code: str, message: str, help: str) -> None:
        """Add what is wrong with the text."""
        self.wrong.append(Diagnostic(code=code, message=message, place=f"{self.place} {self.text!r}", help=help))
