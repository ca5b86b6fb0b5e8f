"""Memory: activations recomputed in the backward, and kernels that save the tensors between them or do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.facet import ALONE, KEYED, LAYER, STRUCTURE, Facet, Field, count, names, unrun, wrong
from meshwright.spec.ends import Contrastive, Head
from meshwright.spec.layers import Moe

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.layers import Block
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
SIMILARITIES = ("stored", "tiles")


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
        portions: a layer that is recomputed whole is so, and differentiated, in so many portions of the sequence one
            after the other (StreamBP, Luo et al. 2506.03077): the last tokens first, so that the gradients of a
            portion's keys and values are whole when it is its turn.
        loss_portions: head and loss are computed in so many portions of the tokens, each differentiated before the next
            (ibid., section 3.2.1), all of them in the backward: scores over the vocabulary are never whole.
        similarities: those of a contrastive loss: ``stored``, each text's with the images of all replicas, or
            computed in ``tiles`` that come round a ring of replicas and are never stored (Cheng et al. 2024,
            2410.17243).
    """

    recompute: str = "none"
    layers: int = 0
    attention: str = "flash"
    loss: str = "eager"
    gathered: str = "again"
    brought: str = "again"
    portions: int = 1
    loss_portions: int = 1
    similarities: str = "stored"

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


def _portioned(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """P074 for everything that keeps layers, or head and loss, from being computed in portions of the sequence."""
    memory = plan.memory
    for name, many in (("recompute_portions", memory.portions), ("loss_portions", memory.loss_portions)):
        if many == 1:
            continue
        of_layers = name == "recompute_portions"
        found = list(_whole(plan, train, many))
        found += _layers_whole(plan, model, train) if of_layers else _loss_whole(model)
        for message, help in found:
            yield wrong("P074", message, f"memory.{'portions' if of_layers else 'loss_portions'} = {many}", help)


def _paired(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    if plan.memory.similarities != "stored" and not isinstance(model.head, Contrastive):
        message = f"similarities={plan.memory.similarities} and the head of {model.name} compares no pairs of a batch"
        yield wrong(
            "P074",
            message,
            f"memory.similarities = {plan.memory.similarities}",
            "a model with a contrastive loss: clip-l",
        )


def _whole(plan: Plan, train: Train, many: int) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    if many > train.seq_len // layout.cp:
        tokens = f"{train.seq_len} tokens" + (f" on {layout.cp} ranks" if layout.cp > 1 else "")
        yield f"{many} portions of a sequence of {tokens} leave some without any", "fewer portions"
    if layout.tp > 1 and layout.sp:
        yield "with sequence parallelism a rank's tokens are a shard of their own, not a portion of all", "say nosp"
    if plan.overlap.tp:
        yield "overlap=tp cuts the same products for their collectives", "leave tp out of overlap="
    if schedules.get(plan.pipeline.schedule).splits_backward:
        message = f"{plan.pipeline.schedule} puts weight gradients off, which would keep every portion's activations"
        yield message, "another schedule, such as 1f1b"


def _layers_whole(plan: Plan, model: Model, train: Train) -> Iterator[tuple[str, str]]:
    memory = plan.memory
    if memory.recompute in ("selective", "operators"):
        yield f"{memory.recompute} recomputes no layer whole, and only those that are have portions", "say full"
    if memory.attention == "unfused":
        yield "unfused attention stores the scores of whole sequences", "say flash"
    if memory.brought == "kept":
        yield "brought=kept keeps what collectives brought for whole sequences", "drop brought="
    if plan.layout.cp > 1 or plan.sequence.groups != "static":
        yield "context-parallel ranks hold parts of the sequence already, whose keys come round a ring", "say cp1"
    if not train.causal or not all(flow.causal for flow in model.flows):
        why = "tokens see later ones, so that no portion's keys have their gradients before all are done"
        yield why, "a model whose tokens see no later one"
    for why in sorted({why for block in model.blocks for why in _undivided(block)}):
        yield f"{why} ({model.name})", "a model of softmax attention and dense MLPs"


def _undivided(block: Block) -> Iterator[str]:
    """Yield the parts of a block that are not computed in portions of a sequence."""
    if block.attention is None or block.mixer is not None:
        yield "a layer's state goes on from token to token"
    elif block.attention.kv_lora_rank or block.attention.index_heads:
        yield "keys and values are made of a latent"
    if block.cross is not None or block.before:
        yield "a layer reads another stream of tokens"
    if isinstance(block.mlp, Moe):
        yield "what experts take, drop and balance is of whole microbatches"


def _loss_whole(model: Model) -> Iterator[tuple[str, str]]:
    if not isinstance(model.head, Head) or model.head.pooled:
        yield f"the head of {model.name} is not one of every token", "a language model"


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
    if memory.loss_portions > 1 and isinstance(model.head, Head) and (model.head.transform or len(model.flows) > 1):
        message = f"the loss of the {model.family} family in portions is priced and not run"
        yield unrun("P033", message, plan, "memory", f"loss_portions = {memory.loss_portions}", loss_portions=1)
    if memory.similarities != "stored":
        message = "similarities in tiles are priced and not run"
        yield unrun("P033", message, plan, "memory", f"similarities = {memory.similarities}", similarities="stored")
    if memory.loss != "eager":
        message = f"the loss kernels {memory.loss!r} are priced and not run"
        yield unrun("P033", message, plan, "memory", f"loss = {memory.loss}", loss="eager")


def _implied(plan: Plan, said: set[str], fresh: bool) -> Memory:
    """Portions of recomputed layers say that layers are recomputed."""
    memory = plan.memory
    if memory.portions > 1 and "recompute" not in said and memory.recompute == "none":
        return msgspec.structs.replace(memory, recompute="full")
    return memory


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
        name="recompute_portions",
        attribute="portions",
        help="portions of the sequence in which a whole layer is recomputed and differentiated",
        form=count(1, wanted="a number of portions"),
        spelled=KEYED,
        place=211,
        decides=(LAYER,),
        with_sizes=True,
    ),
    Field(
        name="loss_portions",
        help="portions of the tokens in which head and loss are computed",
        form=count(1, wanted="a number of portions"),
        spelled=KEYED,
        place=221,
        decides=(STRUCTURE, LAYER),
        seen={STRUCTURE: lambda plan: plan.memory.loss_portions > 1},  # whether scores stay for the backward
        with_sizes=True,
    ),
    Field(
        name="similarities",
        help="similarities of a contrastive loss: stored, or computed in tiles that come round a ring",
        form=names(*SIMILARITIES),
        spelled=KEYED,
        place=222,
        decides=(STRUCTURE, LAYER),
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
    rules=(_recompute, _portioned, _paired),
    unexecutable=_unexecutable,
    implied=_implied,
)
