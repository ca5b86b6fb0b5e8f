"""vLLM's configuration file, the flags of ``vllm serve`` as YAML, and the script that starts a server a replica.

Written for vLLM 0.33.0 (``vllm/engine/arg_utils.py``, ``vllm/config/``); ``data/vllm.toml`` lists the flags.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.export import launch, replicas
from meshwright.export import serving_limits as shared
from meshwright.export.comments import commented
from meshwright.export.deployment import Deployment
from meshwright.export.gap import Gap
from meshwright.export.target import load
from meshwright.export.yaml_text import dumps

NAME, FILE = "vllm", "vllm.yaml"
POLICIES = {"vllm-v1": "admits where the first chunk fits", "sarathi": "admits where the whole prompt fits"}
KV = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}
#: Precision -> (``--dtype``, ``--quantization``): 8 and 4 bits are quantised while the weights are loaded.
PRECISIONS = {
    "bf16": ("bfloat16", ""),
    "fp16": ("float16", ""),
    "fp32": ("float32", ""),
    "fp8": ("bfloat16", "fp8_per_tensor"),
    "fp8_row": ("bfloat16", "fp8_per_channel"),
    "fp8_block": ("bfloat16", "fp8_per_block"),
    "mxfp8": ("bfloat16", "mxfp8"),
    "nvfp4": ("bfloat16", "nvfp4_per_token"),
    "int8": ("bfloat16", ""),
}
#: Ranks of adapters.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Formats of weights that are multiplied in 16 bits, by the checkpoint.
STORED = ("int4", "int8", "fp8", "mxfp4", "nvfp4")


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and vLLM cannot express."""
    yield from engine_limits(d)
    yield from shared.nodes(d, several=True)
    yield from replicas.routing(d)


def engine_limits(d: Deployment) -> Iterator[Gap]:
    """Yield what no vLLM engine can express, however it is started."""
    yield from shared.room(d)
    yield from shared.unknown(d, sums="nccl")
    yield from shared.policies(d, POLICIES, "vllm-v1")
    yield from shared.one_of(d, "kv", KV, f"keys and values are stored as {', '.join(KV)}", "bf16")
    yield from shared.precisions(d, PRECISIONS, f"its precisions are {', '.join(PRECISIONS)}")
    fits = d.engine.block % 16 == 0
    yield from shared.blocks(d, fits, "its attention kernels take blocks of a multiple of 16 tokens", 16)
    yield from shared.experts(d)
    yield from shared.groups(d, alone=False)
    yield from shared.stored(d, STORED)
    yield from shared.cache(d)
    yield from shared.guesses(d)
    yield from shared.adapters(d, RANKS)
    yield from shared.orders(d, ("fcfs", "priority"))


def settings(d: Deployment) -> dict[str, object]:
    """Return the flags of one engine, without their dashes."""
    dtype, quantization = PRECISIONS[d.compute]
    groups = d.layout.adp
    found: dict[str, object] = {"tensor-parallel-size": d.layout.attention_tp, "pipeline-parallel-size": d.layout.pp}
    if groups > 1:
        found["data-parallel-size"] = groups
    if d.plan.experts.ep > 1:
        found["enable-expert-parallel"] = True
        if groups > 1:
            sent = d.plan.experts.dispatch != "gathered"
            found["all2all-backend"] = "deepep_low_latency" if sent else "allgather_reducescatter"
    found["dtype"] = dtype
    if quantization:
        found["quantization"] = quantization
    found |= {
        "kv-cache-dtype": KV[d.engine.kv],
        "block-size": d.engine.block,
        "gpu-memory-utilization": d.engine.memory,
        "max-num-seqs": -(-d.engine.max_batch // groups),
        "max-num-batched-tokens": -(-d.budget // groups),
        "enable-chunked-prefill": True,
        "scheduler-reserve-full-isl": d.engine.policy == "sarathi",
        "scheduling-policy": d.engine.order,
        "enable-prefix-caching": d.engine.prefix_cache,
    }
    if d.plan.serving.sums == "nccl":
        found["disable-custom-all-reduce"] = True
    if d.engine.host_bytes:
        found["kv-offloading-size"] = d.engine.host_bytes * d.devices / 2**30
    if d.adapters:
        slots = min(d.engine.adapter_slots, d.adapters)
        found |= {"enable-lora": True, "max-loras": slots, "max-lora-rank": d.serve.adapter_rank}
        found["max-cpu-loras"] = d.adapters
    if d.guesses:
        own = d.engine.draft in (shared.NGRAM, shared.HEAD)
        model = {"method": d.engine.draft} if own else {"method": "draft_model", "model": "<DRAFT>"}
        found["speculative-config"] = {**model, "num_speculative_tokens": d.guesses}
    if d.engine.kv_blocks:
        found["num-gpu-blocks-override"] = -(-d.engine.kv_blocks // groups)
    if d.engine.graphs:
        found["max-cudagraph-capture-size"] = 512
    else:
        found["enforce-eager"] = True
    return found


def write(d: Deployment) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    about = load(NAME)
    head = f"# Configuration for {about.label}, written by Meshwright.\n# {d.name}\n"
    text = commented(head + dumps(settings(d)), about.comments)
    command = 'vllm serve "$MODEL" --config "$CONFIG" --port "$PORT"'
    parts = f'--nnodes {d.nodes_per_replica} --node-rank "$PART" --master-addr "$HEAD_NODE" '
    parts += f"--master-port {replicas.MEETING} $([[ $PART -eq 0 ]] || echo --headless)"
    run = replicas.script(d, f"Starts {about.label}", FILE, command, parts)
    return {FILE: text, **replicas.balancer(d), launch.FILE: run}, [*replicas.notes(d), *notes(d)]


def notes(d: Deployment) -> Iterator[str]:
    """Yield what is left at the engine's own and what the configuration does not say."""
    if d.serve.engine.profile != NAME:
        yield f"predicted with the host times of engine={d.engine.profile}; engine=vllm has vLLM's"
    if d.compute == "int8":
        yield "MODEL is a checkpoint of 8-bit weights and activations: the engine reads that there"
    yield from shared.checkpoints(d)
    yield from shared.guessed(d)
    yield from shared.adapted(d)
    if d.layout.adp > 1:
        yield f"limits are those of an attention group, of which a replica has {d.layout.adp}"
    if d.engine.order == "priority":
        yield "a request says its priority in the API; of vLLM's numbers the lower come first"
    if PRECISIONS[d.compute][1]:
        yield f"weights are quantised to {d.compute} while they are loaded; drop quantization for a checkpoint that is"
    yield (
        f"max-model-len stays the model's own, {d.model.max_seq_len:,} tokens"
        if d.model.max_seq_len
        else ("max-model-len stays the model's own")
    )
