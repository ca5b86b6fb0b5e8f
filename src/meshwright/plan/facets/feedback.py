"""Feedback: the gradient that enters a layer's backward, what comes back from the layer behind it or the error of the
output through a fixed random matrix (direct feedback alignment).

Nøkland 2016 (1609.01596); Launay et al. 2020 (2006.12878), whose published code for transformers this is: the output is
that of the last block, so that the head learns as ever and the error is as wide as what passes between layers; it goes
through matrices drawn evenly from -1 to 1 over the square root of the width, to the end of every block ("macro") or of
every part of one ("micro"); the embedding learns from what comes back through the first block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan.facet import EXCHANGE, KEYED, LAYER, STRUCTURE, Facet, Field, Form, unrun, wrong
from meshwright.plan.facets.passes import FIXED
from meshwright.spec.ends import Head
from meshwright.spec.layers import Block, Moe
from meshwright.sync.policy import read as policy_of

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: A backward that goes from layer to layer.
CHAIN = "chain"
DFA = "dfa"
#: An error that enters every part of a block, and one matrix for all that it enters.
MICRO, SHARED = "micro", "shared"
CODE = "P087"


class Direct(NamedTuple):
    """The options of ``feedback=dfa``: the error enters every part of a block (``micro``) or every block, through one
    matrix for all (``shared``) or each through its own."""

    micro: bool
    shared: bool

    @property
    def points(self) -> int:
        """The places of a block that the error enters."""
        return 2 if self.micro else 1

    @property
    def text(self) -> str:
        """The words that :func:`read` reads."""
        said = [word for word, holds in ((MICRO, self.micro), (SHARED, self.shared)) if holds]
        return DFA + (":" + ",".join(said) if said else "")


@cache
def read(text: str) -> Direct | None:
    """The options that words of ``feedback=`` say; None for a chain of layers.

    Raises:
        MeshwrightError: P087 for words that are none.
    """
    name, colon, rest = text.partition(":")
    said = rest.split(",") if rest else []
    known = name == DFA and {*said} <= {MICRO, SHARED} and len({*said}) == len(said) and bool(rest) == bool(colon)
    if text == CHAIN:
        return None
    if not known:
        help = f"say {CHAIN}, {DFA}, {DFA}:{MICRO}, {DFA}:{SHARED} or {DFA}:{MICRO},{SHARED}"
        raise MeshwrightError.one(CODE, f"feedback={text} is unknown", help=help)
    return Direct(MICRO in said, SHARED in said)


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """The feedback facet of a plan: the ``way`` that gradients come to layers by, ``chain`` or ``dfa`` with its
    options."""

    way: str = CHAIN

    @property
    def direct(self) -> Direct | None:
        """The options of direct feedback; None where gradients come back from layer to layer."""
        return None if self.way == CHAIN else read(self.way)

    @property
    def exact(self) -> bool:
        """Whether layers learn by their gradients."""
        return self.way == CHAIN


def _way(text: str) -> str:
    found = read(text)
    return CHAIN if found is None else found.text


def otherwise(plan: Plan) -> tuple[str, ...]:
    """Return a caution where layers do not learn by their gradients."""
    direct = None if plan.several else plan.feedback.direct
    if direct is None:
        return ()
    where = "every part of a block" if direct.micro else "every block"
    return (
        f"feedback={plan.feedback.way} is approximate: {where} learns from the output's error through a fixed random "
        "matrix, not by its gradient; what that costs in loss meshwright converge measures",
    )


def _rules(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield what direct feedback does not go with."""
    direct = plan.feedback.direct
    if direct is None:
        return
    layout, memory, policy = plan.layout, plan.memory, policy_of(plan.sync.policy)

    def other(holds: bool, why: str, help: str) -> Iterator[Diagnostic]:
        if holds:
            yield wrong(CODE, f"feedback={plan.feedback.way}: {why}", f"feedback.way = {plan.feedback.way}", help)

    blocks = [block for block in model.blocks if isinstance(block, Block)]
    yield from other(len(model.flows) > 1 or len(blocks) < len(model.blocks) or any(b.before for b in blocks),
                     f"layers of {model.name} read several streams of tokens, and the error is of one",
                     "a model of one stream of tokens")  # fmt: skip
    yield from other(not isinstance(model.head, Head) or model.head.pooled,
                     f"the head of {model.name} does not find every token, which the error of each is asked of",
                     "a language model")  # fmt: skip
    if direct.micro:
        apart = all(b.attention is not None and b.mlp is not None and not b.parallel and b.ways == 1 for b in blocks)
        around = any(isinstance(b.mlp, Moe) and b.mlp.shortcut for b in blocks)
        also = any(b.mixer is not None or b.cross is not None for b in blocks)
        yield from other(not apart or around or also,
                         "blocks are not attention and then an MLP behind it, whose parts the error could enter",
                         f"say feedback={Direct(False, direct.shared).text}, which enters whole blocks")  # fmt: skip
    yield from other(layout.zero >= 2, "the head's gradients come with the forward, and sums that are scattered pass "
                     "by pass would mix those of several microbatches", "say zero1, or drop zero and fsdp")  # fmt: skip
    yield from other(plan.passes.policy != FIXED, "peers are asked for a chain of passes", "drop passes=")
    yield from other(bool(plan.pipeline.fill), "there are no waits of a backward to fill", "drop fill_layers=")
    yield from other(memory.portions > 1, "a layer in portions hands the gradient of each on", "drop the portions")
    yield from other(plan.offload.any, "what is moved off the device comes back in the order of a chain",
                     "drop offload=")  # fmt: skip
    yield from other(bool(plan.overlap.how) and layout.tp > 1, "parts of layers run across the borders that the error "
                     "enters at", f"drop overlap=tp:{plan.overlap.how}")  # fmt: skip
    yield from other(bool(train.adversarial), "text is moved along gradients that come back through all layers",
                     "drop adversarial=")  # fmt: skip
    yield from other(train.lora is not None, "a frozen base hands gradients on to its adapters, and there would be "
                     "none to hand on", "train all weights")  # fmt: skip
    apart = policy.rule.forwards or policy.taught is not None or policy.merged is not None or policy.early
    yield from other(bool(apart), f"sync={plan.sync.policy} has passes or heads of its own", "drop sync=")


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    direct = plan.feedback.direct
    if direct is None:
        return
    policy = policy_of(plan.sync.policy)
    if policy.reference or policy.scaling is not None:
        said, way = f"feedback={plan.feedback.way} under sync={plan.sync.policy}", f"way = {plan.feedback.way}"
        message = f"{said}, which measures gradients by passes more, is priced and not run"
        yield unrun("P033", message, plan, "feedback", way, way=CHAIN)


FIELDS = (
    Field(
        name="feedback",
        attribute="way",
        help="what layers learn from: gradients that come back from layer to layer (chain), or the output's error "
        "through fixed random matrices (dfa; approximate)",
        form=Form(read=_way, wanted="chain, dfa, dfa:micro or dfa:shared", whole=True),
        spelled=KEYED,
        place=333,
        decides=(STRUCTURE, LAYER, EXCHANGE),
    ),
)
FACET = Facet(
    name="feedback",
    help="what layers learn from",
    record=Feedback,
    fields=FIELDS,
    rules=(_rules,),
    unexecutable=_unexecutable,
)
