"""World traces: when nodes of a job fail and how fast it runs, drawn from a mean time between failures or read from a
file, and the words that say which.

``--world mtbf=3h,spares=4,repair=12h`` says a world in words; what is left out is the cluster's own. Words of clients
(``crowd.py``) and of faulty workers (``faulty.py``) may stand among them. A trace file has
lines of ``seconds,event``: ``fail``, or ``slow FACTOR`` (from then on a step takes FACTOR times as long); ``fail 3``
says which node fails, counted from 0, and ``back 3`` when that one is back::

    seconds,event
    86400,fail
    90000,slow 1.2
    93600,slow 1
    97200,fail 3
    99000,back 3
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.world.crowd import WANTED, Crowd, Slowness, factors
from meshwright.world.faulty import WANTED as FAULTY_WANTED
from meshwright.world.faulty import FaultyWorkers, faulty
from meshwright.world.slow import WORDS as SLOW
from meshwright.world.slow import SlowStep, value_of

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)", re.IGNORECASE)
#: A century: longer times are slips of the keyboard.
MOST_S = 3.2e9
MOST_DRAWS, MOST_SPARES = 10_000, 10**6


class WorldEvent(msgspec.Struct, frozen=True):
    """An event at ``at_s`` seconds of the job: a failure where ``slowdown`` is None, else from then on
    a step takes ``slowdown`` times as long. ``node``: the one that fails, -1 for any; ``back_s``: when it is back,
    where that is known."""

    at_s: float
    slowdown: float | None = None
    node: int = -1
    back_s: float | None = None


class JobWorld(msgspec.Struct, frozen=True, kw_only=True):
    """The world of a job: what it meets, and what stands ready for it. ``trace`` is what happens, else failures are
    drawn with a mean of ``mtbf_s`` between them (None: the cluster's). A failed node is back after ``repair_s``;
    ``spares`` stand in for failed nodes (None: always). A checkpoint takes ``save_s`` (None: as the cluster's
    drives write it), one every ``checkpoint_s`` (None: Young's interval), and ``restart_s`` lie between a failure
    and the next step. ``clients``: replicas that differ, where they are clients of a server; ``slow``: ranks and
    links that are slow in every step; ``faulty``: replicas that bring something else than their gradients;
    ``recovery`` and ``saving``: how the job goes on after a failure, and how it saves, of :data:`CHOICES`; ``of_job``:
    there is more than these."""

    trace: tuple[WorldEvent, ...] | None = None
    source: str = ""
    mtbf_s: float | None = None
    repair_s: float = 86_400.0
    spares: int | None = None
    save_s: float | None = None
    checkpoint_s: float | None = None
    restart_s: float | None = None
    draws: int = 100
    seed: int = 0
    clients: Crowd | None = None
    slow: SlowStep | None = None
    faulty: FaultyWorkers | None = None
    recovery: str = "checkpoint"
    saving: str = "blocking"
    of_job: bool = True

    @property
    def jitter(self) -> Slowness | None:
        """How the steps of replicas vary that are no clients of a server; None where nothing says so, or more is said
        that only clients have."""
        return self.clients.jitter if self.clients is not None and self.clients.wavers_alone else None


def read(text: str, *, base: Path = Path(), place: str = "--world") -> JobWorld:
    """The world that words say, or a trace file with words behind it: ``failures.csv,spares=2``. The file lies in
    `base` unless its path says otherwise.

    Raises:
        MeshwrightError: O001 for every word that is wrong, O002 for every line of a trace that is; all at once.
    """
    fields: dict[str, object] = {}
    clients: dict[str, object] = {}
    slow: dict[str, object] = {}
    wrong: list[Diagnostic] = []
    for part in (part.strip() for part in text.split(",")):
        key, equals, value = part.partition("=")
        try:
            if not equals and part.endswith(".csv"):
                fields |= {"trace": read_trace(str(base / part)), "source": part}
            elif key.lower() == FAULTY:
                if (said := faulty(value)) is None or FAULTY in fields:
                    message = f"faulty={value!r} is not {FAULTY_WANTED}" if said is None else "faulty is said twice"
                    wrong.append(_bad(place, text, message, "faulty=2:noise"))
                fields[FAULTY] = said
            elif key.lower() in _CLIENTS or key.lower() in SLOW:
                into, reads = (slow, _of_step) if key.lower() in SLOW else (clients, _of_clients)
                if key.lower() in into:
                    wrong.append(_bad(place, text, f"{key} is said twice", "keep one of them"))
                into[key.lower()] = reads(key.lower(), value, place, text)
            elif part != "catalog":  # the cluster's own failure rate, which is meant anyway
                name, found = _word(key.lower(), value, place, text)
                if fields.get(name, found) != found:
                    wrong.append(_bad(place, text, f"{key} is said twice", "keep one of them"))
                fields[name] = found
        except MeshwrightError as error:
            wrong += error.diagnostics
    if "trace" in fields and "mtbf_s" in fields:
        wrong.append(_bad(place, text, "a trace says when nodes fail, and so does mtbf", "keep one of them"))
    if fields.get("saving") == "lazy" and fields.get("recovery", "checkpoint") != "checkpoint":
        message = f"saving=lazy is of checkpoints, and recovery={fields['recovery']} keeps steps otherwise"
        wrong.append(_bad(place, text, message, "say recovery=all to see them side by side, or leave one of them out"))
    if wrong:
        raise MeshwrightError(wrong)
    if clients or slow or FAULTY in fields:
        fields |= {"of_job": bool(fields.keys() - {"seed", FAULTY}) or "catalog" in text.split(",")}
    seed = fields.get("seed", 0)
    fields |= {FAULTY: FaultyWorkers(**fields[FAULTY], seed=seed)} if FAULTY in fields else {}
    fields |= {"clients": Crowd(**clients, seed=seed)} if clients else {}
    fields |= {"slow": SlowStep(**slow, seed=seed)} if slow else {}
    return JobWorld(**fields)


def _of_step(key: str, value: str, place: str, text: str) -> object:
    """The value of a word of slow ranks and links."""
    found = value_of(key, value)
    if isinstance(found, str):
        raise MeshwrightError(_bad(place, text, f"{key}={value!r} is not {found}", f"{key}={SLOW[key]}"))
    return found


def _of_clients(key: str, value: str, place: str, text: str) -> object:
    """The value of a word of clients."""
    if key in ("speeds", "jitter", "links"):
        found, wanted = factors(value), WANTED
    else:
        number, most = _number(value), 0.999 if key == "drop" else 1e6
        found = number if number is not None and 0 < number <= most else None
        wanted = f"a number above 0 and up to {most:g}"
    if found is None:
        raise MeshwrightError(_bad(place, text, f"{key}={value!r} is not {wanted}", f"{key}={_CLIENTS[key]}"))
    return found


def _word(key: str, value: str, place: str, text: str) -> tuple[str, object]:
    """One word's field and value."""
    if key in _DURATIONS:
        seconds = duration_s(value)
        if seconds is None or seconds < _LEAST[key]:
            raise MeshwrightError(
                _bad(place, text, f"{key}={value!r} is not a duration", f"{key}=10m, such as 90s, 3h or 2d")
            )
        return _DURATIONS[key], seconds
    if key in _COUNTS:
        least, most = _COUNTS[key]
        if not value.isdecimal() or not least <= int(value) <= most:
            raise MeshwrightError(
                _bad(place, text, f"{key}={value!r} is not a number from {least} to {most:,}", f"{key}={least}")
            )
        return key, int(value)
    if key in CHOICES:
        if value.lower() not in CHOICES[key]:
            known = CHOICES[key]
            message = f"{key}={value!r} is not one of {', '.join(known)}"
            raise MeshwrightError(_bad(place, text, message, nearest(value, known) or f"{key}={known[0]}"))
        return key, value.lower()
    known = [*CHOICES, *_DURATIONS, *_COUNTS, *_CLIENTS, *SLOW, FAULTY, "catalog"]
    help = f"{nearest(key, known)} or name a trace file, failures.csv"
    raise MeshwrightError(_bad(place, text, f"unknown word {key!r} of a world", help))


#: The word of faulty workers.
FAULTY = "faulty"
#: Words of clients, each with an example.
_CLIENTS = {"speeds": "lognormal:0.5", "jitter": "slow:0.1x6", "links": "uniform:1-4", "drop": "0.05", "skew": "0.3"}
_LEAST = {"mtbf": 1.0, "repair": 0.0, "save": 0.0, "checkpoint": 1e-3, "restart": 0.0}
_DURATIONS = {key: f"{key}_s" for key in _LEAST}
#: How a job goes on after a failure (``all``: each, side by side), and how it saves.
CHOICES = {"recovery": ("checkpoint", "memory", "elastic", "all"), "saving": ("blocking", "lazy")}
_COUNTS = {"spares": (0, MOST_SPARES), "draws": (1, MOST_DRAWS), "seed": (0, 2**32 - 1)}


def duration_s(text: str) -> float | None:
    """``90s``, ``10m``, ``3h``, ``2d``, ``1w`` in seconds; None when it is none of them or above a century."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
    return seconds if seconds <= MOST_S else None


def _bad(place: str, text: str, message: str, help: str) -> Diagnostic:
    return Diagnostic(code="O001", message=message, place=f"{place} {text}", help=help)


def read_trace(path: str) -> tuple[WorldEvent, ...]:
    """The changes in a trace file, in order of time.

    Raises:
        MeshwrightError: O002 unreadable, and for every line that is wrong, with its number.
    """
    try:
        rows = list(csv.reader(Path(path).read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text of seconds,event"
        raise MeshwrightError.one("O002", f"cannot read the trace: {reason}", place=path) from None
    found: list[WorldEvent] = []
    wrong: list[Diagnostic] = []
    out: dict[int, int] = {}  # nodes that are out: where in `found` they failed
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and cells[0].lower() == "seconds"):
            continue
        problem = _problem(cells, found[-1].at_s if found else 0.0) or _outage(cells, found, out)
        if problem:
            wrong.append(Diagnostic(code="O002", message=problem, place=f"{path}:{number}: {','.join(row)!r}"))
            continue
        at_s, (what, *said) = float(cells[0]), cells[1].lower().split()
        if what == "back":
            failed = out.pop(int(said[0]))
            found[failed] = msgspec.structs.replace(found[failed], back_s=at_s)
            continue
        if what == "fail" and said:
            out[int(said[0])] = len(found)
            found.append(WorldEvent(at_s, node=int(said[0])))
        else:
            found.append(WorldEvent(at_s, float(said[0]) if said else None))
    if not found and not wrong:
        wrong.append(Diagnostic(code="O002", message="the trace has no events", place=path, help="86400,fail"))
    if wrong:
        raise MeshwrightError(wrong)
    return tuple(found)


def _outage(cells: list[str], found: list[WorldEvent], out: dict[int, int]) -> str:
    """Why a node of a line cannot fail, or be back, then; "" where it can."""
    what, *said = cells[1].lower().split()
    if what == "slow" or not said:
        return ""
    node = int(said[0])
    if what == "fail" and node in out:
        since = found[out[node]].at_s
        return f"outages of node {node} overlap: it is out since {since:g}, and fails again at {cells[0]}"
    if what == "back" and node not in out:
        return f"node {node} is back, and it is not out"
    return ""


def unknown_nodes(events: Iterable[WorldEvent], num_nodes: int, source: str) -> list[Diagnostic]:
    """O007 for every node of a trace that there is not among so many."""
    return [
        Diagnostic(
            code="O007",
            message=f"node {one.node} fails at {one.at_s:g} s, and there are {num_nodes} nodes",
            place=source,
            help=f"nodes are 0 to {num_nodes - 1}",
        )
        for one in events
        if one.node >= num_nodes
    ]


def _problem(cells: list[str], after_s: float) -> str:
    """Why a line of a trace cannot be; "" when it can."""
    if len(cells) != 2:
        return "a line is seconds,event"
    at_s, event = _number(cells[0]), cells[1].lower().split()
    if at_s is None or not 0 <= at_s <= MOST_S:
        return "the time must be seconds from 0 on"
    if at_s < after_s:
        return f"times go up, and {cells[0]} comes after {after_s:g}"
    if event == ["fail"] or (len(event) == 2 and event[0] in ("fail", "back") and event[1].isdecimal()):
        return ""
    factor = _number(event[1]) if len(event) == 2 and event[0] == "slow" else None
    if factor is not None and 1e-3 <= factor <= 1e6:
        return ""
    return "the event must be fail, fail or back and the number of a node, or slow and a factor above 0"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def changes(world: JobWorld, mtbf_s: float | None, draw: int) -> Iterator[WorldEvent]:
    """The events of one draw of the world, without end where failures are drawn: exponential times of mean `mtbf_s`,
    none where that is None. A trace is the same in every draw."""
    if world.trace is not None:
        yield from world.trace
        return
    if mtbf_s is None:
        return
    rng, at_s = np.random.default_rng((world.seed, draw)), 0.0
    while True:
        for gap in rng.exponential(mtbf_s, 64).tolist():
            at_s += gap
            yield WorldEvent(at_s)
