"""The serving workload: which requests arrive when, how long they are, and how fast they have to be answered.

``rate=8,prompt=1024,output=256,requests=2000`` is 2,000 requests at random times, 8 a second on average. Arrivals are
Poisson's, bursts (``cv=``), a closed loop (``concurrency=``), one static batch (``batch=``), those of a recorded trace
(``trace=``), or of many clients whose rates change from window to window (``windows=``); lengths are fixed, drawn,
those of a file, or the trace's. Requests are turns of conversations (``turns=``), samples of one query
(``samples=``), begin alike (``prefix=``), and are of tenants, priorities and adapters. ``ttft=500ms,tpot=50ms@p90`` is
the service level objective (SLO), ``ttft.1=200ms`` that of priority 1. The words of the engine (``policy=``,
``budget=``) are :class:`EngineWords`'s. ``FILE.toml`` in front of the words is a file of them
(:mod:`meshwright.spec.serve_file`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.catalog import meant
from meshwright.errors import Diagnostic, MeshwrightError, unseparated
from meshwright.quantity import bytes_text
from meshwright.spec import serve_file
from meshwright.spec.engine_words import ENGINE_READERS, OWN_POLICIES, EngineWords
from meshwright.spec.lengths import Lengths
from meshwright.spec.lengths import is_file as is_file_of_lengths
from meshwright.spec.lengths import read as read_lengths
from meshwright.spec.request_limits import FASTEST, LONGEST, MOST_REQUESTS
from meshwright.spec.routing import Routing
from meshwright.spec.routing import read as read_routing
from meshwright.spec.serve_rules import contradictions
from meshwright.spec.serve_values import (
    AUTO_BUDGET,
    Certain,
    Chunks,
    Objective,
    Pause,
    Population,
    SharedPrefix,
    Turns,
    certain,
    chunks,
    count,
    duration_s,
    file_name,
    num_requests,
    objective,
    one_of,
    pause,
    population,
    positive,
    prefix,
    priorities,
    seed,
    turns,
)

if TYPE_CHECKING:
    from meshwright.spec.requests import Requests

BURSTS = ("gamma", "weibull")
BOUNDS = ("ttft", "tpot", "e2e")
_BOUND_OF_A_CLASS = re.compile(r"(ttft|tpot|e2e)\.(-?\d{1,9})")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The objectives of requests of one ``priority``, or of one client; None where there is none."""

    priority: int = 0
    ttft: Objective | None = None
    tpot: Objective | None = None
    e2e: Objective | None = None

    def metrics(self) -> dict[str, Objective]:
        """Return the bounds that were said, by the name of their metric."""
        return {f"{name}_s": bound for name in BOUNDS if (bound := getattr(self, name)) is not None}


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """One serving workload: requests, objectives and the engine's words. A number that was not said is 0 or "".

    ``rate`` counts requests a second and ``cv`` is the coefficient of variation of the gaps between them (1: Poisson),
    drawn from the family ``burst``. The first requests of a closed loop come evenly over ``ramp_s`` (0: all at once),
    so that they are not answered in step. ``begin_s`` leaves out what arrives before, ``window_s`` keeps the requests
    of so many seconds from there, ``scale`` multiplies the rate of a trace. ``data`` is the folder of published files,
    which are read whole where the catalog has a part of them.

    Requests of conversations wait for the answer before them and for ``think``; ``rate`` counts all of them, and
    ``prompt`` the tokens that a turn adds. ``samples`` requests ask the same at once, a share of which makes
    the answer ``certain``. ``hash_block`` is how many tokens
    a block hash names (0: a block of the engine's cache; 512 in a trace). ``classes`` are objectives of priorities.

    ``longest`` leaves out requests of more tokens, prompt and answer together (0: none), as benchmarks do for models of
    a short context. ``expert_routing`` is how often a mixture's router chooses each expert. ``clients`` are workloads
    on top of each other, each with its ``name``; ``file`` is where they and other words were read, ``keys`` which of
    them it says above its clients. ``base`` is the folder that files lie in.
    """

    name: str = ""
    rate: float = 0.0
    cv: float = 1.0
    burst: str = "gamma"
    concurrency: int = 0
    ramp_s: float = 0.0
    batch: int = 0
    trace: str = ""
    windows: str = ""
    data: str = ""
    scale: float = 1.0
    begin_s: float = 0.0
    window_s: float = 0.0
    prompt: int | Lengths = 0
    output: int | Lengths = 0
    lengths: str = ""
    requests: int = 0
    longest: int = 0
    turns: Turns | None = None
    think: Pause | None = None
    prefix: SharedPrefix | None = None
    chunks: Chunks | None = None
    hash_block: int = 0
    samples: int = 1
    certain: Certain | None = None
    tenants: Population | None = None
    priority: Population | None = None
    adapters: Population | None = None
    adapter_rank: int = 16
    seed: int = 0
    expert_routing: Routing | None = None
    ttft: Objective | None = None
    tpot: Objective | None = None
    e2e: Objective | None = None
    classes: tuple[Bounds, ...] = ()
    engine: EngineWords = EngineWords()
    clients: tuple[Serve, ...] = ()
    file: str = ""
    keys: tuple[str, ...] = ()
    base: Path = Path()

    @property
    def objectives(self) -> dict[str, Objective]:
        """The bounds that were said, by the name of their metric."""
        said = {"ttft_s": self.ttft, "tpot_s": self.tpot, "e2e_s": self.e2e}
        return {name: bound for name, bound in said.items() if bound is not None}

    @property
    def objective_classes(self) -> list[dict[str, Objective]]:
        """The bounds of each class of objectives, by the name of their metric, in the order that ``slo`` of the
        requests counts them: those of the workload, then those of its priorities or clients, which have the
        workload's where they say none of their own."""
        found = [self.objectives, *(self.objectives | one.metrics() for one in self.classes)]
        return found + [self.objectives | bounds for client in self.clients for bounds in client.objective_classes]

    @property
    def class_names(self) -> list[str]:
        """Whose objectives those of each class are, in the same order; "" for those of the workload."""
        found = ["", *(f"priority {one.priority}" for one in self.classes)]
        return found + [f"{c.name} {name}".rstrip() for c in self.clients for name in c.class_names]

    def common(self) -> Serve:
        """Return the workload with the objectives that all of its requests have, and no others."""
        every = self.objective_classes
        said = {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}
        kept = {n: b if all(one[f"{n}_s"] == b for one in every) else None for n, b in said.items()}
        return msgspec.structs.replace(self, **kept, classes=(), clients=())

    def origins(self) -> dict[str, str]:
        """Return where recorded requests and lengths are from, by how much of what they are."""
        from meshwright.spec.request_catalog import origins

        found = origins(self.trace, self.windows, self.lengths)
        for client in self.clients:
            found |= client.origins()
        return found

    def drawn(self) -> Requests:
        """Return the requests, the same for the same workload.

        Raises:
            MeshwrightError: W011 for a file that cannot be read, and for every row of it that is wrong; W015 for a
                trace that is not known, W016 for more block hashes than are drawn.
        """
        from meshwright.spec.request_draws import draw

        return draw(self)

    def for_context(self, tokens: int) -> Serve:
        """Return the workload for a model with so long a context (0: any). Traces of the catalog were recorded with
        other models, whose longer requests are left out."""
        clients = tuple(client.for_context(tokens) for client in self.clients)
        named = any(name and not Path(name).suffix for name in (self.trace, self.windows, self.lengths))
        longest = tokens if named and not self.longest else self.longest
        return msgspec.structs.replace(self, longest=longest, clients=clients)

    def text(self) -> str:
        """Return the form that :func:`parse` reads back."""
        default, parts = Serve(), [self.file] if self.file else []
        for key, (name, _, _) in _READERS.items():
            part, _, field = name.rpartition(".")
            ours, usual = (getattr(o, part) if part else o for o in (self, default))
            value = getattr(ours, field)
            if value != getattr(usual, field) or key in self.keys:
                parts.append(f"{key}={_written(value, field)}")
        for one in self.classes:
            parts += [f"{n}.{one.priority}={b.text()}" for n in BOUNDS if (b := getattr(one, n)) is not None]
        return ",".join(parts)


