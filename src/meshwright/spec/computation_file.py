"""Computations as files: TOML, read without running any of it, and everything that is wrong with one said at once.

[dims]                      # a name for every key, with its length
user = 6000
item = 4000
rank = 32

[inputs]
U = { keys = ["user", "rank"], trained = true }
V = { keys = ["item", "rank"], trained = true }
R = { keys = ["user", "item"], nonzeros = 100000 }   # sparse

steps = '''  (written before the tables)
...
'''
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.computation import FUNCTIONS, Computation, KeyedTensor
from meshwright.spec.computation_steps import StepsReader
from meshwright.spec.toml_text import loaded
from meshwright.spec.workload import TRAINED_DTYPES

TABLES = ("format_version", "title", "dtype", "loss", "rate", "steps", "dims", "inputs", "mesh", "joins")
#: Of the form of a file, which may say it.
FORMAT_VERSION = 1
FIELDS = ("keys", "trained", "nonzeros", "values")
#: What a run fills inputs with: standard normal numbers, those between 0 and 1, ones, or a single 1 along the last key.
VALUES = ("normal", "uniform", "ones", "one-hot")
_NAME = re.compile(r"[A-Za-z_]\w*")


def load(path: str | Path) -> Computation:
    """Read a computation.

    Raises:
        MeshwrightError: A004 for everything that is wrong with it, all at once, each with its line.
    """
    help = "give a TOML file with [dims], [inputs] and steps: meshwright explain computation"
    text, table = loaded(path, "A004", help)
    return read(table, text, str(path))


def read(table: Mapping[str, Any], text: str = "", path: str = "computation.toml") -> Computation:
    """Return the computation of a table; `text` is what it was read from, for the lines of errors.

    Raises:
        MeshwrightError: A004, as :func:`load` says.
    """
    reader = _Reader(table, text, path)
    found = reader.read()
    if reader.wrong:
        raise MeshwrightError(dict.fromkeys(reader.wrong))
    return found


class _Lines:
    """Where a file says a key: its line, by a plain look at how lines begin."""

    def __init__(self, text: str):
        self.at: dict[tuple[str, str], int] = {}
        table = ""
        for number, line in enumerate(text.splitlines(), 1):
            if head := re.match(r"\s*\[([^\[\]]+)\]", line):
                table = head[1].strip()
                self.at.setdefault((table, ""), number)
            elif key := re.match(r"""\s*["']?([\w-]+)["']?\s*=""", line):
                self.at.setdefault((table, key[1]), number)

    def of(self, table: str, key: str = "") -> int:
        return self.at.get((table, key), self.at.get((table, ""), 0))


class _Reader:
    """A file's values, and everything that is wrong with them."""

    def __init__(self, table: Mapping[str, Any], text: str, path: str):
        self.table, self.text, self.path = table, text, path
        self.line = _Lines(text).of
        self.wrong: list[Diagnostic] = []
        self.dims: dict[str, int] = {}
        self.tensors: dict[str, KeyedTensor] = {}
        self.nonzeros: dict[str, int] = {}

    def bad(self, line: int, where: str, message: str, help: str) -> None:
        place = f"{self.path}:{line}: {where}" if line else f"{self.path}: {where}"
        self.wrong.append(Diagnostic(code="A004", message=message, place=place, help=help))

    def read(self) -> Computation:
        for key in self.table:
            if key not in TABLES:
                line = self.line(key) or self.line("", key)
                self.bad(line, key, f"unknown key {key!r}", nearest(key, list(TABLES)))
        version = self.table.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            help = f"write format_version = {FORMAT_VERSION}, or drop it"
            message = f"format_version is {version!r}, this version reads {FORMAT_VERSION}"
            self.bad(self.line("", "format_version"), "format_version", message, help)
        self._dims()
        self._inputs()
        dtype = self._word("dtype", "fp32", TRAINED_DTYPES)
        loss = self._word("loss", "loss", ())
        rate = self.table.get("rate", 0.1)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            self.bad(self.line("", "rate"), "rate", f"rate = {rate!r} is no number above 0", "say such as rate = 0.1")
            rate = 0.1
        steps = StepsReader(self, loss).read()
        return Computation(
            name=Path(self.path).stem,
            dims=self.dims,
            tensors=self.tensors,
            nonzeros=self.nonzeros,
            steps=steps,
            loss=loss,
            dtype=dtype,
            mesh=tuple(self._sizes("mesh", "an axis", "x = 8").items()),
            rate=float(rate),
            joins=self._joins(),
        )

    def _joins(self) -> dict[str, dict[str, str]]:
        """The keys along which joins are said to be cut, by axis."""
        rows, found = self.table.get("joins", {}), {}
        if not isinstance(rows, Mapping):
            self.bad(self.line("", "joins"), "joins", f"joins = {rows!r} is no table", 'say [joins], then C = "i"')
            return {}
        for name, said in rows.items():
            by_axis = said if isinstance(said, Mapping) else {"": said}
            if all(isinstance(key, str) for key in by_axis.values()):
                found[name] = dict(by_axis)
            else:
                help = f'say {name} = "KEY", or {name} = {{ AXIS = "KEY" }}'
                self.bad(self.line("joins", name), f"joins.{name}", f"{name} = {said!r} names no key", help)
        return found

    def _word(self, key: str, usual: str, known: Sequence[str]) -> str:
        value = self.table.get(key, usual)
        if not isinstance(value, str) or (known and value not in known):
            help = nearest(str(value), list(known)) if known else f'say {key} = "{usual}"'
            self.bad(self.line("", key), key, f"{key} = {value!r} is not known", help)
            return usual
        return value

    def _sizes(self, table: str, what: str, example: str) -> dict[str, int]:
        """The whole numbers of a table by name."""
        rows, found = self.table.get(table, {}), {}
        if not isinstance(rows, Mapping):
            self.bad(self.line("", table), table, f"{table} = {rows!r} is no table", f"say [{table}], then {example}")
            return {}
        for name, size in rows.items():
            line = self.line(table, name)
            if not _NAME.fullmatch(name):
                self.bad(line, f"{table}.{name}", f"{name!r} is no name", "letters, digits and _, no digit first")
            elif isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**53:
                message = f"{name} = {size!r} is no whole number of 1 and more"
                self.bad(line, f"{table}.{name}", message, f"give {what} its length: {example}")
            found[name] = size if isinstance(size, int) and size > 0 else 1
        return found

    def _dims(self) -> None:
        self.dims = self._sizes("dims", "a dim", "batch = 64")
        if not self.dims:
            self.bad(self.line("dims"), "[dims]", "it has no dims", "say [dims], then a length each: batch = 64")

    def _inputs(self) -> None:
        rows = self.table.get("inputs", {})
        if not isinstance(rows, Mapping) or not rows:
            help = 'say [inputs], then W = { keys = ["in", "out"], trained = true }'
            self.bad(self.line("inputs"), "[inputs]", "it has no inputs", help)
            return
        for name, fields in rows.items():
            self._input(name, fields, self.line("inputs", name) or self.line(f"inputs.{name}"))
        if not any(tensor.trained for tensor in self.tensors.values()):
            help = "say trained = true of one"
            self.bad(self.line("inputs"), "[inputs]", "no input is trained, so that nothing is derived", help)

    def _input(self, name: str, fields: Any, line: int) -> None:
        where = f"inputs.{name}"
        form = f'say {name} = {{ keys = ["user", "rank"], trained = true }}'
        if not _NAME.fullmatch(name) or name in FUNCTIONS or name == "sum":
            self.bad(
                line, where, f"{name!r} cannot be a tensor's name", "letters, digits and _, and no function's name"
            )
        if not isinstance(fields, Mapping):
            self.bad(line, where, f"{name} = {fields!r} is no table", form)
            return
        for field in fields:
            if field not in FIELDS:
                self.bad(line, where, f"unknown key {field!r}", nearest(field, list(FIELDS)))
        keys = fields.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            self.bad(line, where, f"keys = {keys!r} is no list of dims" if "keys" in fields else "it has no keys", form)
            keys = []
        keys = self.keys(tuple(keys), line, where)
        trained, values, nonzeros = fields.get("trained", False), fields.get("values", "normal"), fields.get("nonzeros")
        if not isinstance(trained, bool):
            self.bad(line, where, f"trained = {trained!r} is neither true nor false", "say trained = true")
        if values not in VALUES:
            self.bad(line, where, f"values = {values!r} is not known", f"known: {', '.join(VALUES)}")
            values = "normal"
        if nonzeros is not None and not keys:
            self.bad(line, where, "nonzeros is of a tensor with keys", "give it keys, or drop nonzeros")
            nonzeros = None
        if nonzeros is not None:
            places = 1
            for key in keys:
                places *= self.dims.get(key, 1)
            whole = isinstance(nonzeros, int) and not isinstance(nonzeros, bool)
            if not whole or not 1 <= nonzeros <= places:
                message = f"nonzeros = {nonzeros!r} is no whole number from 1 to the {places:,} places of its keys"
                self.bad(line, where, message, "say how many rows it has")
                nonzeros = 1
            self.nonzeros[name] = nonzeros
        rows = name if nonzeros is not None else ""
        self.tensors[name] = KeyedTensor(name=name, keys=keys, rows_of=rows, trained=trained is True, values=values)

    def keys(self, keys: tuple[str, ...], line: int, where: str) -> tuple[str, ...]:
        """Keys that are dims, each once; what is wrong with them is noted."""
        for key in dict.fromkeys(keys):
            if key not in self.dims:
                self.bad(
                    line, where, f"unknown dim {key!r}", nearest(key, list(self.dims)) if self.dims else "say [dims]"
                )
            if keys.count(key) > 1:
                help = f"give the second one a dim of its own, as long as {key}"
                self.bad(line, where, f"{key!r} is a key twice, and diagonals are not read", help)
        return tuple(dict.fromkeys(key for key in keys if key in self.dims))


__all__ = ["TABLES", "VALUES", "load", "read"]
