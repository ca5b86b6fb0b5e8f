"""Progress of long work on stderr: how far, how fast, how long yet."""

from __future__ import annotations

import sys
import time

#: Seconds between two lines on a terminal, and where the lines stay.
OFTEN_S, SELDOM_S = 0.2, 10.0


class Progress:
    """Called with a name, what is done and how much there is; says so now and then, and at the end of each name. Work
    that ends within `least_s` seconds is not worth a line."""

    def __init__(self, unit: str = "rows", least_s: float = 0.0) -> None:
        self._unit, self._least_s = unit, least_s
        self._name = ""
        self._begun = self._said = 0.0
        self._live = sys.stderr.isatty()

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name != self._name:
            self._name, self._begun, self._said = name, now, now
        elif done >= total:
            if now - self._begun >= self._least_s:
                self._say(f"{name}: {total:,} {self._unit} in {now - self._begun:.1f} s", last=True)
        elif now - self._begun >= self._least_s and now - self._said >= (OFTEN_S if self._live else SELDOM_S):
            self._said = now
            rate = done / (now - self._begun)
            pace = f"{now - self._begun:.0f} s"
            if rate:
                pace = f"{rate:,.3g} {self._unit}/s, {(total - done) / rate:.0f} s left"
            self._say(f"{name}: {done:,} of {total:,} {self._unit}, {pace}", last=False)

    def _say(self, text: str, *, last: bool) -> None:
        if self._live:
            sys.stderr.write(f"\r\033[K{text}" + ("\n" if last else ""))
            sys.stderr.flush()
        else:
            print(text, file=sys.stderr)
