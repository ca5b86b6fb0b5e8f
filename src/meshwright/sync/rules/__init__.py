"""Rules of synchronisation: which fragments a group of parameters has, and when they are due.

One file a rule; each registers a :class:`SyncRule`. A rule knows nothing of tasks, tensors or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.options import RuleOption

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.fragments import Fragment, Stored, Weights
    from meshwright.sync.record import SyncPolicy
    from meshwright.world.decider import Decider

MODULES = [
    "meshwright.sync.rules.step",
    "meshwright.sync.rules.hfreduce",
    "meshwright.sync.rules.local",
    "meshwright.sync.rules.qsr",
    "meshwright.sync.rules.savic",
    "meshwright.sync.rules.cold_fusion",
    "meshwright.sync.rules.paths",
    "meshwright.sync.rules.espresso",
    "meshwright.sync.rules.qsdp",
    "meshwright.sync.rules.dist_lion",
    "meshwright.sync.rules.demo",
    "meshwright.sync.rules.one_byte",
    "meshwright.sync.rules.masha",
    "meshwright.sync.rules.diloco",
    "meshwright.sync.rules.late",
    "meshwright.sync.rules.clients",
    "meshwright.sync.rules.coding",
    "meshwright.sync.rules.anchors",
    "meshwright.sync.rules.pruned",
    "meshwright.sync.rules.mas",
    "meshwright.sync.rules.gossip",
    "meshwright.sync.rules.admm",
    "meshwright.sync.rules.dadao",
    "meshwright.sync.rules.mhd",
    "meshwright.sync.rules.dedloc",
]
"""The files that define rules, each as ``RULES``: a new rule is a file and its name here."""


class SyncRule(msgspec.Struct, frozen=True, kw_only=True):
    """A way to keep replicas together, by name.

    ``choices`` fills in the seven choices of a policy from the values of the options. ``fragments`` gives what is
    exchanged of a group of parameters; those that are due once in several steps are so together. ``together`` is how
    many data-parallel ranks take the same step; between such sets parameters may differ. ``exact``: training computes
    what one process would. ``optimizer``: the one whose updates are exchanged in place of gradients, so that replicas
    keep its moments in what they send, and what comes of it is applied as it is; "" takes any. ``forwards``: how many
    forward passes of each microbatch replicas learn by, where there are no backward ones. ``vectors_apart``: vectors
    are exchanged apart from matrices. ``wrong`` gives what of a plan on a cluster the rule cannot do. ``decider``:
    replicas are clients of a server, for which it makes a decider from the values of the options and the number of
    clients. ``scoped``: each kind of sharded state may have a scope of its own.
    ``copies``: how many of them compute each part of a batch, in the code of ``sync/clients/coded.py``.
    ``passes``: some steps of clients have more than one pass.
    ``opens``: what the rule may leave to a prediction, and words that say it; of a rule that does, one such plan is
    ``undecided``. ``usual``: the values that options of its codec, combine and graph have where nothing is said and
    theirs are others, by name.
    """

    name: str
    title: str
    paper: str
    exact: bool
    choices: Callable[[dict[str, Any]], dict[str, Any]]
    fragments: Callable[[Plan, SyncPolicy, Weights, Stored], Iterator[Fragment]]
    together: Callable[[Plan], int]
    optimizer: str = ""
    forwards: int = 0
    options: tuple[RuleOption, ...] = ()
    wrong: Callable[[Plan, Cluster, SyncPolicy], Iterator[Diagnostic]] | None = None
    vectors_apart: bool = False
    scoped: bool = False
    decider: Callable[[dict[str, Any], int], Decider] | None = None
    copies: Callable[[dict[str, Any]], int] | None = None
    passes: bool = False
    opens: tuple[str, str] | None = None
    usual: dict[str, Any] = {}


@cache
def rules() -> dict[str, SyncRule]:
    """Every rule by its name."""
    found = [import_module(module).RULES for module in MODULES]
    return {rule.name: rule for group in found for rule in group}
