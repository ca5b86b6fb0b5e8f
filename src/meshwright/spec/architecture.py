"""The Model: what a decoder-only language model is made of, down to the last parameter, immutable and without torch.

A model is a few distinct kinds of block and the order in which they are stacked, between an embedding and a head.
Identical layers are one kind, so that everything that costs time is priced once per kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from meshwright.spec.layers import Block, BlockParams, Moe
from meshwright.spec.numerics import Numerics


class Model(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A decoder-only transformer.

    Attributes:
        name: catalog name, or the stem of the file that it was read from.
        family: the architecture's short name (``llama``, ``deepseek_v3``).
        hidden: width of the residual stream.
        vocab: rows of the embedding, padding included.
        blocks: the distinct kinds of block.
        pattern: for every layer the index of its kind in `blocks`.
        tied_embeddings: the head reuses the embedding matrix.
        learned_positions: rows of a learned position embedding (OPT stores two more than its length), 0 = none.
        embedding_norm: a norm follows the embedding (BLOOM).
        embedding_width: width of the token embedding where it is projected to and from `hidden` (OPT-350m), 0 = hidden.
        final_norm: a norm precedes the head.
        head_bias: the head has a bias.
        max_seq_len: longest sequence that the configuration allows, in tokens, 0 = it does not say.
        numerics: constants that computing needs and costs do not.
        source: where the dimensions come from.
        unknown_fields: keys of the configuration that were not understood.
        notes: what the published model has and this record leaves out.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    blocks: tuple[Block, ...]
    pattern: tuple[int, ...]
    tied_embeddings: bool
    max_seq_len: int
    learned_positions: int = 0
    embedding_norm: bool = False
    embedding_width: int = 0
    final_norm: bool = True
    head_bias: bool = False
    numerics: Numerics = Numerics()
    source: str = ""
    unknown_fields: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Blocks in the stack."""
        return len(self.pattern)

    @cached_property
    def layers_by_kind(self) -> tuple[int, ...]:
        """How many layers are of each kind, in the order of `blocks`."""
        return tuple(self.pattern.count(kind) for kind in range(len(self.blocks)))

    def block(self, layer: int) -> Block:
        """The block at position `layer`, counted from 0."""
        return self.blocks[self.pattern[layer]]

    def block_params(self, kind: int) -> BlockParams:
        """Parameters of one block of a kind, by part."""
        return self.blocks[kind].params(self.hidden)

    @property
    def embedding_params(self) -> int:
        """Token and position embeddings, the projection into `hidden` and the norm behind them."""
        width = self.embedding_width or self.hidden
        projection = self.embedding_width * self.hidden
        norm = self._norm_params if self.embedding_norm else 0
        return self.vocab * width + self.learned_positions * self.hidden + projection + norm

    @property
    def head_params(self) -> int:
        """The head's own matrix (none when tied), its bias and the projection out of `hidden`."""
        matrix = 0 if self.tied_embeddings else self.vocab * (self.embedding_width or self.hidden)
        return matrix + (self.vocab if self.head_bias else 0) + self.embedding_width * self.hidden

    @property
    def final_norm_params(self) -> int:
        """The norm before the head."""
        return self._norm_params if self.final_norm else 0

    @property
    def _norm_params(self) -> int:
        return self.blocks[0].norm_vectors * self.hidden

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model as its checkpoint counts them, tied embeddings once."""
        stack = sum(n * self.block_params(kind).total for kind, n in enumerate(self.layers_by_kind))
        return self.embedding_params + stack + self.final_norm_params + self.head_params

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token passes: all but the experts that it is not routed to. Embedding and head
        count in full, as in published "activated" figures."""
        idle = 0
        for count, block in zip(self.layers_by_kind, self.blocks, strict=True):
            if isinstance(block.mlp, Moe):
                idle += count * (block.mlp.experts - block.mlp.top_k) * block.mlp.expert_params(self.hidden)
        return self.num_params - idle


def stack(layers: Iterable[Block]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Fold the blocks of all layers, in order, into the distinct kinds and the pattern of their indices."""
    kinds: dict[Block, int] = {}
    pattern = tuple(kinds.setdefault(block, len(kinds)) for block in layers)
    return tuple(kinds), pattern
