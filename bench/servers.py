"""Servers that others wrote, calibrated, predicted and measured: how wrong a prediction of their latencies is.

Each server gets a small model with random weights, is probed for some minutes, and then predicted and measured under
two traffics that its probes never sent: requests at random times, and a trace whose prompts begin alike. Both come at
half of the rate that the profile says the server can do, which is fixed before either is measured. They come in rounds,
one of each in turn, drawn anew each time, as the pace of a machine changes from minute to minute: the round whose error
is the median stands for a figure, and the errors of all are shown.

Run: python -m bench.servers all --python PYTHON [--seconds 120] [--requests 60] [--rounds 3] [--out FILE.txt]
     python -m bench.servers transformers --python PYTHON
     python -m bench.servers llama-cpp --python PYTHON
     python -m bench.servers meshwright
     python -m bench.servers meshwright --device cuda
     python -m bench.servers --url http://127.0.0.1:8000 --model NAME

``all`` proves the three one after the other, goes on where one fails, and ends with every target. It wants a quiet
machine of two cores for some twenty-five minutes, and says how much else ran.

PYTHON has the servers installed: transformers with fastapi, typer and uvicorn; llama-cpp-python[server] and gguf.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bench.tiny_models import SMALL, TINY, write_hugging_face
from meshwright.answer.server import predict_server
from meshwright.calibrate.server import fit_server
from meshwright.calibrate.server_probes import MadeProbe, Prober
from meshwright.calibrate.server_report import report
from meshwright.cost.engine import EngineProfile
from meshwright.spec.serve import Serve, parse
from meshwright.traffic.session import opened, replayed
from meshwright.traffic.summary import summed_up

#: What is measured beside predictions: tokens a second that so many clients get in a closed loop.
CLIENTS = "16 clients"
#: Tokens a second of our engine over those of transformers' generate, alone and 16 at a time, and over its server.
FASTER = {"alone": 0.9, "together": 3.0, "server": 1.0}
#: Seconds after which a server is given up.
LIMIT_S = 1500.0
#: The servers, the quickest to fail first.
SERVERS = ("meshwright", "llama-cpp", "transformers")
#: Targets: relative errors of means and of 90th percentiles.
MEAN, P90 = 0.15, 0.25
#: The share of what a server can do that the traffics ask for, and the most requests at a time that say what that is.
LOAD, OPEN = 0.5, 16
#: Tokens of the longest prompt of probes, and of what prompts of the trace share.
LONGEST, SHARED = 512, 256


class Judged(NamedTuple):
    """A figure of a traffic: predicted and measured milliseconds, and the ``target`` that their relative error is to
    keep. Of a mean the prediction has an ``interval``. ``rounds`` has the errors of all rounds."""

    server: str
    traffic: str
    figure: str
    predicted: float
    measured: float
    target: float
    interval: tuple[float, float] | None = None
    rounds: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def met(self) -> bool:
        """Whether the target is kept."""
        return abs(self.error) <= self.target

    def line(self) -> str:
        """Return the figure as a line of text."""
        said = f"{self.server:12s} {self.traffic:16s} {self.figure:9s} predicted {self.predicted:8.1f} ms"
        said += f" measured {self.measured:8.1f} ms {self.error:+7.1%} {'met' if self.met else 'MISSED'}"
        said += f" (within {self.target:.0%})"
        if self.interval is not None:
            low, high = self.interval
            inside = "holds" if low <= self.measured <= high else "misses"
            said += f"; 80% interval {low:.1f} to {high:.1f} {inside} it"
        if len(self.rounds) > 1:
            said += "; rounds " + ", ".join(f"{error:+.1%}" for error in self.rounds)
        return said


def median_round(rounds: list[Judged]) -> Judged:
    """Return the round of the median error; of an even number of rounds, the larger error of the two in the middle."""
    ordered = sorted(rounds, key=lambda one: one.error)
    middle = {ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]}
    return max(middle, key=lambda one: abs(one.error))._replace(rounds=tuple(one.error for one in rounds))


class Launched(NamedTuple):
    """How a server is started: the words behind the Python, and the model as requests name it."""

    words: list[str]
    model: str


def launched(name: str, folder: Path, port: int, python: str, device: str) -> Launched:
    """Return how a server is started on a port, with one thread for its model, so that its client has a core; on a GPU
    it serves a model of a billion parameters."""
    size = SMALL if device == "cuda" else TINY
    if name == "transformers":
        model = write_hugging_face(folder / "tiny", size)
        program = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
        words = ["-c", program, "serve", str(model), "--device", device, "--port", str(port), "--host", "127.0.0.1"]
        return Launched(words, str(model))
    if name == "llama-cpp":
        model = folder / "tiny.gguf"  # written by the Python that has the server, and its package of the format
        program = "import sys, pathlib, bench.tiny_models as b; b.write_gguf(pathlib.Path(sys.argv[1]))"
        subprocess.run([python, "-c", program, str(model)], cwd=Path(__file__).parent.parent, check=True)
        said = {"model": model, "n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "port": port, "host": "127.0.0.1"}
        # a request that comes would else end the answer that another is being given
        said |= {"interrupt_requests": "false", "verbose": "false", "model_alias": "tiny"}
        return Launched(["-m", "llama_cpp.server", *(w for k, v in said.items() for w in (f"--{k}", str(v)))], "tiny")
    model = write_hugging_face(folder / "tiny", size)
    engine = "policy=vllm-v1,budget=256,max_batch=16,prefix_cache=yes,kv_blocks=1024"
    words = ["-m", "meshwright", "serve", "--model", str(model), "--serve", engine, "--device", device]
    return Launched([*words, "--port", str(port), "--name", "tiny"], "tiny")


def traffics(profile: EngineProfile, requests: int, folder: Path, turn: int) -> dict[str, Serve]:
    """Return the two traffics of a round, at half of what the profile says that the server can do."""
    lengths = "prompt=32:0.4;128:0.4;384:0.2,output=12:0.5;32:0.5"
    assert profile.server is not None
    most = min(profile.server.max_batch, OPEN)
    flat = predict_server(profile, parse(f"concurrency={most},{lengths},requests={4 * most + 20}"))
    rate = LOAD * flat.metrics.throughput_req_per_s
    rng, rows, at = np.random.default_rng(7 + turn), [], 0.0
    for number in range(requests):
        group, tail = int(rng.integers(0, 4)), int(rng.integers(16, 96))
        blocks = SHARED // 64
        ids = [*range(group * blocks, (group + 1) * blocks), 1000 + number, 5000 + number][: blocks + -(-tail // 64)]
        rows.append({"timestamp": round(at * 1e3, 3), "input_length": SHARED + tail,
                     "output_length": int(rng.integers(8, 33)), "hash_ids": ids})  # fmt: skip
        at += float(rng.exponential(1 / rate))
    trace = folder / f"shared-{turn}.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    poisson = parse(f"rate={rate:.4g},{lengths},requests={requests},seed={11 + turn}")
    return {"poisson": poisson, "shared prefixes": parse(f"trace={trace.name},hash_block=64", base=folder)}


async def proved(url: str, model: str, asked: argparse.Namespace, folder: Path, server: str) -> list[Judged]:
    """Calibrate, predict and measure; returns every figure."""
    session = await opened(url, model=model)
    print(f"{session.dialect.model}: prompts are {session.prompts.how}; fields {', '.join(session.dialect.extras)}")
    clock, begun = asyncio.get_running_loop().time, os.getloadavg()[0]
    prober = Prober(session, longest=LONGEST, budget_s=asked.seconds, say=_note, clock=clock)
    fitted = list(await prober.make())
    fit = fit_server(fitted, model=session.dialect.model, url=url, name="bench", say=_note)
    print("\n".join(report(fit)))
    print(f"{begun:.1f} processes ran when the probes began; pace changed by {fit.profile.pace_sigma:.1%} (one sigma)")
    rounds: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for turn in range(asked.rounds):
        # no cache of prefixes knows a prompt of the rounds before
        prompts = msgspec.structs.replace(session.prompts, salt=session.prompts.salt + 1 + turn)
        fresh = msgspec.structs.replace(session, prompts=prompts)
        for name, serve in traffics(fit.profile, asked.requests, folder, turn).items():
            predicted = predict_server(fit.profile, serve).metrics
            load = os.getloadavg()[0]
            traffic, end = await replayed(fresh, serve, serve.drawn(), watch=lambda state: None)
            seen = summed_up(serve, traffic, end)
            pace = await _pace(prober, fitted)
            for field in ("ttft_s", "tpot_s") if seen.metrics is not None else ():
                for part, target in (("mean", MEAN), ("p90", P90)):
                    p, m = (getattr(getattr(side, field), part) * 1e3 for side in (predicted, seen.metrics))
                    interval = getattr(predicted, field).mean_interval if part == "mean" else None
                    within = interval and (interval[0] * 1e3, interval[1] * 1e3)
                    figure = f"{field[:4].upper()} {part}"
                    rounds[name, figure].append(Judged(server, name, figure, p, m, target, within))
            hits = "" if seen.hit_rate is None else f", {seen.hit_rate:.0%} of prompts' tokens cached"
            print(f"{name} {turn + 1}/{asked.rounds}: {seen.answered} of {seen.requests} answered, sent "
                  f"{seen.late_s[2] * 1e3:.1f} ms late (p99){hits}, {len(seen.errors)} kinds of errors; {load:.1f} "
                  f"processes ran meanwhile; single requests took {pace:+.0%} against those of the probes")  # fmt: skip
    found = [median_round(some) for some in rounds.values()]
    clients = parse("concurrency=16,prompt=64,output=48,requests=48")
    traffic, end = await replayed(session, clients, clients.drawn(), watch=lambda state: None)
    seen = summed_up(clients, traffic, end).metrics
    if seen is not None:
        print(f"{CLIENTS} {server} {seen.throughput_tokens_per_s:.1f}")
        found.append(Judged(server, CLIENTS, "tokens/s", 0.0, seen.throughput_tokens_per_s, 0.0))
    return found


async def _pace(prober: Prober, fitted: list[MadeProbe]) -> float:
    """By how much longer single requests take now than they did on average among the probes, as a share."""
    before = [probe for probe in fitted if probe.name == "single"]
    now = await prober.single()
    if now is None or not before or any(len(one.e2e) != len(now.e2e) for one in before):
        return 0.0
    usual = np.median([one.e2e for one in before], axis=0)
    return float(np.median(now.e2e / usual)) - 1


def summary(found: list[Judged], failed: dict[str, str], began: tuple[float, float, float], engine: str) -> str:
    """Return all figures, those that missed their target first, and how many kept theirs by server. `engine` is what
    :mod:`bench.engine` says as JSON, "" where it was not asked."""
    speeds = {one.server: one.measured for one in found if one.traffic == CLIENTS}
    found = [one for one in found if one.traffic != CLIENTS]
    lines = [one.line() for one in sorted(found, key=lambda one: (one.met, one.server))]
    for name in dict.fromkeys(one.server for one in found):
        mine = [one for one in found if one.server == name]
        means = [one for one in mine if one.interval is not None]
        held = sum(one.interval[0] <= one.measured <= one.interval[1] for one in means)
        lines.append(f"{name}: {sum(one.met for one in mine)} of {len(mine)} targets met; {held} of {len(means)} means "
                     "lie within their 80% intervals")  # fmt: skip
    ratios = []
    if engine:
        said = json.loads(engine)
        ratios += [
            ("over generate, alone", said["ratio_1"], "alone"),
            ("over it, 16 at a time", said["ratio_16"], "together"),
        ]
    if {"meshwright", "transformers"} <= speeds.keys():
        ratios.append(("over transformers serve, 16 clients", speeds["meshwright"] / speeds["transformers"], "server"))
    for what, ratio, name in ratios:
        verdict = "met" if ratio >= FASTER[name] else "MISSED"
        lines.append(f"tokens/s {what}: {ratio:.2f} times {verdict} (at least {FASTER[name]:g})")
    lines += [f"{name}: {speed:.0f} tokens/s for 16 clients" for name, speed in speeds.items()]
    lines += [f"{name}: FAILED, {why}" for name, why in failed.items()]
    loads = ", ".join(f"{one:.1f}" for one in began)
    lines.append(
        f"predictions: {sum(one.met for one in found)} of {len(found)} targets met; load averages before: {loads}"
    )
    return "\n".join(lines)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def started(name: str, python: str, folder: Path, device: str) -> tuple[subprocess.Popen[bytes], str, str]:
    """Start a server and wait until it answers; returns its process, URL and model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how, log = launched(name, folder, port, python, device), (folder / "server.log").open("wb")
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([python, *how.words], stdout=log, stderr=log, env=os.environ | own, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        time.sleep(0.5)
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=2).close()
            return process, url, how.model
        except urllib.error.HTTPError:
            return process, url, how.model
        except OSError:
            continue
    process.kill()
    raise SystemExit(f"{name} did not start:\n" + (folder / "server.log").read_text()[-2000:])


