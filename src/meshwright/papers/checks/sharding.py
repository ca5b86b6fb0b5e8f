"""Where states are sharded, and what Frontier's links make of it."""

from __future__ import annotations

from meshwright.answer.predict import predict
from meshwright.answer.prediction import Prediction
from meshwright.cost.collectives import collective_seconds
from meshwright.lower.place import Mesh
from meshwright.papers.outcome import ABOVE, AT_LEAST, WITHIN, Check, Fact, Figure, Outcome
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import transformer
from meshwright.spec.workload import parse as parse_train
from meshwright.work import Collective

#: Layers, hidden, heads of GPT models by their size.
SHAPES = {"20B": (44, 6144, 64), "22B": (48, 6144, 48), "175B": (96, 12288, 96), "1T": (128, 25600, 128)}


PLANS = "the plan, batch and recomputation behind it are not known here, nor whether recomputed work is counted"
SCOPES = "one scope for all states, nothing quantised; at collectives priced near the links' rate little is to gain"
LAG = "1% of it is the slowest of 1024 devices over the slowest of 128, the rest exchanges that its plan may hide"


def frontier(size: str, gcds: int, batch: int, words: str) -> Prediction:
    """A step of a GPT model on so many GCDs of Frontier's MI250X."""
    layers, hidden, heads = SHAPES[size]
    gpt = transformer(layers=layers, hidden=hidden, heads=heads, vocab=51200, max_seq_len=2048, name=f"gpt-{size}")
    asked = load_cluster(f"{gcds // 8}x8xmi250x"), parse_train(f"batch={batch},seq=2048")
    return predict(gpt, *asked, parse(words), detail=False)


def frontier_llm() -> Outcome:
    """Weak scaling of its two large models, tensor parallelism inside and across nodes, and memory."""
    trillion = {n: frontier("1T", n, n // 2, "tp8 pp64 mb1 zero1 full") for n in (1024, 3072)}
    large = {n: frontier("175B", n, n * 5 // 8, "tp4 pp16 mb1 zero1 full") for n in (128, 1024)}
    inside, across = (frontier("22B", 64, 256, f"tp{tp} pp1 mb1 zero1 full") for tp in (8, 16))
    few, many = (frontier("22B", 64, batch, "tp2 pp8 mb1 zero1 full") for batch in (64, 512))
    best = frontier("22B", 64, 512, "tp2 pp4 mb1 zero1 full")
    said = {"22B": (0.3838, best.mfu), "175B": (0.3614, large[1024].mfu), "1T": (0.3196, trillion[3072].mfu)}
    return Outcome(
        figures=(
            Figure("weak scaling, 175B, 128 to 1024", 1.0, _each(large, 1024, 128), "", WITHIN, 0.05, why=LAG),
            Figure("weak scaling, 1T, 1024 to 3072", 1.0, _each(trillion, 3072, 1024), "", WITHIN, 0.05),
            Figure(
                "tensor parallelism inside a node over across two",
                None,
                across.step_time_s / inside.step_time_s,
                "x",
                ABOVE,
            ),
            Figure(
                "many microbatches over few, a GCD's tokens",
                None,
                many.tokens_per_s_per_gpu / few.tokens_per_s_per_gpu,
                "x",
                ABOVE,
            ),
            *(
                Figure(f"share of peak, {size}", paper, ours, "", WITHIN, 0.1, why=PLANS)
                for size, (paper, ours) in said.items()
            ),
        ),
        facts=(Fact("1T fits 64 GB a GCD with tp8 pp64 and sharded optimizer states", trillion[3072].fits),),
        baseline="fewer devices, the same batch for each",
        assumptions=(
            "devices are GCDs of an MI250X, two to a module; model shapes by Megatron's tables",
            "its plans and batches are not confirmed: those here follow its advice (tp in the node, deep pp, zero1)",
        ),
        missing=("the plans and batches behind its shares of peak",),
    )


def _each(found: dict[int, Prediction], many: int, few: int) -> float:
    return found[many].tokens_per_s_per_gpu / found[few].tokens_per_s_per_gpu


def frontier_zero() -> Outcome:
    """Gathering weights in three scopes, and a step under each."""
    mesh = Mesh(parse("fsdp mb1").on(384), load_cluster("48x8xmi250x"))
    layer = 12 * 6144**2 * 2.0

    def gather(scope: int) -> float:
        group = mesh.group("dp") if scope == 384 else mesh.hybrid_groups(scope, "dp")[0]
        return collective_seconds(Collective(op="all_gather", num_bytes=layer, group=group))

    times = {scope: gather(scope) for scope in (2, 8, 384)}
    steps = {words: frontier("20B", 384, 768, f"{words} mb2 full") for words in ("hsdp8", "hsdp2")}
    gain = steps["hsdp8"].step_time_s / steps["hsdp2"].step_time_s
    return Outcome(
        figures=(
            Figure("a layer gathered in a node over in the pair of GCDs", None, times[8] / times[2], "x", ABOVE),
            Figure("a layer gathered over all 384 over in a node", None, times[384] / times[8], "x", ABOVE),
            Figure("20B on 384 GCDs, throughput over ZeRO++'s scopes", 1.71, gain, "x", WITHIN, 0.1, why=SCOPES),
            Figure("scaling from 64 to 384 GCDs", 0.94, _scaling("hsdp8"), "", AT_LEAST, 0.95),
        ),
        baseline="ZeRO++: weights gathered inside the node",
        assumptions=(
            "one scope shards every kind of state here, so that the pair's gradients and optimizer states too",
        ),
        missing=("a scope for each kind of state, and quantised collectives: a plan has one sharding group",),
    )


def _scaling(words: str) -> float:
    few, many = (frontier("20B", n, 2 * n, f"{words} mb2 full").tokens_per_s_per_gpu for n in (64, 384))
    return many / few


CHECKS = {
    "frontier-llm": Check(frontier_llm),
    "frontier-zero": Check(frontier_zero),
}
