"""Published plans against the search: is what an expert chose near the best under the model, restricted to what the
expert's system had?

For each row the space has the paper's own recompute, attention kernels, schedules, ZeRO stage and batch; tensor and
pipeline parallelism, chunks and microbatch are free. The paper's plan is the best one with its tensor and pipeline
parallelism (and chunks, where it says them). Beside it: what the unrestricted space would gain. Below each row that
differs: which causes of the step time change from the paper's plan to ours, and in seconds by how much.

    python validation/published_plans.py [--unrestricted]

Sources: Megatron-LM SC'21 (Narayanan et al., 2021, 2104.04473), Table 1, full recompute, no sequence parallelism;
MegaScale (Jiang et al., 2024, 2402.15627), Table 2 and section 6.1; Llama 3 (Grattafiori et al., 2024, 2407.21783),
Table 4 and section 3.3.2.
"""

from __future__ import annotations

import sys

import meshwright as mw
from meshwright.cost import load_framework, standard
from meshwright.errors import MeshwrightError
from meshwright.report.diff import delta
from meshwright.search.find import find
from meshwright.search.found import Found
from meshwright.search.restrict import restricted
from meshwright.search.space import default

ORDER = ["order=tp-cp-dp-pp", "cp=1"]
MEGATRON = [*ORDER, "sp=no", "recompute=full", "attention=unfused", "schedule=1f1b,interleaved", "zero=0"]
MEGASCALE = [*ORDER, "shard=0", "sp=yes", "recompute=selective", "schedule=1f1b,interleaved", "zero=1"]
LLAMA3 = [*ORDER, "shard=0", "sp=yes", "recompute=none,selective", "schedule=1f1b,interleaved,breadth-first", "zero=2"]
#: Model, devices, batch, sequence, what the system had, the paper's own choice, framework profile.
ROWS = [
    *(
        (f"megatron-{size}", f"{n}xa100-80", batch, 2048, MEGATRON, [f"tp={tp}", f"pp={pp}"], "megatron-lm")
        for size, n, tp, pp, batch in (
            ("1.7b", 32, 1, 1, 512),
            ("3.6b", 64, 2, 1, 512),
            ("7.5b", 128, 4, 1, 512),
            ("18.4b", 256, 8, 1, 1024),
            ("39.1b", 512, 8, 2, 1536),
            ("76.1b", 1024, 8, 4, 1792),
            ("145.6b", 1536, 8, 8, 2304),
            ("310.1b", 1920, 8, 16, 2160),
            ("529.6b", 2520, 8, 35, 2520),
            ("1t", 3072, 8, 64, 3072),
        )
    ),
    ("gpt3-175b", "3072xa100-80", 6144, 2048, MEGASCALE, ["tp=8", "pp=8", "vpp=6"], "megascale"),
    ("gpt3-175b", "12288xa100-80", 6144, 2048, MEGASCALE, ["tp=8", "pp=8", "vpp=6"], "megascale"),
    ("llama3-405b", "8192xh100", 2048, 8192, LLAMA3, ["tp=8", "pp=16"], "default"),
    ("llama3-405b", "16384xh100", 2048, 8192, LLAMA3, ["tp=8", "pp=16"], "default"),
]


def best(row: tuple, fix: list[str]) -> Found | None:
    """The search of one row with these facets fixed; None when nothing is legal."""
    model, cluster, batch, seq, _, _, framework = row
    asked = mw.load_model(model), mw.load_cluster(cluster), mw.parse_train(f"batch={batch},seq={seq}")
    try:
        return find(
            *asked, space=restricted(default(*asked), fix=fix), costs=standard(load_framework(framework)), top=1
        )
    except MeshwrightError:
        return None


def main() -> None:
    heads = ("model", "devices", "paper's plan", "s", "our best", "s", "gap", "free")
    print("{:<14} {:<14} {:<36} {:>7}  {:<36} {:>7}  {:>6} {:>6}".format(*heads))
    for row in ROWS:
        had, chose = row[4], row[5]
        paper, ours = best(row, [*had, *chose]), best(row, had)
        free = best(row, []) if "--unrestricted" in sys.argv else None
        print(
            f"{row[0]:<14} {row[1]:<14} {_shown(paper)} {_shown(ours)} {_gap(paper, ours)} {_gap(ours, free)}",
            flush=True,
        )
        if paper is not None and ours is not None and (why := _why(row, paper, ours)):
            print(f"    {why}", flush=True)


def _why(row: tuple, paper: Found, ours: Found) -> str:
    """What our best changes against the paper's plan: causes of the step time, the largest first, down to a hundredth
    of the step; and memory. Empty where they are one plan."""
    if not (ours.best and (paper.best or paper.misses)):
        return ""
    before, after = (f.best[0].plan if f.best else f.misses[0].plan for f in (paper, ours))
    if before == after:
        return ""
    changed = delta(*(_predicted(row, plan) for plan in (before, after)))
    least = 0.01 * changed.step_time_s.a
    causes = sorted((c for c in changed.causes if abs(c.change) >= least), key=lambda c: -abs(c.change))
    said = ", ".join(f"{c.name} {c.change:+.2f} s" for c in causes)
    return f"{said or 'no cause changes by 1%'}; memory {changed.peak_memory_bytes.change / 2**30:+.1f} GiB"


def _predicted(row: tuple, plan: mw.Plan) -> mw.Prediction:
    model, cluster, batch, seq, *_, framework = row
    asked = mw.load_model(model), mw.load_cluster(cluster), mw.parse_train(f"batch={batch},seq={seq}")
    return mw.predict(*asked, plan, costs=standard(load_framework(framework)), detail=False)


def _shown(found: Found | None) -> str:
    if found is None or not (found.best or found.misses):
        return f"{'no legal plan':<36} {'-':>7} "
    if not found.best:
        miss = found.misses[0]
        return f"{miss.plan.text()[:24]:<24} lacks {miss.lacks_bytes / 2**30:3.0f}GiB {miss.step_time_s:7.3f} "
    return f"{found.best[0].plan.text()[:36]:<36} {found.best[0].prediction.step_time_s:7.3f} "


def _gap(slow: Found | None, fast: Found | None) -> str:
    if slow is None or fast is None or not fast.best or not (slow.best or slow.misses):
        return "    -"
    seconds = slow.best[0].prediction.step_time_s if slow.best else slow.misses[0].step_time_s
    return f"{seconds / fast.best[0].prediction.step_time_s - 1:+6.1%}"


if __name__ == "__main__":
    main()
