"""How long whole commands take, beside ``python -c pass`` and ``python -c "import numpy"`` in the same run.

Seconds of a machine say little of another, and of a busy one nothing: what is measured are processor seconds, user and
system together, and every command takes turns with the two others, so that ratios are those of rounds. Targets are
ratios to numpy's import, which is the smallest thing that any answer has to wait for.

Run: python -m bench.process [--rounds N] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

#: On the machine that the targets in seconds are for numpy's import takes this long: a prediction that took 0.68 s
#: there took 7 times numpy's import elsewhere.
NUMPY_S = 0.1
SMALL = ["llama3-8b", "--on", "8xh100", "--train", "batch=16,seq=8192"]
README = ["llama3-70b", "--on", "64xh100", "--train", "batch=512,seq=8192"]
LARGE = ["llama3-405b", "--on", "16384xh100", "--train", "batch=2048,seq=8192"]
#: Name -> the command's words, and the seconds it may take on that machine.
COMMANDS: dict[str, tuple[list[str], float]] = {
    "help": (["--help"], 0.2),
    "predict help": (["predict", "--help"], 0.2),
    "search help": (["search", "--help"], 0.2),
    "small": (["predict", *SMALL, "--plan", "fsdp full"], 0.4),
    "predict": (["predict", *README, "--plan", "tp8 pp4 vpp5 zero1"], 0.4),
    "search 64": (["search", *README], 1.5),
    "search 16384": (["search", *LARGE], 5.0),
}


def main() -> None:
    """Measure the chosen commands, warm: each has run once before, with a store of its own."""
    parser = argparse.ArgumentParser(prog="python -m bench.process", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"which: {', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; their median is shown")
    parser.add_argument("--cold", action="store_true", help="searches without what earlier ones proved")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for name in asked.name or COMMANDS:
            words, target_s = COMMANDS[name]
            words = (
                [*words, "--store", "none"] if asked.cold and words[0] == "search" and "--help" not in words else words
            )
            print(line(name, [sys.executable, "-m", "meshwright", *words], target_s, asked.rounds, cache), flush=True)


def line(name: str, command: list[str], target_s: float, rounds: int, cache: str) -> str:
    """Return the line of a command: its seconds, against an empty Python and numpy's import, beside its target."""
    nothing, numpy = ([sys.executable, "-c", code] for code in ("pass", "import numpy"))
    spent(command, cache)
    turns = [[spent(each, cache) for each in (nothing, numpy, command)] for _ in range(rounds)]
    cpu = [median(turn[i][0] for turn in turns) for i in range(3)]
    wall = median(turn[2][1] for turn in turns)
    times, wanted = median(turn[2][0] / turn[1][0] for turn in turns), target_s / NUMPY_S
    return (
        f"{name:13s} {cpu[2]:6.3f} s of processor, {wall:6.3f} s in all; pass {cpu[0]:.3f} s, numpy {cpu[1]:.3f} s\n"
        f"    {times:5.2f} x numpy's import   {'met' if times <= wanted else 'missed':7s}(target <= {wanted:.2f} x, "
        f"{target_s:g} s where that takes {NUMPY_S:g} s)"
    )


def spent(command: list[str], cache: str) -> tuple[float, float]:
    """Processor seconds and all seconds of a process, which may answer yes or no."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    kept = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": os.pathsep.join(filter(None, (_source(), _path())))}
    done = subprocess.run(command, capture_output=True, text=True, env=kept, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def _source() -> str:
    return str(Path(__file__).parent.parent / "src")


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")


if __name__ == "__main__":
    main()
