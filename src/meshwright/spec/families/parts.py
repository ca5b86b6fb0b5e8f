"""Readers that most families share: of grouped-query attention and sliding windows, and of layers into a Model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.spec.architecture import Model, stack
from meshwright.spec.ends import Embedding, Head
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Attention, Block
from meshwright.spec.numerics import numerics


def grouped_attention(
    r: ConfigReader,
    *,
    grouped: bool = True,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    heads: int | None = None,
    **fields: Any,
) -> Attention:
    """Multi-head or grouped-query attention from the usual keys; arguments replace what a family fixes or lacks.

    ``head_dim`` falls back to hidden / heads, which must then divide; not `grouped` says that the family has as many
    key-value heads as query heads and no key for them.
    """
    hidden = r.int("hidden_size")
    num_heads = r.int("num_attention_heads", default=heads)
    if not grouped:
        kv_heads = num_heads
    elif kv_heads is None:
        kv_heads = r.int("num_key_value_heads", default=num_heads)
        r.divides("num_key_value_heads", "num_attention_heads", kv_heads, num_heads)
    elif num_heads % kv_heads:
        message = f"{kv_heads} key-value heads do not divide {num_heads} query heads"
        r.fault("M003", message, r.spelled("num_attention_heads"), "heads share key-value heads evenly")
    width = r.int("head_dim", default=head_dim or 0)
    if not width:
        r.divides("num_attention_heads", "hidden_size", num_heads, hidden)
        width = max(1, hidden // num_heads)
    fields.setdefault("v_head_dim", width)
    fields.setdefault("rotary", True)
    return Attention(heads=num_heads, kv_heads=kv_heads, head_dim=width, **fields)


def with_window(attention: Attention, window: int) -> Attention:
    """The same attention with a sliding window of so many tokens, 0 = full."""
    return msgspec.structs.replace(attention, window=window)


def normed_per_head(attention: Attention, *, norm_vectors: int = 1) -> Attention:
    """The same attention with one norm of head width shared by all queries, and one by all keys."""
    return msgspec.structs.replace(attention, qk_norm=True, qk_norm_params=2 * attention.head_dim * norm_vectors)


def normed_full_width(attention: Attention, *, norm_vectors: int = 1) -> Attention:
    """The same attention with weights of their own for every head in the norms of queries and keys."""
    width = (attention.heads + attention.kv_heads) * attention.head_dim
    return msgspec.structs.replace(attention, qk_norm=True, qk_norm_params=width * norm_vectors)


def windows(r: ConfigReader, layers: int, *, default_window: int = 0, every: int = 1) -> list[int]:
    """The sliding window of each layer, 0 = full.

    ``layer_types`` decides when present; else every `every`-th layer is full and the others slide
    (``every=1``: all slide when the configuration has a window). A window of null is none.
    """
    window = r.int("sliding_window", default=0 if "sliding_window" in r.config else default_window, low=0)
    kinds = r.layer_types(layers)
    if kinds is not None:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    return [window if every == 1 or (layer + 1) % every else 0 for layer in range(layers)]


def decoder(r: ConfigReader, blocks: Sequence[Block], *, tied: bool, **fields: Any) -> Model:
    """The Model of a decoder's blocks, in order. `tied` is the family's default for tied embeddings; `fields` are those
    of :func:`ends`, and of the Model."""
    fields.setdefault("max_seq_len", r.int("max_position_embeddings", default=0))
    vocab = fields.pop("vocab", None) or r.int("vocab_size")
    tied = r.flag("tie_word_embeddings", default=tied)
    own = {key: fields.pop(key) for key in list(fields) if key in ENDS}
    embedding, head = ends(vocab, blocks[0].norm_vectors, tied=tied, **own)
    return model(r, blocks, embedding=embedding, head=head, **fields)


#: The arguments of :func:`ends`, which makes the embedding and the head.
ENDS = ("learned_positions", "embedding_norm", "embedding_width", "final_norm", "head_bias")


def ends(
    vocab: int,
    norm_vectors: int,
    *,
    tied: bool,
    learned_positions: int = 0,
    embedding_norm: bool = False,
    embedding_width: int = 0,
    final_norm: bool = True,
    head_bias: bool = False,
) -> tuple[Embedding, Head]:
    """A decoder's embedding and head over one vocabulary, with norms of as many learned vectors as its blocks'."""
    embedding = Embedding(
        rows=vocab,
        width=embedding_width,
        positions=learned_positions,
        norm_vectors=norm_vectors if embedding_norm else 0,
    )
    return embedding, Head(
        rows=vocab,
        tied=tied,
        bias=head_bias,
        width=embedding_width,
        norm_vectors=norm_vectors if final_norm else 0,
        bare_norm=final_norm and not norm_vectors,
    )


def model(r: ConfigReader, blocks: Sequence[Block], *, embedding: Any, head: Any, **fields: Any) -> Model:
    """The Model of the blocks of all layers, in order, between an embedding and a head."""
    kinds, pattern = stack(blocks)
    hidden = fields.pop("hidden", None) or r.int("hidden_size")
    r.raise_faults()
    source = r.config.get("_source")
    return Model(
        name=r.name,
        family=r.family,
        hidden=hidden,
        embedding=embedding,
        blocks=kinds,
        pattern=pattern,
        head=head,
        numerics=numerics(r.config, r.family),
        source=source if isinstance(source, str) else r.place,
        unknown_fields=r.unknown_fields(),
        notes=tuple(r.notes),
        **fields,
    )


def note_prediction_layers(r: ConfigReader, *keys: str) -> None:
    """Say that multi-token-prediction layers are left out, when the configuration has them."""
    count = r.int(*keys, default=0, low=0)
    if count:
        r.notes.append(f"{count} multi-token-prediction layer(s) of the published model are not counted")
