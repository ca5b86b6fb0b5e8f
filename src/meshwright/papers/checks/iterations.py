"""Iterations of a serving engine: quantised products and exchanges around them, weights that come, unpadded prompts."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import msgspec
import numpy as np

from meshwright.answer.serving import predict_serving
from meshwright.cost.standard import serving_costs
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.papers.outcome import AT_LEAST, AT_MOST, SHOWN, WITHIN, Check, Figure, Outcome
from meshwright.plan import parse as parse_plan
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.cluster import load_device
from meshwright.spec.dimensions import transformer
from meshwright.spec.model import Model
from meshwright.spec.model import load as load_model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import EngineWords, Serve
from meshwright.work import Gemm

#: Output and input features of the layer that MARLIN's figure 1 multiplies, and its batches.
MARLIN_SHAPE = {"n": 4 * 18432, "k": 18432}
#: Inner widths of ParScale's base and of the model that predicts as well as it does with 8 streams.
BASE_AND_LARGER = (5568, 11397)
#: Prompts of BERT's batches in ByteTransformer's tables: the longest; they are 0.6 as long on average.
BERT_LENGTHS, BERT_BATCHES, SHORTEST = range(64, 1025, 64), (1, 16), 0.2
#: Tokens of the longest sequences whose attention is one kernel in FasterTransformer (2210.03052).
FASTER_FUSES = 512


def forward(model: str, on: str, plan: str) -> Forward:
    """The forward pass of a model of the catalog under a plan that fills a cluster."""
    cluster = load_cluster(on)
    filled = parse_plan(plan).on(cluster.num_devices)
    return Forward(load_model(model), filled, Mesh(filled, cluster))


def marlin() -> Outcome:
    """Weights of four bits against sixteen: one large layer, by the rows that multiply it."""
    costs, device = serving_costs(), load_device("a10g")

    def faster(rows: int) -> float:
        seconds = (
            costs.price(Gemm(m=rows, dtype="fp16", weights=stored, **MARLIN_SHAPE), device).seconds
            for stored in ("", "int4")
        )
        return next(seconds) / next(seconds)

    why = "TensorRT-LLM's kernels, carried from the A100, reach less of an A10's bandwidth than MARLIN's on it"
    return Outcome(
        figures=(
            Figure("one layer, 16 rows, over 16-bit weights", 3.87, faster(16), "x", WITHIN, 0.1, why, headline=True),
            Figure("one layer, 32 rows", 3.87, faster(32), "x", WITHIN, 0.1, why),
            Figure("one layer, 64 rows over 32", None, faster(64) / faster(32), "x", AT_MOST, 0.95),
            Figure("one layer, 128 rows over 32", None, faster(128) / faster(32), "x", AT_MOST, 0.6),
        ),
        baseline="the same product with weights of 16 bits",
        assumptions=(
            "the kernels' constants are those that 4,872 products of TensorRT-LLM's int4 kernels on the A100 show, "
            "carried to the A10; MARLIN's own were not measured",
        ),
    )


def reordered() -> Outcome:
    """An MLP of Llama-2-70B whose inner features are gathered between its products, over one whose columns were
    aligned: products and exchanges, without the activation, as the paper times them."""
    costs = serving_costs()

    def ratio(device: str, ranks: int, rows: int) -> float:
        seconds = {}
        for how in ("aligned", "gathered"):
            found = forward("llama2-70b", f"{ranks}x{device}", f"tp{ranks} fp16 weights=int4 act_order={how}")
            mlp = [e for e in found.tokenwise(0, rows) if e.name.startswith("mlp")]
            timed = [e for e in mlp if e.name.partition(" ")[2] not in ("norm", "residual", "activation")]
            seconds[how] = sum(costs.price(e.work, found.mesh.cluster.islands[0].device).seconds for e in timed)
        return seconds["gathered"] / seconds["aligned"]

    best = max(ratio(device, 8, rows) for device in ("a100-80", "h100") for rows in (1, 2, 4, 8, 16))
    why = "the paper's exchanges are launched by torch one by one; here an engine replays them from a graph"
    return Outcome(
        figures=(
            Figure("largest speed-up of an MLP, 8 ranks", 1.81, best, "x", WITHIN, 0.1, why=why, headline=True),
            Figure(
                "8 ranks over 2, A100, one row",
                None,
                ratio("a100-80", 8, 1) / ratio("a100-80", 2, 1),
                "x",
                AT_LEAST,
                1.1,
            ),
        ),
        baseline="the reordered layout that gathers between the two products",
    )


def window() -> Outcome:
    """Memory of a device that holds a window of a model's layers, the rest of which come from disk."""
    found = forward("llama2-70b", "8xa100-80", "tp8 fp32 weights_from=disk slots=2 tables=master")
    whole = forward("llama2-70b", "8xa100-80", "tp1 dp8 fp32").weight_bytes(0)
    held = found.weight_bytes(0)
    return Outcome(
        figures=(
            Figure(
                "memory of the master, Llama-2-70B over 8 devices", 3.1, held / 1e9, "GB", WITHIN, 0.1, headline=True
            ),
            Figure(
                "cut of a device's weights without a window",
                0.9,
                1 - held / (whole / 8),
                "",
                WITHIN,
                0.1,
                headline=True,
            ),
        ),
        baseline="tensor parallelism with all weights in memory",
        assumptions=(
            "weights of 32 bits, as processors compute; a window of two layers beside the table and the head",
        ),
        missing=("times to first token of phones and laptops, which the catalog does not have",),
    )