def _written(value: Any, field: str) -> str:
    if hasattr(value, "text"):
        return value.text()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field == "budget" and value == AUTO_BUDGET:
        return "auto"
    if field.endswith("_bytes"):
        return bytes_text(value)
    return f"{value:.12g}" + ("s" if field.endswith("_s") else "") if isinstance(value, float) else str(value)


def parse(text: str, *, place: str = "--serve", base: Path = Path()) -> Serve:
    """Return the workload of ``rate=8,prompt=1024,output=256,requests=2000,tpot=50ms@p90``, of ``FILE.toml``, or of
    such a file with words after it, which are put over the file's; files lie in `base`.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 missing key, W005 contradiction, X006 to X008 for a file
            of words that is none; all of them at once.
    """
    head, _, rest = text.partition(",")
    if not head.strip().endswith(".toml") or "=" in head:
        given, wrong = _pairs(text, place)
        return _read(given, wrong, f"{place} {text!r}", base=base)
    name = head.strip()
    said, clients = serve_file.load(base / name, name)
    given, wrong = _pairs(rest, place)
    read = []
    for number, words in enumerate(clients, 1):
        title = words.pop("name", f"client {number}")
        wrong += _of_the_whole(words, f"{name} {title}")
        try:
            read.append(_read(words, [], f"{name} {title}", base=base, name=title))
        except MeshwrightError as error:
            wrong += error.diagnostics
    return _read(
        said | given, wrong, name, base=base, several=bool(clients), clients=tuple(read), file=name, keys=tuple(said)
    )


