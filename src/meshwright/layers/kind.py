"""Kind: what the program knows of one kind of layer or part, as a record of pure functions over its dimensions.

A record (:mod:`meshwright.spec`) holds the dimensions of a part and counts its parameters; the kind of that record says
how they lie on ranks, what operations the part needs, what it is made of and what it remembers of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.spec.items import Batch, document, num_tokens
from meshwright.spec.workload import Train

if TYPE_CHECKING:
    from meshwright.layers.pieces import Context, Piece
    from meshwright.plan import Plan
    from meshwright.spec.architecture import Model


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a part by how they lie on tensor-parallel ranks: ``split`` among them, ``whole`` on each,
    ``expert`` among the expert mesh, ``extra`` on a rank beyond its share (repeated heads, of which a rank holds
    ``repeated`` alike with some others, or ``common`` with all). ``low``: the split ones are multiplied below 16 bits
    when the precision says so."""

    split: int = 0
    whole: float = 0.0
    expert: int = 0
    extra: float = 0.0
    repeated: float = 0.0
    common: float = 0.0
    low: bool = True

    def __add__(self, other: Held) -> Held:
        return Held(
            split=self.split + other.split,
            whole=self.whole + other.whole,
            expert=self.expert + other.expert,
            extra=self.extra + other.extra,
            repeated=self.repeated + other.repeated,
            common=self.common + other.common,
            low=self.low and other.low,
        )


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters one rank holds of a stage before any ZeRO sharding: ``dense`` reduced over dp*cp, ``expert`` over
    the expert mesh's replicas; the ``trained`` ones have gradients and optimizer state; ``low`` of the dense and
    expert ones are multiplied below 16 bits when the precision says so. Of the trained dense ones, ``whole`` are alike
    on all tensor-parallel ranks, ``repeated`` on some."""

    dense: float = 0.0
    expert: float = 0.0
    trained_dense: float = 0.0
    trained_expert: float = 0.0
    low: float = 0.0
    whole: float = 0.0
    repeated: float = 0.0

    def __add__(self, other: Params) -> Params:
        return Params(
            dense=self.dense + other.dense,
            expert=self.expert + other.expert,
            trained_dense=self.trained_dense + other.trained_dense,
            trained_expert=self.trained_expert + other.trained_expert,
            low=self.low + other.low,
            whole=self.whole + other.whole,
            repeated=self.repeated + other.repeated,
        )


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of a step's forward: ``weights`` multiply parameters, ``mixing`` tokens with one another."""

    weights: int = 0
    mixing: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(weights=self.weights + other.weights, mixing=self.mixing + other.mixing)


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Elements that a part keeps of a sequence for its next token: ``per_token`` grow with it, ``constant`` do not."""

    per_token: int = 0
    constant: int = 0

    def __add__(self, other: Cache) -> Cache:
        return Cache(per_token=self.per_token + other.per_token, constant=self.constant + other.constant)


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a step in one stream of a model: ``batch`` are the workload's items, in ``rows`` sequences.
    ``masked``: a token sees no later one, and pairs that this hides are free where the stream is causal."""

    model: Model
    batch: Batch
    rows: int
    stream: int = 0
    masked: bool = True

    @property
    def hidden(self) -> int:
        """Width of the stream's hidden states."""
        return self.model.width(self.stream)

    @property
    def items(self) -> Batch:
        """The items of this stream."""
        flow = self.model.flows[self.stream]
        if not flow.tokens and not flow.scale:
            return self.batch
        return ((document(flow.length(self.batch[0][0].new_tokens)), self.rows),)

    @property
    def count(self) -> int:
        """The number of tokens."""
        return num_tokens(self.items)

    @property
    def causal(self) -> bool:
        """Whether hidden pairs are free here."""
        return self.masked and self.model.flows[self.stream].causal

    def at(self, stream: int) -> Tokens:
        """Return the step's tokens in another stream."""
        return self if stream == self.stream else msgspec.structs.replace(self, stream=stream)


def dense_flops(record: Any, tokens: Tokens) -> Flops:
    """Operations of a part all of whose parameters every token multiplies."""
    return Flops(weights=2 * record.num_params(tokens.hidden) * tokens.count)


def nothing_kept(record: Any) -> Cache:
    """The cache of a part that does not look back."""
    return Cache()


def no_tables(record: Any, c: Context) -> tuple[tuple[int, int], ...]:
    """The tables of a part that looks nothing up: none."""
    return ()


def no_adapters(record: Any, hidden: int, target: str) -> int:
    """The adapters of a part without a matrix of that name: none."""
    return 0


def no_rules(record: Any, plan: Plan, train: Train) -> Iterator[tuple[str, ...]]:
    """The rules of a part that every plan can split: none."""
    yield from ()


def split_evenly(record: Any, context: Context) -> Held:
    """All parameters of a part shared by the tensor-parallel ranks."""
    return Held(split=record.num_params(context.hidden))


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of layer or part.

    Attributes:
        name: in errors and explanations.
        record: the class of its dimensions, a frozen record with ``num_params(hidden)``.
        pieces: its forward on one rank, each piece with what its backward needs.
        params: how its parameters lie on ranks.
        flops: operations of the forward of a step's tokens.
        state: what it keeps of a sequence for the next token.
        adapters: inputs plus outputs of its matrix of a name that LoRA targets (``q``, ``up``), 0 = it has none.
        tables: rows and columns of the matrices on a rank that no product multiplies: those that are looked up.
        rules: what is illegal of a plan for it, what to do, and where that was said, if not in the sizes of the layout.
    """

    name: str
    record: type
    pieces: Callable[[Context, Any], list[Piece]]
    params: Callable[[Any, Context], Held] = split_evenly
    flops: Callable[[Any, Tokens], Flops] = dense_flops
    state: Callable[[Any], Cache] = nothing_kept
    adapters: Callable[[Any, int, str], int] = no_adapters
    tables: Callable[[Any, Context], tuple[tuple[int, int], ...]] = no_tables
    rules: Callable[[Any, Plan, Train], Iterator[tuple[str, ...]]] = no_rules
