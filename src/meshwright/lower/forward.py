"""The forward pass of a serving iteration: the pieces of every layer at so many tokens, and attention apart from them.

What a layer does to tokens one by one (products, norms, activations, the sums over tensor-parallel ranks) depends on
how many there are; attention depends on every request's new tokens and context. The two are priced apart and added.
Hidden states are whole on every rank of an attention group, experts are spread as :mod:`served_experts` says, and the
head computes sampled tokens alone, as serving engines do.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from meshwright import layers
from meshwright.layers.block import normed
from meshwright.layers.pieces import Context, Piece, linear, norm
from meshwright.lower import served_ends, served_experts, served_latent
from meshwright.lower.entry import Entry
from meshwright.lower.layer import program
from meshwright.lower.partition import stage_layers
from meshwright.lower.place import Mesh
from meshwright.lower.rewrites import rewritten
from meshwright.lower.rewrites.divide import HostRates, divided
from meshwright.lower.served_experts import Spread
from meshwright.lower.served_mixing import MIXED, Mixing, entries, kept_bytes, mixings, prefix_once
from meshwright.lower.tier_sizes import COPY_US
from meshwright.plan import Memory, Plan
from meshwright.spec.architecture import EMBEDDING, HEAD
from meshwright.spec.ends import Embedding, Head
from meshwright.spec.engine_words import KV_BYTES
from meshwright.spec.items import Item
from meshwright.spec.layers import Block, Dense, Moe
from meshwright.spec.model import Model
from meshwright.spec.routing import Routing
from meshwright.spec.workload import WEIGHT_BYTES, Train, multiplied_bytes
from meshwright.work import Collective, Group

#: Heads that kernels of sparse latent attention compute at least, by the device's architecture: queries of ranks with
#: fewer are filled up with zeros in front of FlashMLA's kernel for prompts (``_forward_flashmla_sparse`` of SGLang's
#: nsa_backend.py, ``FlashMLASparseImpl`` of vLLM). Its kernel for Blackwell has 128, and engines have others there.
SPARSE_HEADS = {"Hopper": 64}
#: Learned tokens in front of each stream of a token (ParScale, 2505.10475, section 3).
STREAM_PREFIX = 48


class Forward:
    """The forward pass of a model under a plan, on one of its replicas. ``kv`` is the precision of the cache, and
    ``shared`` the tokens of a prefix that all requests have in common; ``routing`` is how often each expert is chosen.

    Of several attention groups (``adp``) each has an equal part of an iteration's tokens and requests; dense MLPs
    beside experts, the embedding and the head are of each group's own tokens, MLPs of a model without experts of all.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        mesh: Mesh,
        kv: str = "bf16",
        shared: int = 0,
        routing: Routing | None = None,
    ):
        self.model, self.mesh, self.kv, self.shared, self.routing = model, mesh, kv, shared, routing
        self.unfused = plan.memory.attention == "unfused"  # of what mixes tokens, which is apart from all else
        plan = msgspec.structs.replace(plan, memory=Memory())
        layout = plan.layout
        self.plan = msgspec.structs.replace(plan, layout=msgspec.structs.replace(layout, sp=False))
        self.spread = Spread.of(plan)
        self.train = Train(global_batch=1, seq_len=1, dtype=plan.precision.compute or "bf16")
        inside = msgspec.structs.replace(layout, sp=False, tp=layout.attention_tp)
        alone = msgspec.structs.replace(plan.experts, ep=1, etp=1, duplicates="sent")
        self._inside = msgspec.structs.replace(plan, layout=inside, experts=alone)
        self._whole = msgspec.structs.replace(self.plan, experts=alone)
        self._group, self._beside = mesh.hybrid_groups(layout.attention_tp, "tp")

    def context(self, tokens: int) -> Context:
        """Return the sizes and groups of the ranks of an attention group at work on its part of so many tokens."""
        return self._context(-(-tokens // self.plan.layout.adp), self._inside, self._group)

    def _context(self, tokens: int, plan: Plan, tp_group: Group) -> Context:
        none, cp = self.mesh.group(), plan.layout.cp
        return Context.of(
            self.model.head.stream,
            ((Item(1, 1.0), -(-tokens // cp) * cp),),
            self.model,
            plan,
            self.train,
            tp_group=tp_group,
            cp_inner=none,
            cp_outer=self.mesh.group("cp") if cp > 1 else none,
            ep_group=none,
            ep_inner=none,
            ep_outer=none,
            etp_group=none,
        )

    @property
    def resident(self) -> float:
        """The share of the layers that lie on the device, where others are divided between it and the host; 1 where
        none are."""
        serving = self.plan.serving
        return serving.resident / self.model.num_layers if serving.divides else 1.0

    def divided(self, kind: int, tokens: int) -> list[Entry]:
        """Return the operators of a layer on so many tokens whose products are divided between device and host."""
        found, layout = self.tokenwise(kind, tokens), self.plan.layout
        node = self.mesh.cluster.islands[0].node
        ranks = min(node.devices, layout.num_ranks)
        rates = HostRates(
            copy_gb_s=node.copies_gb_s,
            read_gb_s=node.read_gb_s / ranks,
            flops=node.product_flops / ranks,
            latency_us=COPY_US,
        )
        return divided(found, (len(found) - 1,), self.plan.serving.host_share, rates)

    def tokenwise(self, kind: int, tokens: int, most: int = 0) -> list[Entry]:
        """Return the operators of a layer on so many tokens, in order, without what mixes them. `most` of them are of
        the attention group that has most (0: its part)."""
        layer, serving = self.model.layer(kind), self.plan.serving
        tokens *= 1 if kind == EMBEDDING else serving.streams
        own = self.context(most * self.plan.layout.adp or tokens)
        if kind == EMBEDDING:
            pieces = served_ends.embedding(own, layer, self.mesh.group())
            if self.spread.stays:
                pieces.append(served_experts.context_gather(own, self.kv_bytes(0), self.mesh.group("tp")))
            return served_ends.summed(_chained(program(pieces, "F")), serving.sums)
        pieces = served_ends.reordered(own, served_latent.beside(own, layer, self._block(layer, own, tokens)))
        found = served_ends.summed(_chained(program(pieces, "F")), serving.sums)
        return rewritten(found, (len(found) - 1,), self.plan.overlap)

    def _block(self, block: Block, own: Context, tokens: int) -> list[Piece]:
        """Return the pieces of a block; experts are those of the busiest rank, and their outputs summed once."""
        moe = block.mlp
        if isinstance(moe, Moe):
            attention = layers.of(block).pieces(own, msgspec.structs.replace(block, mlp=None))
            groups = self.mesh.group("tp"), self._beside
            routed = -(-tokens // own.plan.layout.cp)
            experts = served_experts.pieces(own, routed, moe, self.spread, groups, self.routing)
            return [*attention, *normed(own, block, "mlp", experts)]
        if self.plan.layout.adp == 1 or self.model.mixtures or moe is None:
            return layers.of(block).pieces(own, block)
        return self._shared_mlp(own, block, tokens)

    def _shared_mlp(self, own: Context, block: Block, tokens: int) -> list[Piece]:
        """Return the pieces of a block whose MLP all attention groups share: their tokens are gathered in front of it,
        and its sums scattered to them behind."""
        attention = layers.of(block).pieces(own, msgspec.structs.replace(block, mlp=None))
        everyone = self.mesh.group("tp")
        c = self._context(tokens, self._whole, everyone)
        size = float(c.tokens) * c.hidden * c.element
        gather = Collective(op="all_gather", num_bytes=size, group=self._beside)
        scatter = Collective(op="reduce_scatter", num_bytes=size, group=everyone)
        mlp = layers.of(block.mlp).pieces(c, block.mlp)
        body = [p for p in mlp if not isinstance(p.forward, Collective)]
        exchanged = [Piece(name="mlp gather", forward=gather, queue="tp"), *body]
        exchanged.append(Piece(name="mlp scatter", forward=scatter, queue="tp"))
        if own.tp > 1:
            again = Collective(op="all_gather", num_bytes=own.tokens * own.hidden * own.element, group=own.tp_group)
            exchanged.append(Piece(name="mlp tokens gather", forward=again, queue="tp"))
        return [*attention, *normed(own, block, "mlp", exchanged)]

    def head(self, tokens: int) -> list[Entry]:
        """Return the operators that turn the last hidden states of so many requests into tokens, or into what an
        encoder answers: a vector, or scores of classes."""
        c, head = self.context(tokens), self.model.head
        if c.causal:
            joined = served_ends.joined(c, self.plan.serving.streams)
            return program([*joined, *served_ends.scores(c, head, self.mesh.group())], "F")
        pieces = [norm(c, "final norm")]
        if getattr(head, "pooler", -1) not in (-1, False):
            pieces += linear(c, "pooler", c.hidden, c.hidden, bias=True)
        classes = head.rows if getattr(head, "pooled", False) else getattr(head, "width", 0)
        if classes:
            pieces += linear(c, "head", classes, c.hidden)
        return program(pieces, "F")

    def send(self, tokens: int) -> Collective | None:
        """Return the message of hidden states to the next pipeline stage; None where there is none."""
        if self.plan.layout.pp == 1:
            return None
        c = self.context(tokens)
        pair = self.mesh.pair(0, self.plan.layout.stride("pp"))
        return Collective(op="send", num_bytes=tokens * c.hidden * c.element, group=pair)

    @cached_property
    def mixing(self) -> tuple[Mixing, ...]:
        """The distinct kinds of what mixes a request's tokens, and how many layers have each."""
        return mixings(self._one, self.model.blocks, self.model.layers_by_kind)

    def cores(self, mixing: Mixing, batch: int, new: int, past: int) -> list[Entry]:
        """Return the tasks that mix the tokens of `batch` requests, `new` of each behind `past` others, on a rank of
        the attention group that has most of them."""
        group = -(-batch // self.plan.layout.adp)
        return self._cores(mixing, group, new, past)

    def _cores(self, mixing: Mixing, group: int, new: int, past: int) -> list[Entry]:
        streams, low = self.plan.serving.streams, KV_BYTES[self.kv] < 2
        if streams > 1:
            past += STREAM_PREFIX
        if not self._read_once(mixing, new, past):
            least = SPARSE_HEADS.get(self.mesh.cluster.islands[0].device.architecture, 1)
            said = {"low": low, "unfused": self.unfused, "sparse_heads": least}
            return entries(self._one, mixing, group * streams, new, past, **said)
        cores = self.mesh.cluster.islands[0].device.num_sms
        own = entries(self._one, mixing, group, new, past - self.shared, low=low, unfused=self.unfused)
        return [*own, *prefix_once(self._one, mixing, group, self.shared, len(own), cores)]

    def _read_once(self, mixing: Mixing, new: int, past: int) -> bool:
        """Whether decoding reads a prefix that all requests share once for all of them."""
        spec = mixing.spec
        return (
            self.plan.serving.prefix == "once"
            and new == 1
            and spec is not None
            and not (spec.window or spec.index_top_k or spec.kv_lora_rank)
            and 0 < self.shared <= past
        )

    @cached_property
    def _one(self) -> Context:
        return self.context(1)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of the layers of every pipeline stage, with the embedding and the head."""
        held = [[self.model.pattern[layer] for layer in stage] for stage in stage_layers(self.plan, self.model)]
        return tuple(
            (*((EMBEDDING,) if i == 0 else ()), *kinds, *((HEAD,) if i == len(held) - 1 else ()))
            for i, kinds in enumerate(held)
        )

    def weight_bytes(self, stage: int) -> float:
        """Return the bytes of the weights that a rank of a stage holds; those multiplied below 16 bits, and those
        stored so, take what their format does. Of layers that are streamed it has room for a few."""
        serving, c = self.plan.serving, self._one
        ends = sum(self._held_bytes(self.model.layer(kind)) for kind in self.stages[stage] if kind < 0)
        each = self.block_bytes(stage)
        held = ends + (max(each) * (serving.slots + serving.resident) if serving.stream else sum(each))
        if serving.streams > 1:
            prefixes = serving.streams * STREAM_PREFIX * self.kv_bytes(stage) / serving.streams
            held += served_ends.joined_bytes(c.hidden, serving.streams, c.element) + prefixes
        return held

    def block_bytes(self, stage: int) -> list[float]:
        """Return the bytes of the weights of every block of a stage on a rank, wherever they are kept."""
        return [self._held_bytes(self.model.layer(kind)) for kind in self.stages[stage] if kind >= 0]

    def streamed_bytes(self, stage: int) -> float:
        """Return the bytes of weights that come to a rank of a stage in every iteration."""
        serving, each = self.plan.serving, self.block_bytes(stage)
        return sum(each) * (1 - serving.resident / len(each)) if serving.stream else 0.0

    def _held_bytes(self, layer: msgspec.Struct) -> float:
        c, precision = self._one, self.plan.precision
        dense = min(c.element, multiplied_bytes(self.train.dtype))
        if precision.weights:
            dense = WEIGHT_BYTES[precision.weights]
        expert = WEIGHT_BYTES[precision.experts_format] if precision.experts_format else dense
        parts = [layer]
        if isinstance(layer, Block) and layer.mlp is not None:
            parts = [msgspec.structs.replace(layer, mlp=None), layer.mlp]
        total = 0.0
        for part in parts:
            held = layers.of(part).params(part, self._ends(part))
            shared = isinstance(part, Dense) and not self.model.mixtures
            split = held.split / (self.plan.layout.tp if shared else self._ends(part).tp)
            total += held.whole * c.element + (split + held.extra) * (dense if held.low else c.element)
            total += held.expert / (self.spread.ep * self.spread.etp) * expert
        return total

    def _ends(self, part: msgspec.Struct) -> Context:
        """Return the ranks that share a part's parameters: one alone has a table that is not split, and the head on the
        rank with the table."""
        tables = self.plan.serving.tables
        whole = (isinstance(part, Embedding) and tables != "split") or (isinstance(part, Head) and tables == "master")
        return served_ends.alone(self._one, self.mesh.group()) if whole else self._one

    def request_bytes(self, stage: int, tokens: float) -> float:
        """Return the bytes that a rank of a stage keeps of a request of so many tokens: what its attention sees again,
        and the states of its scans. Of several attention groups one keeps it: this is the mean over them."""
        kept = sum(self.layer_bytes(kind, tokens) for kind in self.stages[stage] if kind >= 0)
        groups = 1 if self.spread.stays else self.plan.layout.adp  # where tokens wander all ranks have all
        return kept * self.plan.serving.streams / groups

    def layer_bytes(self, kind: int, tokens: float) -> float:
        """Return the bytes that a rank of the attention group which has a request keeps of it in a layer."""
        return kept_bytes(self._one, self.model.blocks[kind], tokens, KV_BYTES[self.kv])

    def kv_bytes(self, stage: int) -> float:
        """Return the bytes that a rank of a stage keeps of a request's first token beside its state."""
        return self.request_bytes(stage, 1.0) - self.request_bytes(stage, 0.0)

    def workspace_bytes(self, tokens: int, sampled: int) -> float:
        """Return the most bytes that an iteration's activations take: the two widest results of a layer beside the
        hidden states and their copy, or the scores over the vocabulary in 16 and 32 bits."""
        c = self.context(max(1, tokens))
        widest = 0.0
        for block in self.model.blocks:
            outputs = sorted((sum(p.outputs) for p in self._block(block, c, max(1, tokens))), reverse=True)
            widest = max(widest, sum(outputs[:2]))
        hidden = 2.0 * c.tokens * c.hidden * c.element
        mine = -(-sampled // self.plan.layout.adp)
        return max(hidden + widest, hidden + mine * self.model.vocab * (4.0 + c.element))


def _chained(found: list[Entry]) -> list[Entry]:
    """Return the entries without those that mix tokens, each after the one before it, so that these leave no gap; what
    is summed of several streams stays beside what does not wait for it."""
    kept = [e for e in found if not isinstance(e.work, MIXED)]
    if kept and kept[0].name == "sum of streams":
        read = next(i for i, e in enumerate(kept) if e.name == "sum of streams residual")
        before = [e._replace(after=(i - 1,) if i > 1 else ()) for i, e in enumerate(kept)]
        before[read] = before[read]._replace(after=(0, read - 1))
        return before
    return [e._replace(after=(i - 1,) if i else ()) for i, e in enumerate(kept)]
