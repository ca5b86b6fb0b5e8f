"""Pieces: a layer written once, forward, with what its backward needs.

A piece is a kernel or a collective of the forward together with its input gradient (B), its weight gradient (W)
and the bytes it leaves for them. Every pass of a layer is read off the same list (``lower/layer.py``), so
forward, backward, recompute and memory cannot disagree.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.spec import naming
from meshwright.spec.ends import Stream
from meshwright.spec.items import Batch, along, document, num_tokens, runs_along
from meshwright.spec.layers import Moe
from meshwright.spec.model import Model
from meshwright.spec.workload import DTYPE_BYTES, FROZEN_BYTES, Train
from meshwright.work import Collective, Elementwise, Gemm, Group, Work

if TYPE_CHECKING:
    from meshwright.layers.routed import ExpertLoad
    from meshwright.plan import Plan


class RingMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a ring: ``first`` before the second block, ``each`` before every later one, and ``last`` behind the
    last block, where something has to come home; all on a ``queue``."""

    first: Collective
    each: Collective
    last: Collective | None = None
    queue: str = "cp"


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a layer: its work forward and backward, and the bytes it saves.

    ``queue`` is the queue it runs on. ``saved`` bytes live from F to the end of the backward, ``logits`` of them scores
    over the vocabulary; ``held`` of them (GEMM inputs) until W, and ``gradient`` bytes (GEMM output gradients) from B
    to W. ``core`` marks a piece that selective recompute does not save and recomputes. ``working`` is the workspace of
    its backward in bytes, None where it is as large as ``saved``. ``outputs`` are the bytes of the results of its
    matrix products one by one (q, k and v are three), or of an attention core that never stores its scores: those that
    recompute by operators may save. ``regather`` rebuilds a sequence-sharded GEMM input for W (Korthikanti et al.
    2205.05198). ``ring`` > 1 cuts the piece into that many blocks, each waiting for a message of ``exchange`` (forward)
    or ``exchange_back``; what a later block adds to the results of those before it takes ``merge`` or ``merge_back``.
    ``joins`` marks a collective that may be sliced with the GEMM next to it; ``lands``
    the way (forward, backward) in which the piece is the first to read what a collective behind a part of a layer
    sums. What is ``early`` begins with the pass and is waited for where it stands; its backward is waited for by
    nothing. Neighbouring pieces of so many ``portions`` take each portion of their tokens one after the other,
    exchanges of some beside products of others. What ``opens`` something is waited for where a piece ``closes``
    it, and its backward begins there. ``brought`` bytes of a collective's result are kept where the layer
    is recomputed, 0 where it is exchanged again.
    """

    name: str
    forward: Work | None = None
    backward: Work | None = None
    weight: Work | None = None
    regather: Collective | None = None
    queue: str = "compute"
    saved: float = 0.0
    logits: float = 0.0
    held: float = 0.0
    gradient: float = 0.0
    working: float | None = None
    core: bool = False
    core_saved: float = 0.0
    outputs: tuple[float, ...] = ()
    ring: int = 1
    exchange: RingMoves | None = None
    exchange_back: RingMoves | None = None
    merge: Work | None = None
    merge_back: Work | None = None
    joins: bool = False
    lands: str = ""
    early: bool = False
    opens: str = ""
    closes: str = ""
    portions: int = 1
    brought: float = 0.0


def fused(pieces: list[Piece]) -> list[Piece]:
    """Return pieces whose norms, rotations and activations are fused, whatever the framework has them as."""

    def one(work: Any) -> Any:
        if not isinstance(work, Elementwise):
            return work
        return msgspec.structs.replace(work, fused=True, operator="")

    def made(piece: Piece) -> Piece:
        if piece.name != "rotary" and not piece.name.endswith(("norm", "activation")):
            return piece
        return msgspec.structs.replace(piece, forward=one(piece.forward), backward=one(piece.backward))

    return [made(piece) for piece in pieces]


def locked(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a layer whose parameters are not trained while gradients pass it: there are none of weights,
    and what only those would read is not kept."""
    none = {"weight": None, "regather": None, "held": 0.0, "gradient": 0.0}
    return [msgspec.structs.replace(piece, saved=piece.saved - piece.held, **none) for piece in pieces]


