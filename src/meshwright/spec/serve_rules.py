"""Rules between the words of a serving workload: what has to be said, and what excludes something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import Diagnostic

#: Words that say when requests arrive.
SOURCES = ("rate", "concurrency", "batch", "trace", "windows")
#: Pairs of words that exclude one another -> why, and what to do.
EXCLUDED: dict[tuple[str, str], tuple[str, str]] = {
    ("rate", "scale"): ("rate= and scale= both say how fast the trace is", "keep one of them"),
    ("prompt", "lengths"): ("lengths= says prompt too", "keep one of them"),
    ("output", "lengths"): ("lengths= says output too", "keep one of them"),
    ("prompt", "trace"): ("trace= says prompt too", "keep one of them"),
    ("output", "trace"): ("trace= says output too", "keep one of them"),
    ("lengths", "trace"): ("trace= says lengths too", "keep one of them, or say rate= in place of trace="),
    ("window", "batch"): ("window= is of arrivals over time", "say requests= instead"),
    ("window", "concurrency"): ("window= is of arrivals over time", "say requests= instead"),
    ("turns", "trace"): ("turns= is of requests that are drawn", "drop it: a trace has the requests it has"),
    ("turns", "windows"): ("turns= is of requests that are drawn at one rate", "drop it, or say rate="),
    ("turns", "batch"): ("turns come one after the other, and batch= is all at once", "keep one of them"),
    ("turns", "samples"): ("turns= and samples= both say what belongs together", "keep one of them"),
    ("chunks", "prefix"): ("chunks= and prefix= both say what prompts share", "keep one of them"),
    ("chunks", "trace"): ("chunks= is of requests that are drawn", "drop it: a trace has the requests it has"),
    ("chunks", "turns"): ("chunks= and turns= both say what prompts share", "keep one of them"),
    ("chunks", "samples"): ("chunks= and samples= both say what prompts share", "keep one of them"),
    ("prefix_cache", "chunk_cache"): ("prefix_cache= and chunk_cache= are two caches", "keep one of them"),
    ("samples", "trace"): ("samples= is of requests that are drawn", "drop it: a trace has the requests it has"),
    ("samples", "windows"): ("samples= is of requests that are drawn at one rate", "drop it, or say rate="),
}
#: A word -> the words one of which it needs, and what it is.
NEEDED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "ramp": (("concurrency",), "of a closed loop", "drop it, or say concurrency="),
    "think": (("turns", "concurrency"), "of users who come back", "drop it, or say turns= or concurrency="),
    "scale": (("trace", "windows"), "of a trace, and there is none", "drop it, or say rate= as it shall be"),
    "begin": (("trace", "windows"), "of a trace, and there is none", "drop it"),
    "data": (
        ("trace", "windows", "lengths"),
        "the folder of published files",
        "say which: trace=, windows= or lengths=",
    ),
    "adapter_rank": (("adapters", "trace"), "of adapters", "drop it, or say adapters="),
    "lora": (("adapters", "trace"), "of adapters", "drop it, or say adapters="),
    "adapter_slots": (("lora",), "of adapters in slots", "drop it, or say lora=slots"),
    "adapter_pool": (("adapters", "trace"), "of adapters", "drop it, or say adapters="),
    "chunk_cache": (("host",), "of texts in the host's memory", "say host=, such as host=100GiB"),
    "certain": (("samples",), "of queries of several answers", "drop it, or say samples="),
    "hash_block": (("prefix", "turns", "samples", "trace"), "of prompts that are shared", "drop it, or say prefix="),
}
#: Words of the requests of one client: of a file of several they stand in its table.
OF_A_CLIENT = (
    *SOURCES,
    *("cv", "burst", "ramp", "data", "scale", "begin", "prompt", "output", "lengths", "longest", "turns", "think"),
    *("prefix", "samples", "certain", "tenants", "priority", "adapters", "adapter_rank"),
)


def contradictions(
    given: Mapping[str, str],
    values: Mapping[str, Any],
    classes: Mapping[int, Any],
    place: str,
    several: bool,
) -> list[Diagnostic]:
    """Return a diagnostic for each missing word of a workload, and for words that exclude one another: `given` as
    written, with the `values` that could be read and the priorities that have objectives of their own; of `several`
    clients where these say the requests."""
    if several:
        return _engine(given, place) + _beside_clients(given, classes, place)
    has = given.keys()
    wrong = _engine(given, place) + _arrivals(given, place) + _lengths(given, place)
    wrong += [
        _bad("W005", message, place, help)
        for (one, other), (message, help) in EXCLUDED.items()
        if one in has and other in has
    ]
    for key, (needed, is_of, help) in NEEDED.items():
        if key in has and not any(other in has for other in needed):
            wrong.append(_bad("W005", f"{key}= is {is_of}", place, help))
    for key in ("cv", "burst"):
        if key in has and ("rate" not in has or "trace" in has or "windows" in has):
            wrong.append(_bad("W005", f"{key}= is of arrivals drawn at a rate=", place, f"drop {key}, or say rate="))
    shared, prompt = values.get("prefix"), values.get("prompt")
    texts = values.get("chunks")
    if texts is not None and isinstance(prompt, int) and texts.count * texts.tokens > prompt:
        message = f"{texts.count} texts of {texts.tokens:,} tokens are more than the {prompt:,} of a prompt"
        wrong.append(_bad("W005", message, place, "chunks= are a part of prompt="))
    if shared is not None and isinstance(prompt, int) and shared.tokens > prompt:
        message = f"{shared.tokens:,} tokens that are shared are more than the {prompt:,} of a prompt"
        wrong.append(_bad("W005", message, place, "prefix= is a part of prompt="))
    wrong += _classes(values, classes, place, known="trace" not in has)
    return wrong


def _engine(given: Mapping[str, str], place: str) -> list[Diagnostic]:
    wrong = []
    if given.get("preempt") == "swap" and "host" not in given:
        wrong.append(_bad("W003", "preempt=swap does not say to how much memory", place, "for example host=64GiB"))
    if "draft" in given and "accept" not in given:
        help = (
            "for example accept=0.7, the share of its guesses that come true; it depends on both models and the texts"
        )
        wrong.append(_bad("W003", "draft= does not say how often its guesses come true", place, help))
    for key in ("speculation", "guesses", "accept", "targets", "draft_cache"):
        if key in given and "draft" not in given:
            wrong.append(_bad("W005", f"{key}= is of guessed tokens", place, f"say draft= too, or drop {key}"))
    if "fill" in given and "batch_wait" not in given:
        help = "say batch_wait= too, such as batch_wait=20: the iterations that prompts wait at most; or drop fill"
        wrong.append(_bad("W005", "fill= is of prompts that wait to be computed together", place, help))
    if "settle" in given and "batch_wait" not in given:
        help = "say batch_wait= too, such as batch_wait=50: iterations that they wait for it at most; or drop settle"
        wrong.append(_bad("W005", "settle= is of prompts that waited until each group has one", place, help))
    if "sharing" in given and "beside" not in given:
        help = "say beside=, such as beside=bert-large:batch=8:seq=512, or drop sharing"
        wrong.append(_bad("W005", "sharing= is of a job beside the requests", place, help))
    return wrong


def _arrivals(given: Mapping[str, str], place: str) -> list[Diagnostic]:
    sources = [key for key in SOURCES if key in given]
    if not sources:
        help = "for example rate=8, concurrency=32, batch=16, or trace=azure-conv"
        return [_bad("W003", "the serving workload does not say when requests arrive", place, help)]
    if len(sources) > 1 and sources not in (["rate", "trace"], ["rate", "windows"]):
        return [_bad("W005", f"{' and '.join(sources)} each say when requests arrive", place, "keep one of them")]
    return []


def _lengths(given: Mapping[str, str], place: str) -> list[Diagnostic]:
    """W003 where nobody says how long requests are; a trace does, and so do windows of the catalog."""
    if "trace" in given or "lengths" in given or ("windows" in given and not Path(given["windows"]).suffix):
        return []
    return [
        _bad(
            "W003",
            f"the serving workload does not say {key}",
            place,
            f"for example {key}={usual}, or lengths=requests.csv",
        )
        for key, usual in (("prompt", "1024"), ("output", "256"))
        if key not in given
    ]


def _classes(values: Mapping[str, Any], classes: Mapping[int, Any], place: str, *, known: bool) -> list[Diagnostic]:
    """W005 for objectives of a priority that no request has."""
    there = {int(name) for name in values["priority"].names} if values.get("priority") else {0}
    return [
        _bad("W005", f"no request has priority {one}", place, f"for example priority={one}:0.2+0:0.8")
        for one in classes
        if known and one not in there
    ]


def _beside_clients(given: Mapping[str, str], classes: Mapping[int, Any], place: str) -> list[Diagnostic]:
    wrong = [
        _bad("W005", f"{key}= is of one client, and there are several", place, "say it in the table of a client")
        for key in given
        if key in OF_A_CLIENT
    ]
    return wrong + [
        _bad("W005", f"objectives of priority {one} above several clients", place, "say them in the table of a client")
        for one in classes
    ]


def _bad(code: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, place=place, help=help)
