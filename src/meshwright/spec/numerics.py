"""Numerical constants of a model beside its shapes: of norms, rotary positions and routing.

None of them changes a cost, so every configuration may leave them out; the defaults are the families' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

#: Rotary scalings that are computed; others are known by name only.
ROPE_TYPES = ("default", "linear", "llama3")
#: Families whose published default differs from the first one's: (norm_eps, rope_theta).
_FAMILY = {
    "llama": (1e-6, 10_000.0),
    "mistral": (1e-6, 10_000.0),
    "qwen2": (1e-6, 10_000.0),
    "qwen3": (1e-6, 10_000.0),
    "qwen2_moe": (1e-6, 10_000.0),
    "qwen3_moe": (1e-6, 10_000.0),
    "mixtral": (1e-5, 1_000_000.0),
}
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "layernorm_epsilon")


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """``norm_eps`` is added to a norm's variance. Rotary positions: base ``rope_theta``; ``rope_type`` and the four
    numbers after it the scaling of its frequencies (``llama3``: 2407.21783, ``linear``: position interpolation,
    2306.15595); ``rope_fraction`` the rotated share of a head. ``norm_topk``: the chosen experts' weights are
    divided by their sum."""

    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0
    rope_original: int = 8192
    rope_fraction: float = 1.0
    norm_topk: bool = True


def numerics(config: Mapping[str, Any], family: str) -> Numerics:
    """The constants a Hugging Face configuration states, else the family's defaults. What is no number is taken as
    absent: a model's costs never depend on it."""
    eps, theta = _FAMILY.get(family, (1e-5, 10_000.0))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return Numerics(
        norm_eps=next((float(config[k]) for k in _EPS if _is_number(config.get(k))), eps),
        rope_theta=_number(rope, "rope_theta", _number(config, "rope_theta", theta)),
        rope_type=kind if isinstance(kind, str) else "default",
        rope_factor=_number(rope, "factor", 1.0),
        rope_low_factor=_number(rope, "low_freq_factor", 1.0),
        rope_high_factor=_number(rope, "high_freq_factor", 4.0),
        rope_original=int(_number(rope, "original_max_position_embeddings", 8192)),
        rope_fraction=_number(rope, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0)),
        norm_topk=config.get("norm_topk_prob", family == "mixtral") is True,
    )


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key)
    return float(value) if _is_number(value) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
