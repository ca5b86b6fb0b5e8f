"""Encoders: every token sees every other, positions are learned, the head is no next-token prediction.

BERT (Devlin et al. 2018, 1810.04805), RoBERTa (1907.11692), ViT (Dosovitskiy et al. 2020, 2010.11929), and the two
towers of CLIP (Radford et al. 2021, 2103.00020), of which the text tower is causal.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from meshwright.spec.architecture import Model
from meshwright.spec.ends import Bridge, Contrastive, Embedding, Features, Head, Patches, Stream
from meshwright.spec.families.gpt import layernorm_block, plain_mlp
from meshwright.spec.families.parts import grouped_attention, model
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Block

#: What configurations of CLIP towers leave out has these values (transformers 5.23, CLIPTextConfig, CLIPVisionConfig).
CLIP_TEXT = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
}
CLIP_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}


def head_class(r: ConfigReader, *heads: str) -> str:
    """Return the one of `heads` that the first of ``architectures`` ends in; the first one when the configuration names
    no class."""
    classes = r.config.get("architectures")
    named = classes[0] if isinstance(classes, list | tuple) and classes and isinstance(classes[0], str) else ""
    found = next((head for head in heads if named.endswith(head)), "")
    if named and not found:
        r.fault("M005", f"the head of {named} is not modelled", "architectures", f"modelled: {', '.join(heads)}")
    return found or heads[0]


def attention_block(r: ConfigReader, *, norms: int = 2, activation: str = "gelu") -> Block:
    """Multi-head attention and a plain MLP with biases everywhere, behind LayerNorms."""
    attention = grouped_attention(r, grouped=False, qkv_bias=True, out_bias=True, rotary=False)
    return layernorm_block(attention, plain_mlp(r, activation=activation), norms=norms)


def bert(r: ConfigReader) -> Model:
    """BERT: norms behind attention and MLP, a norm behind the embedding, a transform before the tied head."""
    kind = head_class(r, "ForMaskedLM", "ForPreTraining", "LMHeadModel", "Model")
    if r.text("position_embedding_type", default="absolute") != "absolute":
        r.fault("M005", "position_embedding_type is not modelled", "position_embedding_type", "modelled: absolute")
    return _bert(r, kind, r.int("max_position_embeddings", default=512), 2)


def roberta(r: ConfigReader) -> Model:
    """RoBERTa and XLM-RoBERTa: BERT with one token type, whose positions begin behind the padding's."""
    kind = head_class(r, "ForMaskedLM", "Model")
    return _bert(r, kind, r.int("max_position_embeddings", default=514), 1)


def _bert(r: ConfigReader, kind: str, positions: int, types: int) -> Model:
    vocab, hidden = r.int("vocab_size"), r.int("hidden_size")
    embedding = Embedding(
        rows=vocab, positions=positions, types=r.int("type_vocab_size", default=types), norm_vectors=2
    )
    tied = r.flag("tie_word_embeddings", default=True)
    head: Any = Features(pooler=True)
    if kind != "Model":
        head = Head(rows=vocab, tied=tied, bias=True, transform=True, pooler=2 if kind == "ForPreTraining" else -1)
    blocks = [attention_block(r)] * r.layers()
    causal = r.flag("is_decoder")
    spare = 0 if types == 2 else 2  # RoBERTa counts positions from two
    return model(
        r,
        blocks,
        embedding=embedding,
        head=head,
        max_seq_len=max(1, positions - spare),
        streams=(Stream(name="text", hidden=hidden, causal=causal),),
    )