def engine_words(text: str, *, place: str = "--serve", base: Path = Path()) -> EngineWords:
    """Return the engine of ``policy=vllm-v1,budget=2048``, or of a whole workload, whose requests are left aside. A
    share of guesses that come true need not be said: an engine that runs finds it.

    Raises:
        MeshwrightError: as :func:`parse`.
    """
    given, wrong = _pairs(text, place)
    if any(key not in ENGINE_READERS and (key in _READERS or key.endswith(".toml")) for key in given):
        return parse(text, place=place, base=base).engine
    assumed = {"accept": "1"} if "draft" in given and "accept" not in given else {}
    return _read(given | assumed, wrong, f"{place} {text!r}", base=base, several=True).engine


def _of_the_whole(words: dict[str, str], place: str) -> list[Diagnostic]:
    """Take the words that are of the engine out of a client's, and return what is wrong with them."""
    engines = [key for key in words if key in _READERS and _READERS[key][0].startswith("engine.")]
    help = "say it above the clients: one engine serves all of them"
    return [_bad("W005", f"{key}= is of the engine", f"{place} {key}={words.pop(key)}", help) for key in engines]


def _read(
    given: Mapping[str, str],
    wrong: list[Diagnostic],
    place: str,
    *,
    base: Path,
    several: bool = False,
    **more: Any,
) -> Serve:
    """Return the workload of words by their key, or raise everything that is wrong."""
    values: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    classes: dict[int, dict[str, Objective]] = {}
    wrong = list(wrong)
    for key, value in given.items():
        of_class = _BOUND_OF_A_CLASS.fullmatch(key)
        bound = of_class[1] if of_class else key
        if bound not in _READERS:
            wrong.append(_bad("W001", f"unknown serving key {key!r}", f"{place} {key}={value}", meant(key, KEYS)))
            continue
        name, reader, wanted = _READERS[bound]
        try:
            read = reader(value, base) if bound == "expert_routing" else reader(value)
        except MeshwrightError as error:  # of lengths, which are another word in a training step
            said, help = f"{place} {key}={value}", error.diagnostics[0].help.replace("lengths=", f"{key}=")
            wrong += [msgspec.structs.replace(d, place=said, help=help) for d in error.diagnostics]
            continue
        if read is None:
            help = unseparated(value) or f"write {key}=<{wanted}>"
            wrong.append(_bad("W002", f"{key} = {value!r} is not {wanted}", f"{place} {key}={value}", help))
        elif of_class:
            classes.setdefault(int(of_class[2]), {})[bound] = read
        elif name.startswith("engine."):
            engine[name[7:]] = read
        else:
            values[name] = read
    wrong += contradictions(given, values, classes, place, several)
    if wrong:
        raise MeshwrightError(wrong)
    said = {o: values[o].share for o in given if o in BOUNDS and "@" in given[o]}
    for key in given if said else ():  # a percentile behind one of them is meant for those without
        of_class = _BOUND_OF_A_CLASS.fullmatch(key)
        holder = classes[int(of_class[2])] if of_class else values
        bound = of_class[1] if of_class else key
        if bound in BOUNDS and "@" not in given[key]:
            share = said.get(bound, list(said.values())[-1])
            holder[bound] = msgspec.structs.replace(holder[bound], share=share)
    bounds = tuple(Bounds(priority=p, **classes[p]) for p in sorted(classes))
    own = OWN_POLICIES.get(engine.get("profile", ""))
    words = EngineWords(**({"policy": own} if own else {}) | engine)
    return Serve(**values, classes=bounds, engine=words, base=base, **more)


