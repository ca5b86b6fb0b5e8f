"""Heads that are taught by the predictions of neighbours (multi-headed distillation, Zhmoginov et al. 2211.15774).

Replicas have text of their own, and models that nobody else gets. Each has its main head, which learns from its own
text alone, and some heads more. On public text, which is the same for all, its first further head learns what the main
heads of its neighbours predict, the second one what their first further heads do, and so on: knowledge passes one more
replica with every head. Of several neighbours the one that is surest of a token teaches it. The hidden states that all
heads read are drawn towards those of the neighbours as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train

#: What the names of heads begin with that neighbours teach, before their number and the name of the main one.
TAUGHT = "taught_heads."
#: Bytes of the number of a token in the vocabulary, where some are sent.
NUMBER_BYTES = 4


class Taught(msgspec.Struct, frozen=True, kw_only=True):
    """``heads`` besides the main one, which learn on a ``public`` share of the text; the weights of their losses
    (``aux``) and of the distance of normalised hidden states from those of each neighbour (``embed``); of a token's
    predictions the ``top`` likeliest are sent, 0 for all."""

    heads: int
    public: float
    aux: float
    embed: float
    top: int

    def message_bytes(self, tokens: int, vocab: int, hidden: int, element: int) -> int:
        """Bytes that a replica sends each neighbour of so many public tokens, `element` for each value: what all heads
        predict but the last one, which teaches nobody, and hidden states where they are drawn."""
        each = self.top * (element + NUMBER_BYTES) if self.top else vocab * element
        return tokens * (self.heads * each + (hidden * element if self.embed else 0))


def unteachable(plan: Plan, model: Model, train: Train, taught: Taught) -> Iterator[tuple[str, str, str]]:
    """Yield all that heads cannot be taught under: (place in the plan, reason, help)."""
    layout = plan.layout
    for axis in ("tp", "pp", "cp"):
        ranks = getattr(layout, axis)
        if ranks > 1:
            yield f"layout.{axis} = {ranks}", "a replica's predictions are those of one rank", f"{axis}1"
    if layout.zero or layout.shard:
        yield f"layout.zero = {layout.zero}", "a replica is one rank, which holds its model", "drop what shards"
    if layout.shares or plan.kinds.computed or plan.kinds.mbs or plan.kinds.dtypes:
        yield "layout.shares", "replicas predict the same public text, as much each", "drop shares and sizes of kinds"
    if plan.offload.any:
        yield "offload", "what leaves the device comes back for the passes of a replica's own text", "drop offload="
    if plan.memory.loss_portions > 1 or plan.memory.portions > 1:
        yield "memory", "predictions of public text are made whole", "drop portions"
    if plan.pipeline.fill:
        yield "pipeline.fill", "frozen layers fill waits of other passes", "drop fill_layers="
    if model.mixtures:
        yield "experts", f"routers of {model.name} would count the choices of public text", "a dense model"
    if len(model.flows) > 1 or model.streams or not train.causal:
        yield "model", f"{model.name} predicts no next token of one text", "a language model"
    if train.lora is not None:
        yield "sync", "heads are trained whole, and the workload trains adapters", "drop lora= from the workload"
    for word in ("grow", "align", "adversarial"):
        if getattr(train, word):
            yield "sync", f"{word}= goes by the gradient of one text", f"drop {word}= from the workload"
    if taught.top > model.vocab:
        yield "sync", f"top={taught.top} of {model.vocab} tokens", f"top={model.vocab} at most, or none for all"
