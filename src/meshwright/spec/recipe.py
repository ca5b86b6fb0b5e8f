"""A recipe of data operators: what is done with every sample of a data set, in an order that may be another.

A file says the samples, the machines and the operators::

    format_version = 1
    samples = "70m"
    sample = "4kB"
    processes = 64
    [contexts]
    words = "0.8ms"
    [[operators]]
    name = "words_num_filter"
    takes = "0.1ms"
    keep = 0.9
    shares = "words"

A Data-Juicer configuration (its ``process:`` list, read by PyYAML's safe loader) says the operators' names and order;
what they take is then in a second file of this form.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.quantity import parse_bytes, parse_count
from meshwright.spec.feed import duration

FORMAT_VERSION = 1
#: Kinds of operators: one sample to one, to one or none, and what looks at all samples.
MAPPER, FILTER, DEDUPLICATOR = "mapper", "filter", "deduplicator"
KINDS = (MAPPER, FILTER, DEDUPLICATOR)
#: The field that operators read and mappers write, where a recipe does not say.
TEXT = "text"
MOST_OPERATORS = 256
_YAML = (".yaml", ".yml")


class DataOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator: seconds of a core for a sample (``takes_s``), the share of samples that it keeps, the context that
    it shares ("" for none), bytes of memory in every process, how much larger it makes a sample (``grows``), and the
    fields that it reads and writes."""

    name: str
    kind: str
    takes_s: float
    keep: float = 1.0
    shares: str = ""
    memory_bytes: float = 0.0
    grows: float = 1.0
    reads: tuple[str, ...] = (TEXT,)
    writes: tuple[str, ...] = ()

    def before(self, other: DataOperator) -> bool:
        """Whether this one, which a recipe has first, has to stay before another: the other's outcome would change.

        Filters look at their own sample alone, and pass it on as it is, so that they change places with one another
        and with mappers that write nothing they read. A deduplicator keeps one of several samples: which of them there
        are is what every operator before it decided."""
        if DEDUPLICATOR in (self.kind, other.kind):
            return True
        mine, theirs = set(self.writes), set(other.writes)
        return bool(mine & {*other.reads, *theirs} or theirs & set(self.reads))


class DataRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """The operators in the order of the recipe, seconds of a core that each context takes for a sample, and what they
    run on: so many ``nodes`` with ``processes`` each and ``memory_bytes`` (0: enough), which read and write samples of
    ``sample_bytes`` at ``read_bytes_s`` a node (0: not the bound). ``cached``: every pass writes what it leaves."""

    operators: tuple[DataOperator, ...]
    samples: int
    contexts: dict[str, float] = {}
    sample_bytes: float = 0.0
    nodes: int = 1
    processes: int = 1
    memory_bytes: float = 0.0
    read_bytes_s: float = 0.0
    cached: bool = False
    shuffle_bytes_s: float = 0.0


class _Reader:
    """The values of a file, and everything that is wrong with them."""

    def __init__(self, path: str):
        self.path = path
        self.wrong: list[Diagnostic] = []

    def bad(self, what: str, help: str) -> None:
        self.wrong.append(Diagnostic(code="W022", message=what, place=self.path, help=help))

    def known(self, table: dict[str, Any], names: tuple[str, ...], where: str) -> None:
        for key in table:
            if key not in names:
                self.bad(f"unknown key {key!r}{where}", nearest(key, list(names)))

    def read(self, table: dict[str, Any], key: str, usual: Any, reader: Any, wanted: str) -> Any:
        if key not in table:
            return usual
        found = reader(table[key])
        if found is None:
            self.bad(f"{key} = {table[key]!r} is not {wanted}", f"write {key} = <{wanted}>")
            return usual
        return found


def _time(value: Any) -> float | None:
    return duration(value) if isinstance(value, str) else 0.0 if value == 0 else None


def _bytes(value: Any) -> float | None:
    return parse_bytes(value) if isinstance(value, str) else None


def _rate(value: Any) -> float | None:
    return parse_bytes(value.removesuffix("/s")) if isinstance(value, str) and value.endswith("/s") else None


def _whole(value: Any) -> int | None:
    read = parse_count(value) if isinstance(value, str) else value if type(value) is int else None
    return read if read is not None and 0 < read <= 10**15 else None


