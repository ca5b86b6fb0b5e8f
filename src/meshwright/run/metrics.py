"""The report of a run on its steps: a line of JSON each in a file, and a line of progress on stderr."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import MeshwrightError

METRICS = "metrics.jsonl"
#: Seconds between two lines on a terminal; lines in all where they stay, and seconds between those.
OFTEN_S, LINES, SELDOM_S = 0.2, 10, 10.0
#: Steps that the rest is judged by.
RECENT = 20


class Metrics:
    """A file of one JSON object a step, in order and without a step twice, also when the run is taken up again.

    Raises:
        MeshwrightError: X104 when it cannot be written.
    """

    def __init__(self, path: Path, *, done: int):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if path.is_file() else b""
            kept = b"".join(line for line in before.splitlines(keepends=True) if _within(line, done))
            if kept != before:  # what a run that was killed did beyond its last checkpoint is done again
                write_bytes(path, kept)
            self._file = path.open("ab")
        except OSError as error:
            raise self._cannot(error) from None

    def add(self, entry: dict[str, Any]) -> None:
        """Write one step's object; it is in the file when this returns."""
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot(error) from None

    def close(self) -> None:
        self._file.close()

    def _cannot(self, error: OSError) -> MeshwrightError:
        return MeshwrightError.one(
            "X104",
            f"cannot write {self.path}: {error.strerror or error}",
            place=f"--out {self.path.parent}",
            help="name a folder that may be written to and has room",
        )


def _within(line: bytes, done: int) -> bool:
    """Whether a line is whole and of a step that stays done."""
    try:
        return line.endswith(b"\n") and msgspec.json.decode(line)["step"] <= done
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


class ProgressLine:
    """One line that is written over on a terminal, about ten lines in all elsewhere."""

    def __init__(self, steps: int, tokens_per_step: int, ideal_s: float = 0.0, counted: str = "tokens"):
        """`counted`: the things that a step trains on so many of."""
        self.steps, self.tokens, self.ideal_s, self.counted = steps, tokens_per_step, ideal_s, counted
        self.most = tokens_per_step
        self.learnt = False
        self.seconds: list[float] = []
        self._live = sys.stderr.isatty()
        self._said_at, self._open = -math.inf, False

    def __call__(self, step: int, loss: float, seconds: float, tokens: int = 0) -> None:
        """Step `step` is done, over so many tokens where that is not the same in every step. Fewer than a step has are
        those that something is learnt from, which the line then says."""
        self.learnt = 0 < tokens < self.most
        self.tokens = tokens or self.tokens
        self.seconds = [*self.seconds[1 - RECENT :], seconds]
        now = time.monotonic()
        last = step >= self.steps
        if self._live:
            due = now - self._said_at >= OFTEN_S
        else:
            due = step % math.ceil(self.steps / LINES) == 0 or now - self._said_at >= SELDOM_S
        if due or last:
            self._said_at = now
            text = self.line(step, loss)
            sys.stderr.write(f"\r\033[K{text}" if self._live else f"{text}\n")
            sys.stderr.flush()
            self._open = self._live

    def line(self, step: int, loss: float) -> str:
        """``step 12/20  loss 3.2140  1,234 tokens/s  MFU 3.1%  12 s left``; the rates are of recent steps."""
        seconds = median(self.seconds)
        mfu = f"  MFU {self.ideal_s / seconds:.1%}" if self.ideal_s else ""
        left = (self.steps - step) * seconds
        rate = f"{self.tokens / seconds:,.0f} {'learnt ' if self.learnt else ''}{self.counted}/s"
        return f"step {step}/{self.steps}  loss {loss:.4f}  {rate}{mfu}  {_left(left)}"

    def close(self) -> None:
        """End the line of progress, so that the next output begins on a new one."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False


def _left(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s left"
    minutes = seconds / 60
    return f"{minutes:.0f} min left" if minutes < 100 else f"{minutes / 60:.1f} h left"
