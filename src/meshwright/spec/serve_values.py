"""Values of the words of a serving workload: durations, counts, objectives, and who asks how often.

A reader takes the text behind ``=`` and returns its value, or None where the text is none of that kind. A value that is
more than a number or a name has a ``text()`` that its reader reads back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.quantity import parse_count
from meshwright.spec.request_limits import LONGEST, MOST_OF_A_KIND, MOST_REQUESTS

#: Share of the requests that has to meet an SLO where nobody says.
USUAL_SHARE = 0.9
#: The token budget that follows from the objectives.
AUTO_BUDGET = -1
_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(us|ms|s|m|min|h)?", re.IGNORECASE)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_WHOLE = re.compile(r"-?\d{1,9}")


class Objective(msgspec.Struct, frozen=True):
    """A bound in seconds that ``share`` of the requests has to keep."""

    seconds: float
    share: float = USUAL_SHARE

    def text(self) -> str:
        """Return the form that :func:`objective` reads back."""
        return f"{self.seconds:.12g}s@p{self.share * 100:.10g}"


class Population(msgspec.Struct, frozen=True):
    """Who or what requests are shared out among: ``4``, ``100:zipf=1``, ``chat:3+code:1``; each request is of one of
    them at random.

    The i-th of ``count`` (from 1) has the ``weight`` i, or i to the power of minus ``zipf`` where there are none. They
    have ``names`` where they were given any. A ``share`` of the requests has one at all, the others none.
    """

    count: int
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    zipf: float = 0.0
    share: float = 1.0

    def shares(self) -> list[float]:
        """Return each one's share of the requests that have one; they sum to 1."""
        weights = self.weights or [i**-self.zipf for i in range(1, self.count + 1)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def text(self) -> str:
        """Return the form that :func:`population` reads back."""
        pairs = [f"{n}:{w:.12g}" if w != 1.0 else n for n, w in zip(self.names, self.weights)]
        options = [f":zipf={self.zipf:.12g}"] if self.zipf else []
        options += [f":share={self.share:.12g}"] if self.share != 1.0 else []
        return "".join(["+".join(pairs) or str(self.count), *options])


class Turns(msgspec.Struct, frozen=True):
    """How many requests a conversation has: ``4``, or ``4:geometric``, at random with that mean, at least one."""

    mean: float
    geometric: bool = False

    def text(self) -> str:
        """Return the form that :func:`turns` reads back."""
        return f"{self.mean:.12g}" + (":geometric" if self.geometric else "")


class Pause(msgspec.Struct, frozen=True):
    """The time from an answer to the next request of the same user: ``20s``, drawn with the mean ``mean_s`` and the
    coefficient of variation ``cv`` from a gamma distribution (1: exponential, 0: always the same)."""

    mean_s: float
    cv: float = 1.0

    def text(self) -> str:
        """Return the form that :func:`pause` reads back."""
        return f"{self.mean_s:.12g}s" + (f":cv={self.cv:.12g}" if self.cv != 1.0 else "")


class Certain(msgspec.Struct, frozen=True):
    """The share of a query's answers after which it is settled: ``0.5``, or ``0.2..0.8``, for each query one between
    them at random."""

    low: float
    high: float

    def text(self) -> str:
        """Return the form that :func:`certain` reads back."""
        return f"{self.low:.12g}" + (f"..{self.high:.12g}" if self.high != self.low else "")


class SharedPrefix(msgspec.Struct, frozen=True):
    """The first ``tokens`` of a prompt, equal among the requests (or conversations) of one of ``groups``:
    ``1024:groups=8:zipf=1``."""

    tokens: int
    groups: int = 1
    zipf: float = 0.0

    def text(self) -> str:
        """Return the form that :func:`prefix` reads back."""
        options = [f":groups={self.groups}"] if self.groups > 1 else []
        options += [f":zipf={self.zipf:.12g}"] if self.zipf else []
        return "".join([str(self.tokens), *options])


class Chunks(msgspec.Struct, frozen=True):
    """The texts that a prompt contains: ``count`` different ones of ``tokens`` each, ``of`` so many that there are,
    some asked for more often than others (``zipf``): ``5:tokens=512:of=2000:zipf=1``. They stand at its beginning, in
    an order drawn for each request."""

    count: int
    tokens: int = 512
    of: int = 1000
    zipf: float = 0.0

    def text(self) -> str:
        """Return the form that :func:`chunks` reads back."""
        said = f"{self.count}:tokens={self.tokens}:of={self.of}"
        return f"{said}:zipf={self.zipf:.12g}" if self.zipf else said


def duration_s(text: str) -> float | None:
    """Return ``500ms``, ``0.5s`` or ``10m`` in seconds, a bare number as seconds; None where it is none above 0."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[(match[2] or "s").lower()] if match else 0.0
    return seconds if 0 < seconds < 1e10 else None


def objective(text: str) -> Objective | None:
    """Read ``50ms`` or ``50ms@p90``."""
    bound, at, share = text.partition("@")
    seconds = duration_s(bound)
    percent = positive(share.strip().lower().removeprefix("p")) if at else USUAL_SHARE * 100
    if seconds is None or percent is None or percent >= 100:
        return None
    return Objective(seconds, percent / 100)


def positive(text: str, most: float = math.inf) -> float | None:
    """Read a number above 0 and not above `most`."""
    value = number(text)
    return value if value is not None and 0 < value <= most else None


def number(text: str) -> float | None:
    """Read a finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def count(most: int) -> Callable[[str], int | None]:
    """Return a reader of whole numbers from 1 to `most`; 8k is 8192."""

    def read(text: str) -> int | None:
        value = parse_count(text, binary_k=True)
        return value if value is not None and 0 < value <= most else None

    return read


def num_requests(text: str) -> int | None:
    """Read how many requests there are; 2k is 2000."""
    value = parse_count(text)
    return value if value is not None and 0 < value <= MOST_REQUESTS else None


def one_of(choices: tuple[str, ...] | dict[str, Any]) -> Callable[[str], str | None]:
    """Return a reader of one of the `choices`, in small letters."""
    return lambda text: text.lower() if text.lower() in choices else None


def policy_name(text: str) -> str | None:
    """Read the name of a policy, with underscores for hyphens; which there are is not known here."""
    name = text.strip().lower().replace("_", "-")
    return name if re.fullmatch(r"[a-z][a-z0-9-]*", name) else None


def numbered_name(text: str) -> str | None:
    """Read ``h2o`` or ``h2o:0.2``, a name with a number from 0 to 1, or ``h2o:819t``, with tokens from 2 on."""
    name, colon, number = text.strip().lower().partition(":")
    if policy_name(name) is not None and number.endswith("t") and number[:-1].isdigit() and int(number[:-1]) > 1:
        return f"{policy_name(name)}:{int(number[:-1])}t"
    if policy_name(name) is None or (colon and positive(number, 1.0) is None):
        return None
    return f"{policy_name(name)}:{positive(number, 1.0):g}" if colon else policy_name(name)


def token_budget(text: str) -> int | None:
    """Read the tokens of an iteration, or ``auto``."""
    return AUTO_BUDGET if text.strip().lower() == "auto" else count(10**7)(text)


def counted_name(text: str) -> str | None:
    """Read ``dlpm`` or ``dlpm:4096``, a name with a positive number."""
    name, colon, number = text.strip().lower().partition(":")
    if policy_name(name) is None or (colon and positive(number, 1e12) is None):
        return None
    return f"{policy_name(name)}:{positive(number, 1e12):.12g}" if colon else policy_name(name)


def certain(text: str) -> Certain | None:
    """Read ``0.5`` or ``0.2..0.8``."""
    first, dots, last = text.partition("..")
    low, high = positive(first.strip(), 1.0), positive(last.strip(), 1.0) if dots else positive(first.strip(), 1.0)
    return Certain(low, high) if low is not None and high is not None and low <= high else None


def yes_no(text: str) -> bool | None:
    """Read yes or no."""
    return {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}.get(text.lower())


def file_name(text: str) -> str | None:
    """Read the name of a file or of an entry of the catalog."""
    return text or None


def seed(text: str) -> int | None:
    """Read what draws begin with."""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def population(text: str) -> Population | None:
    """Read ``4``, ``4:zipf=1``, ``100:zipf=1:share=0.9``, ``chat+code`` or ``chat:3+code:1``."""
    head, options = _with_options(text, {"zipf": _exponent, "share": lambda t: positive(t, 1.0)})
    if options is None:
        return None
    if head.isdecimal():
        found = count(MOST_OF_A_KIND)(head)
        return Population(found, **options) if found else None
    named = _weights(head)
    if named is None or "zipf" in options:
        return None
    return Population(len(named), tuple(named), tuple(named.values()), **options)


def priorities(text: str) -> Population | None:
    """Read ``1``, ``0+1`` or ``1:0.2+0:0.8``: whole numbers, higher ones go first."""
    named = _weights(text, _WHOLE)
    if named is None:
        return None
    names = tuple(str(int(name)) for name in named)
    return Population(len(named), names, tuple(named.values())) if len(set(names)) == len(names) else None


def turns(text: str) -> Turns | None:
    """Read ``4`` or ``3.5:geometric``."""
    head, colon, kind = text.partition(":")
    mean = positive(head, 1e6)
    if mean is None or mean < 1 or (colon and kind != "geometric") or not (colon or mean == int(mean)):
        return None
    return Turns(mean, bool(colon))


def pause(text: str) -> Pause | None:
    """Read ``20s``, ``20s:cv=0.5``."""
    head, options = _with_options(text, {"cv": lambda t: 0.0 if number(t) == 0 else positive(t, 100.0)})
    mean = duration_s(head)
    return Pause(mean, **options) if mean is not None and options is not None else None


def prefix(text: str) -> SharedPrefix | None:
    """Read ``1024``, ``1024:groups=8`` or ``1024:groups=8:zipf=1``."""
    head, options = _with_options(text, {"groups": count(MOST_OF_A_KIND), "zipf": _exponent})
    tokens = count(LONGEST)(head)
    return SharedPrefix(tokens, **options) if tokens is not None and options is not None else None


def chunks(text: str) -> Chunks | None:
    """Read ``5`` or ``5:tokens=512:of=2000:zipf=1``."""
    known = {"tokens": count(LONGEST), "of": count(MOST_OF_A_KIND), "zipf": _exponent}
    head, options = _with_options(text, known)
    each = count(1000)(head)
    found = Chunks(each, **options) if each is not None and options is not None else None
    return found if found is not None and found.count <= found.of else None


def _exponent(text: str) -> float | None:
    value = number(text)
    return value if value is not None and 0 <= value <= 20 else None


def _with_options(text: str, known: dict[str, Callable[[str], Any]]) -> tuple[str, dict[str, Any] | None]:
    """Split ``HEAD:key=value:key=value``; None for options that cannot be read or are said twice."""
    parts = text.split(":")
    heads = [part for part in parts if "=" not in part]
    options: dict[str, Any] = {}
    for part in parts[len(heads) :]:
        key, _, value = part.partition("=")
        read = known[key](value) if key in known and key not in options else None
        if read is None:
            return "", None
        options[key] = read
    return ":".join(heads), options


def _weights(text: str, name_form: re.Pattern[str] = _NAME) -> dict[str, float] | None:
    """Read ``chat:3+code:1``, a weight of 1 where none is said."""
    found: dict[str, float] = {}
    for part in text.split("+"):
        name, colon, weight = part.partition(":")
        value = positive(weight) if colon else 1.0
        if not name_form.fullmatch(name) or name in found or value is None:
            return None
        found[name] = value
    return found