def prove(name: str, asked: argparse.Namespace) -> list[Judged]:
    """Start a server, unless one runs, and return its figures."""
    with tempfile.TemporaryDirectory() as place:
        folder, process, url, model = Path(place), None, asked.url, asked.model
        if not url:
            python = sys.executable if name == "meshwright" else asked.python
            process, url, model = started(name, python, folder, asked.device)
        try:
            work = proved(url, model, asked, folder, name or "server")
            return asyncio.run(asyncio.wait_for(work, LIMIT_S))
        finally:
            if process is not None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def main() -> None:
    """Prove one server, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench.servers", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=("all", *SERVERS))
    parser.add_argument("--python", default=sys.executable, help="the Python that has the servers")
    parser.add_argument("--url", default="", help="a server that runs already")
    parser.add_argument("--model", default="", help="its model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what a server's model is on")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long probes of a server may take")
    parser.add_argument("--requests", type=int, default=60, help="requests of each traffic")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both traffics")
    parser.add_argument("--out", type=Path, help="a file that the figures are written to as well")
    asked = parser.parse_args()
    if not (asked.name or asked.url):
        parser.error("say which server, or the --url of one that runs")
    began, found, failed = os.getloadavg(), [], {}
    for name in SERVERS if asked.name == "all" else (asked.name,):
        _note(f"== {name or asked.url}")
        try:
            found += prove(name, asked)
        except (Exception, SystemExit) as error:
            if asked.name != "all":
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:500]}"
    engine = ""
    if asked.name == "all":
        _note("== bench.engine")
        command = [sys.executable, "-m", "bench.engine", "--json", "--rounds", "3"]
        try:
            engine = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
        except (subprocess.SubprocessError, OSError) as error:
            failed["bench.engine"] = str(error)[:300]
    text = summary(found, failed, began, engine)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if found and not failed and "MISSED" not in text else 1)


if __name__ == "__main__":
    main()
