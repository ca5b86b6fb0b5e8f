"""Layers before, between and behind a model's blocks: embeddings, bridges and heads, and the streams of their tokens.

Token embeddings with learned positions and token types (BERT, Devlin et al. 2018, 1810.04805), patches of an image
(ViT, Dosovitskiy et al. 2020, 2010.11929), contrastive heads (CLIP, Radford et al. 2021, 2103.00020), projectors from
images to text (LLaVA, Liu et al. 2023, 2310.03744). Each record counts its parameters as the checkpoint stores them.
"""

from __future__ import annotations

from math import isqrt

import msgspec


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that flow through some of a model's layers: ``hidden`` is their width, ``tokens`` how many of them one
    sequence of the workload brings (0 = as many as the sequence is long), ``causal`` whether one sees no later one,
    ``inserts`` how many of a sequence's tokens come from another stream (an image among words). ``scale``: the tokens
    are the places of feature maps, whose sides are so many times smaller than those of the workload's image, rounded up
    where they are ``padded`` and down where not; 0: they are none."""

    name: str
    hidden: int
    tokens: int = 0
    causal: bool = True
    inserts: int = 0
    scale: int = 0
    padded: bool = True

    def length(self, whole: int) -> int:
        """Return the tokens of one sequence here, of which the workload's has `whole`."""
        if self.scale:
            return ((isqrt(whole) + (self.scale - 1 if self.padded else 0)) // self.scale) ** 2
        return self.tokens or whole


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens become hidden states.

    Attributes:
        rows: of the table, padding included.
        width: of the table where it is projected to the model's (OPT-350m), 0 = the model's.
        positions: rows of a learned position table, 0 = none.
        types: rows of a table of token types (BERT), 0 = none.
        norm_vectors: learned vectors of the norm behind it, 0 = no norm.
        borrows: the table is another part's of the same model.
        stream: which tokens.
    """

    rows: int
    width: int = 0
    positions: int = 0
    types: int = 0
    norm_vectors: int = 0
    borrows: bool = False
    stream: int = 0

    def table_params(self, hidden: int) -> int:
        """Numbers in the token table that belong to this part."""
        return 0 if self.borrows else self.rows * (self.width or hidden)

    def looked_up(self, hidden: int) -> int:
        """Parameters that a token looks up and multiplies with nothing."""
        return self.table_params(hidden) + (self.positions + self.types) * hidden

    def num_params(self, hidden: int) -> int:
        """Parameters of tables, projection and norm."""
        return self.looked_up(hidden) + self.width * hidden + self.norm_vectors * hidden


class Patches(msgspec.Struct, frozen=True, kw_only=True):
    """Square patches of an image become hidden states: one product of ``channels`` x ``patch`` x ``patch`` numbers.

    Attributes:
        count: patches of an image.
        extra: learned tokens beside them (a class token).
        bias: the product has a bias.
        norm_vectors: learned vectors of the norm behind it, 0 = no norm.
        stream: which tokens.
    """

    channels: int
    patch: int
    count: int
    extra: int = 1
    bias: bool = True
    norm_vectors: int = 0
    stream: int = 0

    @property
    def inner(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.patch**2

    def looked_up(self, hidden: int) -> int:
        """Parameters that are added or put beside, and multiply nothing: positions and learned tokens."""
        return (self.count + 2 * self.extra) * hidden

    def num_params(self, hidden: int) -> int:
        """Parameters of the product, positions, learned tokens and norm."""
        return (self.inner + int(self.bias) + self.norm_vectors) * hidden + self.looked_up(hidden)


class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """Layers between two stacks, on the tokens of the stream that ends here.

    Attributes:
        stream: the stream that ends.
        norm_vectors: learned vectors of its final norm, 0 = no norm.
        widths: widths of projections one after the other (LLaVA: hidden of the text twice).
        bias: those projections have biases.
        pooled: only one token of a sequence is projected (CLIP).
    """

    stream: int
    norm_vectors: int = 0
    widths: tuple[int, ...] = ()
    bias: bool = False
    pooled: bool = False

    def num_params(self, hidden: int) -> int:
        """Parameters behind a stream of width `hidden`."""
        total, width = self.norm_vectors * hidden, hidden
        for out in self.widths:
            total += (width + int(self.bias)) * out
            width = out
        return total


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Final norm, projection to a vocabulary and cross-entropy, of every token or of one per sequence.

    Attributes:
        rows: of the projection: the vocabulary, padding included, or classes.
        tied: the projection is the embedding's table.
        bias: the projection has a bias.
        width: of the table where hidden states are projected to it first (OPT-350m), 0 = the model's.
        norm_vectors: learned vectors of the norm before it, 0 = no norm, or a bare one.
        bare_norm: the norm before it has no learned vectors (OLMo).
        transform: a dense layer and a LayerNorm come first (BERT).
        pooled: only the first token of a sequence is projected (ViT).
        pooler: a dense layer on the first token, with classes behind it (BERT's next sentence: 2), -1 = no pooler.
        stream: which tokens.
    """

    rows: int
    tied: bool = False
    bias: bool = False
    width: int = 0
    norm_vectors: int = 0
    bare_norm: bool = False
    transform: bool = False
    pooled: bool = False
    pooler: int = -1
    stream: int = 0

    def matrix_params(self, hidden: int) -> int:
        """Numbers in the projection, wherever they are stored."""
        return self.rows * (self.width or hidden)

    def norm_params(self, hidden: int) -> int:
        """Parameters of the norm before it."""
        return self.norm_vectors * hidden

    def beside_params(self, hidden: int) -> int:
        """Parameters of the transform and the pooler."""
        transform = (hidden + 3) * hidden if self.transform else 0
        pooler = (hidden + 1) * (hidden + self.pooler) if self.pooler >= 0 else 0
        return transform + pooler

    def num_params(self, hidden: int) -> int:
        """Parameters that the head adds to the model."""
        own = 0 if self.tied else self.matrix_params(hidden)
        bias = self.rows if self.bias else 0
        return own + bias + self.width * hidden + self.norm_params(hidden) + self.beside_params(hidden)


class Contrastive(msgspec.Struct, frozen=True, kw_only=True):
    """A text tower's final norm and projection, and the loss over all pairs of a batch of texts and images, with one
    learned temperature.

    Attributes:
        width: of both projected vectors.
        norm_vectors: learned vectors of the norm before the projection.
        stream: of the texts.
    """

    width: int
    norm_vectors: int = 2
    stream: int = 0

    def norm_params(self, hidden: int) -> int:
        """Parameters of the norm before it."""
        return self.norm_vectors * hidden

    def num_params(self, hidden: int) -> int:
        """Parameters of norm, projection and temperature."""
        return self.norm_params(hidden) + hidden * self.width + 1


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a model that gives hidden states and no loss of its own: a final norm, and a pooler on one token.

    Attributes:
        norm_vectors: learned vectors of the norm, 0 = no norm.
        pooler: a dense layer on the first token.
        width: of a projection of the first token, 0 = none.
        stream: which tokens.
    """

    norm_vectors: int = 0
    pooler: bool = False
    width: int = 0
    stream: int = 0

    def norm_params(self, hidden: int) -> int:
        """Parameters of the norm."""
        return self.norm_vectors * hidden

    def num_params(self, hidden: int) -> int:
        """Parameters of norm, pooler and projection."""
        return self.norm_params(hidden) + ((hidden + 1) * hidden if self.pooler else 0) + hidden * self.width


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part of a model was cut from its neighbour: hidden states of a stream come in or go out, and those of the
    streams ``beside`` it that a later layer reads; nothing is computed."""

    stream: int = 0
    beside: tuple[int, ...] = ()

    def norm_params(self, hidden: int) -> int:
        """Return 0, as there is no norm."""
        return 0

    def num_params(self, hidden: int) -> int:
        """Return 0, as there are no parameters."""
        return 0
