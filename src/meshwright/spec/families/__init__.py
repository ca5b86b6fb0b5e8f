"""Which reader understands which architecture of a Hugging Face configuration, and which are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import MeshwrightError, nearest
from meshwright.spec.architecture import Model
from meshwright.spec.families import experts, gpt, llama
from meshwright.spec.families.reader import Reader

READERS: dict[str, Callable[[Reader], Model]] = {
    "llama": llama.llama,
    "mistral": llama.mistral,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "mimo": llama.mimo,
    "internlm2": llama.internlm2,
    "gpt2": gpt.gpt2,
    "mixtral": experts.mixtral,
}


def read(config: Mapping[str, Any], *, name: str, place: str) -> Model:
    """The Model of a configuration."""
    family = config.get("model_type")
    reader = READERS.get(family) if isinstance(family, str) else None
    if reader is None:
        raise MeshwrightError.one(
            "M004", f"unknown architecture {family!r} ({name})", place=place, help=nearest(str(family), list(READERS))
        )
    r = Reader(config, name=name, family=family, place=place)
    model = reader(r)
    r.raise_faults()
    return model
