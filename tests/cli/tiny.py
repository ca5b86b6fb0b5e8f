"""A model that trains in seconds, as a folder of a published one."""

import json
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}


def tiny(folder: Path) -> None:
    """Write it into `folder`, as ``tiny``."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG))
