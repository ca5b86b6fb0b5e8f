"""Published training steps predicted, untuned: Megatron-LM (2104.04473, Table 1), Korthikanti et al. (2205.05198,
Table 5) and MegaScale (2402.15627, Table 2).

One rule fills what a paper leaves open, the same for every row:

* microbatch 4 without a pipeline, else 1; two chunks per rank where layers and microbatches divide, else one;
* fp16 with dropout; no sequence parallelism unless the row says so (MegaScale's both systems have it);
* ZeRO-2 beside a pipeline is Megatron-LM's distributed optimizer, whose gradient buffer is whole: zero1;
* attention as separate kernels and gradients exchanged after the last backward, as Megatron-LM did in 2021 and 2022;
  MegaScale's own system: FlashAttention, and overlap in data, tensor and pipeline parallelism, which it is about.

Nothing is fitted to these rows: devices, links and efficiencies are the catalog's.

Run: python validation/published_steps.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from meshwright import Prediction, predict
from meshwright.plan import parse
from meshwright.spec import cluster, model
from meshwright.spec.workload import Train

DATA = Path(__file__).parents[1] / "tests" / "data" / "published_steps.json"


class Compared(NamedTuple):
    """A published row, the plan that was predicted for it, and the prediction."""

    row: dict[str, Any]
    plan: str
    found: Prediction

    @property
    def error(self) -> float:
        """Predicted over published, minus one."""
        return self.found.step_time_s / self.row["step_time_s"] - 1


def plan_of(row: dict[str, Any]) -> str:
    """The plan of a row in words, by the rule above."""
    tp, pp, dp, layers = (row[key] for key in ("tp", "pp", "dp", "layers"))
    micro = row.get("micro_batch") or (4 if pp == 1 else 1)
    divides = pp > 1 and layers % (2 * pp) == 0 and row["batch"] // (dp * micro) % pp == 0
    vpp = row.get("vpp") or (2 if divides else 1)
    megascale = row["system"] == "megascale"
    zero = min(row.get("zero", 0), 1) if pp > 1 else row.get("zero", 0)
    words = [f"tp{tp} pp{pp} dp{dp} mb{micro} zero{zero}"]
    words.append(f"interleaved vpp{vpp}" if vpp > 1 else "1f1b")
    words.append({"none": "norecompute"}.get(row["recompute"], row["recompute"]))
    words.append("flash overlap=dp,tp,pp" if megascale else "unfused overlap=pp")
    if not row.get("sequence_parallel", row["paper"] == "megascale"):
        words.append("nosp")
    return " ".join(words)


def compare(row: dict[str, Any]) -> Compared:
    """One row predicted."""
    shape = {key: row[key] for key in ("layers", "hidden", "heads", "vocab")}
    gpt = model.transformer(**shape, max_seq_len=row["seq"], name=row["model"])
    train = Train(global_batch=row["batch"], seq_len=row["seq"], dtype="fp16", dropout=True)
    plan = plan_of(row)
    found = predict(gpt, cluster.load(f"{row['gpus']}xa100-80"), train, parse(plan), detail=False)
    return Compared(row, plan, found)


def all_rows() -> list[Compared]:
    return [compare(row) for row in json.loads(DATA.read_text())["rows"]]


def mean_errors(compared: list[Compared]) -> dict[str, float]:
    """Mean absolute error by paper."""
    papers = dict.fromkeys(c.row["paper"] for c in compared)
    by_paper = {paper: [abs(c.error) for c in compared if c.row["paper"] == paper] for paper in papers}
    return {paper: sum(errors) / len(errors) for paper, errors in by_paper.items()}


def main() -> None:
    """Print the table: published and predicted seconds, one row a line, and mean errors."""
    compared = all_rows()
    print(
        f"{'paper':12s}{'model':14s}{'system':14s}{'GPUs':>5s}{'published':>11s}{'predicted':>11s}{'error':>8s}  plan"
    )
    for c in compared:
        row = c.row
        line = f"{row['paper']:12s}{row['model']:14s}{row['system']:14s}{row['gpus']:5d}{row['step_time_s']:10.2f}s"
        print(f"{line}{c.found.step_time_s:10.2f}s{c.error:+8.1%}  {c.plan}")
    for paper, error in mean_errors(compared).items():
        print(f"mean absolute error of {paper}: {error:.1%}")
    print(f"worst: {max(abs(c.error) for c in compared):.1%} of {len(compared)} rows")


if __name__ == "__main__":
    main()
