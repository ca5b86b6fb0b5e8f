"""SGLang's configuration file, the flags of ``sglang.launch_server`` as YAML, and the script that starts a server a
replica.

Written for SGLang 0.5.23 (``sglang/srt/arg_groups/fields/``); ``data/sglang.toml`` lists the flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from meshwright.export import launch, replicas
from meshwright.export import serving_limits as shared
from meshwright.export.comments import commented
from meshwright.export.deployment import Deployment
from meshwright.export.gap import Gap
from meshwright.export.target import load
from meshwright.export.yaml_text import dumps

NAME, FILE = "sglang", "sglang.yaml"
POLICIES = {
    "vllm-v0": "prompts whole, in iterations of their own",
    "vllm-v1": "next tokens ride with chunks of prompts",
    "sarathi": "the same",
}
KV = {"bf16": "bf16", "fp8": "fp8_e4m3"}
#: Precision -> (``--dtype``, ``--quantization``).
PRECISIONS = {
    "bf16": ("bfloat16", ""),
    "fp16": ("float16", ""),
    "fp32": ("float32", ""),
    "fp8": ("bfloat16", "fp8"),
    "fp8_row": ("bfloat16", "w8a8_fp8"),
    "mxfp8": ("bfloat16", "mxfp8"),
    "nvfp4": ("bfloat16", "nvfp4_online"),
    "int8": ("bfloat16", "w8a8_int8"),
}
#: Formats of weights that are multiplied in 16 bits, by the checkpoint.
STORED = ("int4", "int8", "fp8", "mxfp4", "nvfp4")


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and SGLang cannot express."""
    yield from shared.room(d)
    yield from shared.unknown(d, "poll")
    yield from shared.policies(d, POLICIES, "vllm-v1")
    yield from shared.one_of(d, "kv", KV, f"keys and values are stored as {', '.join(KV)}", "bf16")
    yield from shared.precisions(d, PRECISIONS, f"its precisions are {', '.join(PRECISIONS)}")
    yield from shared.experts(d)
    yield from shared.stored(d, STORED)
    yield from shared.cache(d)
    yield from shared.guesses(d)
    yield from shared.adapters(d)
    yield from shared.orders(d, ("fcfs", "priority", "lpm"))
    yield from shared.nodes(d, several=True)
    yield from replicas.routing(d)


def settings(d: Deployment) -> dict[str, object]:
    """Return the flags of one engine, without their dashes."""
    dtype, quantization = PRECISIONS[d.compute]
    whole = d.engine.policy == "vllm-v0"
    found: dict[str, object] = {"tp-size": d.layout.tp, "pp-size": d.layout.pp}
    if d.layout.adp > 1:
        found["attn-dp-size"] = d.layout.adp
    if d.plan.experts.ep > 1:
        found["ep-size"] = d.plan.experts.ep
        if d.layout.adp > 1 and d.plan.experts.dispatch != "gathered":
            found["moe-a2a-backend"] = "deepep"
    found["dtype"] = dtype
    if quantization:
        found["quantization"] = quantization
    found |= {
        "kv-cache-dtype": KV[d.engine.kv],
        "page-size": d.engine.block,
        "mem-fraction-static": floor(d.static_share * 1000) / 1000,
        "max-running-requests": d.engine.max_batch,
        "max-prefill-tokens": -(-d.budget // d.layout.adp),
        "chunked-prefill-size": -1 if whole else d.budget,
        "schedule-policy": "lpm" if d.engine.order == "lpm" else "fcfs",
    }
    if d.engine.poll > 1:
        found["scheduler-recv-interval"] = d.engine.poll
    if d.engine.order == "priority":
        found["enable-priority-scheduling"] = True
    if not d.engine.prefix_cache:
        found["disable-radix-cache"] = True
    elif d.engine.host_bytes:
        found |= {"enable-hierarchical-cache": True, "hicache-size": max(1, round(d.engine.host_bytes / 1e9))}
    if not whole:
        found["enable-mixed-chunk"] = True
    if d.adapters:
        found |= {"enable-lora": True, "max-lora-rank": d.serve.adapter_rank, "max-loaded-loras": d.adapters}
        found["max-loras-per-batch"] = min(d.engine.adapter_slots, d.adapters)
    if d.guesses:
        algorithms = {shared.NGRAM: "NGRAM", shared.HEAD: "EAGLE"}  # a head of the model's own runs as EAGLE's does
        found["speculative-algorithm"] = algorithms.get(d.engine.draft, "STANDALONE")
        if d.engine.draft not in algorithms:
            found["speculative-draft-model-path"] = "<DRAFT>"
        if d.engine.draft != shared.NGRAM:
            found |= {"speculative-num-steps": d.guesses, "speculative-eagle-topk": 1}
        found["speculative-num-draft-tokens"] = d.guesses + 1
    if d.engine.kv_blocks:
        found["max-total-tokens"] = -(-d.engine.kv_blocks // d.layout.adp) * d.engine.block
    if d.engine.graphs:
        found["cuda-graph-max-bs-decode"] = min(d.engine.max_batch, 512)
    else:
        found |= {"cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled"}
    return found


def write(d: Deployment) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    about = load(NAME)
    head = f"# Configuration for {about.label}, written by Meshwright.\n# {d.name}\n"
    text = commented(head + dumps(settings(d)), about.comments)
    command = 'python3 -m sglang.launch_server --model-path "$MODEL" --config "$CONFIG" --port "$PORT"'
    parts = f'--nnodes {d.nodes_per_replica} --node-rank "$PART" --dist-init-addr "$HEAD_NODE:{replicas.MEETING}"'
    run = replicas.script(d, f"Starts {about.label}", FILE, command, parts)
    return {FILE: text, **replicas.balancer(d), launch.FILE: run}, [*replicas.notes(d), *_notes(d)]


def _notes(d: Deployment) -> Iterator[str]:
    if d.serve.engine.profile != NAME:
        yield f"predicted with the host times of engine={d.engine.profile}; engine=sglang has SGLang's"
    yield from shared.checkpoints(d)
    yield from shared.guessed(d)
    yield from shared.adapted(d)
    if d.compute == "int8":
        yield "MODEL is a checkpoint of 8-bit weights and activations"
    elif PRECISIONS[d.compute][1]:
        yield f"weights are quantised to {d.compute} while they are loaded; drop quantization for a checkpoint that is"
    yield "mem-fraction-static counts weights and cache: it is their predicted share, and memory= counts workspace too"
    if d.engine.policy != "vllm-v0":
        yield "the budget bounds the tokens of prompts of an iteration; next tokens ride along beyond it"
    yield "admission also reserves an estimate of the answers: --schedule-conservativeness, 1.0 unless said"
