"""Servers that others wrote, calibrated, predicted and measured: how wrong a prediction of their latencies is.

Each server gets a small model with random weights, is probed for some minutes, and then predicted and measured under
two traffics that its probes never sent: requests at random times, and a trace whose prompts begin alike. Both come at
half of the rate that the profile says the server can do, which is fixed before either is measured.

Run: python -m bench.servers transformers --python PYTHON [--seconds 120] [--requests 60]
     python -m bench.servers llama-cpp --python PYTHON
     python -m bench.servers meshwright
     python -m bench.servers --url http://127.0.0.1:8000 --model NAME

PYTHON has the server installed (transformers with fastapi, typer and uvicorn; llama-cpp-python[server]).
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
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.tiny_models import write_gguf, write_hugging_face
from meshwright.answer.server import predict_server
from meshwright.calibrate.server import fit_server
from meshwright.calibrate.server_probes import Prober
from meshwright.calibrate.server_report import report
from meshwright.cost.engine import EngineProfile
from meshwright.spec.serve import Serve, parse
from meshwright.traffic.session import opened, replayed
from meshwright.traffic.summary import summed_up

#: Targets: relative errors of means and of 90th percentiles.
MEAN, P90 = 0.15, 0.25
#: The share of what a server can do that the traffics ask for, and the most requests at a time that say what that is.
LOAD, OPEN = 0.5, 16
#: Tokens of the longest prompt of probes, and of what prompts of the trace share.
LONGEST, SHARED = 512, 256


class Launched(NamedTuple):
    """How a server is started: the words behind the Python, and the model as requests name it."""

    words: list[str]
    model: str


def launched(name: str, folder: Path, port: int) -> Launched:
    """Return how a server is started on a port, with one thread for its model, so that its client has a core."""
    if name == "transformers":
        model = write_hugging_face(folder / "tiny")
        program = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
        words = ["-c", program, "serve", str(model), "--device", "cpu", "--port", str(port), "--host", "127.0.0.1"]
        return Launched(words, str(model))
    if name == "llama-cpp":
        model = write_gguf(folder / "tiny.gguf")
        said = {"model": model, "n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "port": port, "host": "127.0.0.1"}
        # a request that comes would else end the answer that another is being given
        said |= {"interrupt_requests": "false", "verbose": "false", "model_alias": "tiny"}
        return Launched(["-m", "llama_cpp.server", *(w for k, v in said.items() for w in (f"--{k}", str(v)))], "tiny")
    model = write_hugging_face(folder / "tiny")
    engine = "policy=vllm-v1,budget=256,max_batch=16,prefix_cache=yes,kv_blocks=1024"
    words = ["-m", "meshwright", "serve", "--model", str(model), "--serve", engine, "--device", "cpu"]
    return Launched([*words, "--port", str(port), "--name", "tiny"], "tiny")


def traffics(profile: EngineProfile, requests: int, folder: Path) -> dict[str, Serve]:
    """Return the two traffics, at half of what the profile says that the server can do."""
    lengths = "prompt=32:0.4;128:0.4;384:0.2,output=12:0.5;32:0.5"
    assert profile.server is not None
    most = min(profile.server.max_batch, OPEN)
    flat = predict_server(profile, parse(f"concurrency={most},{lengths},requests={4 * most + 20}"))
    rate = LOAD * flat.metrics.throughput_req_per_s
    rng, rows, at = np.random.default_rng(7), [], 0.0
    for number in range(requests):
        group, tail = int(rng.integers(0, 4)), int(rng.integers(16, 96))
        blocks = SHARED // 64
        ids = [*range(group * blocks, (group + 1) * blocks), 1000 + number, 5000 + number][: blocks + -(-tail // 64)]
        rows.append({"timestamp": round(at * 1e3, 3), "input_length": SHARED + tail,
                     "output_length": int(rng.integers(8, 33)), "hash_ids": ids})  # fmt: skip
        at += float(rng.exponential(1 / rate))
    trace = folder / "shared.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    poisson = parse(f"rate={rate:.4g},{lengths},requests={requests},seed=11")
    return {"poisson": poisson, "shared prefixes": parse(f"trace={trace.name},hash_block=64", base=folder)}


async def proved(url: str, model: str, seconds: float, requests: int, folder: Path) -> int:
    """Calibrate, predict and measure; returns how many targets were missed."""
    session = await opened(url, model=model)
    print(f"{session.dialect.model}: prompts are {session.prompts.how}; fields {', '.join(session.dialect.extras)}")
    clock, begun = asyncio.get_running_loop().time, os.getloadavg()[0]
    probes = await Prober(session, longest=LONGEST, budget_s=seconds, say=_note, clock=clock).make()
    fit = fit_server(probes, model=session.dialect.model, url=url, name="bench", say=_note)
    print("\n".join(report(fit)))
    lines, missed = [], 0
    for name, serve in traffics(fit.profile, requests, folder).items():
        predicted = predict_server(fit.profile, serve).metrics
        load = os.getloadavg()[0]
        traffic, end = await replayed(session, serve, serve.drawn(), watch=lambda state: None)
        found = summed_up(serve, traffic, end)
        for field in ("ttft_s", "tpot_s"):
            if found.metrics is None:
                continue
            for part, target in (("mean", MEAN), ("p90", P90)):
                p, m = (getattr(getattr(side, field), part) * 1e3 for side in (predicted, found.metrics))
                near = abs(p / m - 1) <= target
                missed += not near
                said = f"{name:16s} {field[:4].upper()} {part:4s} predicted {p:8.1f} ms measured {m:8.1f} ms"
                lines.append((near, f"{said} {p / m - 1:+7.1%} {'met' if near else 'missed'} (within {target:.0%})"))
        hits = "" if found.hit_rate is None else f", {found.hit_rate:.0%} of prompts' tokens cached"
        _note(f"{name}: {found.answered} of {found.requests} answered, sent {found.late_s[2] * 1e3:.1f} ms late (p99)"
              f"{hits}, {len(found.errors)} kinds of errors; {load:.1f} processes ran meanwhile")  # fmt: skip
    print("\n".join(line for _, line in sorted(lines, key=lambda one: one[0])))  # missed first
    print(f"{missed} of {len(lines)} missed; {begun:.1f} processes ran when the probes began")
    return missed


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def started(name: str, python: str, folder: Path) -> tuple[subprocess.Popen[bytes], str, str]:
    """Start a server and wait until it answers; returns its process, URL and model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how, log = launched(name, folder, port), (folder / "server.log").open("wb")
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


def main() -> None:
    """Prove one server."""
    parser = argparse.ArgumentParser(prog="python -m bench.servers", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=("transformers", "llama-cpp", "meshwright"))
    parser.add_argument("--python", default=sys.executable, help="the Python that has the server")
    parser.add_argument("--url", default="", help="a server that runs already")
    parser.add_argument("--model", default="", help="its model")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long probes may take")
    parser.add_argument("--requests", type=int, default=60, help="requests of each traffic")
    asked = parser.parse_args()
    if not (asked.name or asked.url):
        parser.error("say which server, or the --url of one that runs")
    with tempfile.TemporaryDirectory() as place:
        folder, process, url, model = Path(place), None, asked.url, asked.model
        if not url:
            process, url, model = started(asked.name, asked.python, folder)
        try:
            missed = asyncio.run(proved(url, model, asked.seconds, asked.requests, folder))
        finally:
            if process is not None:
                process.terminate()
                process.wait(20)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
