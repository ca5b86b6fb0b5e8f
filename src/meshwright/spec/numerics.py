"""Numerical constants of a model beside its shapes: of norms, rotary positions, scores, caps and routing.

None of them changes a cost, so every configuration may leave them out; the defaults are the families' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

#: Rotary scalings that are computed; others are known by name only.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: Families whose published default differs from the first one's: (norm_eps, rope_theta).
_FAMILY = {
    "llama": (1e-6, 10_000.0),
    "mistral": (1e-6, 10_000.0),
    "qwen2": (1e-6, 10_000.0),
    "qwen3": (1e-6, 10_000.0),
    "qwen2_moe": (1e-6, 10_000.0),
    "qwen3_moe": (1e-6, 10_000.0),
    "mixtral": (1e-5, 1_000_000.0),
    "gemma": (1e-6, 10_000.0),
    "gemma2": (1e-6, 10_000.0),
    "gemma3": (1e-6, 1_000_000.0),
    "olmo3": (1e-5, 500_000.0),
    "deepseek_v2": (1e-6, 10_000.0),
    "deepseek_v3": (1e-6, 10_000.0),
    "kimi_k2": (1e-6, 10_000.0),
}
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "layernorm_epsilon")
_GEMMA = ("gemma", "gemma2", "gemma3")
#: Families whose layers that slide rotate by another base, or without the scaling: that base, 0 for the others' own.
_LOCAL = {"gemma3": 10_000.0, "olmo3": 0.0}
_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "kimi_k2")
#: Families whose attention rotates a share of a head where the configuration states one.
_PARTIAL = ("phi", "phi3")


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of norms, rotary positions, scores and routing.

    Attributes:
        norm_eps: added to a norm's variance.
        rope_theta: base of rotary positions.
        rope_type: scaling of their frequencies (``llama3``: 2407.21783, ``linear``: position interpolation, 2306.15595,
            ``yarn``: 2309.00071), by the numbers ``rope_*`` after it.
        rope_attention: cosines and sines are multiplied by it (yarn).
        rope_fraction: the rotated share of a head.
        rope_interleaved: neighbours are turned as a pair (DeepSeek), not the first half with the second.
        local_theta: base in layers that slide, whose positions are not scaled; 0 = as in the others (Gemma 3).
        score_scale: what products of queries and keys are multiplied by; 0 = 1 / sqrt(head width).
        score_factor: multiplies that scale (yarn in DeepSeek).
        score_cap: scores are cap * tanh(score / cap) (Gemma 2); 0 = as they are.
        logit_cap: the same of the head's logits.
        embed_scale: what looked-up embeddings are multiplied by (Gemma: sqrt(hidden)).
        clip_qkv: queries, keys and values are cut to this range (OLMo); 0 = as they are.
        norm_topk: the chosen experts' weights are divided by their sum.
        sigmoid: a router's scores are sigmoids, one expert's for itself (DeepSeek-V3), not one softmax.
        groups: groups of experts, of which a token takes the best `top_groups` before it takes experts.
        route_scale: what the chosen experts' weights are multiplied by in the end.
        refused: what the configuration asks for and no module computes.
    """

    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0
    rope_original: int = 8192
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention: float = 1.0
    rope_fraction: float = 1.0
    rope_interleaved: bool = False
    local_theta: float = 0.0
    score_scale: float = 0.0
    score_factor: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    clip_qkv: float = 0.0
    norm_topk: bool = True
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    route_scale: float = 1.0
    refused: tuple[str, ...] = ()

    def scale(self, head_dim: int) -> float:
        """Return the number that products of queries and keys of heads `head_dim` wide are multiplied by."""
        return (self.score_scale or head_dim**-0.5) * self.score_factor

    @property
    def unscaled(self) -> Numerics:
        """The constants of layers that slide, where they differ."""
        if not self.local_theta:
            return self
        plain = {"rope_theta": self.local_theta, "rope_type": "default", "rope_attention": 1.0, "local_theta": 0.0}
        return msgspec.structs.replace(self, **plain)


