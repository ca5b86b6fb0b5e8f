"""MegaScale's ablation line by line, and its strong scaling (Jiang et al., 2024, arXiv 2402.15627, Tables 2 and 3).

Each line of Table 3 is a word of the model, of the plan, of the framework or of the workload, added to the line before.
Throughput is compared, not the MFU that the table prints: a sliding window lowers the work that an MFU counts. Host
costs are those of the profile ``default``: that of Megatron-LM is fitted to steps of which four are rows of Table 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost import load_framework, standard
from meshwright.papers import figures
from meshwright.papers.checks.steps import compare
from meshwright.papers.outcome import NEAR, SHOWN, WITHIN, Check, Fact, Figure, Outcome
from meshwright.plan import parse
from meshwright.spec import cluster, model
from meshwright.spec.workload import Train

#: The table's model, plan and devices.
SHAPE = {"layers": 96, "hidden": 12288, "heads": 128, "vocab": 64000, "max_seq_len": 2048}
PLAN = "tp8 pp8 dp4 mb1 zero1 interleaved vpp6 selective"
#: Tokens of the sliding window, which the paper does not say.
WINDOW = 1024
STRAGGLERS = "stragglers, which it names as what grows with the cluster, are not in the inputs"


class Line(NamedTuple):
    """A line of Table 3 with all that those before it added: its MFU, and how it is said here."""

    name: str
    mfu: float
    words: str
    model: dict[str, Any]
    framework: str = "default"
    batch: int = 256


_BOTH = {"parallel": True, "window": WINDOW}
LINES = (
    Line("baseline", 0.477, "unfused overlap=none", {}),
    Line("parallel transformer block", 0.523, "unfused overlap=none", {"parallel": True}),
    Line("sliding window attention", 0.533, "unfused overlap=none", _BOTH),
    Line("overlap inside tensor parallelism", 0.555, "unfused overlap=tp", _BOTH),
    Line("overlap of the pipeline", 0.580, "unfused overlap=tp,pp", _BOTH),
    Line("overlap of data parallelism", 0.595, "unfused overlap=tp,pp,dp", _BOTH),
    Line("efficient operators", 0.612, "flash overlap=tp,pp,dp", _BOTH),
    Line("what else its host does", 0.623, "flash overlap=tp,pp,dp", _BOTH, "megascale"),
    Line("three times the batch", 0.653, "flash overlap=tp,pp,dp", _BOTH, "megascale", 768),
)


def line_of(line: Line) -> Prediction:
    """The step of one line."""
    gpt = model.transformer(**SHAPE, **line.model)
    train = Train(global_batch=line.batch, seq_len=2048, dtype="fp16", dropout=True)
    costs = standard(load_framework(line.framework))
    return predict(gpt, cluster.load("256xa100-80"), train, parse(f"{PLAN} {line.words}"), costs=costs, detail=False)


def megascale() -> Outcome:
    """The ablation, then Table 2."""
    found = [line_of(line) for line in LINES]
    speed = [p.tokens_per_s_per_gpu for p in found]
    first, last = LINES[0], LINES[-1]
    gains = [
        Figure(
            f"Table 3, {line.name}, over the line before",
            line.mfu / before.mfu,
            b / a,
            "x",
            SHOWN if line.name in UNPRICED else WITHIN,
            NEAR,
            why=WHY.get(line.name, ""),
        )
        for before, line, a, b in zip(LINES, LINES[1:], speed, speed[1:])
    ]
    ablation = (
        Figure("Table 3, MFU of the baseline", first.mfu, found[0].mfu, "", WITHIN, NEAR),
        *gains,
        Figure("Table 3, all lines together", last.mfu / first.mfu, speed[-1] / speed[0], "x", WITHIN, NEAR),
    )
    return Outcome(
        figures=(*ablation, *_table_two()),
        facts=(Fact("every line that is judged gains", all(f.ours > 1 for f in gains if f.judge != SHOWN)),),
        baseline="Megatron-LM on the same devices, model and batch",
        assumptions=(
            "set-up of its section 6, as the figures' file says; rows up to 1,024 GPUs, and the largest; Table 2 with "
            "the model of its Table 1, without parallel blocks and windows",
            f"the window is {WINDOW} tokens: the paper gives no size; kernels that are not fused are priced without "
            "gain from it, whatever its size, so that its line is shown",
            "the baseline's attention is taken to be unfused, so that FlashAttention counts among the operators, whose "
            "line is larger than the table's, and more is left to hide than for the lines before",
            "LAMB is the batch it allows: the optimizer itself is priced as Adam",
            "host costs are those of the catalog's profile default, round figures fitted to neither table; 'what else "
            "its host does' is its profile megascale, the least of the fitted ones",
        ),
        missing=(
            "what a sliding window is worth to attention that is not fused",
            "finding and replacing slow or failed machines",
            "LAMB itself",
            "products sliced beside their collectives in what is trained: they are priced and not run",
        ),
    )


#: Lines whose own mechanism nothing here prices.
UNPRICED = ("sliding window attention",)
#: What the miss of a line comes from.
WHY = {
    "efficient operators": "its baseline's operators are not said: FlashAttention, taken to be new in this line, makes "
    "most of it"
}


def _table_two() -> list[Figure]:
    """Step times and speed-ups of Table 2; of its largest scale what the abstract says."""
    rows = [r for r in figures.load("published_steps")["rows"] if r["paper"] == "megascale"]
    table = {(row["gpus"], row["system"]): compare(row) for row in rows}
    speedups = [
        Figure(
            f"Table 2, MegaScale over Megatron-LM, {n} GPUs",
            table[n, "megatron-lm"].row["step_time_s"] / table[n, "megascale"].row["step_time_s"],
            table[n, "megatron-lm"].found.step_time_s / table[n, "megascale"].found.step_time_s,
            "x",
            WITHIN,
            NEAR,
        )
        for n in dict.fromkeys(row["gpus"] for row in rows)
    ]
    steps = [
        Figure(f"Table 2, {c.row['system']}, {n} GPUs", c.row["step_time_s"], c.found.step_time_s, "s", WITHIN, NEAR)
        for (n, _), c in table.items()
    ]
    large = {
        system: compare({**row, "gpus": 12288, "dp": 192, "batch": 6144}).found
        for row, system in ((r, r["system"]) for r in rows if r["gpus"] == 256)
    }
    gain = large["megatron-lm"].step_time_s / large["megascale"].step_time_s
    headline = [
        Figure("12,288 GPUs, MegaScale over Megatron-LM", 1.34, gain, "x", WITHIN, NEAR),
        Figure("12,288 GPUs, MFU of MegaScale", 0.552, large["megascale"].mfu, "", WITHIN, NEAR, why=STRAGGLERS),
    ]
    return [*speedups, *steps, *headline]


CHECKS = {"megascale": Check(megascale)}