def unpadded() -> Outcome:
    """Batches of BERT with prompts of unlike lengths: packed with fused attention, over rectangles with separate
    kernels (PyTorch JIT), and with attention that is fused for short sequences alone (FasterTransformer). Times are an
    iteration's of device and host, as benchmark/bert_bench.sh measures them, without a server's front."""
    bert = msgspec.structs.replace(load_model("bert-base"), max_seq_len=0)
    where, tables = load_cluster("1xa100-80"), {}

    def parts(prompt: np.ndarray, plan: str) -> dict[str, float]:
        count = len(prompt)
        serve = Serve(batch=count, prompt=1, output=1, requests=count, engine=EngineWords(policy="static"))
        some = Requests(arrival_s=np.zeros(count), prompt=prompt, output=np.ones(count, np.int64))
        asked = predict_serving(bert, where, serve, parse_plan(plan), requests=some, detail=False, tables=tables)
        return {cause: seconds for cause, seconds in asked.attribution.items() if cause != "idle"}

    whole, kernels, fused = [], [], []
    for batch, longest in product(BERT_BATCHES, BERT_LENGTHS):
        middle = (1 + SHORTEST) / 2 * longest
        own = np.linspace(longest, SHORTEST * longest, batch) if batch > 1 else np.array([middle])
        all_longest = np.full(batch, longest)
        packed = parts(own.astype(np.int64), "dp1")
        separate = parts(all_longest, "padding=yes unfused")
        other = parts(all_longest, "padding=yes") if longest <= FASTER_FUSES else separate
        whole.append(sum(separate.values()) / sum(packed.values()))
        fused.append(sum(other.values()) / sum(packed.values()))
        if batch == max(BERT_BATCHES):
            kernels.append(separate["attention"] / packed["attention"])
    return Outcome(
        figures=(
            Figure(
                "BERT end to end over separate kernels on rectangles (PyTorch JIT)",
                1.87, fmean(whole), "x", WITHIN, 0.1, headline=True,
            ),
            Figure("attention over separate kernels on rectangles, batch of 16", 6.13, fmean(kernels), "x", WITHIN, 0.1,
                   headline=True),
            Figure("BERT end to end over FasterTransformer, fused up to 512 tokens", 1.55, fmean(fused), "x", SHOWN),
        ),
        baseline="every prompt computed as long as the longest that its batch may have",
        assumptions=(
            "as benchmark/bert_bench.sh and the tables of its code: 12 layers in 16 bits, batches of 1 and 16 prompts, "
            "0.2 to 1 times as long as the longest of 64 to 1,024 tokens by 64 (one prompt 0.6 times); means of the "
            "ratios, as the mean over those tables is 1.88",
            "one host for all, of the default profile, which issues kernels one after the other",
            "1.55 over FasterTransformer is of the paper's last version, and whether tokens but those of attention "
            "were on rectangles there is not known",
            "prompts are packed unless a plan says padding=yes, which is what its gains are over",
        ),
        missing=(
            "three of the five comparisons that its claim heads: XLA, TurboTransformer and DeepSpeed have no kernels "
            "here, and are not asked",
        ),
    )  # fmt: skip


def streams() -> Outcome:
    """Eight streams through one model against a larger model that predicts as well: what each adds in memory and in
    the time of a token, for one request."""
    shape = {"layers": 36, "hidden": 2048, "heads": 16, "kv_heads": 2, "vocab": 151936, "gated": True}
    small, large = (transformer(ffn=ffn, tied_embeddings=True, name="qwen", **shape) for ffn in BASE_AND_LARGER)
    where = load_cluster("1xa100-80")
    serve = Serve(batch=1, prompt=64, output=64, requests=1)

    def costs(model: Model, plan: str) -> tuple[float, float]:
        filled = parse_plan(plan).on(1)
        asked = predict_serving(model, where, serve, filled, detail=False)
        held = Forward(model, filled, Mesh(filled, where))
        return held.weight_bytes(0) + held.request_bytes(0, 128), asked.metrics.tpot_s.mean

    base, many, more = costs(small, "dp1"), costs(small, "streams=8"), costs(large, "dp1")
    memory, time = ((more[i] - base[i]) / (many[i] - base[i]) for i in range(2))
    return Outcome(
        figures=(
            Figure("memory that parameters add over what streams do", 22.0, memory, "x", WITHIN, 0.1, headline=True),
            Figure("time of a token, likewise", 6.0, time, "x", WITHIN, 0.1, headline=True),
        ),
        baseline="a model with so many more parameters that it predicts as well",
        assumptions=(
            "36 layers 2,048 wide with MLPs of 5,568 make 1.6B parameters beside the table; MLPs of 11,397 the 1.82 "
            "times as many that the paper's law N (k log P + 1), with its k of 0.39 on code, holds equal to 8 streams",
            "one request, prompt and answer of 64 tokens, on an A100",
        ),
        missing=("the paper's own pairs of models that predict equally well: here they follow from its law alone",),
    )


CHECKS = {
    "parscale": Check(streams),
    "marlin": Check(marlin),
    "tp-aware-dequant": Check(reordered),
    "tpi-llm": Check(window),
    "bytetransformer": Check(unpadded),
}
