"""A day of serving in words: how the rate rises and falls, how replicas follow it, and which of them are lost.

``--day low=4,peak=14h,start=3m,lose=10h`` is a day whose rate goes from 4 requests a second at night up to the
workload's at 2 p.m.; replicas take 3 minutes to start, and one is lost at 10 o'clock. Where ``low`` is not said,
requests come as the workload says: a trace of a day, or the windows of its clients.
"""

from __future__ import annotations

import math
import re

import msgspec
import numpy as np

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.request_limits import MOST_REQUESTS
from meshwright.spec.requests import Requests

HOUR_S = 3600.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h)", re.IGNORECASE)
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_S}
#: Steps of the rate over a day.
STEPS = 1440


class ServingDay(msgspec.Struct, frozen=True, kw_only=True):
    """A day: the lowest rate (0: requests come as the workload says), when it is highest, how long it lasts.

    Every ``every_s`` somebody looks at the rate, and wants replicas for it with the share ``room`` to spare. One takes
    ``start_s`` to start, and is stopped when it was not needed for ``hold_s``. There are at least ``least``. One is
    lost at each of ``lost_s``. A training job beside takes ``restart_s`` to go on with other devices.
    """

    low: float = 0.0
    peak_s: float = 14 * HOUR_S
    length_s: float = 24 * HOUR_S
    every_s: float = 60.0
    start_s: float = 180.0
    hold_s: float = 600.0
    restart_s: float = 300.0
    room: float = 0.2
    least: int = 1
    lost_s: tuple[float, ...] = ()
    seed: int = 0


_TIMES = {
    "peak": "peak_s",
    "length": "length_s",
    "every": "every_s",
    "start": "start_s",
    "hold": "hold_s",
    "restart": "restart_s",
}
_KEYS = ("low", *_TIMES, "room", "least", "lose", "seed")


def parse(text: str, *, place: str = "--day") -> ServingDay:
    """Return the day that words say; ``lose`` may be said several times.

    Raises:
        MeshwrightError: W001 for words that are unknown, W002 for values that are none, W005 for two of one; all of
            them at once.
    """
    values: dict[str, object] = {}
    lost: list[float] = []
    wrong: list[Diagnostic] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        key, value = key.strip().lower(), value.strip()
        if key not in _KEYS:
            message, help = f"unknown word {key!r} of a day", nearest(key, list(_KEYS))
            wrong.append(Diagnostic(code="W001", message=message, place=f"{place} {part}", help=help))
            continue
        read, wanted = _value(key, value)
        name = _TIMES.get(key, key)
        if read is None:
            message = f"{key} = {value!r} is not {wanted}"
            wrong.append(Diagnostic(code="W002", message=message, place=f"{place} {part}", help=f"{key}=<{wanted}>"))
        elif key == "lose":
            lost.append(read)
        elif values.setdefault(name, read) != read:
            message = f"{key} is said twice"
            wrong.append(Diagnostic(code="W005", message=message, place=f"{place} {text}", help="keep one of them"))
    late = [at for at in lost if at >= values.get("length_s", 24 * HOUR_S)]
    if late:
        message = f"a replica is lost after {late[0] / HOUR_S:g} h, when the day is over"
        wrong.append(Diagnostic(code="W005", message=message, place=f"{place} {text}", help="lose it before"))
    if wrong:
        raise MeshwrightError(wrong)
    return ServingDay(**values, lost_s=tuple(sorted(lost)))


def _value(key: str, text: str) -> tuple[float | int | None, str]:
    """Return the value of a word, None where it is none, and which values it has."""
    if key in _TIMES or key == "lose":
        match = _DURATION.fullmatch(text)
        seconds = float(match[1]) * _UNITS[match[2].lower()] if match else -1.0
        least = 0.0 if key in ("start", "hold", "restart", "peak", "lose") else 1.0
        fits = least <= seconds <= 7 * 24 * HOUR_S
        return (seconds if fits else None), "a duration of up to a week such as 90s, 3m or 14h"
    if key == "room":
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        return (share if 0 <= share < 0.95 else None), "a share below 95% such as 20%"
    if key == "low":
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        return (rate if 0 < rate <= 1e6 else None), "requests a second above 0"
    whole = int(text) if text.isdecimal() and len(text) <= 9 else -1
    return (whole if whole >= (key == "least") else None), "a whole number"


def requests_of(day: ServingDay, high: float, like: Requests) -> Requests:
    """Return the requests of a day: drawn at a rate that goes from its lowest to `high` and back as a cosine does, with
    lengths drawn from those of `like`; those of `like` themselves where the day says no lowest rate.

    Raises:
        MeshwrightError: W002 where the day has more requests than are simulated.
    """
    if not day.low:
        return like.chosen(np.flatnonzero(like.earliest_s() < day.length_s))
    at = np.linspace(0.0, day.length_s, STEPS + 1)
    rate = day.low + (high - day.low) * (1 + np.cos(2 * np.pi * (at - day.peak_s) / (24 * HOUR_S))) / 2
    total = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(at))])
    if total[-1] > MOST_REQUESTS:
        message = f"the day has {total[-1]:,.0f} requests, and {MOST_REQUESTS:,} are simulated"
        raise MeshwrightError.one("W002", message, place="--day", help="a shorter length=, or a lower rate")
    rng = np.random.default_rng(day.seed)
    count = max(1, int(rng.poisson(total[-1])))
    arrival = np.interp(np.sort(rng.uniform(0.0, total[-1], count)), total, at)
    rows = rng.integers(0, len(like), count)
    return Requests(arrival_s=arrival, prompt=like.prompt[rows], output=like.output[rows])
