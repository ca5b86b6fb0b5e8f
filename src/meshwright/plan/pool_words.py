"""The words and the TOML of a plan of several pools.

``encoder=[dp2 mb4 on=0:2 part=0:8 frozen] + lm=[tp2 pp3 part=8:32]``: a pool is its name and its words in brackets.
``on=`` are its devices, ``part=`` its layers, ``frozen`` says that it is not trained, and all others are those of a
plan. Words outside of brackets are said to every pool. ``encoder->lm`` is a link; without one each pool feeds the next.
``prefill=[tp2 dp2] + decode=[dp4] prefill->decode:kv`` are pools that serve: keys and values flow from one to another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan.pool import ACTIVATIONS, FLOWS, Pool, PoolLink, chain
from meshwright.plan.record import Plan, joined
from meshwright.plan.text import read as read_words
from meshwright.spec.parts import is_range

_POOL = re.compile(r"([^\s=\[\]+]*)\s*=\s*\[([^\[\]]*)\]")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_LINK = re.compile(r"([^\s\->:]+)->([^\s\->:]+?)(?::(\S+))?")
_DEVICES = re.compile(r"(\d{1,9}):(\d{1,9})")
#: Words of a pool that its plan has not.
OWN = ("on=0:2", "part=0:8", "frozen")


def is_several(text: str) -> bool:
    """Whether a plan's text says pools."""
    return "[" in text or "]" in text or "->" in text


def read(text: str, *, place: str = "--plan") -> Plan:
    """The plan of pools that a text says.

    Raises:
        MeshwrightError: P040 for what is no pool or link, and what is wrong with the words of each; all at once.
    """
    text = text.lower()
    found: list[Diagnostic] = []
    said = [(match[1], match[2]) for match in _POOL.finditer(text)]
    rest = _POOL.sub(" + ", text)
    links, common = [], []
    for word in rest.replace("+", " ").split():
        if "[" in word or "]" in word:
            found.append(_bad(f"{word!r} is half of a pool", place, text))
        elif "->" in word:
            links.append(word)
        else:
            common.append(word)
    try:
        read_words(" ".join(common), place=place)
    except MeshwrightError as error:
        found += error.diagnostics
        common = []
    pools = [_pool(name, " ".join((words, *common)), place, found) for name, words in said]
    if len(said) < 2:
        found.append(_bad(f"{'one pool' if said else 'no pool'} in brackets, and several are joined", place, text))
    return _plan(tuple(pool for pool in pools if pool), [_link(word, place, found) for word in links], place, found)


def words_of(text: str) -> dict[str, str]:
    """Return the words of each pool by its name, in a text that :func:`read` takes: its own, and those said to all."""
    text = text.lower()
    common = [word for word in _POOL.sub(" + ", text).replace("+", " ").split() if "->" not in word]
    plain = {match[1]: match[2].split() for match in _POOL.finditer(text)}
    own = {
        name: [w for w in some if w != "frozen" and not w.startswith(("on=", "part="))] for name, some in plain.items()
    }
    return {name: " ".join((*some, *common)) for name, some in own.items()}


def _bad(problem: str, place: str, text: str, help: str = "") -> Diagnostic:
    usual = "write encoder=[dp2 on=0:2 part=0:8] + lm=[tp2 pp3 part=8:32], and the words of one pool without brackets"
    return Diagnostic(code="P040", message=problem, place=f"{place} {text!r}", help=help or usual)


def _pool(name: str, words: str, place: str, found: list[Diagnostic]) -> Pool | None:
    before = len(found)
    if not _NAME.fullmatch(name):
        found.append(_bad(f"{name!r} is no name of a pool", place, f"{name}=[{words}]", "a letter, then a-z 0-9 _ -"))
    own, others = {}, []
    for word in words.split():
        key, _, value = word.partition("=")
        if word == "frozen":
            own["frozen"] = True
        elif key in ("on", "part"):
            problem = _repeated(own, key, value) or _wrong_value(key, value)
            if problem:
                found.append(_bad(problem, place, f"{name}=[... {word}]", "write on=0:2 for devices 0 and 1, part=0:8"))
            own[key] = value
        else:
            others.append(word)
    try:
        plan = read_words(" ".join(others), place=place)
    except MeshwrightError as error:
        found += error.diagnostics
        return None
    if len(found) > before:
        return None
    return Pool(
        name=name,
        devices=tuple(map(int, own["on"].split(":"))) if "on" in own else (),
        part=_plain(own.get("part", "")),
        frozen=own.get("frozen", False),
        plan=plan,
    )


