"""Plans written as words: a plan of one pool by the fields of its facets, several pools side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plan.facets import fields
from meshwright.plan.pool import Pool, PoolLink, chain

if TYPE_CHECKING:
    from meshwright.plan.record import Plan


def write(plan: Plan) -> str:
    """The shortest words that are read back as a plan of one pool."""
    ordered = sorted(fields().values(), key=lambda field: field.place)
    return " ".join(word for field in ordered for word in field.words(plan))


def write_pools(pools: tuple[Pool, ...], links: tuple[PoolLink, ...]) -> str:
    """The words that are read back as these pools, with their links where they are not a chain."""
    words = " + ".join(f"{pool.name}=[{_words(pool)}]" for pool in pools)
    return " ".join([words, *(link.text() for link in links if links != chain(pools))])


def _words(pool: Pool) -> str:
    words = [write(pool.plan)]
    words += [f"on={pool.devices[0]}:{pool.devices[1]}"] if pool.devices else []
    words += [f"part={pool.part}"] if pool.part else []
    return " ".join([*words, *(["frozen"] if pool.frozen else [])])
