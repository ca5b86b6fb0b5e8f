"""The Model: the parts of a network, down to the last parameter, immutable and without torch.

A model is a few distinct kinds of block and the order in which they are stacked, between an embedding and a head. All
three are layers. Identical layers are one kind, so that everything that costs time is priced once per kind. Layers
follow one another; where one reads more than its predecessor's output (cross attention, a text model behind an image
tower), it names the stream of tokens that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from meshwright.spec.ends import Embedding, Head, Stream
from meshwright.spec.layers import Attention, Block, BlockParams, Moe
from meshwright.spec.numerics import Numerics

#: Kinds of the first and of the last layer: places in :attr:`Model.kinds`, whose blocks count from 0.
EMBEDDING, HEAD = -2, -1


class Model(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A network to train.

    Attributes:
        name: catalog name, or the stem of the file that it was read from.
        family: the architecture's short name (``llama``, ``deepseek_v3``).
        hidden: width of the residual stream that ends in the head.
        embedding: the first layer (:class:`~meshwright.spec.ends.Embedding`, or ``Patches``).
        blocks: the distinct kinds of block.
        pattern: for every layer the index of its kind in `blocks`.
        head: the last layer, with the loss (:class:`~meshwright.spec.ends.Head`, or ``Contrastive``).
        streams: the tokens that flow through layers, where there are several kinds or one that is not causal; layers
            name them by their index.
        max_seq_len: longest sequence that the configuration allows, in tokens, 0 = it does not say.
        frozen: so many first layers are never trained (encoders of text and images before a diffusion model's network).
        numerics: constants that computing needs and costs do not.
        source: where the dimensions come from.
        unknown_fields: keys of the configuration that were not understood.
        notes: what the published model has and this record leaves out.
    """

    name: str
    family: str
    hidden: int
    embedding: msgspec.Struct
    blocks: tuple[Block, ...]
    pattern: tuple[int, ...]
    head: msgspec.Struct
    max_seq_len: int
    streams: tuple[Stream, ...] = ()
    frozen: int = 0
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
        """The number of layers of each kind, in the order of `blocks`."""
        return tuple(self.pattern.count(kind) for kind in range(len(self.blocks)))

    def block(self, layer: int) -> Block:
        """The block at position `layer`, counted from 0."""
        return self.blocks[self.pattern[layer]]

    @cached_property
    def kinds(self) -> tuple[msgspec.Struct, ...]:
        """The distinct layers: the blocks, then the embedding (:data:`EMBEDDING`) and the head (:data:`HEAD`)."""
        return (*self.blocks, self.embedding, self.head)

    def layer(self, kind: int) -> msgspec.Struct:
        """The layer of a kind."""
        return self.kinds[kind]

    @cached_property
    def flows(self) -> tuple[Stream, ...]:
        """The streams of tokens; one that is as long as the workload's sequences unless the model says more."""
        return self.streams or (Stream(name="text", hidden=self.hidden),)

    def width(self, stream: int) -> int:
        """Width of the hidden states of a stream."""
        return self.flows[stream].hidden

    def carried(self, layer: int) -> tuple[int, ...]:
        """Streams whose tokens pass from the layers before position `layer` (from 1) to that layer or one behind."""
        entered = getattr(self.embedding, "beside", ())
        made = {self.embedding.stream, *entered, *(self.block(i).stream for i in range(layer))}
        wanted = {s for i in range(layer, self.num_layers) for s in self.block(i).reads} | {self.head.stream}
        return tuple(sorted(made & wanted))

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The distinct softmax attentions."""
        return tuple(dict.fromkeys(a for block in self.blocks for a in block.attentions))

    @cached_property
    def mixtures(self) -> tuple[Moe, ...]:
        """The distinct mixtures of experts."""
        return tuple(dict.fromkeys(block.mlp for block in self.blocks if isinstance(block.mlp, Moe)))

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        routed = {kind for kind, block in enumerate(self.blocks) if isinstance(getattr(block, "mlp", None), Moe)}
        return tuple(layer for layer, kind in enumerate(self.pattern) if kind in routed)

    def block_params(self, kind: int) -> BlockParams:
        """Parameters of one block of a kind, by part, without the layers before its parts (embeddings, bridges)."""
        block = self.blocks[kind]
        return block.params(self.width(block.stream))

    def before_params(self, kind: int) -> int:
        """Parameters of the layers before the parts of a block (embeddings, bridges)."""
        block = self.blocks[kind]
        return sum(p.num_params(self.width(getattr(p, "stream", block.stream))) for p in block.before)

    @property
    def vocab(self) -> int:
        """Rows of the token table, or of the head where no tokens come in."""
        return self.tables[-1].rows if self.tables else getattr(self.head, "rows", 0)

    @cached_property
    def tables(self) -> tuple[Embedding, ...]:
        """The embeddings of tokens, in order; the last is of the stream that ends in the head."""
        found = (self.embedding, *(part for block in self.blocks for part in block.before))
        return tuple(part for part in found if isinstance(part, Embedding))

    @property
    def tied_embeddings(self) -> bool:
        """Whether the head reuses the embedding's table."""
        return getattr(self.head, "tied", False)

    @property
    def learned_positions(self) -> int:
        """Rows of the table of positions of the tokens that end in the head."""
        last = self.tables[-1] if self.tables else None
        return last.positions if last is not None and last.stream == self.head.stream else 0

    @property
    def table_params(self) -> int:
        """Numbers in the token table, which a tied head shares."""
        return self.vocab * (getattr(self.embedding, "width", 0) or self.hidden)

    @property
    def all_layers(self) -> tuple[tuple[int, msgspec.Struct], ...]:
        """Every kind of layer with how many there are: the embedding, the blocks, the head."""
        return (1, self.embedding), *zip(self.layers_by_kind, self.blocks, strict=True), (1, self.head)

    @property
    def ways(self) -> int:
        """Parts of a block with a residual stream of their own each, at most; 1 of usual blocks."""
        return max((block.ways for block in self.blocks), default=1)

    @property
    def is_decoder(self) -> bool:
        """Whether blocks of attention and MLP stand between a token table and a head over the same vocabulary, and
        nothing else does."""
        plain = all(b.mixer is b.cross is None and b.attention and b.mlp and not b.before for b in self.blocks)
        ends = isinstance(self.embedding, Embedding) and isinstance(self.head, Head) and not self.embedding.types
        plain = plain and self.ways == 1
        return plain and ends and not self.streams and not self.head.transform and self.head.pooler < 0

    @property
    def embedding_params(self) -> int:
        """Parameters of the first layer."""
        return self.embedding.num_params(self.width(self.embedding.stream))

    @property
    def head_params(self) -> int:
        """Parameters of the last layer but its norm; a tied projection is none of them."""
        return self.head.num_params(self.width(self.head.stream)) - self.final_norm_params

    @property
    def final_norm_params(self) -> int:
        """The norm before the head."""
        return self.head.norm_params(self.width(self.head.stream))

    @cached_property
    def num_params(self) -> int:
        """Parameters of the model as its checkpoint counts them, shared ones once."""
        kinds = [self.block_params(kind).total + self.before_params(kind) for kind in range(len(self.blocks))]
        stack = sum(n * each for n, each in zip(self.layers_by_kind, kinds, strict=True))
        return self.embedding_params + stack + self.final_norm_params + self.head_params

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token passes: all but the experts that it is not routed to. Embedding and head
        count in full, as in published "activated" figures."""
        idle = 0
        for count, block in zip(self.layers_by_kind, self.blocks, strict=True):
            if isinstance(block.mlp, Moe):
                width = self.width(block.stream)
                idle += count * (block.mlp.experts - block.mlp.top_k) * block.mlp.expert_params(width)
        return self.num_params - idle


def stack(layers: Iterable[Block]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Fold the blocks of all layers, in order, into the distinct kinds and the pattern of their indices."""
    kinds: dict[Block, int] = {}
    pattern = tuple(kinds.setdefault(block, len(kinds)) for block in layers)
    return tuple(kinds), pattern
