"""A small Llama with random weights and a tokenizer of bytes, as Hugging Face's files and as a gguf file.

25 million parameters: a next token is some milliseconds of one core, so that a server's own work is seen beside its
model's. A letter is a token, in both forms the same one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

HIDDEN, LAYERS, HEADS, FFN, CONTEXT = 512, 8, 8, 1376, 4096
#: Tokens: one for each byte, then the first and the last of a text.
FIRST, LAST, VOCAB = 256, 257, 258
LETTERS = np.arange(ord("a"), ord("z") + 1)
NORM_EPS, ROPE = 1e-5, 10000.0


class Size(NamedTuple):
    """The size of a Llama, and the type its weights are published in."""

    hidden: int = HIDDEN
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = HEADS
    ffn: int = FFN
    dtype: str = "float32"


#: The tiny one, and one of Llama-3.2-1B's layers for a GPU.
TINY, SMALL = Size(), Size(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, dtype="float16")


def alphabet() -> list[str]:
    """Return the character that stands for each byte, as GPT-2's tokenizer writes them: itself where it can be printed,
    else one from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256))
    return [chr(byte) if byte in plain else chr(256 + next(rest)) for byte in range(256)]


def weights(size: Size = TINY) -> dict[str, np.ndarray]:
    """Return the weights by Hugging Face's names; the same in every run. The likeliest token always is a letter: each
    is a piece of text, and none ends an answer."""
    rng, hidden, kv = np.random.default_rng(0), size.hidden, size.hidden // size.heads * size.kv_heads
    kind = np.dtype(size.dtype)

    def drawn(rows: int, columns: int) -> np.ndarray:
        if size == TINY:
            return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        return (rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))).astype(kind)

    found = {"model.embed_tokens.weight": drawn(VOCAB, hidden) * kind.type(np.sqrt(hidden))}
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        for name in "qkvo":
            found[f"{at}.self_attn.{name}_proj.weight"] = drawn(kv if name in "kv" else hidden, hidden)
        found[f"{at}.mlp.gate_proj.weight"] = drawn(size.ffn, hidden)
        found[f"{at}.mlp.up_proj.weight"] = drawn(size.ffn, hidden)
        found[f"{at}.mlp.down_proj.weight"] = drawn(hidden, size.ffn)
        found[f"{at}.input_layernorm.weight"] = np.ones(hidden, kind)
        found[f"{at}.post_attention_layernorm.weight"] = np.ones(hidden, kind)
    found["model.norm.weight"] = np.ones(hidden, kind)
    found["lm_head.weight"] = drawn(VOCAB, hidden)
    found["lm_head.weight"][~np.isin(np.arange(VOCAB), LETTERS)] = 0.0
    return found


def write_hugging_face(folder: Path, size: Size = TINY) -> Path:
    """Write config.json, model.safetensors and the tokenizer into a folder; returns it."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": FIRST,
        "eos_token_id": LAST,
        "torch_dtype": size.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights(size), folder / "model.safetensors", metadata={"format": "pt"})
    vocab = {character: byte for byte, character in enumerate(alphabet())} | {"<s>": FIRST, "</s>": LAST}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"model_max_length": CONTEXT}))
    return folder


def write_gguf(path: Path) -> Path:
    """Write the same model as a gguf file with weights in float16; returns its path."""
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(NORM_EPS)
    out.add_rope_freq_base(ROPE)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_vocab_size(VOCAB)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([*alphabet(), "<s>", "</s>"])
    out.add_token_types([1] * 256 + [3, 3])
    out.add_token_merges([" ".join(alphabet()[:2])])  # of bytes that no text has; the reader wants some
    out.add_bos_token_id(FIRST)
    out.add_eos_token_id(LAST)
    out.add_add_bos_token(False)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, values in weights().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            said = f"blk.{layer}.{names[rest]}.weight"
        else:
            said = f"{names[stem]}.weight"
        if stem.endswith(("q_proj", "k_proj")):  # gguf has the two halves of a head's rotations interleaved
            values = values.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
        out.add_tensor(said, values if values.ndim == 1 else values.astype(np.float16))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