def numerics(config: Mapping[str, Any], family: str) -> Numerics:
    """The constants a Hugging Face configuration states, else the family's defaults. What is no number is taken as
    absent: a model's costs never depend on it."""
    eps, theta = _FAMILY.get(family, (1e-5, 10_000.0))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    local = rope.get("sliding_attention")
    if isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = kind if isinstance(kind, str) else "default"
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", theta))
    fraction = 0.5 if family == "phi" else 1.0
    # a scaling that does not say from which length it stretches is of the longest
    usual = _number(config, "max_position_embeddings", 8192.0) if kind in ("llama3", "yarn") else 8192.0
    found = {
        "norm_eps": next((float(config[k]) for k in _EPS if _is_number(config.get(k))), eps),
        "rope_theta": theta,
        "rope_type": kind,
        "rope_factor": _number(rope, "factor", 1.0),
        "rope_low_factor": _number(rope, "low_freq_factor", 1.0),
        "rope_high_factor": _number(rope, "high_freq_factor", 4.0),
        "rope_original": max(1, int(_number(rope, "original_max_position_embeddings", usual))),
        "rope_fraction": _number(rope, "partial_rotary_factor", _number(config, "partial_rotary_factor", fraction)),
        "norm_topk": config.get("norm_topk_prob", family in ("mixtral", "deepseek_v3", "kimi_k2")) is True,
        "refused": tuple(_refused(config, family)),
    }
    if kind == "yarn":
        found |= _yarn(rope, config, found)
    if family in _LOCAL:
        said = local if isinstance(local, Mapping) else {}
        own = _number(said, "rope_theta", _number(config, "rope_local_base_freq", _LOCAL[family] or theta))
        found["local_theta"] = own
        if (scaled := said.get("rope_type") or "default") != "default":
            found["refused"] += (f"layers that slide scale their positions by {scaled!r}",)
    if family in _GEMMA:
        found |= _gemma(config, family)
    if family.startswith("olmo"):
        found["clip_qkv"] = _number(config, "clip_qkv", 0.0)
    if family in _DEEPSEEK:
        found |= _deepseek(config, rope, family, kind)
    return Numerics(**found)


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The constants of yarn; without a factor that of the lengths, and without one for scores its paper's (2309.00071,
    section 3.4), or the ratio of the two that DeepSeek states."""
    longest = _number(config, "max_position_embeddings", float(found["rope_original"]))
    factor = _number(rope, "factor", longest / found["rope_original"])
    one, all_dims = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    both = _mscale(factor, one) / _mscale(factor, all_dims) if one and all_dims else _mscale(factor, 1.0)
    return {
        "rope_factor": factor,
        "rope_beta_fast": _number(rope, "beta_fast", 32.0) or 32.0,
        "rope_beta_slow": _number(rope, "beta_slow", 1.0) or 1.0,
        "rope_truncate": rope.get("truncate", True) is not False,
        "rope_attention": _number(rope, "attention_factor", both),
    }


def _mscale(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _gemma(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Gemma's: embeddings are multiplied by sqrt(hidden); from Gemma 2 scores are scaled by a number of their own, and
    capped as the logits are."""
    found: dict[str, Any] = {"embed_scale": _number(config, "hidden_size", 1.0) ** 0.5}
    if family == "gemma":
        return found
    capped = (50.0, 30.0) if family == "gemma2" else (0.0, 0.0)
    for name, key, usual in zip(("score_cap", "logit_cap"), _CAPS, capped):
        found[name] = 0.0 if key in config and config[key] is None else _number(config, key, usual)
    found["score_scale"] = max(1.0, _number(config, "query_pre_attn_scalar", 256.0)) ** -0.5
    return found


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _deepseek(config: Mapping[str, Any], rope: Mapping[str, Any], family: str, kind: str) -> dict[str, Any]:
    """DeepSeek's: pairs of neighbours are rotated, scores scaled by yarn's factor squared, experts chosen in the best
    groups. DeepSeek-V2's weights are never divided by their sum."""
    v3 = family != "deepseek_v2"
    grouped = v3 or config.get("topk_method") == "group_limited_greedy"
    all_dims = _number(rope, "mscale_all_dim", 0.0)
    found = {
        "rope_interleaved": config.get("rope_interleave", True) is not False,
        "sigmoid": v3,
        "groups": int(_number(config, "n_group", 8.0 if v3 else 1.0)) if grouped else 1,
        "top_groups": int(_number(config, "topk_group", 4.0 if v3 else 1.0)) if grouped else 1,
        "route_scale": _number(config, "routed_scaling_factor", 2.5 if v3 else 1.0),
    }
    if kind != "default" and all_dims:
        found["score_factor"] = _mscale(_number(rope, "factor", 1.0), all_dims) ** 2
    if not v3:
        found["norm_topk"] = False
    return found


def _refused(config: Mapping[str, Any], family: str) -> Iterator[str]:
    """Yield what a configuration asks for beyond what its family's modules compute."""
    if config.get("use_bidirectional_attention"):
        yield "its tokens see later ones (use_bidirectional_attention)"
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    share = _number(rope, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0))
    if share != 1 and family not in _PARTIAL:
        yield f"it rotates a share of a head (partial_rotary_factor={share:g}), which its family's attention does not"
    if family == "gpt2" and config.get("scale_attn_weights") is False:
        yield "its scores are not scaled (scale_attn_weights)"
    if family == "gpt2" and config.get("scale_attn_by_inverse_layer_idx"):
        yield "its scores are divided by the layer's number (scale_attn_by_inverse_layer_idx)"
    if family == "gemma3" and config.get("attn_logit_softcapping"):
        yield "its scores are capped (attn_logit_softcapping), which Gemma 3's never are"
    if family == "phi" and config.get("qk_layernorm"):
        yield "it normalises queries and keys by LayerNorm (qk_layernorm)"
    if family == "deepseek_v2" and config.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        yield f"its router chooses by topk_method={config['topk_method']!r}"
    if family in ("deepseek_v3", "kimi_k2"):
        if config.get("scoring_func", "sigmoid") != "sigmoid":
            yield f"its router scores by {config['scoring_func']!r}"
        if config.get("topk_method", "noaux_tc") != "noaux_tc":
            yield f"its router chooses by topk_method={config['topk_method']!r}"
    if family == "deepseek_v2" and config.get("mlp_bias"):
        yield "its MLPs have biases (mlp_bias)"
    if family == "deepseek_v2" and config.get("norm_topk_prob"):
        yield "the chosen experts' weights are divided by their sum (norm_topk_prob), which DeepSeek-V2 has never done"


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key)
    return float(value) if _is_number(value) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
