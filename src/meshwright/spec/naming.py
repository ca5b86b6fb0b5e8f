"""Naming schemes: how families name their tensors on the Hugging Face hub."""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model

#: The naming scheme of each family whose tensors are named, and which can be trained for that.
SCHOOLS = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "qwen2_moe": "llama",
    "qwen3_moe": "llama",
    "gpt2": "gpt2",
    "mamba2": "mamba2",
    "qwen3_5": "qwen3_5",
    "bert": "bert",
    "t5": "t5",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma2",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "phi": "phi",
    "phi3": "phi3",
    "olmo": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "llama",
    "resnet": "resnet",
    "vgg": "vgg",
    "features": "features",
    "dit": "dit",
    "latte": "dit",
    "dit_pipeline": "dit",
}
#: Schools of classifiers of labelled samples.
CLASSIFIERS = ("resnet", "vgg", "features")
#: That of diffusion transformers, which learn to find the noise in labelled samples.
DENOISER = "dit"


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the tensors in one naming scheme; ``layer`` takes the layer's number.

    ``conv``: matrices are stored transposed (GPT-2's Conv1D). ``qkv`` and ``gate_up`` name the tensor that holds query,
    key and value, or gate and up, below each other; "" where each is one of its own. ``after`` are the norms behind
    attention and MLP, where there are any. ``unit_offset``: norms multiply by one plus their stored weight (Qwen3-Next,
    Gemma). ``shared`` are the experts that all tokens pass."""

    layer: str
    embedding: str
    final_norm: str
    attention: str
    out: str
    norms: tuple[str, str]
    mlp: str
    up: str
    down: str
    head: str = "lm_head"
    gate: str = ""
    positions: str = ""
    qkv: str = ""
    gate_up: str = ""
    after: tuple[str, str] = ("", "")
    shared: str = "shared_expert."
    conv: bool = False
    mixer: str = ""
    unit_offset: bool = False


LLAMA = Names(
    layer="model.layers.{}.",
    embedding="model.embed_tokens.weight",
    final_norm="model.norm",
    attention="self_attn.",
    out="o_proj",
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp="mlp.",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
)
MIXTRAL = msgspec.structs.replace(LLAMA, mlp="block_sparse_moe.")
GPT2 = Names(
    layer="transformer.h.{}.",
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f",
    attention="attn.",
    out="c_proj",
    norms=("ln_1", "ln_2"),
    mlp="mlp.",
    up="c_fc",
    down="c_proj",
    positions="transformer.wpe.weight",
    qkv="c_attn",
    conv=True,
)
GEMMA = msgspec.structs.replace(LLAMA, unit_offset=True)
GEMMA2 = msgspec.structs.replace(
    GEMMA,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)
#: Modules of latent attention name its matrices.
DEEPSEEK = msgspec.structs.replace(LLAMA, shared="shared_experts.")
PHI = msgspec.structs.replace(
    LLAMA, final_norm="model.final_layernorm", out="dense", norms=("input_layernorm", ""), up="fc1", down="fc2"
)
PHI3 = msgspec.structs.replace(LLAMA, qkv="qkv_proj", gate_up="gate_up_proj")
OLMO2 = msgspec.structs.replace(LLAMA, norms=("", ""), after=("post_attention_layernorm", "post_feedforward_layernorm"))
QWEN3_5 = msgspec.structs.replace(LLAMA, mixer="linear_attn.", unit_offset=True)
MAMBA2 = msgspec.structs.replace(
    LLAMA,
    layer="backbone.layers.{}.",
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f",
    norms=("norm", ""),
    mixer="mixer.",
)
#: Modules of these name their tensors themselves; the table is what ties ask for.
BERT = msgspec.structs.replace(
    LLAMA, layer="bert.encoder.layer.{}.", embedding="bert.embeddings.word_embeddings.weight"
)
T5 = msgspec.structs.replace(LLAMA, layer="{}", embedding="shared.weight")
#: Those of classifiers are in :mod:`.image_names`.
RESNET = msgspec.structs.replace(LLAMA, layer="resnet.encoder.stages.{}", embedding="resnet.embedder.")
VGG = msgspec.structs.replace(LLAMA, layer="features.{}", embedding="features.0.")
FEATURES = msgspec.structs.replace(LLAMA, layer="layers.{}", embedding="")
#: DiT's, as its authors' code has them; Latte's has the same.
DIT = Names(
    layer="blocks.{}.",
    embedding="x_embedder.proj.weight",
    final_norm="",
    attention="attn.",
    qkv="qkv",
    out="proj",
    norms=("", ""),
    mlp="mlp.",
    up="fc1",
    down="fc2",
    head="final_layer.linear",
)
_NAMES = {
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "gpt2": GPT2,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "deepseek": DEEPSEEK,
    "phi": PHI,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "mamba2": MAMBA2,
    "qwen3_5": QWEN3_5,
    "bert": BERT,
    "t5": T5,
    "resnet": RESNET,
    "vgg": VGG,
    "features": FEATURES,
    "dit": DIT,
}


#: The parameter of `transformers` that holds a matrix of all experts of a layer, by the target of adapters.
EXPERT_PARAMETERS = {"experts_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"}


def school(model: Model) -> str:
    """Return the naming scheme of a model's tensors; that of a model given by its dimensions follows its shape."""
    if model.family == "transformer":
        return "llama" if model.blocks[0].norm == "rmsnorm" else "gpt2"
    return SCHOOLS.get(model.family, "")


def classifies(model: Model) -> bool:
    """Whether a model tells the classes of labelled samples, which are no text."""
    return school(model) in CLASSIFIERS


def denoises(model: Model) -> bool:
    """Whether a model is a diffusion transformer, which learns to find the noise in samples."""
    return school(model) == DENOISER


def labelled(model: Model) -> bool:
    """Whether a model reads labelled samples, which are no text."""
    return classifies(model) or denoises(model)


def modules(model: Model) -> dict[str, str]:
    """Return the published module of each target of adapters that a model has; targets that are one matrix have
    the same. Of latent attention they are the projections down to the latents (that
    of keys and values is k's), the queries' own where they have no latent, and those from the latents up to heads."""
    n = names(model)
    q, k, v = (n.qkv,) * 3 if n.qkv else ("q_proj", "k_proj", "v_proj")
    latent = next((a for block in model.blocks for a in block.attentions if a.kv_lora_rank), None)
    if latent is not None:
        q, k, v = "q_a_proj" if latent.q_lora_rank else "q_proj", "kv_a_proj_with_mqa", ""
    gate, up = (n.gate_up,) * 2 if n.gate_up else (n.gate, n.up)
    o, down = (n.attention + n.out, n.mlp + n.down) if n.out == n.down else (n.out, n.down)
    said = {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down}
    if latent is not None:
        said |= {"q_up": "q_b_proj" if latent.q_lora_rank else "", "kv_up": "kv_b_proj"}
    return {target: name for target, name in said.items() if name}


def expert_parameters(model: Model) -> dict[str, str]:
    """Return the parameter that holds a matrix of all experts of a layer, of each target that a model has."""
    return dict(EXPERT_PARAMETERS) if model.mixtures else {}


def fused(model: Model) -> tuple[bool, bool]:
    """Whether a model publishes queries, keys and values, and gate and up, as one matrix, which has one adapter."""
    found = _NAMES.get(school(model))
    return (False, False) if found is None else (bool(found.qkv), bool(found.gate_up))


def names(model: Model) -> Names:
    """The names of a model that can be trained (``plan/executable.py`` refuses the others)."""
    return _NAMES[school(model)]
