"""Why two predictions differ: the step time's difference cause by cause, memory by category, and what was asked.

The causes add up: each is the difference of one entry of the attribution, and what an attribution leaves of its
step time is an entry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import msgspec

from meshwright.answer.metrics import METRICS, RATES
from meshwright.answer.prediction import Prediction
from meshwright.causes import WORDS
from meshwright.report.fields import Difference, differences, words

FORMAT_VERSION = 1
UNATTRIBUTED = ("unattributed", "what the attribution leaves of the step time")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity on both sides; ``change`` is b - a. Seconds for causes, bytes for memory."""

    name: str
    what: str
    a: float
    b: float
    change: float


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Why b is not a.

    ``causes`` sum to ``step_time_s.change``. ``memory`` is of the rank with the least headroom on each side,
    ``only_a`` and ``only_b`` are words of the plan that the other side does not have, ``fields`` what differs in
    model, cluster and workload.
    """

    format_version: int
    a: dict[str, str]
    b: dict[str, str]
    fits: tuple[bool, bool]
    step_time_s: Change
    causes: tuple[Change, ...]
    peak_memory_bytes: Change
    memory: tuple[Change, ...]
    rates: tuple[Change, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    fields: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """The delta as plain values, seconds and bytes."""
        return msgspec.to_builtins(self)


def delta(a: Prediction | Mapping[str, Any], b: Prediction | Mapping[str, Any]) -> Delta:
    """Why `b` differs from `a`; each a prediction, or what :meth:`Prediction.to_json` said of one.

    Only a prediction knows the fields of its model and cluster; a saved one knows their names.
    """
    left, right = _saved(a), _saved(b)
    tight_a, tight_b = _tightest(left), _tightest(right)
    words_a, words_b = left["plan"].split(), right["plan"].split()
    return Delta(
        format_version=FORMAT_VERSION,
        a={key: left[key] for key in ("model", "cluster", "workload", "plan")},
        b={key: right[key] for key in ("model", "cluster", "workload", "plan")},
        fits=(left["fits"], right["fits"]),
        step_time_s=_change("step_time_s", METRICS["step_time_s"].words, left["step_time_s"], right["step_time_s"]),
        causes=_causes(left, right),
        peak_memory_bytes=_change(
            "peak_memory_bytes", METRICS["peak_memory_bytes"].words, tight_a["peak_bytes"], tight_b["peak_bytes"]
        ),
        memory=_by_entry(tight_a["alive"], tight_b["alive"], {}),
        rates=tuple(_change(name, _rate(name, left, right), left[name], right[name]) for name in RATES),
        only_a=tuple(w for w in words_a if w not in words_b),
        only_b=tuple(w for w in words_b if w not in words_a),
        fields=_fields(a, b, left, right),
    )


def _saved(side: Prediction | Mapping[str, Any]) -> Mapping[str, Any]:
    return side.to_json() if isinstance(side, Prediction) else side


def _tightest(side: Mapping[str, Any]) -> Mapping[str, Any]:
    return min(side["memory"], key=lambda rank: rank["capacity_bytes"] - rank["peak_bytes"])


def _change(name: str, what: str, a: float, b: float) -> Change:
    return Change(name=name, what=what, a=a, b=b, change=b - a)


def _rate(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The words of a rate, which counts images where a side's model reads images and tokens where it does not."""
    words = METRICS[name].words
    counted = dict.fromkeys("images" if side.get("images_per_s") is not None else "tokens" for side in (a, b))
    return " or ".join(words.replace("tokens", each) for each in counted)


def _by_entry(a: Mapping[str, float], b: Mapping[str, float], what: Mapping[str, str]) -> tuple[Change, ...]:
    """A change for every entry of either side, in the order of `what`, then as the sides name them."""
    names = dict.fromkeys([*(n for n in what if n in a or n in b), *a, *b])
    return tuple(_change(n, what.get(n, n), a.get(n, 0.0), b.get(n, 0.0)) for n in names)


def _causes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    """Changes of the attribution's entries and, where they miss the step time's, the rest."""
    found = _by_entry(a["attribution"], b["attribution"], WORDS)
    rest_a, rest_b = (_exact_rest(s["step_time_s"], s["attribution"].values()) for s in (a, b))
    whole = Fraction(b["step_time_s"]) - Fraction(a["step_time_s"])
    rest = float(whole - sum(Fraction(c.change) for c in found))
    if rest == 0.0:
        return found
    name, what = UNATTRIBUTED
    return (*found, Change(name=name, what=what, a=rest_a, b=rest_b, change=rest))


def _exact_rest(whole: float, parts) -> float:
    return float(Fraction(whole) - sum(map(Fraction, parts)))


def _fields(a, b, left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the differences of two questions: of names and workload always, of the fields of model and cluster where
    both sides are whole predictions."""
    found = [
        Difference(field=key, a=str(left[key]), b=str(right[key]))
        for key in ("model", "cluster")
        if left[key] != right[key]
    ]
    found += words("workload", left["workload"], right["workload"])
    if isinstance(a, Prediction) and isinstance(b, Prediction):
        found += differences("model", a.model, b.model)
        found += differences("cluster", a.cluster, b.cluster)
    return tuple(found)
