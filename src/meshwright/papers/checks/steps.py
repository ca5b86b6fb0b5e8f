"""Published training steps predicted: Megatron-LM (2104.04473, Tables 1 and 2), Korthikanti et al.
(2205.05198, Table 5), MegaScale (2402.15627, Table 2) and TorchTitan's own benchmark tables.

One rule fills what a paper leaves open, the same for every row:

* microbatch 4 without a pipeline, else 1; two chunks per rank where layers and microbatches divide, else one;
* fp16 with dropout; no sequence parallelism unless the row says so (MegaScale's both systems have it);
* ZeRO-2 beside a pipeline is Megatron-LM's distributed optimizer, whose gradient buffer is whole: zero1;
* attention as separate kernels and gradients exchanged after the last backward, as Megatron-LM did in 2021 and 2022;
  MegaScale's own system: FlashAttention, and overlap in data, tensor and pipeline parallelism, which it is about.

Rows of papers are judged with the catalog's profile ``default``, whose host costs are round figures between the
profiles that were fitted to measured steps: no number of it is fitted to these rows alone, though they were among the
steps. Two profiles are fitted to what they are compared with, and it is said of them: ``deepspeed``, whose share of the
links is read off the rows of ZeRO-3 in Table 2, and the two of TorchTitan, whose tables are only shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost import load_framework, standard
from meshwright.papers import figures
from meshwright.papers.checks.pipeline import interleaving
from meshwright.papers.outcome import AT_LEAST, AT_MOST, NEAR, SHOWN, SIDE, WITHIN, Check, Figure, Outcome
from meshwright.plan import parse
from meshwright.spec import cluster, model
from meshwright.spec.workload import Train


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
    if not row.get("sequence_parallel", row.get("paper") == "megascale"):
        words.append("nosp")
    return " ".join(words)


def compare(row: dict[str, Any], plan: str = "", framework: str = "default") -> Compared:
    """One row predicted, under its own plan or another, with the host costs of a framework profile."""
    shape = {key: row[key] for key in ("layers", "hidden", "heads", "vocab")}
    gpt = model.transformer(**shape, max_seq_len=row["seq"], name=row["model"])
    train = Train(global_batch=row["batch"], seq_len=row["seq"], dtype="fp16", dropout=True)
    plan = plan or plan_of(row)
    costs = standard(load_framework(framework))
    found = predict(gpt, cluster.load(f"{row['gpus']}xa100-80"), train, parse(plan), costs=costs, detail=False)
    return Compared(row, plan, found)


def all_rows(paper: str = "") -> list[Compared]:
    """Every published row predicted, or those of one paper."""
    return [compare(row) for row in figures.load("published_steps")["rows"] if paper in ("", row["paper"])]


def mean_errors(compared: list[Compared]) -> dict[str, float]:
    """Mean absolute error by paper."""
    papers = dict.fromkeys(c.row["paper"] for c in compared)
    by_paper = {paper: [abs(c.error) for c in compared if c.row["paper"] == paper] for paper in papers}
    return {paper: sum(errors) / len(errors) for paper, errors in by_paper.items()}


def megatron() -> Outcome:
    """Table 1 row by row, Table 2's advantage over ZeRO-3, and the gain of interleaving."""
    table = all_rows("sc21")
    rows = [
        Figure(
            f"Table 1, {c.row['model']} on {c.row['gpus']} GPUs",
            c.row["step_time_s"],
            c.found.step_time_s,
            "s",
            WITHIN,
            0.2,
            why="" if abs(c.error) <= NEAR else "its largest model on 3072 GPUs: what grows there is not in the inputs",
        )
        for c in table
    ]
    table_two = _table_two()
    alone, whole = interleaving()
    mean = sum(abs(c.error) for c in table) / len(table)
    return Outcome(
        figures=(
            Figure("mean error of Table 1", None, mean, "", AT_MOST, 0.1),
            *rows,
            *table_two,
            Figure("interleaving, schedule alone, p=8 m=16", (23 / 16) / (39 / 32), alone, "x", WITHIN, 1e-9),
            Figure("interleaving, 175B at batch 16 ('10+%')", 1.10, whole, "x", AT_LEAST),
        ),
        baseline="Table 2: DeepSpeed ZeRO-3 without model parallelism; interleaving: plain 1F1B",
        assumptions=(
            "what the paper leaves open is filled by one rule (see checks/steps.py)",
            "step times follow from its teraFLOP/s by its equation 3",
            "Table 2: the tensor-parallel size 8 of its model-parallel sizes is inferred",
            "host costs are those of the catalog's profile default; ZeRO-3's are those of its profile deepspeed",
            "Table 2's ZeRO-3 exchanges at a tenth of the links' rate: the share is the profile's, which has it from "
            "the six ZeRO-3 rows of this very table; the side of 1 is judged. At the links' rate ZeRO-3 would be "
            "faster than PTD-P, which is shown beside it",
        ),
    )


SHARED = "one share of the links for all rows makes these exchanges a little slow, and PTD-P comes out a little fast"
PRICED = "its ZeRO-3 of 2021 exchanged far below the links' rate; why, the paper does not say"


