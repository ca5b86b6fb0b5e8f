"""A campaign's examples in a process of their own, watched: what it finds, and where it hangs or dies."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fuzz.commands import Commands
from fuzz.engine import Deaths, Interleavings
from fuzz.found import minimised
from fuzz.http import Http
from fuzz.questions import Questions
from fuzz.served import Served
from fuzz.texts import Texts

CAMPAIGNS = {
    "texts": Texts,
    "predictions": Questions,
    "serving": Served,
    "commands": Commands,
    "http": Http,
    "engine": Interleavings,
    "deaths": Deaths,
}
#: An example that takes more seconds of the processor hangs, and so does one that waits so many on the clock.
LIMIT_S, LIMIT_CLOCK_S = 10.0, 600.0
#: A worker's first example may be longer by so many times: it comes after imports and may compile.
FIRST = 30
MEMORY_BYTES = 12 * 2**30
#: Examples between two reports of a worker.
REPORT = {"texts": 500, "predictions": 20, "serving": 20, "commands": 20, "engine": 20, "deaths": 20, "http": 500}
ROOT = Path(__file__).parent.parent


class Finding(NamedTuple):
    """An example that is not taken as it must be: what was wrong, where, and the example as a plain value."""

    signature: str
    was: str
    example: dict[str, Any]


class Report(NamedTuple):
    """How far a worker came: the next example's number, outcomes since the last report, and what was found."""

    at: int
    outcomes: dict[str, int]
    findings: tuple[Finding, ...]


def rng_of(seed: int, number: int) -> Random:
    """The source of one example: it depends on nothing else."""
    return Random(seed << 40 | number)


def signature(error: BaseException) -> str:
    """The kind of an error and the place that it comes from, the same for all examples of one defect."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/meshwright/" in f.filename] or [
        f for f in traceback.extract_tb(error.__traceback__) if "/fuzz/" in f.filename
    ]
    where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "nowhere"
    said = "".join(c for c in str(error)[:60] if not c.isdigit()) if type(error).__name__ == "Defect" else ""
    return f"{type(error).__name__} in {where} {said}".strip()


def work(name: str, seed: int, start: int, stop: int, skip: set[int], place: str) -> None:
    """The worker: examples `start` to `stop`, a line of JSON on stdout for every report."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    campaign, seen, lines = CAMPAIGNS[name](), set(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what examples print is no report
    outcomes: Counter[str] = Counter()
    findings: list[Finding] = []
    with Path(place).open("r+b") as file, mmap.mmap(file.fileno(), 8) as shown:
        for number in range(start, stop):
            shown[:8] = struct.pack("q", number)
            if number not in skip:
                example = campaign.example(rng_of(seed, number))
                try:
                    outcomes[campaign.look(example)] += 1
                except Exception as error:
                    outcomes["defect"] += 1
                    if signature(error) not in seen:
                        seen.add(signature(error))
                        small = minimised(campaign, example, signature(error), signature)
                        findings.append(Finding(signature(error), f"{type(error).__name__}: {error}"[:400], small))
            if (number + 1) % REPORT[name] == 0 or number + 1 == stop:
                print(json.dumps([number + 1, outcomes, findings]), file=lines, flush=True)
                outcomes, findings = Counter(), []


def watched(name: str, seed: int, start: int, stop: int) -> Iterator[Report]:
    """Run a worker, and another where one hangs or dies, until all examples were looked at."""
    skip: set[int] = set()
    with tempfile.NamedTemporaryFile(prefix="fuzz-at-") as shown, tempfile.TemporaryFile() as stacks:
        while start < stop:
            shown.seek(0)
            shown.write(struct.pack("q", start))
            shown.flush()
            arguments = [name, str(seed), str(start), str(stop), ",".join(map(str, skip)), shown.name]
            command = [sys.executable, "-m", "fuzz.campaign", *arguments]
            stacks.seek(0)
            stacks.truncate()
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stacks, cwd=ROOT)
            try:
                ended = yield from _followed(worker, shown.name, start)
            finally:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
                worker.stdout.close()
            start = max(start, ended.at)
            if start < stop:  # it hangs or died
                number = struct.unpack("q", Path(shown.name).read_bytes()[:8])[0]
                stacks.seek(0)
                yield Report(start, {}, (_lost(name, seed, number, ended.why, stacks.read().decode(errors="replace")),))
                skip.add(number)


class _Ended(NamedTuple):
    at: int
    why: str


def _followed(worker: subprocess.Popen, place: str, start: int) -> Iterator[Report]:
    """Reports of a worker until it ends; where it does, and why."""
    os.set_blocking(worker.stdout.fileno(), False)
    at, number, pending, since = 0, -1, b"", (0.0, 0.0)
    while True:
        ended = worker.poll() is not None
        pending += worker.stdout.read() or b""
        *lines, pending = pending.split(b"\n")
        for line in lines:
            at, outcomes, findings = json.loads(line)
            yield Report(at, outcomes, tuple(Finding(*found) for found in findings))
        if ended:
            return _Ended(at, f"ended with code {worker.returncode}")
        now, (used, clock) = struct.unpack("q", Path(place).read_bytes()[:8])[0], (_cpu_s(worker.pid), time.monotonic())
        if now != number:
            number, since = now, (used, clock)
        elif used - since[0] > LIMIT_S * (FIRST if now == start else 1) or clock - since[1] > LIMIT_CLOCK_S:
            worker.send_signal(signal.SIGUSR1)  # says where it is
            time.sleep(0.5)
            return _Ended(at, f"more than {LIMIT_S:g} s")
        time.sleep(0.2)


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _lost(name: str, seed: int, number: int, why: str, stack: str) -> Finding:
    """The example at which a worker was lost, and its innermost place in Meshwright."""
    frames = [line.strip() for line in stack.splitlines() if "/meshwright/" in line]
    where = frames[0].rpartition("/")[2].replace('"', "") if frames else stack.strip().rpartition("\n")[2]
    where = "".join(c for c in where if not c.isdigit())
    try:
        example = CAMPAIGNS[name]().example(rng_of(seed, number))
    except Exception as error:
        example = {"seed": seed, "number": number, "error": str(error)}
    return Finding(f"{why} in {where}", f"{why}\n{stack[-2000:]}", example)


if __name__ == "__main__":
    campaign_name, *numbers, skipped, shown_at = sys.argv[1:]
    work(campaign_name, *map(int, numbers), {int(n) for n in skipped.split(",") if n}, shown_at)
