"""Megatron-LM's command line, as far as an exported script uses it: the type of every flag, and what is refused.

Its parser is on no package index, so this is a record of it: ``megatron/training/arguments.py`` of NVIDIA/Megatron-LM
at commit 000c4ac24f61 (types and choices of the flags, and the conditions of its ``validate_args``), and for flags
that are made from the fields of a record, ``transformer_config.py`` of megatron-core 0.16.1.
"""

import argparse
import re
import shlex

WHOLE = """
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels --num-query-groups
    --max-position-embeddings --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
    --num-experts --moe-ffn-hidden-size --moe-shared-expert-intermediate-size --moe-router-topk
    --expert-model-parallel-size --expert-tensor-parallel-size --tensor-model-parallel-size
    --pipeline-model-parallel-size --num-virtual-stages-per-pipeline-rank --context-parallel-size
    --num-distributed-optimizer-instances --micro-batch-size --global-batch-size --seq-length --train-iters
    --recompute-num-layers --padded-vocab-size
"""
FRACTIONS = "--activation-func-clamp-value --glu-linear-offset --attention-dropout --hidden-dropout --lr --sgd-momentum"
SWITCHES = """
    --group-query-attention --swiglu --untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm
    --qk-l2-norm --disable-bias-linear --add-qkv-bias --moe-grouped-gemm --moe-router-enable-expert-bias
    --moe-shared-expert-gate --sequence-parallel --use-tp-pp-dp-mapping --use-distributed-optimizer
    --use-megatron-fsdp --no-gradient-accumulation-fusion --overlap-grad-reduce --overlap-param-gather
    --no-overlap-p2p-communication --tp-comm-overlap --overlap-moe-expert-parallel-comm --cross-entropy-loss-fusion
    --quick-geglu --no-bias-dropout-fusion
    --bf16 --fp16 --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --use-precision-aware-optimizer
"""
CHOICES = {
    "--attention-backend": "flash fused unfused local auto",
    "--softmax-type": "learnable vanilla off-by-one",
    "--position-embedding-type": "learned_absolute rope mrope relative none",
    "--normalization": "LayerNorm RMSNorm",
    "--moe-router-score-function": "softmax sigmoid",
    "--moe-token-dispatcher-type": "allgather alltoall flex",
    "--data-parallel-sharding-strategy": "no_shard optim optim_grads optim_grads_params",
    "--ckpt-format": "torch torch_dist zarr torch_dcp fsdp_dtensor",
    "--optimizer": "adam sgd muon dist_muon",
    "--recompute-granularity": "full selective",
    "--recompute-method": "uniform block",
    "--cross-entropy-fusion-impl": "native te",
    "--tokenizer-type": "GPT2BPETokenizer SentencePieceTokenizer HuggingFaceTokenizer Llama2Tokenizer TikTokenizer",
    "--fp8-format": "e4m3 hybrid",
    "--fp8-recipe": "tensorwise delayed mxfp8 blockwise custom",
    "--fp4-format": "e2m1",
    "--fp4-recipe": "nvfp4 custom",
    "--main-grads-dtype": "fp32 bf16",
    "--main-params-dtype": "fp32 fp16",
    "--exp-avg-dtype": "fp32 fp16 bf16 fp8",
    "--exp-avg-sq-dtype": "fp32 fp16 bf16 fp8",
}
#: Texts with a form of their own: one word for all layers, a list as an expression, a pair, letters, paths.
FORMS = {
    "--cp-comm-type": r"p2p|a2a|allgather|a2a\+p2p",
    "--moe-layer-freq": r"\d+|[\d\[\](),+*]+",
    "--window-attn-skip-freq": r"\d+|[\d\[\](),+*]+",
    "--window-size": r"-?\d+,-?\d+",
    "--pipeline-model-parallel-layout": r"[EtmL|()*,\d]+",
    "--recompute-modules": "core_attn|moe_act|layernorm|mla_up_proj|mlp|moe|shared_experts",
    "--data-path": ".+",
    "--tokenizer-model": ".+",
}


