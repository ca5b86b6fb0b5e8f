"""Memory: activations recomputed in the backward, and kernels that save the tensors between them or do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.plan.facet import ALONE, KEYED, LAYER, STRUCTURE, Facet, Field, count, names, unrun, wrong

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


#: ``selective`` repeats the attention core (Korthikanti et al. 2205.05198), ``operators`` all but the outputs of the
#: attention core and of every second matrix product (TorchTitan's selective policy "op"), ``full`` the whole layer.
RECOMPUTE_MODES = ("none", "selective", "operators", "full")
#: Recompute by operators is a policy of few frameworks and the executor has none of it: allowed, not the default.
USUAL_RECOMPUTE = ("none", "selective", "full")
ATTENTION_KERNELS = ("flash", "unfused")
LOSS_KERNELS = ("eager", "copied", "in-place", "fused")
GATHERED = BROUGHT = ("again", "kept")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory facet of a plan: activations recomputed in backward, and kernels that save fewer of them.

    Attributes:
        recompute: ``selective`` recomputes the attention core (Korthikanti et al. 2205.05198); ``full`` the whole layer
            from its input, the only tensor saved.
        layers: recompute is limited to the first so many layers of every chunk (0: all).
        attention: one fused kernel, or separate ones that save the tensors between them.
        loss: ``fused`` saves the 16-bit logits and writes their gradient over them. The others save the probabilities
            in fp32: ``eager`` has two gradients beside them in backward, ``in-place`` writes its one over them, and so
            does ``copied``, whose forward has the fp32 logits beside the probabilities.
        gathered: the input of a product, which sequence parallelism gathers over the tensor-parallel ranks: gathered
            ``again`` for the weight gradient (Korthikanti et al., section 4.2.2), or ``kept`` from the forward, as a
            framework's automatic differentiation does by itself.
        brought: the results of collectives where whole layers are recomputed: exchanged ``again``, or ``kept`` from the
            first forward (communication-aware checkpointing, DeepSpeed-TED, 2303.06318).
    """

    recompute: str = "none"
    layers: int = 0
    attention: str = "flash"
    loss: str = "eager"
    gathered: str = "again"
    brought: str = "again"

    def mode(self, position: int) -> str:
        """Return the recompute mode of the layer at this position of its chunk."""
        return self.recompute if not self.layers or position < self.layers else "none"


def _recompute(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    memory = plan.memory
    if memory.layers and memory.recompute == "none":
        yield wrong(
            "P021",
            f"recompute_layers={memory.layers} without a recompute mode",
            f"memory.layers = {memory.layers}",
            "say full or selective",
        )
    most = max(plan.layout.stages or (-(-model.num_layers // plan.num_stages),))
    if memory.layers > most:
        yield wrong(
            "P021",
            f"recompute_layers={memory.layers} and a chunk has at most {most} layers",
            f"memory.layers = {memory.layers}",
            f"at most {most}; 0 or nothing means all",
        )


def _unexecutable(plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    memory = plan.memory
    if memory.attention == "unfused":
        message = "unfused attention is priced and not run"
        yield unrun("P033", message, plan, "memory", "attention = unfused", attention="flash")
    if memory.recompute == "operators":
        message = "recompute by operators is priced and not run"
        yield unrun("P033", message, plan, "memory", "recompute = operators", recompute="full")
    if memory.brought != "again":
        message = "collectives whose results are kept for recomputation are priced and not run"
        yield unrun("P033", message, plan, "memory", f"brought = {memory.brought}", brought="again")
    if memory.loss != "eager":
        message = f"the loss kernels {memory.loss!r} are priced and not run"
        yield unrun("P033", message, plan, "memory", f"loss = {memory.loss}", loss="eager")


FIELDS = (
    Field(
        name="recompute",
        help="activations recomputed in the backward",
        form=names(*RECOMPUTE_MODES),
        spelled=ALONE,
        place=140,
        decides=(STRUCTURE, LAYER),
        seen={LAYER: lambda plan: None},
        domain=lambda model, cluster, train: USUAL_RECOMPUTE,
        also={"norecompute": {"recompute": "none"}},
    ),
    Field(
        name="recompute_layers",
        attribute="layers",
        help="layers of a chunk that do (0: all)",
        form=count(0, wanted="a number of layers per chunk"),
        spelled=KEYED,
        place=210,
        decides=(STRUCTURE, LAYER),
        seen={LAYER: lambda plan: None},
    ),
    Field(
        name="attention",
        help="attention kernels",
        form=names(*ATTENTION_KERNELS),
        spelled=ALONE,
        place=150,
        decides=(LAYER,),
        with_sizes=True,
    ),
    Field(
        name="loss",
        help="loss kernels",
        form=names(*LOSS_KERNELS),
        spelled=KEYED,
        place=220,
        decides=(LAYER,),
    ),
    Field(
        name="brought",
        help="results of collectives where whole layers are recomputed: exchanged again, or kept",
        form=names(*BROUGHT),
        spelled=KEYED,
        place=231,
        decides=(LAYER,),
        useful=lambda plan: plan.memory.recompute == "full",
    ),
    Field(
        name="gathered",
        help="gathered inputs of products for their weight gradients: gathered again, or kept",
        form=names(*GATHERED),
        spelled=KEYED,
        place=230,
        decides=(LAYER,),
        useful=lambda plan: plan.layout.tp > 1 and plan.layout.sp,
    ),
)
FACET = Facet(
    name="memory",
    help="activations recomputed in the backward, and the kernels that run",
    record=Memory,
    fields=FIELDS,
    rules=(_recompute,),
    unexecutable=_unexecutable,
)