def _table_two() -> list[Figure]:
    """PTD-P's speed over ZeRO-3's on as many GPUs, with the same batch."""
    rows = figures.load("ptdp_zero3")["rows"]
    known = {(row["model"], row["gpus"], row["system"]): row for row in rows}
    out = []
    for name, devices in (("GPT-174.6B", 768), ("GPT-529.6B", 1120), ("GPT-529.6B", 2240)):
        fast, slow = ({**known[name, devices, system], "recompute": "full"} for system in ("ptd-p", "zero-3"))
        said = slow["step_time_s"] / fast["step_time_s"]
        # DeepSpeed gathers the next layers and reduces gradients beside the passes
        beside = plan_of({**slow, "zero": 3}).replace("overlap=pp", "overlap=dp")
        ours = compare(fast).found.step_time_s
        what = f"Table 2, PTD-P over ZeRO-3, {name} on {devices}"
        for profile, more, judge, why in (("deepspeed", "", SIDE, SHARED), ("default", LINKS, SHOWN, PRICED)):
            priced = compare(slow, beside, profile).found.step_time_s / ours
            out.append(Figure(what + more, said, priced, "x", judge, why=why))
    return out


#: How a figure is called whose collectives go at the links' own rate.
LINKS = ", collectives at the links' rate"


def torchtitan() -> Outcome:
    """Its benchmark tables, and what float8, compilation and asynchronous tensor parallelism are worth."""
    data = figures.load("torchtitan")
    said = {row["id"]: row for row in data["rows"] if not row["rowwise"]}
    apart = {name: _titan(row, data["hardware"], "default") for name, row in said.items()}
    fitted = {name: _titan(row, data["hardware"]) for name, row in said.items()}

    def gain(what: str, a: str, b: str, ours: dict[str, float], *asked: Any) -> Figure:
        paper = said[a]["tokens_s_gpu"] / said[b]["tokens_s_gpu"]
        return Figure(what, paper, ours[a] / ours[b], "x", *asked, why=_titan_why(said[a]))

    judged = (
        ("float8 over bf16, 8B on 8", "2412t12", "2412t11"),
        ("float8 over bf16, 8B on 128", "2412t32", "2412t31"),
        ("async TP, 70B on 256, bf16", "2506_70b_0async_tp", "2506_70b_0"),
        ("async TP, 70B on 256, float8", "2506_70b_1async_tp", "2506_70b_1"),
        ("async TP, 8B on 64, bf16", "2506_8b_0async_tp", "2506_8b_0"),
    )
    shown = (
        ("compiled over eager, 8B on 8", "2412t11", "2412t10"),
        ("compiled over eager, 8B on 128", "2412t31", "2412t30"),
        ("compiled in float8 over eager in bf16, 8B on 128", "2412t32", "2412t30"),
    )
    rows = [
        Figure(_titled(row), row["tokens_s_gpu"], fitted[name], "tokens/s/GPU", SHOWN, why=_titan_why(row))
        for name, row in said.items()
    ]
    return Outcome(
        figures=(
            *(gain(*words, apart, WITHIN, 0.1) for words in judged),
            *(gain(f"{what}, with profiles fitted to it", a, b, fitted, SHOWN) for what, a, b in shown),
            *rows,
        ),
        baseline="the same row without the technique",
        assumptions=(
            "tables of the project's repository, not of the paper: December 2024 and June 2025",
            "full sharding in 16 bits with fp32 master parameters; its selective recompute is by operators",
            "gains that are judged: host costs and passes over memory of the catalog's profile default",
            "rows and compilation: those of its profiles torchtitan and torchtitan-compile, which are fitted to these "
            "tables; they are shown and judge nothing",
        ),
        missing=(
            "what compilation is worth, and the tables' speeds, from anything that was not fitted to them",
            "what the interleaved schedule adds to 405B on 512 devices: its microbatches are not in the inputs",
            "row-wise float8, whose products and casts no plan tells from tensor-wise ones",
            "products sliced beside their collectives in what is trained: they are priced and not run",
        ),
    )


def _titan_why(row: dict[str, Any]) -> str:
    """What a miss in a row comes from."""
    if row["dtype"] == "fp8":
        return "quantising is priced as passes over memory, which the compiler fuses"
    if row["gpus"] > 64:
        return "one number of passes over memory serves both precisions, and in 16 bits it is a little small"
    return "64 GPUs with tp8: slower than the same model on 128, and nothing in the inputs says why"


def _titled(row: dict[str, Any]) -> str:
    with_tp = "" if row["compile"] else ", eager"
    with_tp += f", async TP {'on' if row['async_tp'] else 'off'}" if row["tp"] > 1 else ""
    return f"{row['table']}, {row['model']} {row['dtype']} on {row['gpus']}{with_tp}"


def _titan(row: dict[str, Any], hardware: str, profile: str = "") -> float:
    """Predicted tokens per second and GPU of a row of TorchTitan's tables, with a framework profile or its own."""
    own = load_framework("torchtitan compile" if row["compile"] else "torchtitan")
    recompute = own.defaults.selective if row["recompute"] == "selective" else row["recompute"]
    words = f"tp{row['tp']} fsdp mb{row['micro_batch']} {recompute} {row['dtype']}"
    words += " overlap=dp,tp" if row["async_tp"] else " overlap=dp"
    train = Train(global_batch=row["batch"], seq_len=row["seq"], dtype="bf16")
    asked = model.load(row["model"]), cluster.load(f"{row['gpus']}x{hardware}"), train, parse(words)
    costs = standard(load_framework(profile) if profile else own)
    return predict(*asked, costs=costs, detail=False).tokens_per_s_per_gpu


CHECKS = {"megatron-ptdp": Check(megatron), "torchtitan": Check(torchtitan)}
