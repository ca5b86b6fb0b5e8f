"""The cost of stragglers in published traces of training, beside the published results.

Run: python -m bench.stragglers FOLDER [--steps N] [--json]

FOLDER holds ``trace-NAME.parquet`` (or ``.csv``) and ``result-NAME.json`` of "Understanding Stragglers in Large Model
Training Using What-if Analysis" (Lin et al., 2505.05713; github.com/ByteDance-Seed/StragglerAnalysis, Apache-2.0). A
trace has a row for every operation of every pipeline and data-parallel rank; parquet needs pyarrow. Its steps become
timelines, whose graphs are rebuilt and timed as those of ``meshwright diagnose`` are; the slowdowns of the job, of each
replica and of each stage stand beside the published ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.graph import ATTRIBUTES, KIND, QUEUE, RankClass
from meshwright.replay.ideal import Ideal
from meshwright.replay.rebuild import rebuild
from meshwright.timeline import Identity, Timeline

#: Target: the largest relative error of a slowdown.
WITHIN = 0.05
#: Operations of one rank that are computed, with their kinds here.
COMPUTED = {"forward-compute": "F", "backward-compute": "BW", "optimizer": "optimizer"}
#: Collectives: kind, queue, and what the ranks of one have in common.
JOINED = {
    "params-all-gather": ("all_gather", "dp_gather", ("stage", "seq_id")),
    "embedding-grads-all-reduce": ("all_reduce", "dp", ("dp_rank", "seq_id")),
    "grads-reduce-scatter": ("reduce_scatter", "dp", ("stage", "seq_id")),
    "optimizer-clip-main-grad": ("all_reduce", "dp", ("seq_id",)),
}


def read(path: Path) -> Any:
    """The rows of a trace, with the ends of operations."""
    pandas = import_module("pandas")
    if path.suffix == ".csv":
        rows = pandas.read_csv(path)
    else:
        rows = import_module("pyarrow.parquet").read_table(path).to_pandas()
        rows["optype"] = rows["optype"].astype(str)
    rows["end"] = rows["start_ts"] + rows["duration"]
    return rows


class _Spans:
    """Collects tasks with their members."""

    def __init__(self, stages: int):
        self.stages, self.rows, self.count = stages, [], 0

    def put(self, ranks: Iterable[int], queue: str, kind: str, start: float, end: float, stage=-1, microbatch=-1):
        for rank in ranks:
            self.rows.append((self.count, rank, QUEUE[queue], KIND[kind], start, max(start, end), stage, microbatch))
        self.count += 1

    def timeline(self, replicas: int) -> Timeline:
        rows = sorted(self.rows, key=lambda row: row[4])
        task, rank, queue, kind, start, end, stage, microbatch = (np.array(column) for column in zip(*rows))
        attributes = np.full((len(ATTRIBUTES), len(rows)), -1, np.int32)
        attributes[ATTRIBUTES.index("stage")] = stage
        attributes[ATTRIBUTES.index("microbatch")] = microbatch
        places = [(d, s) for d in range(replicas) for s in range(self.stages)]
        return Timeline(
            ranks=tuple(RankClass(stage=s, at=(("dp", d),)) for d, s in places),
            task=task.astype(np.int32),
            rank=rank.astype(np.int32),
            queue=queue.astype(np.int32),
            kind=kind.astype(np.uint8),
            attributes=attributes,
            start_s=start.astype(float),
            end_s=end.astype(float),
            waited_for=np.full(len(rows), -1, np.int32),
            cost_key=np.zeros(len(rows), np.int32),
            keys=("",),
            identity=Identity(source="measured"),
        )


def timeline_of(step: Any, replicas: int, stages: int) -> Timeline:
    """The timeline of one step's rows. A message is under way from when both ends are there to when either has it."""
    spans = _Spans(stages)
    for row in step.itertuples():
        if row.optype in COMPUTED:
            rank = row.dp_rank * stages + row.stage
            spans.put([rank], "compute", COMPUTED[row.optype], row.start_ts, row.end, row.stage, row.mb_id)
    for what, (kind, queue, common) in JOINED.items():
        for _, some in step[step.optype == what].groupby(list(common)):
            ranks = (some.dp_rank * stages + some.stage).tolist()
            stage = int(some.stage.iloc[0]) if what == "grads-reduce-scatter" else -1
            spans.put(ranks, queue, kind, some.start_ts.max(), some.end.max(), stage)
    for replica, rows in step.groupby("dp_rank"):
        for way, ahead in (("forward", 1), ("backward", -1)):
            for stage in range(stages):
                if 0 <= stage + ahead < stages:
                    _messages(spans, rows, replica, stage, way, ahead)
    return spans.timeline(replicas)


def _messages(spans: _Spans, rows: Any, replica: int, stage: int, way: str, ahead: int) -> None:
    def of(where: int, what: str) -> Any:
        return rows[(rows.stage == where) & (rows.optype == f"{way}-{what}")].sort_values("start_ts")

    sent, got, passes = of(stage, "send"), of(stage + ahead, "recv"), of(stage, "compute")
    for one, other, microbatch in zip(sent.itertuples(), got.itertuples(), passes.mb_id.tolist(), strict=True):
        start = max(one.start_ts, other.start_ts)
        rank, end = replica * spans.stages + stage, min(one.end, other.end)
        spans.put([rank], f"pp_{way}", "send", start, end, stage, microbatch)


def judged(path: Path, steps: int, note: Callable[[str], None]) -> list[tuple[str, float, float]]:
    """(what, ours, published) of a trace's slowdowns."""
    name = path.stem.removeprefix("trace-")
    known = json.loads((path.parent / f"result-{name}.json").read_text())
    replicas, stages = known["job_meta"]["dp_size"], known["job_meta"]["pp_size"]
    rows = read(path)
    numbers = sorted(rows.step.unique().tolist())[: steps or None]
    note(f"{name}: {len(numbers)} steps")
    rebuilt = [rebuild(timeline_of(some, replicas, stages)) for n, some in rows.groupby("step") if n in numbers]
    found = Ideal(rebuilt).slowdowns(())
    out = [("job", found.whole, known["blocking_slowdown"])]
    for what, own, theirs in (
        ("replica", found.by_replica, known["blocking_decompose_by_dp_rank"]),
        ("stage", found.by_stage, known["blocking_decompose_by_stage"]),
    ):
        out += [(f"{what} {place}", own[place], theirs[str(place)]) for place in sorted(own) if str(place) in theirs]
    return [(f"{name} {what}", own, theirs) for what, own, theirs in out]


def main() -> None:
    said = argparse.ArgumentParser(prog="python -m bench.stragglers", description=__doc__.splitlines()[0])
    said.add_argument("folder", type=Path)
    said.add_argument("--steps", type=int, default=0, help="only the first so many steps of each trace")
    said.add_argument("--json", action="store_true")
    asked = said.parse_args()
    files = sorted([*asked.folder.glob("trace-*.parquet"), *asked.folder.glob("trace-*.csv")])
    if not files:
        sys.exit(f"no trace-NAME.parquet in {asked.folder}")
    found = [one for file in files for one in judged(file, asked.steps, lambda text: print(text, file=sys.stderr))]
    if asked.json:
        json.dump([{"what": what, "slowdown": own, "published": theirs} for what, own, theirs in found], sys.stdout)
        print()
    else:
        for what, own, theirs in found:
            print(f"{what:14} {own:.3f}  published {theirs:.3f}  {own / theirs - 1:+.1%}")
    sys.exit(0 if all(abs(own / theirs - 1) <= WITHIN for _, own, theirs in found) else 1)


if __name__ == "__main__":
    main()
