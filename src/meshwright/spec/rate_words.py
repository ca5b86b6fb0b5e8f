"""Rates and delays of links in words: ``100mbit``, ``1.5gbit``, ``delay=20ms``."""

from __future__ import annotations

import re

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(k|m|g)bit", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(us|ms|s)", re.IGNORECASE)
_BITS, _SECONDS = {"k": 1e3, "m": 1e6, "g": 1e9}, {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def rate_bits_s(word: str) -> float | None:
    """The bits/s that a word such as ``100mbit`` says; None for another word."""
    found = _RATE.fullmatch(word.strip())
    return float(found[1]) * _BITS[found[2].lower()] if found else None


def delay_s(word: str) -> float | None:
    """The seconds that a word such as ``20ms`` says; None for another word."""
    found = _TIME.fullmatch(word.strip())
    return float(found[1]) * _SECONDS[found[2].lower()] if found else None
