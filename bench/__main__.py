"""Prints the table of benchmarks: what was measured, its target, and how much faster than the plain reference.

Run: python -m bench [--json] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from bench.cases import CASES
from bench.result import Result


def main() -> None:
    """Run the chosen benchmarks (all by default) and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"which: {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    unknown = [name for name in asked.name if name not in CASES]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    results = {}
    for name in asked.name or CASES:
        print(f"{name} ...", file=sys.stderr)
        results[name] = CASES[name]()
        if not asked.json:
            print(line(results[name]), flush=True)
    if asked.json:
        print(json.dumps({name: fields(result) for name, result in results.items()}, indent=1))


def fields(result: Result) -> dict[str, object]:
    """A result for machines."""
    return {**msgspec.to_builtins(result), "met": result.met, "ratio": result.ratio}


def line(result: Result) -> str:
    """A result for reading, on two lines."""
    said = f"{result.value:,.4g} {result.unit}"
    verdict = f"{'met' if result.met else 'missed':8s} (target {result.wanted})"
    beside = f"  {result.ratio:,.0f} x the plain reference" if result.ratio else ""
    return f"{result.what}\n    {said:22s}{verdict:38s}{beside}"


if __name__ == "__main__":
    main()