def patches_of(r: ConfigReader, *, bias: bool, norm_vectors: int = 0) -> Patches:
    """The patches of a vision configuration's images, which a class token joins."""
    size, patch = r.int("image_size", default=224), r.int("patch_size", default=16)
    r.divides("patch_size", "image_size", patch, size)
    count = max(1, size // patch) ** 2
    return Patches(
        channels=r.int("num_channels", default=3), patch=patch, count=count, bias=bias, norm_vectors=norm_vectors
    )


def vit(r: ConfigReader) -> Model:
    """ViT: norms before attention and MLP, one class token, whose state the head classifies."""
    kind = head_class(r, "ForImageClassification", "Model")
    patches, hidden = patches_of(r, bias=True), r.int("hidden_size")
    if not r.flag("qkv_bias", default=True):
        r.fault("M005", "qkv_bias = false is not modelled", "qkv_bias", "modelled: true")
    r.ignore("encoder_stride", "pooler_act", "pooler_output_size")
    labels = r.config.get("id2label")
    named = len(labels) if isinstance(labels, dict) and labels else 2
    head: Any = Features(norm_vectors=2, pooler=True)
    if kind != "Model":
        head = Head(rows=r.int("num_labels", default=named), bias=True, norm_vectors=2, pooled=True)
    return model(
        r,
        [attention_block(r)] * r.layers(),
        embedding=patches,
        head=head,
        max_seq_len=patches.count + patches.extra,
        streams=(image_stream(hidden, patches),),
    )


def image_stream(hidden: int, patches: Patches) -> Stream:
    """The tokens of one image."""
    return Stream(name="image", hidden=hidden, tokens=patches.count + patches.extra, causal=False)


def completed(r: ConfigReader, key: str, defaults: dict[str, Any]) -> ConfigReader:
    """The nested configuration under a key, with the values of what it leaves out."""
    inner = r.section(key)
    inner.config = {**defaults, **inner.config}
    inner.ignore("transformers_version", "projection_dim", "model_type")
    return inner


def vision_tower(r: ConfigReader) -> tuple[Patches, list[Block]]:
    """CLIP's image tower: patches without a bias behind a norm, then the blocks."""
    patches = patches_of(r, bias=False, norm_vectors=2)
    return patches, [attention_block(r, activation="quick_gelu")] * r.layers()


def clip(r: ConfigReader) -> Model:
    """CLIP: an image tower, then a text tower, and one loss over all pairs of their projections."""
    head_class(r, "Model")
    text, vision = completed(r, "text_config", CLIP_TEXT), completed(r, "vision_config", CLIP_VISION)
    r.ignore("text_config_dict", "vision_config_dict", "logit_scale_init_value")
    width = r.int("projection_dim", default=512)
    patches, images = vision_tower(vision)
    positions = text.int("max_position_embeddings")
    begins = (
        Bridge(stream=0, norm_vectors=2, widths=(width,), pooled=True),
        Embedding(rows=text.int("vocab_size"), positions=positions, stream=1),
    )
    texts = [attention_block(text, activation="quick_gelu")] * text.layers()
    hidden = text.int("hidden_size")
    return model(
        r,
        [*images, *begun(texts, begins, stream=1)],
        embedding=patches,
        head=Contrastive(width=width, stream=1),
        hidden=hidden,
        max_seq_len=positions,
        streams=(
            image_stream(vision.int("hidden_size"), patches),
            Stream(name="text", hidden=hidden),
        ),
    )


def begun(blocks: list[Block], before: tuple[Any, ...], *, stream: int) -> list[Block]:
    """Blocks on the tokens of a stream, with what makes them before the first."""
    moved = [replace(block, stream=stream) for block in blocks]
    return [replace(moved[0], before=before), *moved[1:]]


def clip_text(r: ConfigReader) -> Model:
    """CLIP's text tower alone: causal, with learned positions."""
    kind = head_class(r, "WithProjection", "Model")
    r.config = {**CLIP_TEXT, **r.config}
    positions = r.int("max_position_embeddings")
    width = r.int("projection_dim", default=512) if kind == "WithProjection" else 0
    r.ignore("projection_dim")
    return model(
        r,
        [attention_block(r, activation="quick_gelu")] * r.layers(),
        embedding=Embedding(rows=r.int("vocab_size"), positions=positions),
        head=Features(norm_vectors=2, width=width),
        max_seq_len=positions,
    )


def clip_vision(r: ConfigReader) -> Model:
    """CLIP's image tower alone."""
    kind = head_class(r, "WithProjection", "Model")
    r.config = {**CLIP_VISION, **r.config}
    width = r.int("projection_dim", default=512) if kind == "WithProjection" else 0
    r.ignore("projection_dim")
    patches, blocks = vision_tower(r)
    return model(
        r,
        blocks,
        embedding=patches,
        head=Features(norm_vectors=2, width=width),
        max_seq_len=patches.count + patches.extra,
        streams=(image_stream(r.int("hidden_size"), patches),),
    )
