"""An elastic run whose processes are killed at random instants, beside the same run undisturbed.

Run: python -m bench.elastic [--kills 100] [--plan "pp2 dp2 zero1"] [--spares N] [--seed 0] [--json]

Four ranks train a small Llama-like model in float64. Once every rank holds the state and its neighbour's copy, one of
the job's processes, a host with its memory or a worker, is sent SIGKILL after a random time that is longer than a few
steps. Told are the difference of all losses from those of the undisturbed run, the steps repeated for a kill, and the
seconds from the instant of a kill until all ranks held the state and the copies again. With `--spares 0` lost hosts are
not replaced at once: the job shrinks, and they join again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from meshwright.answer.replan import replanned
from meshwright.plan import parse
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.run.elastic.launcher import ElasticRun, Formed, run
from meshwright.run.loop import Job
from meshwright.run.settings import Settings
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.elastic import Elastic

MODEL = transformer(layers=4, hidden=32, heads=4, kv_heads=2, vocab=260, ffn=48, gated=True, max_seq_len=64)
TRAIN = Train(global_batch=12, seq_len=32, dtype="fp32")
RANKS = 4
#: A kill comes so many seconds after all is well again, at most.
MOST_S = 0.4
#: Targets: the losses' difference, the steps repeated for a kill, and seconds of a recovery.
EXACT, AGAIN, RECOVERY_S = 1e-9, 1, 2.0


class Killer:
    """Kills a random process of a run, again and again, whenever the state is in memory twice."""

    def __init__(self, kills: int, seed: int):
        self.left, self.rng = kills, random.Random(seed)
        self.at_s: list[float] = []
        self.recovered_s: list[float] = []

    def __call__(self, pids: dict[int, int]) -> None:
        if len(self.recovered_s) < len(self.at_s):
            self.recovered_s.append(time.monotonic() - self.at_s[-1])
        if self.left:
            self.left -= 1
            victim = self.rng.choice(self.rng.choice(sorted(pids.items())))
            timer = threading.Timer(self.rng.uniform(0.0, MOST_S), self._kill, (victim,))
            timer.daemon = True
            timer.start()

    def _kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # the ranks changed meanwhile, as a host joined
            self.left += 1
        else:
            self.at_s.append(time.monotonic())


def trained(corpus: str, plan: str, steps: int, spares: int | None, killer: Killer | None) -> ElasticRun:
    """A run of so many steps, with what kills its processes."""
    own = parse(plan).on(RANKS)
    settings = Settings(precision="float64", lr=1e-3)
    job = Job(model=MODEL, plan=own, train=TRAIN, settings=settings, corpus=corpus, steps=steps, quiet=True)

    @cache
    def formed(ranks: int) -> Formed:
        found = None if ranks == RANKS else replanned(MODEL, load(f"{RANKS}xh100"), TRAIN, own, ranks)
        return Formed(own) if found is None else Formed(found.plan, found.counts, found.params)

    sizes = {RANKS} if spares is None else {formed(n).plan.num_ranks for n in range(1, RANKS + 1)}
    decider = Elastic(sizes=tuple(sorted(sizes)), spares=spares)
    return run(job, decider, formed, repair_s=1.0, whole=killer)


def main() -> None:
    said = argparse.ArgumentParser(prog="python -m bench.elastic", description=__doc__.splitlines()[0])
    said.add_argument("--kills", type=int, default=100)
    said.add_argument("--plan", default="pp2 dp2 zero1")
    said.add_argument("--spares", type=int, default=None)
    said.add_argument("--seed", type=int, default=0)
    said.add_argument("--json", action="store_true")
    asked = said.parse_args()
    steps = 10 * asked.kills + 20
    with tempfile.TemporaryDirectory() as folder:
        corpus = str(data.build("sample", tokenizer.Bytes(), Path(folder)))
        plain = trained(corpus, asked.plan, steps, asked.spares, None)
        killer = Killer(asked.kills, asked.seed)
        killed = trained(corpus, asked.plan, steps, asked.spares, killer)
    differ = max(abs(a - b) for a, b in zip(plain.losses, killed.losses, strict=True))
    recovered = sorted(killer.recovered_s)
    found = {
        "kills": len(killer.at_s),
        "failures": killed.failures,
        "steps": len(killed.losses),
        "final_loss": killed.losses[-1],
        "undisturbed": plain.losses[-1],
        "losses_differ": differ,
        "most_repeated": max((one.repeated for one in killed.recoveries), default=0),
        "repeated": sum(one.repeated for one in killed.recoveries),
        "recovery_s": {
            "median": recovered[len(recovered) // 2] if recovered else 0.0,
            "most": recovered[-1] if recovered else 0.0,
        },
        "seconds": {"undisturbed": plain.seconds, "killed": killed.seconds},
        "sources": sorted({one.source for one in killed.recoveries}),
    }
    if asked.json:
        json.dump(found, sys.stdout, indent=2)
        print()
    else:
        for what, value in found.items():
            print(f"{what:16} {value}")
    met = differ <= EXACT and found["most_repeated"] <= AGAIN and found["recovery_s"]["most"] <= RECOVERY_S
    sys.exit(0 if met and found["kills"] >= asked.kills else 1)


if __name__ == "__main__":
    main()