def keeping(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of a layer whose recomputation keeps what collectives brought in the first forward."""
    out = []
    for piece in pieces:
        work = piece.forward
        if isinstance(work, Collective):
            part = work.group.size if work.op == "reduce_scatter" else 1
            piece = msgspec.structs.replace(piece, brought=work.num_bytes / part)
        out.append(piece)
    return out


class Context(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The sizes per rank and the groups from which a layer's pieces are built; of the context-parallel ranks,
    ``cp_inner`` swap heads and ``cp_outer`` exchange keys and values. Where experts' tokens are exchanged in two steps,
    ``ep_inner`` do so first and then ``ep_outer``.

    ``batch``: the items of one microbatch over all context-parallel ranks; nothing else says how long sequences are.
    ``hidden`` is the width of the hidden states and ``causal`` whether a token sees no later one; all three are of the
    stream of tokens that the layer works on, and ``workload`` are the items of the streams that the workload fills.
    ``shares``: where a rank is in groups that share documents of their own, the same ranks at work on those of each
    group; the batch is then the tokens of one rank. ``tokens`` of the batch on a rank inside tensor-parallel regions,
    ``shard_tokens`` outside (divided by tp under sequence parallelism); ``element`` bytes of an activation.
    ``runs``: each row is so many runs of tokens that attend to themselves alone (a video's, over one of its dims).
    ``ends_meet``: the first and the last stage are on one rank, so that a shared table is there once. ``lowered``: the
    products, by the names of their pieces, that the layer multiplies in ``lowered_dtype``.
    """

    model: Model
    plan: Plan
    train: Train
    batch: Batch
    tp_group: Group
    cp_inner: Group
    cp_outer: Group
    ep_group: Group
    etp_group: Group
    ep_inner: Group
    ep_outer: Group
    hidden: int
    causal: bool
    dp_group: Group = Group(size=1, hops=())
    workload: Batch = ()
    runs: int = 1
    ends_meet: bool = True
    shares: tuple[Context, ...] = ()
    lowered: tuple[str, ...] = ()
    lowered_dtype: str = ""

    @classmethod
    def of(cls, stream: int, batch: Batch, model: Model, plan: Plan, train: Train, **fields: Any) -> Context:
        """Return the context of ranks at work on a stream of a model's tokens, for a microbatch of the workload."""
        flow = model.flows[stream]
        fields["batch"] = _items(flow, batch, plan)
        fields |= {"hidden": flow.hidden, "causal": train.causal and flow.causal, "workload": batch}
        return cls(model=model, plan=plan, train=train, **fields)

    def at(self, stream: int) -> Context:
        """Return the same ranks at work on another stream of the model's tokens."""
        flow = self.model.flows[stream]
        batch = _items(flow, self.workload, self.plan)
        if (flow.hidden, self.train.causal and flow.causal, batch) == (self.hidden, self.causal, self.batch):
            return self
        causal = self.train.causal and flow.causal
        return msgspec.structs.replace(self, hidden=flow.hidden, causal=causal, batch=batch)

    def along(self, dim: str, ranks: int = 1) -> Context:
        """Return the same ranks at attention over one dim of a video; each of `ranks` ranks has its share of the runs
        whole."""
        ((item, _),) = self.batch
        batch = tuple((run, count // ranks) for run, count in along(self.batch, dim))
        return msgspec.structs.replace(self, batch=batch, runs=runs_along(item, dim) // ranks)

    def sequences_only(self) -> Context:
        """Return the same ranks at work on one token of each sequence."""
        one = document(self.plan.layout.cp)
        return msgspec.structs.replace(self, batch=((one, self.plan.pipeline.microbatch),))

    @property
    def groups(self) -> tuple[Group, ...]:
        return (
            self.tp_group,
            self.cp_inner,
            self.cp_outer,
            self.ep_group,
            self.etp_group,
            self.ep_inner,
            self.ep_outer,
        )

    @cached_property
    def seq_len(self) -> int:
        """Tokens of one row of the microbatch, over all context-parallel ranks."""
        return num_tokens(self.batch) // self.rows

    @property
    def rows(self) -> int:
        """Rows of the microbatch, or the runs that they are made of, each attended to for itself."""
        return self.train.rows(self.plan.pipeline.microbatch) * self.runs

    @cached_property
    def tokens(self) -> int:
        return num_tokens(self.batch) // self.plan.layout.cp

    @property
    def shard_tokens(self) -> float:
        return self.tokens / self.plan.layout.tp if self.sp else float(self.tokens)

    @property
    def routed_tokens(self) -> int:
        """Tokens that this rank routes: of those that tensor-parallel ranks hold alike its part, unless all send
        all."""
        alike = self.tp > 1 and not self.sp and self.plan.experts.duplicates == "dropped"
        return int(self.tokens / self.tp if alike else self.shard_tokens)

    def load(self, spec: Moe) -> ExpertLoad:
        """Return how the tokens of these ranks load the experts of a mixture."""
        from meshwright.layers.routed import load_of  # needs numpy, which no --help does

        steps = (self.ep_inner, self.ep_outer) if self.plan.experts.ep_inner > 1 else ()
        return load_of(self.model, self.plan, self.train, spec, self.routed_tokens, self.ep_group, steps)

    @property
    def tp(self) -> int:
        return self.plan.layout.tp

    @property
    def sp(self) -> bool:
        # ranks that each have a stream of their own share no tokens between regions
        return self.plan.layout.sp and self.plan.layout.tp > 1 and self.model.blocks[0].ways == 1

    @property
    def dtype(self) -> str:
        return self.plan.precision.compute or self.train.dtype

    @property
    def element(self) -> float:
        return 4.0 if self.dtype == "fp32" else 2.0

    @property
    def low(self) -> float:
        """Return the bytes of an element of a product's operand: 1 in fp8, half in fp4."""
        return DTYPE_BYTES[self.dtype]

    @property
    def low_or_element(self) -> float:
        """Return the bytes of an element of an output gradient that is held for W: below 16 bits its quantised copy."""
        return min(self.low, self.element)

    @property
    def attention_dtype(self) -> str:
        """The attention core stays in 16 bits when matrix products go lower."""
        return self.dtype if self.dtype in ("fp32", "fp16") else "bf16"


def _items(flow: Stream, batch: Batch, plan: Plan) -> Batch:
    """Return a stream's items of a microbatch: the workload's, or one of the stream's own length for each row."""
    if not flow.tokens and not flow.scale:
        return batch
    return ((document(flow.length(batch[0][0].new_tokens)), plan.pipeline.microbatch),)


def dequantised(c: Context, name: str, num_weights: float, kernels: int = 1) -> list[Piece]:
    """The kernel that makes a frozen base's quantised weights 16 bits, forward and backward again (QLoRA, 2305.14314,
    section 3); none where weights are stored as they are multiplied."""
    stored = FROZEN_BYTES.get(c.plan.precision.params)
    if stored is None:
        return []
    work = Elementwise(num_bytes=num_weights * (stored + c.element), kernels=kernels, fused=True)
    return [Piece(name=f"{name} dequantise", forward=work, backward=work, working=num_weights * c.element)]


def linear(
    c: Context,
    name: str,
    n: int,
    k: int,
    *,
    targets: dict[str, int] | None = None,
    bias: bool = False,
    rows: int | None = None,
    **saved,
) -> list[Piece]:
    """A projection of a microbatch's tokens (or of `rows` of them) from k to n features (per rank), with its
    quantisation below 16 bits.

    In a LoRA run the base weight is frozen (no W) and those of its parts that are targets, by name with their
    features, get two low-rank factors each. A base that is stored quantised is made 16 bits before each product, which
    in bitsandbytes keeps its input although no gradient of a frozen weight needs it.
    """
    m = int(c.tokens) if rows is None else rows
    e, dtype = c.element, c.dtype
    frozen = c.train.lora is not None
    pieces = []
    if dtype not in ("fp32", "fp16", "bf16"):
        # read 16 bits, write the quantised operand. W multiplies the transposes of the output's gradient and of the
        # input, which Transformer Engine writes beside operands: both are counted in the backward, as none serves them
        transposes = 0.0 if frozen else m * n + m * k
        pieces.append(
            Piece(
                name=f"{name} quantise",
                forward=Elementwise(num_bytes=m * k * (e + 1), fused=True),
                backward=Elementwise(num_bytes=m * n * (e + 1) + transposes, fused=True),
            )
        )
        # what stays for W is the quantised operand, not the 16-bit one
        saved = {field: size * c.low / e for field, size in saved.items()}
    out_bytes = e
    if name in c.lowered:
        # operands are cast for a product, and its result and the input's gradient back
        dtype, out_bytes = c.lowered_dtype, DTYPE_BYTES[c.lowered_dtype]
        each = e + out_bytes
        cast = Elementwise(num_bytes=(m * k + n * k + m * n) * each, kernels=3)
        kept = {field: size * out_bytes / e for field, size in saved.items()}
        # the weight's cast copy is kept beside its input's
        saved = kept | {"saved": kept.get("saved", 0.0) + n * k * out_bytes}
        pieces.append(Piece(name=f"{name} cast", forward=cast, backward=cast))
    pieces += dequantised(c, name, n * k)
    grads = 4.0 if c.plan.precision.grads == "fp32" else 2.0
    summed = "summed" if bias else ""
    gradient = Gemm(m=k, n=n, k=m, dtype=dtype, out_bytes=grads, accumulate=True, bias=summed)
    pieces.append(
        Piece(
            name=name,
            forward=Gemm(
                m=m,
                n=n,
                k=k,
                dtype=dtype,
                out_bytes=out_bytes,
                bias="added" if bias else "",
                weights=c.plan.precision.weights,
            ),
            backward=Gemm(m=m, n=k, k=n, dtype=dtype, out_bytes=out_bytes),
            weight=None if frozen else gradient,
            gradient=0.0 if frozen else m * n * c.low_or_element,
            outputs=tuple(m * width * e for width in targets.values()) if targets else (m * n * e,),
            **(_kept_by_frozen(c, saved) if frozen else saved),
        )
    )
    chosen = [(part, width) for part, width in (targets or {}).items() if frozen and part in c.train.lora.targets]
    if len(chosen) > 1 and fused_targets(c.model, name):  # published as one matrix, which has one adapter
        return pieces + _adapter(c, name, m, sum(width for _, width in chosen), k, input_kept=True)
    for i, (part, width) in enumerate(chosen):
        pieces += _adapter(c, name if len(targets) == 1 else f"{name} {part}", m, width, k, input_kept=i == 0)
    return pieces


def fused_targets(model: Model, name: str) -> bool:
    """Whether a model publishes the products of a piece of this ``name`` as one matrix."""
    return (naming.fused(model)[0] and name == "qkv") or (naming.fused(model)[1] and name == "mlp up")


#: Formats of a frozen base whose products keep their inputs for the backward: bitsandbytes' ``MatMul4Bit``; unverified:
#: to 0.45, and not in every version.
KEEPS_INPUT = ("nf4", "nf4-dq")


def _kept_by_frozen(c: Context, saved: dict[str, float]) -> dict[str, float]:
    """Return what a product with a frozen weight saves of what one with a trained weight saves."""
    return {"saved": saved.get("saved", 0.0)} if c.plan.precision.params in KEEPS_INPUT else {}


def _adapter(c: Context, name: str, m: int, n: int, k: int, *, input_kept: bool) -> list[Piece]:
    """Return the two low-rank factors of an adapter. Adapters of one projection read the same input, which the first of
    them saves; with dropout each saves one of its own, and a mask of a byte an element."""
    rank, e, dtype = c.train.lora.rank, c.element, c.attention_dtype
    masked, dropped = m * k * (2 * e + 1), []
    if c.train.lora.dropout:
        work = Elementwise(num_bytes=masked)
        dropped = [Piece(name=f"{name} lora dropout", forward=work, backward=work, saved=m * k)]
        input_kept = True

    def factor(label: str, n: int, k: int, kept: float) -> Piece:
        return Piece(
            name=f"{name} lora {label}",
            forward=Gemm(m=m, n=n, k=k, dtype=dtype, out_bytes=e),
            backward=Gemm(m=m, n=k, k=n, dtype=dtype, out_bytes=e),
            weight=Gemm(m=k, n=n, k=m, dtype=dtype, out_bytes=4.0, accumulate=True),
            saved=kept,
            held=kept,
            gradient=m * n * e,
        )

    first = factor("down", rank, k, m * k * e if input_kept else 0.0)
    return [*dropped, first, factor("up", n, rank, m * rank * e)]


def regather(c: Context) -> Collective | None:
    """Return the all-gather of an entering GEMM's input for its weight gradient; None unless it is saved sharded, as
    under sequence parallelism where the plan does not keep it gathered."""
    if not c.sp or c.train.lora is not None or c.plan.memory.gathered == "kept":
        return None
    return Collective(op="all_gather", num_bytes=c.tokens * c.hidden * c.element, group=c.tp_group)


def entering(c: Context) -> float:
    """Return the bytes saved of the input of a GEMM that enters a tensor-parallel region."""
    tokens = c.tokens if c.plan.memory.gathered == "kept" else c.shard_tokens
    return tokens * c.hidden * c.element


def norm(c: Context, name: str) -> Piece:
    """LayerNorm or RMSNorm over the hidden width; its input is saved."""
    size = c.shard_tokens * c.hidden * c.element
    return Piece(
        name=name,
        forward=Elementwise(num_bytes=2 * size, operator=c.model.blocks[0].norm),
        backward=Elementwise(num_bytes=3 * size, operator=f"{c.model.blocks[0].norm} backward"),
        saved=size,
        lands="backward",
    )


def residual(c: Context, name: str) -> Piece:
    """Dropout (if any) and the residual addition, fused; backward adds the two gradients."""
    size = c.shard_tokens * c.hidden * c.element
    mask = c.shard_tokens * c.hidden if c.train.dropout else 0.0
    return Piece(
        name=name,
        forward=Elementwise(num_bytes=3 * size + mask, operator="residual"),
        backward=Elementwise(
            num_bytes=3 * size + (2 * size + mask if mask else 0.0),
            kernels=2 if mask else 1,
            operator="residual backward",
        ),
        saved=mask,
        lands="forward",
    )
