"""SyncPolicy: seven choices that say how replicas are kept together.

Published systems differ in these: *when* replicas exchange, which *fragments* of their state, within which *group*, in
which *codec*, how what arrives is *combined*, which *outer* step applies the result, and after which *delay*. A rule
(``rules/``) fills them in from the words of a plan; both executors read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.sync.growing import GrowingRounds
from meshwright.sync.options import runs

if TYPE_CHECKING:
    from meshwright.sync.clocks import Clocks
    from meshwright.sync.merged import MergedTasks
    from meshwright.sync.options import RuleOption
    from meshwright.sync.paths import ModulePaths
    from meshwright.sync.pruning import Pruning
    from meshwright.sync.rules import SyncRule
    from meshwright.sync.taught import Taught

#: The rule of a plan that says none: gradients are exchanged in every step.
USUAL = "step"
#: The option that names a codec, and the name of none.
CODEC, NO_CODEC = "codec", "none"
#: The option that says how what arrives is combined, and the ways in which it may be added on its way.
COMBINE, ADDED = "combine", ("sum", "mean", "joined")
#: The option that says by which graph some replicas meet, and the group in which every one meets every other.
GRAPH, ALL = "graph", "all"


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    """The step that takes what replicas agreed on as a gradient: its learning ``rate``, its ``momentum``, and whether
    that looks ahead (``nesterov``). With a rate of 1 and no momentum the result is taken as it is.

    ``mix`` is the share of its own parameters that a replica keeps beside the result. ``eager``: a replica's own part
    of the mean is that of this round, where the others' is of the round before. ``clip``: no
    element of the momentum is larger, 0 for none. ``penalty``: what a change is divided by before it is taken, for how
    far replicas have gone on since."""

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    mix: float = 0.0
    eager: bool = False
    clip: float = 0.0
    penalty: float = 1.0

    @property
    def taken(self) -> bool:
        """Whether the result is taken as it is."""
        return self.rate == 1 and self.penalty == 1 and not (self.momentum or self.mix or self.eager)

    def __str__(self) -> str:
        if self.taken:
            return "taken"
        more = [("mix", self.mix), ("eager", self.eager), ("clip", self.clip)]
        said = [f"rate={self.rate:g}", f"momentum={self.momentum:g}"]
        more.append(("penalty", self.penalty if self.penalty != 1 else 0))
        said += [name if value is True else f"{name}={value:g}" for name, value in more if value]
        return f"{'nesterov' if self.nesterov else 'momentum'}({', '.join(said)})"


class SharedScales(msgspec.Struct, frozen=True, kw_only=True):
    """The scales of local steps, a diagonal that replicas share: rounds keep ``beta`` of the squares that are gathered,
    and no scale is taken for less than ``least``. With a distance ``apart`` curvature is gathered in place of squares,
    by passes so far to both sides; 0 for squares."""

    beta: float
    least: float
    apart: float = 0.0

    def keeps(self, rounds: int) -> float:
        """Return the part of the squares that is kept after so many rounds: none of nothing, and in the end ``beta``
        (as Adam's correction, Kingma and Ba 1412.6980)."""
        return self.beta * (1 - self.beta**rounds) / (1 - self.beta ** (rounds + 1))


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which replicas that meet by a ``graph`` (of ``sync/groups.py``) take what they hear: the ``share`` of
    the way to their weighted mean that they go in a code, and whether a matrix is ``respread`` as far as those that it
    is the mean of. With a penalty ``rho`` they take no mean: duals price that they differ, and steps are pulled to the
    middle between neighbours (ADMM), in whose place ``noise`` times what a sampler adds is. With ``clocks`` two meet at
    a time, when these say so."""

    graph: str
    share: float = 1.0
    respread: bool = False
    rho: float = 0.0
    noise: float = 0.0
    clocks: Clocks | None = None

    @property
    def sampled(self) -> float:
        """The standard deviation of what is added to the middle, for each value."""
        return self.noise * 2**0.5 / (2 * self.rho) if self.rho else 0.0

    @property
    def priced(self) -> bool:
        """Whether replicas keep duals in place of taking a mean."""
        return self.rho > 0

    def pulled(self, rate: float, neighbours: int) -> float:
        """Return the share of the way to the middle that a step of a learning rate is pulled: that of the proximal step
        on the penalty, ``rho`` times the squared distance from the middle of each pair."""
        force = 2 * self.rho * neighbours * rate
        return force / (1 + force)


class SyncPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas are kept together.

    ``when``: steps between two exchanges; where a ``growth`` makes them more as the learning rate falls, the fewest.
    ``fragments``: what is exchanged (``sync.fragments`` names it), at once or in so many ``parts`` of the layers at
    different times, where ``strided`` parts take layers in turn and others take neighbours. ``early``: layers are
    updated in the last backward of a step, and sent from there on, in place of at its end. ``layers``: the numbers of
    those whose gradients are encoded, None for all; ``undecided``: a prediction has still to choose them, or the
    ``sums``: the part that each replica makes of every sum, () for alike. ``group``: who meets whom, all or by a graph
    some. ``codec``: a codec with its options, as ``int8`` or ``topk:share=0.01``. ``combine``: the sum or the mean of
    what arrives, or a combine with its options, as ``trimmed:cut=2``. ``outer``: the step that applies it. ``delay``:
    steps after which it does, while training goes on. ``reference``: gradients travel as what they differ from those
    at a point that moves once in so many steps in the mean, 0 where they travel themselves. ``scaling``: local steps
    are in scales that replicas share. ``own_data``: each replica has a run of the text that no other has,
    ``own_heads``: and a head. ``paths``: models of replicas are made of modules, and sequences are routed to them.
    ``pruning``: clients train what a mask keeps. ``mix``: how those that meet take what they hear, where it is no mean;
    ``clocks``: when each steps, and which two meet. ``taught``: heads learn what those of neighbours predict.
    ``hosted``: sums are made in the memory of hosts.
    ``merged``: tasks with a head each are one job of clients at first, and several later.
    The ``rule`` that chose them has ``values`` for its ``options`` (and
    the codec's, the combine's and the graph's), by name.
    """

    rule: SyncRule
    values: dict[str, Any]
    options: tuple[RuleOption, ...]
    when: int = 1
    growth: GrowingRounds | None = None
    fragments: tuple[str, ...]
    parts: int = 1
    strided: bool = True
    early: bool = False
    layers: tuple[int, ...] | None = None
    sums: tuple[int, ...] = ()
    hosted: bool = False
    undecided: bool = False
    group: str = ALL
    codec: str = NO_CODEC
    combine: str
    outer: Outer = Outer()
    delay: int = 0
    reference: int = 0
    scaling: SharedScales | None = None
    own_data: bool = False
    own_heads: bool = False
    paths: ModulePaths | None = None
    pruning: Pruning | None = None
    mix: Mix | None = None
    clocks: Clocks | None = None
    taught: Taught | None = None
    merged: MergedTasks | None = None

    def __getitem__(self, option: str) -> Any:
        return self.values[option]

    def __str__(self) -> str:
        said = {
            "when": self._when,
            "fragments": ("+".join(self.fragments) or "none") + self._parted + self._differing,
            "group": self._met + self._divided,
            "codec": self.codec,
            "combine": self.combine,
            "outer": self.outer,
            "delay": self.delay,
        }
        return " | ".join(f"{name} {value}" for name, value in said.items())

    @property
    def _when(self) -> str:
        if self.growth is not None:
            return f"every {self.when} steps or more, {self.spacing:.4g} in the mean"
        return "every step" if self.when == 1 else f"every {self.when} steps"

    @property
    def _met(self) -> str:
        if self.paths is None:
            return self.group
        levels = "x".join(map(str, self.paths.levels))
        return f"those of a module, of {levels}" if levels else "none"

    @property
    def _parted(self) -> str:
        parts = f" in {self.parts} {'strided' if self.strided else 'sequential'} parts" if self.parts > 1 else ""
        some = " in layers to choose" if self.undecided and self.coded else ""
        if self.layers is not None:
            some = f" encoded in layers {runs(self.layers)}"
        return parts + (" from the backward on" if self.early else "") + some

    @property
    def _differing(self) -> str:
        if not self.reference:
            return ""
        return " less those at a reference" + (f" of {self.reference} steps" if self.reference > 1 else "")

    @property
    def helpers(self) -> int:
        """The replicas, the last ones, that make parts of sums and have no part of a batch."""
        return int(self.values.get("aux", 0)) if self.rule.name == "dedloc" else 0

    @property
    def _divided(self) -> str:
        """How the sums are divided, in words."""
        if self.undecided and not self.coded:
            return " in parts to choose"
        return f" in parts {self.values['sums']}" if self.sums else ""

    @property
    def text(self) -> str:
        """The shortest words of a plan that :func:`meshwright.sync.policy.read` reads back."""
        name, shown = self.rule.name, self.options
        if name == USUAL and self.codec != NO_CODEC:
            name, shown = self.values[CODEC], tuple(o for o in shown if o.name != CODEC)
        said = [f"{o.name}={o.word(self[o.name])}" for o in shown if self[o.name] != o.default]
        return name + (":" + ",".join(said) if said else "")

    @property
    def spacing(self) -> float:
        """Steps between two exchanges, in the mean over a run where rounds grow."""
        return self.when if self.growth is None else self.growth.mean

    @property
    def stepped(self) -> bool:
        """Whether replicas take a step along what arrives, apply it later or mix it, in place of taking it as it is."""
        return not self.outer.taken or self.delay > 0 or self.meets or self.paths is not None

    @property
    def meets(self) -> bool:
        """Whether every replica exchanges with some others alone."""
        return self.group != ALL

    @property
    def priced(self) -> bool:
        """Whether replicas that meet keep prices of differing, in place of taking a mean."""
        return self.mix is not None and self.mix.priced

    @property
    def apart(self) -> bool:
        """Whether replicas hold different parameters even after a round."""
        return self.parts > 1 or self.delay > 0 or self.outer.mix > 0 or self.meets or self.differing_models

    @property
    def alike_every(self) -> int:
        """Steps between those after which all replicas hold the same parameters: 1 where they step together; 0 where
        that is never so, or it is not known after which steps."""
        known = self.growth is None and self.rule.decider is None and not self.apart
        return self.when if known else 0

    @property
    def differing_models(self) -> bool:
        """Whether replicas have parameters that others never get."""
        return self.paths is not None or self.own_heads or self.taught is not None

    @property
    def further_heads(self) -> int:
        """Heads that a model has besides its own."""
        if self.merged is not None:
            return self.merged.tasks - 1
        return 0 if self.taught is None else self.taught.heads

    @property
    def copies(self) -> int:
        """Clients that compute each part of a batch."""
        return 1 if self.rule.copies is None else self.rule.copies(self.values)

    def encodes(self, layer: int) -> bool:
        """Whether the gradients of a layer travel in the codec."""
        return self.layers is None or layer in self.layers

    def level_of(self, layer: int, num_layers: int) -> int:
        """The level of a layer of the model whose modules replicas share."""
        return 0 if self.paths is None or not self.paths.levels else self.paths.level_of(layer, num_layers)

    @property
    def coded(self) -> bool:
        """Whether what is exchanged is encoded."""
        return self.codec != NO_CODEC

    @property
    def plain(self) -> bool:
        """Whether values travel as they are, and are added on their way."""
        return not self.coded and self.combine in ADDED and not self.reference

    @property
    def alike(self) -> bool:
        """Whether all parameters are exchanged alike: as they are, among the same."""
        return self.plain and not self.differing_models

    @property
    def exact(self) -> bool:
        """Whether training computes what one process would."""
        return self.rule.exact and self.plain
