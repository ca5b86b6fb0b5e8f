"""TensorRT-LLM's options as YAML for ``trtllm-serve --config``, and the script that starts a server a replica.

Written for TensorRT-LLM 1.2.1 (``tensorrt_llm/llmapi/llm_args.py``, ``tensorrt_llm/commands/serve.py``, the PyTorch
backend); ``data/trtllm.toml`` lists the keys.
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

NAME, FILE = "trtllm", "trtllm.yaml"
#: Policy -> (``capacity_scheduler_policy``, ``enable_chunked_prefill``).
POLICIES = {
    "static": ("STATIC_BATCH", False),
    "orca": ("GUARANTEED_NO_EVICT", False),
    "trtllm": ("GUARANTEED_NO_EVICT", False),
    "vllm-v1": ("MAX_UTILIZATION", True),
    "sarathi": ("MAX_UTILIZATION", True),
}
#: Precisions that the backend computes in: 16 bits by a setting, fewer where the checkpoint says so.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
CHECKPOINTS = {"fp8": "FP8", "fp8_block": "FP8_BLOCK_SCALES", "nvfp4": "NVFP4"}
#: Formats of weights that are multiplied in 16 bits, by the checkpoint.
STORED = ("int4", "mxfp4")


def limits(d: Deployment) -> Iterator[Gap]:
    """Yield what the request needs and TensorRT-LLM cannot express."""
    yield from shared.room(d)
    yield from shared.unknown(d, "batch_wait", "fill", "settle")
    yield from shared.policies(d, POLICIES, "vllm-v1")
    kv = {"fp8": "", d.compute if d.compute in DTYPES else "bf16": ""}
    yield from shared.one_of(
        d, "kv", kv, "keys and values are stored as the model computes, or as fp8", next(reversed(kv))
    )
    known = {**DTYPES, **CHECKPOINTS}
    yield from shared.precisions(d, known, f"its precisions are {', '.join(known)}")
    block = d.engine.block
    power = 1 << max(0, block.bit_length() - 1)
    yield from shared.blocks(d, block == power, "its cache has blocks of a power of two tokens", power)
    yield from shared.experts(d)
    yield from shared.groups(d, alone=True)
    yield from shared.stored(d, STORED)
    yield from shared.cache(d)
    yield from shared.guesses(d)
    yield from shared.no_adapters(d)
    yield from shared.orders(d, ("fcfs",))
    yield from shared.nodes(d, False, "servers of several nodes are started by MPI, and no such launch is written")
    yield from replicas.routing(d)


def settings(d: Deployment) -> dict[str, object]:
    """Return the options of one engine."""
    capacity, chunked = POLICIES[d.engine.policy]
    cache: dict[str, object] = {
        "dtype": "fp8" if d.engine.kv == "fp8" else "auto",
        "tokens_per_block": d.engine.block,
        "free_gpu_memory_fraction": floor(d.free_share * 1000) / 1000,
        "enable_block_reuse": d.engine.prefix_cache,
    }
    if d.engine.host_bytes:
        cache["host_cache_size"] = round(d.engine.host_bytes)
    if d.engine.kv_blocks:
        cache["max_tokens"] = -(-d.engine.kv_blocks // d.layout.adp) * d.engine.block
    found: dict[str, object] = {
        "backend": "pytorch",
        "tensor_parallel_size": d.layout.tp,
        "pipeline_parallel_size": d.layout.pp,
    }
    if d.layout.adp > 1:
        found["enable_attention_dp"] = True
    if d.engine.batch_wait and d.layout.adp > 1:
        waits = {"timeout_iters": d.engine.batch_wait, "batching_wait_iters": d.engine.settle}
        found["attention_dp_config"] = {"enable_balance": True} | waits
    elif d.engine.batch_wait:
        found |= {"batch_wait_timeout_iters": d.engine.batch_wait, "batch_wait_max_tokens_ratio": d.engine.fill or 1.0}
    if d.plan.experts.ep > 1:
        found["moe_expert_parallel_size"] = d.plan.experts.ep
    if d.guesses:
        draft = {"decoding_type": "Draft_Target", "speculative_model": "<DRAFT>", "max_draft_len": d.guesses}
        if d.engine.draft == shared.NGRAM:
            draft = {"decoding_type": "NGram", "max_draft_len": d.guesses}
        elif d.engine.draft == shared.HEAD:
            draft = {"decoding_type": "MTP", "num_nextn_predict_layers": d.guesses}
        found["speculative_config"] = draft
    graphs = {"max_batch_size": min(d.engine.max_batch, 512), "enable_padding": True}
    return found | {
        "dtype": DTYPES.get(d.compute, "auto"),
        "max_batch_size": -(-d.engine.max_batch // d.layout.adp),
        "max_num_tokens": -(-d.budget // d.layout.adp),
        "enable_chunked_prefill": chunked,
        "scheduler_config": {"capacity_scheduler_policy": capacity},
        "kv_cache_config": cache,
        "cuda_graph_config": graphs if d.engine.graphs else None,
    }


def write(d: Deployment) -> tuple[dict[str, str], list[str]]:
    """(files, notes)."""
    about = load(NAME)
    head = f"# Options for {about.label}, written by Meshwright.\n# {d.name}\n"
    text = commented(head + dumps(settings(d)), about.comments)
    command = 'trtllm-serve "$MODEL" --config "$CONFIG" --port "$PORT"'
    run = replicas.script(d, f"Starts {about.label}", FILE, command)
    return {FILE: text, **replicas.balancer(d), launch.FILE: run}, [*replicas.notes(d), *_notes(d)]


def _notes(d: Deployment) -> Iterator[str]:
    if d.serve.engine.profile != NAME:
        yield f"predicted with the host times of engine={d.engine.profile}; engine=trtllm has TensorRT-LLM's"
    if d.compute in CHECKPOINTS:
        yield f"MODEL is a checkpoint whose hf_quant_config.json says {CHECKPOINTS[d.compute]}: precision is read there"
    yield from shared.checkpoints(d)
    yield from shared.guessed(d)
    if d.layout.adp > 1:
        yield f"limits are those of an attention group, of which a replica has {d.layout.adp}"
    yield "free_gpu_memory_fraction is of what weights and workspace leave: the predicted cache, in its words"
    if d.engine.policy == "sarathi":
        yield "admission looks at the next chunk's blocks, where the plan's waits for the whole prompt's"