class Refused(Exception):
    """The error that Megatron-LM would stop with."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def formed(pattern):
    def read(text):
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return read


def parser():
    out = Parser(allow_abbrev=False)
    for flags, kind in ((WHOLE, int), (FRACTIONS, float)):
        for flag in flags.split():
            out.add_argument(flag, type=kind)
    for flag in SWITCHES.split():
        out.add_argument(flag, action="store_true")
    for flag, words in CHOICES.items():
        out.add_argument(flag, choices=words.split())
    for flag, pattern in FORMS.items():
        out.add_argument(flag, type=formed(pattern))
    return out


def words(script, **environment):
    """The flags and values of an exported script, as bash hands them to Megatron-LM."""
    arrays = re.findall(r"^[A-Z]+=\(\n(.*?)^\)", script, re.MULTILINE | re.DOTALL)
    said = shlex.split("".join(arrays), comments=True)
    return [environment.get(word[1:], "1") if word.startswith("$") else word for word in said]


def accepted(script):
    """The arguments of an exported script.

    Raises:
        Refused: a flag that is none, a value of another kind, or a condition of ``validate_args`` that is not met.
    """
    args = parser().parse_args(words(script))
    ranks = re.search(r"--nnodes=(\d+) --nproc-per-node=(\d+)", script)
    world = int(ranks[1]) * int(ranks[2])
    for wrong, why in conditions(args, world, "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script):
        if wrong:
            raise Refused(why)
    return args


def conditions(a, world, one_connection):
    """(whether it is violated, what it says)."""
    tp, pp, cp = a.tensor_model_parallel_size, a.pipeline_model_parallel_size, a.context_parallel_size
    ep, vpp, layout = a.expert_model_parallel_size or 1, a.num_virtual_stages_per_pipeline_rank, None
    layout = a.pipeline_model_parallel_layout
    stages = layout.count("|") + 1 if layout else pp * (vpp or 1)
    chunks = stages // pp
    replicas = world // (tp * pp * cp)
    fsdp = a.use_megatron_fsdp
    yield world % (tp * pp * cp) > 0, "the world size divides by tp * pp * cp"
    yield a.global_batch_size % (a.micro_batch_size * replicas) > 0, "the batch divides by microbatch and replicas"
    yield bool(layout and vpp), "a layout says the virtual stages itself"
    yield stages % pp > 0, "a layout's stages divide by pp"
    yield not layout and a.num_layers % stages > 0, "layers divide by stages"
    yield chunks > 1 and pp == 1, "interleaving needs a pipeline"
    yield chunks > 1 and a.no_overlap_p2p_communication and pp <= 2, "blocking sends of chunks need pp of 3 and more"
    yield a.overlap_param_gather and not (a.use_distributed_optimizer or fsdp), "gathers need a sharded optimizer"
    yield a.overlap_param_gather and not a.overlap_grad_reduce, "gathers overlap where reductions do"
    yield fsdp and one_connection, "its FSDP wants several connections"
    yield fsdp != (a.ckpt_format == "fsdp_dtensor"), "its FSDP has its own checkpoints, and nothing else has them"
    yield not fsdp and tp * cp > 1 and not one_connection, "tensor and context parallelism want one connection"
    yield a.bf16 and a.fp16, "bf16 or fp16"
    yield a.accumulate_allreduce_grads_in_fp32 and a.main_grads_dtype == "bf16", "gradients have one type"
    yield bool(a.fp8_format and a.fp4_format), "fp8 or fp4"
    yield cp > 1 and a.seq_length % (2 * cp) > 0, "a sequence divides by 2 * cp"
    yield a.max_position_embeddings < a.seq_length, "positions reach the end of a sequence"
    yield a.moe_grouped_gemm and not a.bf16, "grouped products are in bf16"
    yield a.recompute_granularity == "selective" and a.recompute_method is not None, "selective has no method"
    yield a.tp_comm_overlap and not a.sequence_parallel, "tensor-parallel exchange overlaps under sequence parallelism"
    yield ep > 1 and (a.num_experts or 0) % ep > 0, "experts divide by ep"
    yield ep > 1 and (not a.num_experts or a.fp16), "expert parallelism is for experts, and not in fp16"
    overlap = a.overlap_moe_expert_parallel_comm
    yield overlap and (ep == 1 or (pp > 1 and chunks == 1)), "experts' exchange overlaps with ep, and with chunks"
    yield overlap and a.recompute_granularity == "full", "experts' exchange does not overlap under full recompute"
