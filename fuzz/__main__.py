"""Runs the campaigns, from where they were stopped, and says what was found.

Run: python -m fuzz [texts|predictions|serving|commands|engine|deaths ...] [--count N] [--seconds S] [--seed N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.campaign import CAMPAIGNS, ROOT, Report, watched
from fuzz.found import keep

LAST = Path(__file__).parent / "last.json"
STATES = ROOT / "out" / "fuzz"
FORMAT_VERSION = 1


def main() -> int:
    """Run what is asked; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"which: {', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument(
        "--count",
        type=int,
        help="examples of each (default: 1,000,000 texts, 1,000 engines or deaths, 20,000 others)",
    )
    parser.add_argument("--seconds", type=float, help="stop each after so many seconds; the next run goes on")
    parser.add_argument(
        "--seed", type=int, help="begin anew with this seed (default: go on, or the seed after the last)"
    )
    asked = parser.parse_args()
    unknown = [name for name in asked.name if name not in CAMPAIGNS]
    if unknown:
        parser.error(f"no campaign is called {', '.join(unknown)}; there are {', '.join(CAMPAIGNS)}")
    found = 0
    for name in asked.name or CAMPAIGNS:
        found += _campaign(name, asked)
    return 1 if found else 0


def _campaign(name: str, asked: argparse.Namespace) -> int:
    """Run one campaign to its end or its time; how much it found."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    state = _state(name, asked)
    target, ends = state["target"], time.monotonic() + (asked.seconds or float("inf"))
    progress = Progress(name, state["at"], target)
    try:
        while state["at"] < target and time.monotonic() < ends:
            stop = min(target, state["at"] + CAMPAIGNS[name].chunk)
            for report in watched(name, state["seed"], state["at"], stop):
                _add(state, name, report)
                if progress.show(state):
                    _write(STATES / f"{name}.json", state)
                if time.monotonic() > ends:
                    break
    except KeyboardInterrupt:
        print(f"\nstopped at {state['at']:,}; the next run goes on", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        progress.show(state, last=True)
        _save(name, state)
    for finding in state["findings"]:
        print(f"{name}: {finding['signature']}\n  kept as {finding['kept']}")
    return len(state["findings"])


def _state(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Where the campaign was stopped, if it was on this very code; else its beginning."""
    target, code = asked.count or CAMPAIGNS[name].target, _code()
    file = STATES / f"{name}.json"
    last = json.loads(LAST.read_text())["campaigns"].get(name) if LAST.exists() else None
    if asked.seed is None and file.exists():
        state = json.loads(file.read_text())
        if state["code"] == code and state["at"] < state["target"]:
            return state | {"target": target}
    seed = asked.seed if asked.seed is not None else last["seed"] + 1 if last else 0
    return {"code": code, "seed": seed, "target": target, "at": 0, "outcomes": {}, "findings": []}


def _add(state: dict[str, Any], name: str, report: Report) -> None:
    state["at"] = report.at
    state["outcomes"] = dict(sorted((Counter(state["outcomes"]) + Counter(report.outcomes)).items()))
    known = {finding["signature"] for finding in state["findings"]}
    for found in report.findings:
        if found.signature not in known:
            kept = keep(name, found.signature, found.was, found.example)
            state["findings"].append({"signature": found.signature, "kept": str(kept.relative_to(ROOT))})
            print(f"\n{name}: found {found.signature}", file=sys.stderr)
            _write(STATES / f"{name}.json", state)


def _save(name: str, state: dict[str, Any]) -> None:
    """The state to go on from, and the result that is kept."""
    from meshwright import __version__

    _write(STATES / f"{name}.json", state)
    whole = json.loads(LAST.read_text()) if LAST.exists() else {"campaigns": {}}
    result = {key: state[key] for key in ("seed", "at", "target", "outcomes", "findings", "code")}
    campaigns = {key: value for key, value in {**whole["campaigns"], name: result}.items() if key in CAMPAIGNS}
    _write(
        LAST, {"format_version": FORMAT_VERSION, "version": __version__, "campaigns": dict(sorted(campaigns.items()))}
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    from meshwright.atomic import write_bytes

    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def _code() -> str:
    """Return a digest of the code that the examples go through: the package and the search itself."""
    digest = hashlib.sha256()
    for folder in (ROOT / "src" / "meshwright", Path(__file__).parent):
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.suffix in (".py", ".toml", ".json") and file != LAST:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Progress:
    """A line on stderr: how far, how fast, how long still."""

    def __init__(self, name: str, at: int, target: int):
        self.name, self.first, self.target, self.began, self.shown = name, at, target, time.monotonic(), 0.0

    def show(self, state: dict[str, Any], *, last: bool = False) -> bool:
        """Print it, at most once a second on a terminal and once in ten elsewhere; whether it was printed."""
        now, often = time.monotonic(), 1.0 if sys.stderr.isatty() else 10.0
        if now - self.shown < often and not last:
            return False
        self.shown = now
        rate = (state["at"] - self.first) / max(1e-9, now - self.began)
        left = f"{(self.target - state['at']) / rate:,.0f} s left" if rate else "no rate yet"
        line = (
            f"{self.name}: {state['at']:,} of {self.target:,} ({rate:,.0f}/s, {left}), {len(state['findings'])} found"
        )
        print(
            f"\r\033[K{line}" if sys.stderr.isatty() else line, end="\n" if last or often > 1 else "", file=sys.stderr
        )
        return True


if __name__ == "__main__":
    sys.exit(main())
