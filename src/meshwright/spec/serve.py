"""The serving workload: which requests arrive when, how long they are, and how fast they have to be answered.

``rate=8,prompt=1024,output=256,requests=2000`` is 2,000 requests at random times, 8 a second on average. Arrivals are
Poisson's, bursts (``cv=``), a closed loop (``concurrency=``), one static batch (``batch=``), or those of a recorded
trace (``trace=``); lengths are fixed, those of a file, or the trace's. ``ttft=500ms,tpot=50ms@p90`` is the service
level objective (SLO). The words of the engine (``policy=``, ``budget=``) are :class:`EngineWords`'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.catalog import meant
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import parse_bytes, parse_count
from meshwright.spec.request_limits import FASTEST, LONGEST, MOST_REQUESTS

if TYPE_CHECKING:
    from meshwright.spec.requests import Requests

#: Share of the requests that has to meet an SLO where nobody says.
USUAL_SHARE = 0.9
#: How those come back whose cache was taken.
PREEMPTIONS = ("recompute", "swap")
BURSTS = ("gamma", "weibull")
#: Bytes of a number in the cache of keys and values.
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(us|ms|s|m|min|h)?", re.IGNORECASE)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Objective(msgspec.Struct, frozen=True):
    """A bound in seconds that ``share`` of the requests has to keep."""

    seconds: float
    share: float = USUAL_SHARE

    def text(self) -> str:
        """Return the form that :func:`parse` reads back."""
        return f"{self.seconds:g}s@p{self.share * 100:g}"


class EngineWords(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the serving engine: the batching ``policy`` and its limits.

    At most ``max_batch`` requests run at a time, and an iteration computes at most ``budget`` tokens (0: as the policy
    usually does). Keys and values of ``kv`` precision lie in blocks of ``block`` tokens: ``kv_blocks`` of them, or as
    many as fit into the share ``memory`` of the device's (0: counted). ``graphs``: iterations of few tokens are
    replayed from CUDA graphs. ``order`` says who of those who wait runs first; with ``prefix_cache`` blocks of a common
    prefix are shared and kept. A request that is evicted is computed again, or swapped (``preempt``) to ``host_bytes``
    of the host's memory for each rank, where shared blocks that leave the device go too. ``kv_budget`` keeps a part of
    each context alone, which is approximate. ``profile`` names the engine whose host times are meant.
    """

    policy: str = "vllm-v1"
    profile: str = "default"
    max_batch: int = 256
    budget: int = 0
    block: int = 16
    kv_blocks: int = 0
    kv: str = "bf16"
    memory: float = 0.9
    routing: str = "round-robin"
    graphs: bool = True
    order: str = "fcfs"
    prefix_cache: bool = False
    preempt: str = "recompute"
    host_bytes: float = 0.0
    kv_budget: str = ""


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """One serving workload: requests, objectives and the engine's words. A number that was not said is 0 or "".

    ``rate`` counts requests a second and ``cv`` is the coefficient of variation of the gaps between them (1: Poisson),
    drawn from the family ``burst``. The first requests of a closed loop come evenly over ``ramp_s`` (0: all at once),
    so that they are not answered in step. ``window_s`` keeps the requests of the first so many seconds, ``scale``
    multiplies the rate of a trace. ``base`` is the folder that files lie in.
    """

    rate: float = 0.0
    cv: float = 1.0
    burst: str = "gamma"
    concurrency: int = 0
    ramp_s: float = 0.0
    batch: int = 0
    trace: str = ""
    scale: float = 1.0
    window_s: float = 0.0
    prompt: int = 0
    output: int = 0
    lengths: str = ""
    requests: int = 0
    seed: int = 0
    ttft: Objective | None = None
    tpot: Objective | None = None
    e2e: Objective | None = None
    engine: EngineWords = EngineWords()
    base: Path = Path()

    @property
    def objectives(self) -> dict[str, Objective]:
        """The bounds that were said, by the name of their metric."""
        said = {"ttft_s": self.ttft, "tpot_s": self.tpot, "e2e_s": self.e2e}
        return {name: bound for name, bound in said.items() if bound is not None}

    def drawn(self) -> Requests:
        """Return the requests, the same for the same workload.

        Raises:
            MeshwrightError: W011 for a file that cannot be read, and for every row of it that is wrong.
        """
        from meshwright.spec.request_draws import draw

        return draw(self)

    def text(self) -> str:
        """Return the form that :func:`parse` reads back."""
        default, parts = Serve(), []
        for key, (name, _, _) in _READERS.items():
            part, _, field = name.rpartition(".")
            ours, usual = (getattr(o, part) if part else o for o in (self, default))
            value = getattr(ours, field)
            if value != getattr(usual, field) and not any(p.startswith(f"{key}=") for p in parts):
                parts.append(f"{key}={_written(value, field)}")
        return ",".join(parts)


