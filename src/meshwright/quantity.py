"""Numbers as people write them: ``8k`` tokens, ``15t`` tokens, ``1.5e12``; and as people read them back."""

from __future__ import annotations

import math
import re

_SUFFIX = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?) ?((?:[kmgt]i?)?b|)", re.IGNORECASE)
_BYTE_UNITS = {"": 1.0, "b": 1.0} | {f"{p}b": 1e3 ** (i + 1) for i, p in enumerate("kmgt")}
_BYTE_UNITS |= {f"{p}ib": 1024.0 ** (i + 1) for i, p in enumerate("kmgt")}


def parse_count(text: str, *, binary_k: bool = False) -> int | None:
    """``"512"``, ``"15t"``, ``"1.5e12"`` as a whole number; None when it is not one.

    With `binary_k`, ``8k`` is 8192: lengths and batches are powers of two, so that is what people mean.
    """
    match = _COUNT.fullmatch(text.strip().replace("_", ""))
    if not match:
        return None
    number, suffix = float(match[1]), match[2].lower()
    scale = 1024 if binary_k and suffix == "k" else _SUFFIX.get(suffix, 1)
    value = number * scale
    return int(value) if math.isfinite(value) and value == int(value) else None


def parse_bytes(text: str) -> float | None:
    """``"64GiB"``, ``"80GB"``, ``"1e9"`` in bytes; None when it is no size above 0."""
    match = _BYTES.fullmatch(text.strip())
    if not match:
        return None
    value = float(match[1]) * _BYTE_UNITS[match[2].lower()]
    return value if 0 < value < 1e18 else None


def bytes_text(value: float) -> str:
    """A size with the largest unit that keeps it exact, which :func:`parse_bytes` reads: ``100GiB``, ``80GB``."""
    for unit, scale in (("TiB", 2**40), ("TB", 1e12), ("GiB", 2**30), ("GB", 1e9), ("MiB", 2**20), ("MB", 1e6)):
        number = value / scale
        if number >= 1 and float(f"{number:.6g}") * scale == value:
            return f"{number:.6g}{unit}"
    return f"{value:.12g}"


def write_count(value: float) -> str:
    """A whole number with the largest suffix that keeps it exact: ``15t``, ``300b``, ``1536``."""
    number = int(value)
    for suffix, scale in reversed(_SUFFIX.items()):
        if number >= scale and number % (scale // 10) == 0 and scale > 10**3:
            return f"{number / scale:g}{suffix}"
    return str(number)


def each(value: float) -> str:
    """Return a duration in the unit that reads best, from nanoseconds on: ``12 ns``, else as :func:`seconds` does."""
    return f"{value * 1e9:.3g} ns" if 0 < abs(value) < 1e-6 else seconds(value)


def seconds(value: float) -> str:
    """A duration in the unit that reads best: ``1.23 ms``, ``4.560 s``, ``669 s``, ``3.2 h``, ``12.1 days``."""
    if 600.0 <= abs(value) < 3600.0:
        return f"{value:,.0f} s"
    for limit, scale, unit in (
        (1e-3, 1e6, "us"),
        (1.0, 1e3, "ms"),
        (600.0, 1.0, "s"),
        (172_800.0, 1 / 3600, "h"),
    ):
        if abs(value) < limit:
            return f"{value * scale:.3g} {unit}" if unit != "s" else f"{value:.3f} s"
    return f"{value / 86_400:.1f} days"


def time_left(value: float) -> str:
    """A duration that is only estimated, without parts of a second: ``8 s``, ``120 s``, ``3.2 h``."""
    return f"{value:.0f} s" if 1.0 <= value < 600.0 else seconds(value)


def latency(value: float) -> str:
    """A wait as :func:`seconds` writes it, in seconds however long: ``1.23 ms``, ``4.560 s``, ``12,345.6 s``. Times of
    requests stand beside each other and beside objectives, which are said in seconds."""
    return seconds(value) if abs(value) < 600.0 else f"{value:,.1f} s"


def gibibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def lacking(num_bytes: float) -> str:
    """Bytes that are missing: ``1.5 GiB``, and in MiB what would read as none at all."""
    return gibibytes(num_bytes) if num_bytes >= 0.05 * 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def big(value: float) -> str:
    """A count with a suffix: ``70.6B``, ``15T``, ``8.03B``."""
    value = float(f"{value:.3g}")  # rounded first, or 999.9 million would read 1e+03M
    for scale, suffix in ((1e15, "e15"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"
