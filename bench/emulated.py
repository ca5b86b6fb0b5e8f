"""Predicted against measured step times on the emulated cluster: every schedule, products of axes, several links.

Run: python -m bench.emulated [--repeats 5] [--json] [ROW ...]

Each row is one plan on emulated hosts (``meshwright emulate``): the prediction knows the link from one calibration and
nothing else. Exchanges that meet on a rank's port share it; the last column is the error if they passed each other. In
``PLANS`` exchanges are shorter than what they run beside, as in plans that are worth running; ``CROWDED`` are those
that fill the ports, and are summed up apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

from meshwright.plan import parse
from meshwright.run.emulate.hosts import Hosts, missing
from meshwright.run.emulate.measure import Emulated, on_hosts
from meshwright.run.emulate.network import calibrate
from meshwright.spec import cluster, model
from meshwright.spec.workload import parse as workload

MODEL = Path(__file__).parent / "models" / "small-llama.json"
DEVICE = "h100"
#: Seconds the busiest rank computes in a step.
COMPUTE_S = 1.0


class Row(NamedTuple):
    """A plan on ``hosts`` hosts of ``per_host`` ranks with links of ``mbit_s``."""

    hosts: int
    per_host: int
    mbit_s: float
    plan: str
    train: str = "batch=8,seq=1024"


PLANS = (
    Row(2, 1, 100, "dp2"),
    Row(2, 1, 100, "pp2 1f1b"),
    Row(2, 1, 500, "dp2 zero1"),
    Row(2, 1, 500, "dp2 zero2"),
    Row(2, 1, 500, "tp2", "batch=4,seq=1024"),
    Row(2, 1, 500, "tp2 nosp", "batch=4,seq=1024"),
    Row(2, 1, 500, "cp2", "batch=4,seq=1024"),
    Row(2, 1, 1000, "cp2 ulysses", "batch=4,seq=1024"),
    Row(2, 1, 1000, "cp2 allgather", "batch=4,seq=1024"),
    Row(2, 1, 1000, "dp2 zero3"),
    Row(4, 1, 200, "pp4 gpipe"),
    Row(4, 1, 200, "pp4 1f1b"),
    Row(4, 1, 200, "pp4 vpp2 interleaved"),
    Row(4, 1, 200, "pp4 vpp2 breadth-first"),
    Row(4, 1, 200, "pp4 zb-h1"),
    Row(4, 1, 200, "pp4 zb-h2"),
    Row(4, 1, 200, "pp4 vpp2 zb-v"),
    Row(4, 1, 200, "pp4 dualpipe"),
    Row(4, 1, 200, "pp4 vpp2 dualpipev"),
    Row(4, 1, 200, "pp4 vpp2 hanayo"),
    Row(4, 1, 200, "pp4 chimera"),
    Row(4, 1, 200, "pp4 vpp2 bitpipe"),
    Row(4, 1, 200, "pp4 vpp2 zeropp"),
    Row(4, 1, 200, "pp4 zb-auto"),
    Row(4, 1, 200, "pp4 zb-1p"),
    Row(4, 1, 200, "pp4 zb-2p"),
    Row(4, 1, 200, "pp4 2bp:1f1b"),
    Row(4, 1, 200, "dp4"),
    Row(4, 1, 200, "pp2 dp2 zero1"),
    Row(4, 1, 500, "tp2 pp2", "batch=4,seq=1024"),
    Row(4, 1, 500, "cp2 pp2", "batch=4,seq=1024"),
    Row(4, 1, 500, "cp2 dp2", "batch=8,seq=1024"),
    Row(2, 2, 200, "tp2 dp2"),
    Row(4, 2, 200, "tp2 pp2 dp2", "batch=16,seq=1024"),
    Row(4, 2, 200, "tp2 pp4", "batch=8,seq=1024"),
    Row(8, 1, 200, "pp4 dp2", "batch=16,seq=1024"),
    Row(8, 1, 500, "pp2 dp4 zero1", "batch=16,seq=1024"),
    Row(4, 1, 500, "dp4 zero3"),
)
CROWDED = (
    Row(2, 1, 200, "dp2 zero3", "batch=16,seq=2048"),
    Row(2, 1, 200, "dp2 zero3 overlap=none", "batch=16,seq=2048"),
    Row(2, 1, 200, "cp2", "batch=4,seq=2048"),
    Row(4, 1, 200, "pp4 1f1b", "batch=32,seq=2048"),
    Row(4, 1, 200, "pp4 vpp2 interleaved", "batch=32,seq=2048"),
    Row(4, 1, 200, "pp4 vpp2 zb-v", "batch=32,seq=2048"),
    Row(4, 1, 200, "pp4 dualpipe", "batch=32,seq=2048"),
    Row(4, 1, 200, "cp2 pp2", "batch=8,seq=2048"),
)


def measure(rows: tuple[Row, ...], repeats: int) -> Iterator[tuple[Row, Emulated]]:
    """Every row, those on the same hosts one after another."""
    described = model.load(str(MODEL))
    for (num_hosts, per_host, mbit_s), group in groupby(rows, key=lambda row: row[:3]):
        ranks = num_hosts * per_host
        with Hosts(num_hosts, mbit_s * 1e6, per_host) as hosts:
            links = calibrate(hosts)
            for row in group:
                plan, devices = parse(row.plan).on(ranks), cluster.load(f"{ranks}x{DEVICE}")
                yield (
                    row,
                    on_hosts(
                        hosts,
                        links,
                        described,
                        devices,
                        workload(row.train),
                        plan,
                        repeats=repeats,
                        compute_s=COMPUTE_S,
                    ),
                )


def line(row: Row, done: Emulated) -> str:
    low, high = done.spread_s
    where = f"{row.hosts}x{row.per_host} {row.mbit_s:g} Mbit/s"
    return (
        f"{row.plan:24s} {row.train:18s} {where:16s} {done.prediction.step_time_s * 1e3:9.1f} "
        f"{done.step_time_s * 1e3:9.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) {done.error:+7.1%} "
        f"{done.apart_error:+7.1%}"
    )


def main() -> None:
    """Measure the chosen rows and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.emulated", description=__doc__.splitlines()[0])
    parser.add_argument("row", nargs="*", help="only rows whose plan contains one of these (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    reason = missing()
    if reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    summaries = {}
    for name, rows in (("plans", PLANS), ("crowded", CROWDED)):
        found = []
        for row, done in measure(tuple(r for r in rows if _wanted(r, asked.row)), asked.repeats):
            found.append((row, done))
            print(line(row, done), file=sys.stderr if asked.json else sys.stdout, flush=True)
        if found:
            summaries[name] = summary(found)
            if not asked.json:
                print(in_words(name, summaries[name]), flush=True)
    if asked.json:
        print(json.dumps(summaries, indent=1))


def _wanted(row: Row, words: list[str]) -> bool:
    return not words or any(word in row.plan for word in words)


def summary(found: list[tuple[Row, Emulated]]) -> dict[str, object]:
    """Errors of some rows, as predicted and with exchanges that pass each other, and the rows."""
    errors = [abs(done.error) for _, done in found]
    apart = [abs(done.apart_error) for _, done in found]
    rows = [
        row._asdict()
        | {
            "predicted_s": done.prediction.step_time_s,
            "apart_s": done.apart_s,
            "measured_s": done.steps_s,
            "error": done.error,
            "error_apart": done.apart_error,
        }
        for row, done in found
    ]
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "median_error_apart": median(apart),
        "worst_error_apart": max(apart),
        "rows": rows,
    }


def in_words(name: str, found: dict) -> str:
    return (
        f"{len(found['rows'])} {name}: median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}; "
        f"if exchanges passed each other {found['median_error_apart']:.1%}, {found['worst_error_apart']:.1%}"
    )


if __name__ == "__main__":
    main()