def _repeated(own: Mapping[str, Any], key: str, value: str) -> str:
    return f"{key}={own[key]} and {key}={value} contradict each other" if own.get(key, value) != value else ""


def _wrong_value(key: str, value: str) -> str:
    """Why a text is no devices and no part; "" when it may be."""
    if key == "on":
        match = _DEVICES.fullmatch(value)
        return "" if match and int(match[1]) < int(match[2]) else f"on={value} is no range of devices"
    usable = is_range(value) or _NAME.fullmatch(value)
    return "" if usable else f"part={value} is no range of layers and no name"


def _plain(part: str) -> str:
    """A part as it is written: without leading zeros."""
    if not is_range(part):
        return part
    return ":".join(str(int(end)) if end else "" for end in part.split(":"))


def _link(word: str, place: str, found: list[Diagnostic]) -> PoolLink | None:
    match = _LINK.fullmatch(word)
    if match is None:
        found.append(_bad(f"{word!r} is no link", place, word, "write encoder->lm"))
        return None
    what = match[3] or ACTIVATIONS
    if what not in FLOWS:
        help = f"known: {', '.join(FLOWS)}; encoder->lm in training, prefill->decode:kv in serving"
        found.append(_bad(f"{what!r} does not flow between pools yet", place, word, help))
    return PoolLink(source=match[1], target=match[2], what=what)


def _plan(pools: tuple[Pool, ...], links: list[PoolLink | None], place: str, found: list[Diagnostic]) -> Plan:
    names = [pool.name for pool in pools]
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        found.append(_bad(f"two pools are called {name!r}", place, f"{name}=[...]", "each pool has a name of its own"))
    if found:
        raise MeshwrightError(found)
    return joined(pools, tuple(link for link in links if link) or chain(pools))


def tables(plan: Plan, dump: Any) -> dict[str, Any]:
    """The TOML tables of a plan's pools; `dump` gives those of one plan."""
    out: dict[str, Any] = {}
    if plan.links != chain(plan.pools):
        out["links"] = [link.text() for link in plan.links]
    own = {}
    for pool in plan.pools:
        row: dict[str, Any] = {}
        if pool.devices:
            row["on"] = f"{pool.devices[0]}:{pool.devices[1]}"
        row |= {"part": pool.part} if pool.part else {}
        row |= {"frozen": True} if pool.frozen else {}
        own[pool.name] = row | dump(pool.plan)
    return out | {"pools": own}


def from_tables(pools: Any, links: Any, place: str, load: Any) -> Plan:
    """The plan of TOML tables; `load` reads the facets of one plan (tables, place, errors) into a plan.

    Raises:
        MeshwrightError: P040 and P004 for every key and value that is wrong, with its place.
    """
    found: list[Diagnostic] = []
    if not isinstance(pools, dict) or len(pools) < 2 or not all(isinstance(row, dict) for row in pools.values()):
        raise MeshwrightError(_bad("several pools are wanted, each a table", place, "pools", "write [pools.encoder]"))
    made = []
    for name, row in pools.items():
        words = []
        for key in ("on", "part", "frozen"):
            value = row.get(key, False if key == "frozen" else "")
            if not isinstance(value, bool if key == "frozen" else str) or (isinstance(value, str) and " " in value):
                wanted = "true or false" if key == "frozen" else 'a text such as "0:8"'
                found.append(_bad(f"{key} is {wanted}", place, f"pools.{name}.{key} = {value!r}", wanted))
            elif value:
                words.append(key if key == "frozen" else f"{key}={value.lower()}")
        facets = {key: rows for key, rows in row.items() if key not in ("on", "part", "frozen")}
        plan = load(facets, f"pools.{name}.", place, found)
        pool = _pool(name, " ".join(words), place, found)
        if pool:
            made.append(msgspec.structs.replace(pool, plan=plan))
    if not isinstance(links, list) or not all(isinstance(link, str) for link in links):
        found.append(_bad("links are a list of texts", place, f"links = {links!r}", 'write links = ["encoder->lm"]'))
        links = []
    return _plan(tuple(made), [_link(link.lower(), place, found) for link in links], place, found)


def unknown(name: str, pools: tuple[Pool, ...]) -> str:
    """A help line for a name that no pool has."""
    return nearest(name, [pool.name for pool in pools])
