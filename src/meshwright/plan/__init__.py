"""The plan: how a workload is laid out and run, immutable, with a text form that round-trips.

``tp8 pp4 vpp2 dp2 zero1 interleaved mb1 selective`` is a plan. ``parse`` reads it, ``Plan.text`` writes it back,
``check`` lists everything that makes it illegal for a model, a cluster and a workload.
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError, a_folder
from meshwright.plan.facets.experts import Experts
from meshwright.plan.facets.layout import Layout
from meshwright.plan.facets.memory import Memory
from meshwright.plan.facets.overlap import Overlap
from meshwright.plan.facets.pipeline import Pipeline
from meshwright.plan.facets.precision import Precision
from meshwright.plan.facets.sequence import Sequence
from meshwright.plan.facets.serving import ServingPlan
from meshwright.plan.facets.sync import Sync
from meshwright.plan.pool import Pool, PoolLink
from meshwright.plan.record import FACETS, Plan, joined

__all__ = [
    "FACETS",
    "Experts",
    "Layout",
    "Memory",
    "Overlap",
    "Pipeline",
    "Plan",
    "Pool",
    "PoolLink",
    "Precision",
    "Sequence",
    "ServingPlan",
    "Sync",
    "check",
    "joined",
    "parse",
]


def parse(text: str, *, place: str = "--plan") -> Plan:
    """The plan written as words, or in a .toml file when `text` names one.

    Raises:
        MeshwrightError: P001 unknown word, P002 bad value, P003 a word said twice, P040 what is no pool; all at once.
    """
    if text.endswith(".toml"):
        from meshwright.plan.toml import load

        return load(text)
    from meshwright.plan.pool_words import is_several
    from meshwright.plan.pool_words import read as read_pools

    if is_several(text):
        return read_pools(text, place=place)
    from meshwright.plan.text import read

    try:
        return read(text, place=place)
    except MeshwrightError as error:
        raise a_folder(text, "P004", ".toml") or error from None


def check(plan, model, cluster, train, *, serving=False):
    """Every violation of `plan` for this model, cluster and workload; see ``plan/legality.py``."""
    from meshwright.plan.legality import violations

    return violations(plan, model, cluster, train, serving=serving)
