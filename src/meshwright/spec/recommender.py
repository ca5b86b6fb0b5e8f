"""Recommendation models with embedding tables (DLRM, Naumov et al., 2019, arXiv 1906.00091), from a small JSON file.

Dense features pass a bottom MLP. Each sparse feature looks rows up in a table of its own and sums them (pooling). Both
meet in an interaction, dot products of all pairs or low-rank cross layers (DCN-V2, Wang et al., 2020, arXiv
2008.13535), and what comes out of it passes a top MLP::

    {"architectures": ["DLRM"], "dense_features": 13, "bottom_mlp": [512, 256, 128], "embedding_dim": 128,
     "rows": [40000000, 39060], "pooling": [3, 2], "interaction": "dot", "top_mlp": [1024, 512, 1]}

``pooling`` is rows looked up a sample, one number for all tables or one each; ``"interaction": "dcn"`` has
``cross_layers`` of rank ``cross_rank`` besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.catalog_models import CatalogModels, ModelKind

#: The architecture that a file names.
ARCHITECTURE = "DLRM"
#: How features meet.
DOT, DCN = "dot", "dcn"
#: Largest number that a file says: above, a slip of the keyboard.
MOST = 10**12
#: Keys of a file, and those of cross layers.
_KEYS = ("dense_features", "bottom_mlp", "embedding_dim", "rows", "pooling", "interaction", "top_mlp")
_CROSS = ("cross_layers", "cross_rank")


class EmbeddingTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of ``rows`` vectors of ``dim`` numbers, of which a sample looks up ``pooling`` in the mean and sums
    them."""

    rows: int
    dim: int
    pooling: float = 1.0

    @property
    def num_params(self) -> int:
        """Numbers in the table."""
        return self.rows * self.dim