def _written(value: Any, field: str) -> str:
    if isinstance(value, Objective):
        return value.text()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}s" if field.endswith("_s") else f"{value:.12g}" if isinstance(value, float) else str(value)


def parse(text: str, *, place: str = "--serve", base: Path = Path()) -> Serve:
    """Return the workload of ``rate=8,prompt=1024,output=256,requests=2000,tpot=50ms@p90``; files lie in `base`.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 missing key, W005 contradiction; all of them at once.
    """
    given, wrong = _pairs(text, place)
    values: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _READERS:
            help = meant(key, list(_READERS))
            wrong.append(_bad("W001", f"unknown serving key {key!r}", f"{place} {key}={value}", help))
            continue
        name, reader, wanted = _READERS[key]
        read = reader(value)
        if read is None:
            help = f"write {key}=<{wanted}>"
            wrong.append(_bad("W002", f"{key} = {value!r} is not {wanted}", f"{place} {key}={value}", help))
        elif name.startswith("engine."):
            engine[name[7:]] = read
        else:
            values[name] = read
    wrong += _contradictions(given, f"{place} {text!r}")
    if wrong:
        raise MeshwrightError(wrong)
    shares = [o for o in given if o in ("ttft", "tpot", "e2e")]
    said = [values[o].share for o in shares if "@" in given[o]]
    for name in shares:  # a percentile behind one of them is meant for those without
        if "@" not in given[name] and said:
            values[name] = msgspec.structs.replace(values[name], share=said[-1])
    return Serve(**values, engine=EngineWords(**engine), base=base)


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


def _contradictions(given: dict[str, str], place: str) -> list[Diagnostic]:
    """Return a diagnostic for each missing key of a serving workload, and for keys that exclude one another."""
    wrong, has = [], given.keys()
    sources = [key for key in ("rate", "concurrency", "batch", "trace") if key in has]
    if not sources:
        help = "for example rate=8, concurrency=32, batch=16, or trace=requests.csv"
        wrong.append(_bad("W003", "the serving workload does not say when requests arrive", place, help))
    if len(sources) > 1 and sources != ["rate", "trace"]:
        said = " and ".join(sources)
        wrong.append(_bad("W005", f"{said} each say when requests arrive", place, "keep one of them"))
    if "trace" not in has:
        for key, other in (("prompt", "1024"), ("output", "256")):
            if key not in has and "lengths" not in has:
                help = f"for example {key}={other}, or lengths=requests.csv"
                wrong.append(_bad("W003", f"the serving workload does not say {key}", place, help))
        if "scale" in has:
            help = "drop it, or say rate= as it shall be"
            wrong.append(_bad("W005", "scale= is of a trace, and there is none", place, help))
    if "rate" in has and "scale" in has:
        wrong.append(_bad("W005", "rate= and scale= both say how fast the trace is", place, "keep one of them"))
    for key in ("cv", "burst"):
        if key in has and ("rate" not in has or "trace" in has):
            wrong.append(_bad("W005", f"{key}= is of arrivals drawn at a rate=", place, f"drop {key}, or say rate="))
    for key in ("prompt", "output"):
        if key in has and "lengths" in has:
            wrong.append(_bad("W005", f"lengths= says {key} too", place, "keep one of them"))
    if "ramp" in has and "concurrency" not in has:
        wrong.append(_bad("W005", "ramp= is of a closed loop", place, "drop it, or say concurrency="))
    if given.get("preempt") == "swap" and "host" not in has:
        wrong.append(_bad("W003", "preempt=swap does not say to how much memory", place, "for example host=64GiB"))
    if "window" in has and ("batch" in has or "concurrency" in has):
        help = "say requests= instead"
        wrong.append(_bad("W005", "window= is of arrivals over time", place, help))
    return wrong


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)


