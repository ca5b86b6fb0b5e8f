"""The readers of Hugging Face configurations, by architecture, and the architectures that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import MeshwrightError, nearest
from meshwright.spec.architecture import Model
from meshwright.spec.families import (
    convolutional,
    diffusion,
    encoders,
    experts,
    gemma,
    gpt,
    hybrids,
    latent,
    latent_diffusion,
    llama,
    mixed,
    mlp_hybrids,
    pairs,
    unet,
    vectors,
)
from meshwright.spec.families.reader import ConfigReader, shown
from meshwright.spec.families.refused import MISSING

READERS: dict[str, Callable[[ConfigReader], Model]] = {
    **dict.fromkeys(("llama", "baichuan", "yi", "granite", "code_llama"), llama.llama),
    "internlm2": llama.internlm2,
    "mistral": llama.mistral,
    "mimo": llama.mimo,
    "phi3": llama.mistral,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "qwen3_vl": llama.qwen3,
    "glm": llama.glm,
    "glm4": llama.glm4,
    "qwen2_vl": llama.qwen2,
    "qwen2_5_vl": llama.qwen2,
    "qwen3_vl_moe": experts.qwen3_moe,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "gemma4": gemma.gemma4,
    "gpt2": gpt.gpt2,
    "gpt_bigcode": gpt.gpt_bigcode,
    "gptj": gpt.gptj,
    "gpt_neox": gpt.gpt_neox,
    "opt": gpt.opt,
    "bloom": gpt.bloom,
    "falcon": gpt.falcon,
    "mpt": gpt.mpt,
    "phi": mixed.phi,
    "phimoe": mixed.phimoe,
    "nemotron": mixed.nemotron,
    "starcoder2": mixed.starcoder2,
    "stablelm": mixed.stablelm,
    "cohere": mixed.cohere,
    "cohere2": mixed.cohere2,
    "dbrx": mixed.dbrx,
    "olmo": mixed.olmo,
    "hf_olmo": mixed.hf_olmo,
    "olmo2": mixed.olmo2,
    "olmo3": mixed.olmo2,
    "olmoe": experts.olmoe,
    "mixtral": experts.mixtral,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3_moe": experts.qwen3_moe,
    "llama4": experts.llama4,
    "gpt_oss": experts.gpt_oss,
    "minimax_m2": experts.minimax_m2,
    "step3": experts.step3,
    "mimo_v2_flash": experts.mimo_v2_flash,
    "glm4_moe": experts.glm4_moe,
    "bert": encoders.bert,
    "roberta": encoders.roberta,
    "xlm_roberta": encoders.roberta,
    "vit": encoders.vit,
    "clip": encoders.clip,
    "clip_text_model": encoders.clip_text,
    "clip_vision_model": encoders.clip_vision,
    "mamba": hybrids.mamba,
    "falcon_mamba": hybrids.mamba,
    "mamba2": hybrids.mamba2,
    "jamba": hybrids.jamba,
    "nemotron_h": hybrids.nemotron_h,
    "zamba2": hybrids.zamba2,
    "bamba": mlp_hybrids.bamba,
    "granitemoehybrid": mlp_hybrids.granite_hybrid,
    "qwen3_next": hybrids.qwen3_next,
    "qwen3_5": hybrids.qwen3_5,
    "qwen3_5_moe": hybrids.qwen3_5_moe,
    "resnet": convolutional.resnet,
    "vgg": convolutional.vgg,
    "unet": unet.unet,
    "stable_diffusion": latent_diffusion.stable_diffusion,
    "controlnet": latent_diffusion.controlnet,
    "dit_pipeline": latent_diffusion.dit_pipeline,
    "features": vectors.feature_classifier,
    "dit": diffusion.dit,
    "latte": diffusion.latte,
    "t5": pairs.t5,
    "bart": pairs.bart,
    "llava": pairs.llava,
    "deepseek": experts.deepseek,
    "deepseek_v2": latent.deepseek_v2,
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa"), latent.deepseek_v3),
}

_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_MOSAIC = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}

# The own words of some families for the usual keys.
SPELLINGS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), _GPT),
    "bloom": {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "falcon": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "num_kv_heads",
               "intermediate_size": "ffn_hidden_size"},
    "opt": {"intermediate_size": "ffn_dim"},
    "mpt": _MOSAIC,
    "dbrx": _MOSAIC,
    "dit": {"num_hidden_layers": "num_layers"},
    "latte": {"num_hidden_layers": "num_layers"},
    "hf_olmo": _MOSAIC | {"max_position_embeddings": "max_sequence_length", "num_key_value_heads": "n_kv_heads"},
}  # fmt: skip

# Architectures whose class name is not their family's name in capitals.
_CLASSES = {
    "OLMoForCausalLM": "hf_olmo",
    "RWForCausalLM": "falcon",
    "BaiChuanForCausalLM": "baichuan",
    "DeciLMForCausalLM": "nemotron_nas",
    "GPTRefactForCausalLM": "gpt_bigcode",
    "T5WithLMHeadModel": "t5",
    **dict.fromkeys(("CLIPTextModel", "CLIPTextModelWithProjection"), "clip_text_model"),
    **dict.fromkeys(("CLIPVisionModel", "CLIPVisionModelWithProjection"), "clip_vision_model"),
    "XLMRobertaForMaskedLM": "xlm_roberta",
    **dict.fromkeys(("DiTTransformer2DModel", "Transformer2DModel"), "dit"),
    "LatteTransformer3DModel": "latte",
    "UNet2DConditionModel": "unet",
    "StableDiffusionPipeline": "stable_diffusion",
    "StableDiffusionControlNetPipeline": "controlnet",
    "DiTPipeline": "dit_pipeline",
    "FeatureClassifier": "features",
}
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
#: Families that read the class's head themselves.
_OWN_HEADS = (
    "bert",
    "roberta",
    "xlm_roberta",
    "vit",
    "clip",
    "clip_text_model",
    "clip_vision_model",
    "t5",
    "bart",
    "llava",
    "dit",
    "latte",
    "resnet",
    "vgg",
    "unet",
    "stable_diffusion",
    "controlnet",
    "dit_pipeline",
    "features",
)
_OTHER_HEADS = ("ForMaskedLM", "ForPreTraining", "ForImageClassification", "Model")
_NESTED = ("text_config", "language_config", "llm_config")
#: Families that are read as a whole: their nested configurations are parts of one model.
_WHOLE = ("clip", "llava")

#: The key by which configurations of diffusers say what they are of.
CLASS = "_class_name"


def read(config: Mapping[str, Any], *, name: str, place: str) -> Model:
    """The Model of a configuration.

    Raises:
        MeshwrightError: M001-M003 with every fault of the configuration; M004 when its architecture is unknown;
            M005 when it is known and not modelled.
    """
    family = family_of(config, name=name, place=place)
    nested = nested_key(config)
    if nested is None:
        return _read(config, family, name=name, place=place)
    inner = dict(config[nested])
    inner_family = family_of(inner, name=name, place=f"{place}: {nested}") if _is_named(inner) else family
    for key in ("tie_word_embeddings", "_source"):
        if inner.get(key) is None and key in config:
            inner[key] = config[key]
    outer = ConfigReader(config, name=name, family=family, place=place)
    outer.ignore(nested, "tie_word_embeddings")
    note = "the text model alone: encoders for images and sound are not counted"
    return _read(inner, inner_family, name=name, place=f"{place}: {nested}", notes=(note,), outer=outer)


def nested_key(config: Mapping[str, Any]) -> str | None:
    """The key under which a multimodal configuration keeps its language model; None for a plain one, and for one that
    is read as a whole."""
    if str(config.get("model_type", "")).lower() in _WHOLE:
        return None
    return next((key for key in _NESTED if isinstance(config.get(key), Mapping)), None)


def family_of(config: Mapping[str, Any], *, name: str, place: str) -> str:
    """The family that the first of ``architectures``, or else ``model_type``, names."""
    classes = config.get("architectures")
    named = classes[0] if isinstance(classes, list | tuple) and classes and isinstance(classes[0], str) else ""
    if not named and isinstance(config.get(CLASS), str):  # as diffusers names them
        named = config[CLASS]
    kind = config.get("model_type")
    kind = kind.lower().replace("-", "_").removesuffix("_text") if isinstance(kind, str) else ""
    stem = _stem(named)
    for family in (_CLASSES.get(named), _BY_STEM.get(stem), kind):
        if family in MISSING:
            raise MeshwrightError.one(
                "M005",
                f"{named or family} is not modelled: {MISSING[family]} ({name})",
                place=f"{place}: model_type = {kind or family!r}",
                help="modelled are: " + ", ".join(sorted(READERS)),
            )
        if family in READERS:
            if named and family not in _OWN_HEADS and not named.endswith(_HEADS):
                break
            return family
    near = nearest(kind or stem, sorted(READERS))
    raise MeshwrightError.one(
        "M004",
        f"unknown architecture {named or kind or 'none'} ({name})",
        place=f"{place}: architectures = {shown(classes)}, model_type = {shown(config.get('model_type'))}",
        help=(f"{near}; " if near.startswith("did") else "") + "known families: " + ", ".join(sorted(READERS)),
    )


def _read(
    config: Mapping[str, Any],
    family: str,
    *,
    name: str,
    place: str,
    notes: tuple[str, ...] = (),
    outer: ConfigReader | None = None,
) -> Model:
    r = ConfigReader(config, name=name, family=family, place=place, spelling=SPELLINGS.get(family), outer=outer)
    r.notes.extend(notes)
    model = READERS[family](r)
    r.raise_faults()
    return model


def _is_named(config: Mapping[str, Any]) -> bool:
    return bool(config.get("architectures") or config.get("model_type"))


def _stem(class_name: str) -> str:
    for head in (*_HEADS, *_OTHER_HEADS):
        class_name = class_name.removesuffix(head)
    return class_name.removesuffix("Text").lower()


_BY_STEM = {family.replace("_", ""): family for family in (*READERS, *MISSING)}
