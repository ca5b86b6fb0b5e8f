"""Clocks that follow the power of a row: ``power=polca``.

POLCA (Patel et al. 2023, arXiv 2308.12908): above a first threshold of the row's power clocks of low priority are
capped, above a second one these more and the others too, and above what the row may draw a power brake stops nearly
everything. A cap is taken back when the power is ``back`` below its threshold. Thresholds and clocks are the paper's
for the A100 of 1,410 MHz (80% and 89%; 1,275 and 1,110 MHz; 1,305 MHz; a brake at 288 MHz): unverified.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.power import FREE, Cap, PowerSeen

#: The clock that the caps are stated at, in MHz.
FULL_MHZ = 1410.0


class Polca(msgspec.Struct, frozen=True):
    """The policy: two thresholds as shares of what the row may draw, and the clocks above each."""

    name: str = "polca"
    title: str = "clocks of low priority are capped above a threshold of the row's power, all above a second one"
    first: float = 0.80
    second: float = 0.89
    back: float = 0.05
    above_first: Cap = Cap(1275 / FULL_MHZ, 1.0)
    above_second: Cap = Cap(1110 / FULL_MHZ, 1305 / FULL_MHZ)
    brake: Cap = Cap(288 / FULL_MHZ, 288 / FULL_MHZ)

    def begin(self) -> int:
        """Nothing is capped: the state is the number of the limit that was passed, 0 to 3."""
        return 0

    def decide(self, state: int, event: PowerSeen) -> tuple[int, tuple[Cap, ...]]:
        """The state after a look at the power, and the clocks where these are others."""
        limits = (self.first, self.second, 1.0)
        passed = [
            number for number, limit in enumerate(limits, 1) if event.drawn > limit - self.back * (number <= state)
        ]
        after = max(passed, default=0)
        return after, (self.cap(after),) if after != state else ()

    def cap(self, state: int) -> Cap:
        """Return the clocks of a state."""
        return (FREE, self.above_first, self.above_second, self.brake)[state]


POLICY = Polca()