class Recommender(msgspec.Struct, frozen=True, kw_only=True):
    """A recommendation model: widths of its layers, its tables in the order of their features, how these meet."""

    name: str
    dense_features: int
    bottom_mlp: tuple[int, ...]
    tables: tuple[EmbeddingTable, ...]
    interaction: str
    top_mlp: tuple[int, ...]
    cross_layers: int = 0
    cross_rank: int = 0
    source: str = ""

    @property
    def dim(self) -> int:
        """Numbers in a vector of every feature."""
        return self.tables[0].dim

    @property
    def table_params(self) -> int:
        """Numbers in all tables."""
        return sum(table.num_params for table in self.tables)

    def met_width(self, features: int) -> int:
        """Return the numbers that go into the top MLP where so many vectors meet, the dense one among them: each pair's
        product beside the dense vector, or all vectors after their cross layers."""
        if self.interaction == DOT:
            return features * (features - 1) // 2 + self.dim
        return features * self.dim

    def bottom_products(self) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the products of the bottom MLP."""
        return _chained((self.dense_features, *self.bottom_mlp))

    def top_products(self, features: int) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the products of the top MLP where so many vectors meet."""
        return _chained((self.met_width(features), *self.top_mlp))

    def cross_products(self, features: int) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the products of the cross layers: down to the rank and up again, each."""
        width = features * self.dim
        return ((width, self.cross_rank), (self.cross_rank, width)) * self.cross_layers

    def dense_params(self, features: int = 0) -> int:
        """Return the parameters outside of the tables where so many vectors meet (0: those of all tables and the dense
        one), with a bias for every output of an MLP and of a cross layer."""
        count = features or len(self.tables) + 1
        found = sum(i * o + o for i, o in (*self.bottom_products(), *self.top_products(count)))
        crossed = self.cross_products(count)
        return found + sum(i * o for i, o in crossed) + self.cross_layers * count * self.dim

    @property
    def num_params(self) -> int:
        """All parameters."""
        return self.table_params + self.dense_params()


def read_recommender(config: Mapping[str, Any], *, name: str = "recommender", place: str = "config") -> Recommender:
    """Return the model of a parsed file; `name` and `place` appear in its errors.

    Raises:
        MeshwrightError: M010 for everything that is wrong, at once.
    """
    found: list[Diagnostic] = []

    def bad(message: str, where: str, help: str) -> None:
        found.append(Diagnostic(code="M010", message=message, place=f"{place}: {where}", help=help))

    if not isinstance(config, Mapping):
        raise MeshwrightError.one("M010", "a recommendation model is an object", place=place, help="see explain dlrm")
    said = {key: value for key, value in config.items() if not key.startswith("_") and key != "architectures"}
    for key in said.keys() - {*_KEYS, *_CROSS}:
        bad(f"unknown key {key!r}", key, nearest(key, [*_KEYS, *_CROSS]))
    rows, bottom, top = (_numbers(said.get(key)) for key in ("rows", "bottom_mlp", "top_mlp"))
    for key, value in (("rows", rows), ("bottom_mlp", bottom), ("top_mlp", top)):
        if not value:
            bad(f"{key} = {said.get(key)!r:.60} is not a list of whole numbers from 1", key, f"say {key} = [...]")
    for key in ("dense_features", "embedding_dim"):
        if not _number(said.get(key)):
            bad(f"{key} = {said.get(key)!r:.60} is not a whole number from 1", key, f"say {key} = 128")
    interaction = said.get("interaction", DOT)
    if interaction not in (DOT, DCN):
        bad(f"interaction = {interaction!r:.60} is neither dot nor dcn", "interaction", "say dot or dcn")
    crossed = {key: said.get(key, 0) for key in _CROSS}
    if interaction == DCN and not all(map(_number, crossed.values())):
        bad("cross layers have a number and a rank", "interaction = dcn", "say cross_layers = 3, cross_rank = 512")
    if interaction == DOT and any(crossed.values()):
        bad("cross layers are of interaction = dcn", "cross_layers", "drop them, or say interaction = dcn")
    pooling = said.get("pooling", 1)
    pooling = pooling if isinstance(pooling, list) else [pooling] * len(rows)
    if any(isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1e6 for p in pooling):
        bad("pooling is rows looked up a sample, above 0", "pooling", "say a number, or one for each table")
    elif len(pooling) != len(rows):
        bad(f"{len(pooling)} poolings for {len(rows)} tables", "pooling", "say a number, or one for each table")
    dim = said.get("embedding_dim")
    if bottom and _number(dim) and bottom[-1] != dim:
        message = f"the bottom MLP ends with {bottom[-1]} numbers, and vectors of features have {dim}"
        bad(message, "bottom_mlp", f"end it with {dim}, so that both meet")
    if found:
        raise MeshwrightError(found)
    return Recommender(
        name=name,
        dense_features=said["dense_features"],
        bottom_mlp=bottom,
        tables=tuple(EmbeddingTable(rows=r, dim=dim, pooling=float(p)) for r, p in zip(rows, pooling)),
        interaction=interaction,
        top_mlp=top,
        **(crossed if interaction == DCN else {}),
        source=str(config.get("_source", "")),
    )


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _numbers(value: Any) -> tuple[int, ...]:
    """The whole numbers of a list; () where it is none of these."""
    return tuple(value) if isinstance(value, list) and all(map(_number, value)) else ()


def _chained(widths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(widths))


_MODELS = CatalogModels(ModelKind("recommendation model", "recommenders", (ARCHITECTURE,), "M010", read_recommender))


def is_recommender(text: str) -> bool:
    """Whether a text names a recommendation model of the catalog, or a JSON file of one."""
    return _MODELS.named(text)


def known_recommenders() -> tuple[str, ...]:
    """Names and aliases of the catalog's recommendation models."""
    return tuple(_MODELS.names)


def load_recommender(text: str) -> Recommender:
    """Return a recommendation model by its catalog name or alias, or the path of its JSON file.

    Raises:
        MeshwrightError: M010 for a name that is none, an unreadable file, and everything wrong in one.
    """
    return _MODELS.load(text)