def _share(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value <= 1 else None


def _factor(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value <= 1e6 else None


def _fields(value: Any) -> tuple[str, ...] | None:
    return tuple(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else None


_OPERATOR = ("name", "kind", "takes", "keep", "shares", "memory", "grows", "reads", "writes")
_RECIPE = ("format_version", "samples", "sample", "nodes", "processes", "memory", "read", "shuffle", "cached")
_RECIPE += ("contexts", "operators")


def load(path: str, costs: str = "") -> DataRecipe:
    """Return the recipe in a file: one of this form, or a Data-Juicer configuration with its `costs` in one.

    Raises:
        MeshwrightError: W022 for everything that is wrong with it; X006 for a file that cannot be read.
    """
    if not path.endswith(_YAML):
        if costs:
            message = f"{path} says itself what its operators take"
            help = "drop --costs, which is of a Data-Juicer configuration (.yaml)"
            raise MeshwrightError.one("W022", message, place=f"--costs {costs}", help=help)
        return _recipe(_toml(path), path)
    names = _juicer(path)
    if not costs:
        message = "a Data-Juicer configuration does not say what its operators take"
        help = "say --costs FILE.toml with [[operators]] by the same names: takes=, keep=, shares="
        raise MeshwrightError.one("W022", message, place=path, help=help)
    priced = _recipe(_toml(costs), costs)
    known = {one.name: one for one in priced.operators}
    lacking = [name for name in names if name not in known]
    if lacking:
        reader = _Reader(costs)
        for name in dict.fromkeys(lacking):
            reader.bad(f"it does not say what {name} takes", nearest(name, list(known)))
        raise MeshwrightError(reader.wrong)
    return msgspec.structs.replace(priced, operators=tuple(known[name] for name in names))


def _toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        raise MeshwrightError.one("X006", f"cannot read {path}: {reason}", place=path) from None


def _juicer(path: str) -> list[str]:
    """Names of the operators of a Data-Juicer configuration, in its order."""
    import yaml

    try:
        said = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not YAML"
        raise MeshwrightError.one("X006", f"cannot read {path}: {reason}", place=path) from None
    steps = said.get("process") if isinstance(said, dict) else None
    listed = steps if isinstance(steps, list) else []
    names = [next(iter(one)) if isinstance(one, dict) and len(one) == 1 else one for one in listed]
    if not names or not all(isinstance(name, str) for name in names):
        help = "process: is a list of operators by name, each with its options"
        raise MeshwrightError.one("W022", "it has no list of operators under process:", place=path, help=help)
    return names


def _recipe(table: dict[str, Any], path: str) -> DataRecipe:
    reader = _Reader(path)
    if table.get("format_version") != FORMAT_VERSION:
        reader.bad("format_version is missing or another", f"write format_version = {FORMAT_VERSION} at the top")
    reader.known(table, _RECIPE, "")
    contexts = {}
    said = table.get("contexts", {})
    if not isinstance(said, dict):
        reader.bad(f"contexts = {said!r} is no table", 'write [contexts] and under it words = "0.8ms"')
    for name, value in said.items() if isinstance(said, dict) else ():
        contexts[name] = reader.read({name: value}, name, 0.0, _time, "a time with its unit, such as 0.8ms")
    listed = table.get("operators")
    tables = isinstance(listed, list) and all(isinstance(one, dict) for one in listed)
    if not tables or not 0 < len(listed) <= MOST_OPERATORS:
        reader.bad("it has no [[operators]]", f"one for each, up to {MOST_OPERATORS}")
        listed = []
    operators = tuple(_operator(one, contexts, reader) for one in listed)
    if "samples" not in table:
        reader.bad("it does not say samples", 'for example samples = "70m"')
    found = {
        "samples": reader.read(table, "samples", 1, _whole, 'a number such as "70m"'),
        "sample_bytes": reader.read(table, "sample", 0.0, _bytes, 'bytes such as "4kB"'),
        "nodes": reader.read(table, "nodes", 1, _whole, "a whole number"),
        "processes": reader.read(table, "processes", 1, _whole, "a whole number"),
        "memory_bytes": reader.read(table, "memory", 0.0, _bytes, 'bytes of a node such as "512GB"'),
        "read_bytes_s": reader.read(table, "read", 0.0, _rate, 'a rate of a node such as "2GB/s"'),
        "shuffle_bytes_s": reader.read(table, "shuffle", 0.0, _rate, 'a rate of a node such as "1GB/s"'),
        "cached": reader.read(table, "cached", False, lambda v: v if isinstance(v, bool) else None, "true or false"),
    }
    if reader.wrong:
        raise MeshwrightError(reader.wrong)
    return DataRecipe(operators=operators, contexts=contexts, **found)


def _operator(table: dict[str, Any], contexts: dict[str, float], reader: _Reader) -> DataOperator:
    name = table.get("name")
    if not isinstance(name, str) or not name:
        reader.bad("an operator has no name", 'name = "words_num_filter"')
        name = "?"
    reader.known(table, _OPERATOR, f" of {name}")
    kind = table.get("kind") or next((kind for kind in KINDS if name.endswith(f"_{kind}")), "")
    if kind not in KINDS:
        reader.bad(f"the kind of {name} is not said", f"kind = one of {', '.join(KINDS)}")
    if "takes" not in table:
        reader.bad(f"it is not said what {name} takes", 'takes = "0.1ms", of a core a sample')
    shares = table.get("shares", "")
    if shares and shares not in contexts:
        reader.bad(f"{name} shares {shares!r}, which is no context", f'[contexts] {shares} = "1ms"')
    writes = (TEXT,) if kind == MAPPER else ()
    return DataOperator(
        name=name,
        kind=kind,
        takes_s=reader.read(table, "takes", 0.0, _time, "a time with its unit, such as 0.1ms"),
        keep=reader.read(table, "keep", 1.0, _share, "a share above 0 and up to 1"),
        shares=shares,
        memory_bytes=reader.read(table, "memory", 0.0, _bytes, 'bytes of a process such as "2GB"'),
        grows=reader.read(table, "grows", 1.0, _factor, "a factor above 0"),
        reads=reader.read(table, "reads", (TEXT,), _fields, "a list of fields"),
        writes=reader.read(table, "writes", writes, _fields, "a list of fields"),
    )
