"""The wire between emulated hosts, as a user says it: ``100mbit,delay=20ms``. Needs no torch."""

from __future__ import annotations

import msgspec

from meshwright.spec.rate_words import delay_s, rate_bits_s

#: Rates of a link that are emulated: slower ones take minutes a step, faster ones more than a machine moves.
RATES_BITS_S = (1e6, 1e10)
#: The longest delay of a packet that is emulated, seconds: a way around the world.
MOST_DELAY_S = 0.5
WANTED = "a rate from 1mbit to 10gbit, and where packets are delayed how long one way takes: 100mbit,delay=20ms"


class EmulatedWire(msgspec.Struct, frozen=True, kw_only=True):
    """The link of every host, each way: ``rate_bits_s``, and the ``delay_s`` of a packet from one host to another."""

    rate_bits_s: float
    delay_s: float = 0.0

    def __str__(self) -> str:
        delay = f" and {self.delay_s * 1e3:g} ms" if self.delay_s else ""
        return f"{self.rate_bits_s / 1e6:g} Mbit/s{delay}"


def read(text: str) -> EmulatedWire | None:
    """The wire of a text such as ``1gbit`` or ``100mbit,delay=20ms``; None where it says none that is emulated."""
    first, comma, rest = (part.strip() for part in text.partition(","))
    key, _, value = (part.strip() for part in rest.partition("="))
    bits, seconds = rate_bits_s(first), delay_s(value) if key.lower() == "delay" else None
    if bits is None or (comma and seconds is None):
        return None
    seconds = seconds or 0.0
    if not RATES_BITS_S[0] <= bits <= RATES_BITS_S[1] or seconds > MOST_DELAY_S:
        return None
    return EmulatedWire(rate_bits_s=bits, delay_s=seconds)
