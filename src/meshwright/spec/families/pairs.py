"""Models of two stacks: an encoder whose tokens a decoder reads, an image tower whose tokens a text model continues.

T5 (Raffel et al. 2019, 1910.10683), BART (Lewis et al. 2019, 1910.13461), LLaVA (Liu et al. 2023, 2310.03744).
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from meshwright.spec.architecture import Model
from meshwright.spec.ends import Bridge, Embedding, Head, Stream
from meshwright.spec.families.encoders import CLIP_VISION, begun, completed, head_class, image_stream, vision_tower
from meshwright.spec.families.gpt import layernorm_block
from meshwright.spec.families.llama import llama
from meshwright.spec.families.parts import model
from meshwright.spec.families.reader import MAX_LAYERS, ConfigReader
from meshwright.spec.layers import Attention, Block, Dense

#: What LLaVA configurations leave out of their text model is Llama 7B's (transformers 5.23, LlamaConfig).
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def t5(r: ConfigReader) -> Model:
    """T5: norms before each part, no biases, scores that learn the distance in the first layer of each stack."""
    kind = head_class(r, "ForConditionalGeneration", "WithLMHeadModel")
    hidden, width, heads = r.int("d_model"), r.int("d_kv"), r.int("num_heads")
    layers = r.int("num_layers", high=MAX_LAYERS)
    decoders = r.int("num_decoder_layers", default=layers, high=MAX_LAYERS)
    r.ignore("n_positions", "classifier_dropout", "initializer_factor", "relative_attention_max_distance")
    r.ignore("dense_act_fn", "is_gated_act", "output_past", "layer_norm_epsilon")
    distances = r.int("relative_attention_num_buckets", default=32) * heads
    attention = Attention(heads=heads, kv_heads=heads, head_dim=width, v_head_dim=width, rotary=False)
    first = replace(attention, position_params=distances)
    projection = r.text("feed_forward_proj", default="relu")
    gated, activation = projection.startswith("gated-"), projection.removeprefix("gated-")
    if activation not in ("relu", "gelu", "silu"):
        r.fault(
            "M005",
            f"feed_forward_proj {projection!r} is not modelled",
            "feed_forward_proj",
            "modelled: relu, gated-gelu",
        )
    mlp = Dense(ffn=r.int("d_ff"), gated=gated, activation=activation)
    encoder = [Block(attention=first if i == 0 else attention, mlp=mlp) for i in range(layers)]
    decoder = [
        Block(attention=first if i == 0 else attention, cross=attention, mlp=mlp, norms=3) for i in range(decoders)
    ]
    vocab = r.int("vocab_size")
    begins = (Bridge(stream=0, norm_vectors=1), Embedding(rows=vocab, borrows=True, stream=1))
    tied = r.flag("tie_word_embeddings", default=True) or kind == "WithLMHeadModel"
    head = Head(rows=vocab, tied=tied, norm_vectors=1, stream=1)
    return _pair(r, hidden, encoder, begun(decoder, begins, stream=1), Embedding(rows=vocab), head, 0)


def bart(r: ConfigReader) -> Model:
    """BART: norms behind each part and behind both embeddings, learned positions, biases, a tied head."""
    head_class(r, "ForConditionalGeneration", "Model")
    hidden, length = r.int("d_model"), r.int("max_position_embeddings", default=1024)
    r.ignore("scale_embedding", "num_hidden_layers", "classif_dropout", "normalize_before", "normalize_embedding")
    r.ignore("force_bos_token_to_be_generated", "add_final_layer_norm", "add_bias_logits", "static_position_embeddings")
    r.ignore("extra_pos_embeddings", "save_step", "gradient_checkpointing")
    for key in ("add_final_layer_norm", "normalize_before"):
        if r.flag(key):
            r.fault("M005", f"{key} is not modelled", key, "modelled: false")
    activation = r.activation("activation_function", default="gelu")

    def layers(side: str) -> tuple[Attention, Dense, int]:
        heads, ffn = r.int(f"{side}_attention_heads"), r.int(f"{side}_ffn_dim")
        r.divides(f"{side}_attention_heads", "d_model", heads, hidden)
        width = max(1, hidden // heads)
        attention = Attention(
            heads=heads, kv_heads=heads, head_dim=width, v_head_dim=width, rotary=False, qkv_bias=True, out_bias=True
        )
        mlp = Dense(ffn=ffn, gated=False, activation=activation, bias=True)
        return attention, mlp, r.int(f"{side}_layers", high=MAX_LAYERS)

    (own, mlp, count), (mine, other, decoders) = layers("encoder"), layers("decoder")
    encoder = [layernorm_block(own, mlp)] * count
    decoder = [replace(layernorm_block(mine, other, norms=3), cross=mine)] * decoders
    vocab = r.int("vocab_size")
    embedding = Embedding(rows=vocab, positions=length + 2, norm_vectors=2)
    begins = (Bridge(stream=0), replace(embedding, borrows=True, stream=1))
    head = Head(rows=vocab, tied=r.flag("tie_word_embeddings", default=True), stream=1)
    return _pair(r, hidden, encoder, begun(decoder, begins, stream=1), embedding, head, length)


def _pair(
    r: ConfigReader, hidden: int, encoder: list[Block], decoder: list[Block], embedding: Any, head: Any, length: int
) -> Model:
    streams = (Stream(name="encoder", hidden=hidden, causal=False), Stream(name="decoder", hidden=hidden))
    return model(
        r, [*encoder, *decoder], embedding=embedding, head=head, hidden=hidden, max_seq_len=length, streams=streams
    )


def llava(r: ConfigReader) -> Model:
    """LLaVA: CLIP's image tower, two projections to the text model's width, and Llama, among whose tokens an image's
    stand."""
    head_class(r, "ForConditionalGeneration")
    vision = completed(r, "vision_config", CLIP_VISION)
    kinds = {"vision_config": "clip_vision_model", "text_config": "llama"}
    for key, known in kinds.items():
        inner = r.config.get(key)
        kind = inner.get("model_type", known) if isinstance(inner, dict) else known
        if kind != known:
            r.fault("M005", f"{key} of the kind {kind!r:.40} is not modelled in {r.family}", key, f"modelled: {known}")
    vision.ignore("vocab_size")
    r.ignore("vision_feature_layer", "image_seq_length", "ignore_index", "vocab_size")
    if r.text("vision_feature_select_strategy", default="default") != "default":
        key = "vision_feature_select_strategy"
        r.fault("M005", f"{key} is not modelled", key, "modelled: default, which leaves out the class token")
    text = completed(r, "text_config", LLAMA)
    if r.flag("tie_word_embeddings"):
        text.config["tie_word_embeddings"] = True
    language = llama(text)
    patches, images = vision_tower(vision)
    r.notes += text.notes
    bridge = Bridge(
        stream=0,
        norm_vectors=2,
        widths=(language.hidden, language.hidden),
        bias=r.flag("multimodal_projector_bias", default=True),
    )
    blocks = [language.block(layer) for layer in range(language.num_layers)]
    return model(
        r,
        [*images, *begun(blocks, (bridge, replace(language.embedding, stream=1)), stream=1)],
        embedding=patches,
        head=replace(language.head, stream=1),
        hidden=language.hidden,
        max_seq_len=language.max_seq_len,
        streams=(
            image_stream(vision.int("hidden_size"), patches),
            Stream(name="text", hidden=language.hidden, inserts=patches.count),
        ),
    )