def _pairs(text: str, place: str) -> tuple[dict[str, str], list[Diagnostic]]:
    given: dict[str, str] = {}
    wrong = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        key, value = key.strip().lower(), value.strip()
        if given.setdefault(key, value) != value:
            message = f"{key}={given[key]} and {key}={value} contradict each other"
            wrong.append(_bad("W005", message, f"{place} {text!r}", "keep one of them"))
    return given, wrong


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def _tokens(text: str) -> int | Lengths | None:
    """Read a length, or lengths and their shares."""
    length = count(LONGEST)(text)
    if length is not None or not text or is_file_of_lengths(text):
        return length
    found = read_lengths(text)
    return None if found is None else msgspec.structs.replace(found, said=text)


_TOKENS = f"a positive number of tokens up to {LONGEST:.0e}, 512:0.5;2048:0.5, or lognormal:mean=1024;sigma=1"
_BOUND = "a duration such as 500ms or 0.5s, with a percentile behind it if need be: 500ms@p90"
_WHO = "a positive number such as 4, 4:zipf=1, or names with weights such as chat:3+code:1"
#: Key -> (field of :class:`Serve`, or of its engine; reader of the value; what is wanted).
_READERS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "rate": ("rate", lambda t: positive(t, FASTEST), "a positive number of requests a second up to 1e6"),
    "cv": ("cv", lambda t: positive(t, 100.0), "a coefficient of variation above 0 up to 100"),
    "burst": ("burst", one_of(BURSTS), f"one of {', '.join(BURSTS)}"),
    "concurrency": ("concurrency", count(10**6), "a positive number of requests that are open at a time"),
    "ramp": ("ramp_s", duration_s, "a duration such as 10s"),
    "batch": ("batch", count(10**6), "a positive number of requests of one batch"),
    "trace": ("trace", file_name, "a .csv, .jsonl or .json file of requests, or a trace of the catalog"),
    "windows": ("windows", file_name, "a .csv file of clients' rates, or a trace of the catalog that has them"),
    "data": ("data", file_name, "the folder of a published trace"),
    "scale": ("scale", lambda t: positive(t, FASTEST), "a factor above 0 of a trace's rate"),
    "begin": ("begin_s", duration_s, "a duration such as 600s or 1h"),
    "window": ("window_s", duration_s, "a duration such as 600s or 1h"),
    "prompt": ("prompt", _tokens, _TOKENS),
    "output": ("output", _tokens, _TOKENS),
    "lengths": ("lengths", file_name, "a .csv, .jsonl or .json file of lengths, or a trace of the catalog"),
    "requests": ("requests", num_requests, f"a positive number of requests up to {MOST_REQUESTS:,}"),
    "longest": ("longest", count(LONGEST), f"a positive number of tokens up to {LONGEST:.0e}"),
    "turns": ("turns", turns, "a whole number of requests a conversation, or their mean, 3.5:geometric"),
    "think": ("think", pause, "a duration such as 20s, with its variation if need be: 20s:cv=0.5"),
    "chunks": ("chunks", chunks, "texts of a prompt, such as 5:tokens=512:of=2000:zipf=1"),
    "prefix": ("prefix", prefix, "a number of tokens, of several groups if need be: 1024:groups=8:zipf=1"),
    "hash_block": ("hash_block", count(10**6), "a positive number of tokens of a block that is shared"),
    "samples": ("samples", count(10**4), "a positive number of answers to each query, up to 10,000"),
    "certain": ("certain", certain, "a share of a query's answers up to 1, or two for one between them: 0.2..0.8"),
    "tenants": ("tenants", lambda t: p if (p := population(t)) and p.share == 1 else None, _WHO),
    "priority": ("priority", priorities, "a whole number, or several with weights: 1:0.2+0:0.8"),
    "adapters": ("adapters", population, _WHO),
    "adapter_rank": ("adapter_rank", count(65536), "a positive rank up to 65,536"),
    "expert_routing": ("expert_routing", read_routing, "zipf:s=1.2 (with ;affinity=), or a .json file"),
    "seed": ("seed", seed, "a whole number from 0 up to 999999999"),
    "ttft": ("ttft", objective, _BOUND),
    "tpot": ("tpot", objective, _BOUND),
    "e2e": ("e2e", objective, _BOUND),
    **ENGINE_READERS,
}
#: Keys that a serving workload may say.
KEYS = tuple(_READERS)
