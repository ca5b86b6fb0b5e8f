"""Every target of time that training has, in one table: steps beside torch's own parts, the way to the first step, and
predictions of this machine after ``calibrate --here``.

Run: python -m bench.training [--pairs 12] [--rounds 3] [--quick] [--json] [PART ...]

Parts are ``beside`` (transformers' Llama under DistributedDataParallel and fully_shard, alternating with ours in one
run), ``start`` (a whole command up to its first step) and ``predicted`` (this machine calibrated into a folder of its
own, or that of $MESHWRIGHT_HOME where it holds a calibration; then every plan trained by the command line, in rounds;
a mixture's first run counts how often its experts are chosen, which its predictions know).
They want a quiet machine of two cores or more; the table says whether it was. About 12 minutes; with --quick, which
calibrates in one, 6.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench import executor
from bench.result import Result
from meshwright.catalog import measured_here

#: A small Llama and a mixture of experts, as `config.json`.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 352,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
TRAIN = "batch=16,seq=128,dtype=fp32"
PLANS = {
    "dp2": ("llama", "dp2 mb2"),
    "tp2": ("llama", "tp2 mb4"),
    "pp2": ("llama", "pp2 mb2"),
    "fsdp": ("llama", "dp2 fsdp mb4"),
    "ep2": ("experts", "dp2 ep2 mb2"),
}
PARTS = ("beside", "start", "predicted")
STEPS = 25
#: A part of a step that takes less of it than this is listed and not judged.
LEAST = 0.02


class Compared(msgspec.Struct):
    """A plan's step: seconds predicted and of the rounds, and of each part of it."""

    plan: str
    predicted_s: float
    rounds_s: list[float]
    parts: dict[str, tuple[float, list[float]]]

    @property
    def measured_s(self) -> float:
        return median(self.rounds_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def part_errors(self) -> dict[str, float]:
        """The errors of the parts that take enough of the step to be judged."""
        found = {name: (said, median(seen)) for name, (said, seen) in self.parts.items()}
        judged = {n: pair for n, pair in found.items() if max(pair) >= LEAST * self.measured_s and pair[1]}
        return {name: said / seen - 1 for name, (said, seen) in judged.items()}


def beside(pairs: int) -> Iterator[Result]:
    """Yield the steps beside those of transformers' Llama."""
    for name, target in executor.TARGETS.items():
        row = executor.measure(name, pairs)
        print(executor.line(name, row), file=sys.stderr)
        what = f"step over that of {name.replace('-', ' under ')}, median of {pairs} pairs ({row.elapsed})"
        yield Result(what=what, value=row.elapsed.middle, unit="x", target=target)


def first_step(folder: Path) -> Iterator[Result]:
    """Yield how long a command takes to its first step."""
    command = [*_run(folder, "llama", "dp2 mb2"), "--on", "2xh100", "--device", "cpu", "--steps", "2"]
    seen = [_to_first_step(command) for _ in range(6)][1:]
    yield Result(what="start of `run` to its first step, median of 5", value=median(seen), unit="s", target=6.0)


def _to_first_step(command: list[str]) -> float:
    begun = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
        said = []
        for line in child.stderr:
            said.append(line)
            if "step 1/" in line:
                took = time.perf_counter() - begun
                child.stderr.read()
                return took
    raise SystemExit(f"no first step: {''.join(said)}")


def predicted(folder: Path, rounds: int, quick: bool) -> Iterator[Result]:
    """Yield how far predictions of this machine are off."""
    if not (measured_here() / "here.json").is_file():
        os.environ["MESHWRIGHT_HOME"] = str(folder / "here")
        calibrate = [sys.executable, "-m", "meshwright", "calibrate", "--here", *(["--quick"] if quick else [])]
        subprocess.run(calibrate, check=True, stdout=subprocess.DEVNULL)
    rows = [Compared(name, 0.0, [], {}) for name in PLANS]
    for number in range(rounds):
        for row in rows:
            print(f"round {number + 1} of {rounds}: {row.plan}", file=sys.stderr)
            model, plan = PLANS[row.plan]
            routing = folder / f"{row.plan}-routing.json" if model == "experts" else None
            if routing and not routing.is_file():  # how often experts are chosen is of the text, not of the machine
                count = [*_run(folder, model, plan), "--on", "2xhere", "--steps", str(STEPS), "--routing", str(routing)]
                subprocess.run(count, check=True, capture_output=True)
            command = [*_run(folder, model, plan, routing), "--on", "2xhere", "--steps", str(STEPS), "--json"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            _add(row, json.loads(done.stdout)["comparison"])
    for row in rows:
        parts = ", ".join(f"{name} {error:+.0%}" for name, error in row.part_errors().items())
        span = f"{min(row.rounds_s) * 1e3:.0f} to {max(row.rounds_s) * 1e3:.0f} ms"
        print(f"{row.plan:5s} {row.predicted_s * 1e3:5.0f} ms, {span} {row.error:+.1%}: {parts}", file=sys.stderr)
    errors = {row.plan: abs(row.error) for row in rows}
    worst = max(errors, key=errors.get)
    each = {f"{error_name} of {row.plan}": abs(e) for row in rows for error_name, e in row.part_errors().items()}
    part = max(each, key=each.get)
    named = ", ".join(PLANS)
    yield Result(what=f"predicted steps of {named}: median", value=100 * median(errors.values()), unit="%", target=5.0)
    yield Result(what=f"predicted steps: worst ({worst})", value=100 * errors[worst], unit="%", target=12.0)
    yield Result(what=f"parts of predicted steps: worst ({part})", value=100 * each[part], unit="%", target=25.0)


def _add(row: Compared, comparison: dict[str, Any]) -> None:
    row.predicted_s = comparison["step_time_s"]["predicted"]
    row.rounds_s.append(comparison["step_time_s"]["measured"])
    for kind in (k for k in comparison["kinds"] if k["matched"]):  # others are inside of these on one side
        _, seen = row.parts.setdefault(kind["name"], (kind["predicted_s"] + kind["unmatched_predicted_s"], []))
        seen.append(kind["measured_s"] + kind["unmatched_measured_s"])


def _run(folder: Path, model: str, plan: str, routing: Path | None = None) -> list[str]:
    """The command that trains a model under a plan, on a text of one document; its prediction knows how often experts
    are chosen where `routing` is a file that says so."""
    train = f"{TRAIN},routing={routing}" if routing else TRAIN
    asked = ["--train", train, "--plan", plan, "--data", str(folder / "text.txt")]
    return [sys.executable, "-m", "meshwright", "run", str(folder / f"{model}.json"), *asked]


def _prepare(folder: Path) -> None:
    for name, config in (("llama", LLAMA), ("experts", EXPERTS)):
        (folder / f"{name}.json").write_text(json.dumps(config))
    words = "the quick brown fox jumps over the lazy dog and trains a small model on two cores\n"
    (folder / "text.txt").write_text(words * 8000)


def machine() -> str:
    """The machine that is measured, and how busy it was before."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    quiet = "quiet" if load < cores / 4 else "BUSY: other work takes part in these times"
    return f"{cores} cores, load {load:.1f}: {quiet}"


def main() -> None:
    """Measure the chosen parts (all by default) and print each target."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", help=f"which: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="calibrate --here --quick")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    unknown = [name for name in asked.part if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    said, found = machine(), []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        _prepare(folder)
        parts = {
            "beside": lambda: beside(asked.pairs),
            "start": lambda: first_step(folder),
            "predicted": lambda: predicted(folder, asked.rounds, asked.quick),
        }
        for part in asked.part or PARTS:
            found += parts[part]()
    if asked.json:
        print(json.dumps({"machine": said, "targets": msgspec.to_builtins(found)}, indent=1))
        return
    print(said)
    for result in found:
        verdict = "met" if result.met else "missed"
        print(f"{verdict:7s} {result.value:6.3g} {result.unit:2s} (target {result.wanted})  {result.what}")


if __name__ == "__main__":
    main()