def duration_s(text: str) -> float | None:
    """Return ``500ms``, ``0.5s`` or ``10m`` in seconds, a bare number as seconds; None where it is none above 0."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[(match[2] or "s").lower()] if match else 0.0
    return seconds if 0 < seconds < 1e10 else None


def _objective(text: str) -> Objective | None:
    """Read ``50ms`` or ``50ms@p90``."""
    bound, at, share = text.partition("@")
    seconds = duration_s(bound)
    percent = _positive(share.strip().lower().removeprefix("p")) if at else USUAL_SHARE * 100
    if seconds is None or percent is None or percent >= 100:
        return None
    return Objective(seconds, percent / 100)


def _positive(text: str, most: float = math.inf) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= most and math.isfinite(value) else None


def _count(most: int) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        value = parse_count(text, binary_k=True)
        return value if value is not None and 0 < value <= most else None

    return read


def _requests(text: str) -> int | None:
    value = parse_count(text)
    return value if value is not None and 0 < value <= MOST_REQUESTS else None


def _one_of(choices: tuple[str, ...] | dict[str, Any]) -> Callable[[str], str | None]:
    return lambda text: text.lower() if text.lower() in choices else None


def _name(text: str) -> str | None:
    """Read the name of a policy, with underscores for hyphens; which there are is not known here."""
    name = text.strip().lower().replace("_", "-")
    return name if re.fullmatch(r"[a-z][a-z0-9-]*", name) else None


def _numbered(text: str) -> str | None:
    """Read ``h2o`` or ``h2o:0.2``, a name with a number from 0 to 1."""
    name, colon, number = text.strip().lower().partition(":")
    if _name(name) is None or (colon and _positive(number, 1.0) is None):
        return None
    return f"{_name(name)}:{_positive(number, 1.0):g}" if colon else _name(name)


def _yes_no(text: str) -> bool | None:
    return {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}.get(text.lower())


def _file(text: str) -> str | None:
    return text or None


def _seed(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 9 else None


_TOKENS = f"a positive number of tokens up to {LONGEST:.0e}"
_BOUND = "a duration such as 500ms or 0.5s, with a percentile behind it if need be: 500ms@p90"
_READERS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "rate": ("rate", lambda t: _positive(t, FASTEST), "a positive number of requests a second up to 1e6"),
    "cv": ("cv", lambda t: _positive(t, 100.0), "a coefficient of variation above 0 up to 100"),
    "burst": ("burst", _one_of(BURSTS), f"one of {', '.join(BURSTS)}"),
    "concurrency": ("concurrency", _count(10**6), "a positive number of requests that are open at a time"),
    "ramp": ("ramp_s", duration_s, "a duration such as 10s"),
    "batch": ("batch", _count(10**6), "a positive number of requests of one batch"),
    "trace": ("trace", _file, "a .csv or .jsonl file of requests"),
    "scale": ("scale", lambda t: _positive(t, FASTEST), "a factor above 0 of a trace's rate"),
    "window": ("window_s", duration_s, "a duration such as 600s or 1h"),
    "prompt": ("prompt", _count(LONGEST), _TOKENS),
    "output": ("output", _count(LONGEST), _TOKENS),
    "lengths": ("lengths", _file, "a .csv or .jsonl file with prompt_tokens and output_tokens"),
    "requests": ("requests", _requests, f"a positive number of requests up to {MOST_REQUESTS:,}"),
    "seed": ("seed", _seed, "a whole number from 0 up to 999999999"),
    "ttft": ("ttft", _objective, _BOUND),
    "tpot": ("tpot", _objective, _BOUND),
    "e2e": ("e2e", _objective, _BOUND),
    "policy": ("engine.policy", _name, "a batching policy such as vllm-v1"),
    "engine": ("engine.profile", _name, "an engine profile: meshwright catalog"),
    "max_batch": ("engine.max_batch", _count(65536), "a positive number of requests up to 65,536"),
    "budget": ("engine.budget", _count(10**7), "a positive number of tokens of an iteration"),
    "block": ("engine.block", _count(4096), "a positive number of tokens of a block up to 4,096"),
    "kv_blocks": ("engine.kv_blocks", _requests, "a positive number of blocks"),
    "kv": ("engine.kv", _one_of(KV_BYTES), f"one of {', '.join(KV_BYTES)}"),
    "memory": ("engine.memory", lambda t: _positive(t, 1.0), "a share of the device's memory above 0 up to 1"),
    "routing": ("engine.routing", _name, "a routing policy such as round-robin"),
    "graphs": ("engine.graphs", _yes_no, "yes or no"),
    "order": ("engine.order", _name, "a policy of who is served first, such as fcfs"),
    "prefix_cache": ("engine.prefix_cache", _yes_no, "yes or no"),
    "preempt": ("engine.preempt", _one_of(PREEMPTIONS), f"one of {', '.join(PREEMPTIONS)}"),
    "kv_budget": ("engine.kv_budget", _numbered, "a KV budget with its number if need be, such as h2o:0.2"),
    "host": ("engine.host_bytes", parse_bytes, "memory of the host for each rank, such as 64GiB"),
}
#: Keys that a serving workload may say.
KEYS = tuple(_READERS)
