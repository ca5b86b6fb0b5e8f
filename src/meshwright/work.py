"""Work items: the work of one task as dimensions, before anyone says how long it takes.

Lowering writes them, the cost chain prices them, and equal items share one price: they are hashable values.
Dimensions are per rank, after sharding. ``dtype`` is the compute precision (``spec/workload.py``).
"""

from __future__ import annotations

import msgspec

from meshwright.spec.workload import DTYPE_BYTES, WEIGHT_BYTES, multiplied_bytes


class Gemm(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """``batch`` products C[m, n] = A[m, k] B[k, n]. ``out_bytes`` per element of C; ``accumulate`` adds to C.

    ``bias``: a vector is ``added`` to the rows of C, or its gradient ``summed`` over those that are multiplied (k of
    them); GPU libraries do either in the product.

    One of ``slices`` equal slices of a larger product along m, issued on several streams as Transformer Engine and
    PyTorch's asynchronous tensor parallelism do: blocks of the next slice fill what a slice's last wave leaves idle.

    ``fixed``: B is random and never changes, so that light may multiply by it
    (:class:`~meshwright.spec.hardware.Optics`).

    ``weights``: B is stored in a quantised format and made operands of ``dtype`` in registers, as MARLIN does ("": it
    is stored as it is multiplied).

    ``read`` is the share of A's numbers that lie in memory, where the product makes A of them as it goes: the taps of a
    convolution overlap (an implicit product, Chetlur et al., 2014, cuDNN, arXiv 1410.0759).
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    out_bytes: float = 2.0
    accumulate: bool = False
    bias: str = ""
    slices: int = 1
    weights: str = ""
    fixed: bool = False
    read: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def num_bytes(self) -> float:
        """Bytes that must cross device memory at least once."""
        operand = DTYPE_BYTES[self.dtype] * self.m * self.k * self.read + weight_bytes(self) * self.k * self.n
        return self.batch * (operand + self.out_bytes * self.m * self.n * (2 if self.accumulate else 1))


class GroupedGemm(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One product per local expert: ``rows`` tokens in all, spread over ``groups`` weights [k, n].

    The busiest rank holds ``imbalance`` times the mean (already in ``rows`` of the pricing, not here). ``weights`` as
    of :class:`Gemm`."""

    groups: int
    rows: int
    n: int
    k: int
    dtype: str = "bf16"
    imbalance: float = 1.0
    out_bytes: float = 2.0
    weight_gradient: bool = False
    weights: str = ""

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.imbalance * self.n * self.k

    @property
    def num_bytes(self) -> float:
        element = DTYPE_BYTES[self.dtype]
        rows = self.rows * self.imbalance
        weights = self.groups * self.n * self.k * (self.out_bytes if self.weight_gradient else weight_bytes(self))
        return weights + rows * (self.k * element + self.n * (element if self.weight_gradient else self.out_bytes))


class AttentionCore(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The attention core of ``batch`` sequences: scores, softmax, weighted sum, fused (FlashAttention,
    Dao 2307.08691). ``pairs`` is the number of (query, key) pairs per head and sequence that a mask leaves; ``batch`` a
    rank's mean where each sequence is on one of several."""

    batch: float
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    pairs: float
    dtype: str = "bf16"
    backward: bool = False

    @property
    def flops(self) -> float:
        """Two products forward; five backward (the scores are recomputed)."""
        qk, pv = 2.0 * self.head_dim, 2.0 * self.v_head_dim
        per_pair = 3 * qk + 2 * pv if self.backward else qk + pv
        return self.batch * self.heads * self.pairs * per_pair

    @property
    def num_bytes(self) -> float:
        q = self.q_len * self.heads * (self.head_dim + self.v_head_dim)
        kv = self.kv_len * self.kv_heads * (self.head_dim + self.v_head_dim)
        stored = 1.0 if DTYPE_BYTES[self.dtype] < 2 else 2.0  # a cache in 8 bits, multiplied as it is
        return self.batch * (2.0 * q + stored * kv) * (2.5 if self.backward else 1.0)


class VarlenAttention(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One attention kernel over documents of several lengths (FlashAttention's variable-length form): ``groups`` of
    equal ones, each a count (``batch``), queries and keys."""

    groups: tuple[AttentionCore, ...]

    @property
    def flops(self) -> float:
        return sum(group.flops for group in self.groups)

    @property
    def num_bytes(self) -> float:
        return sum(group.num_bytes for group in self.groups)


#: The operator that adds a block of ring attention to the results of the blocks before it.
RING_MERGE = "ring merge"
#: The operators that sort tokens by expert, and back.
PERMUTE = "permute"
#: The operator that makes sequences contiguous for a kernel, of activations whose first dim is the sequence's.
SEQUENCES_TOGETHER = "sequences together"


class Scores(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Stored scores of attention that a softmax is over: ``batch`` (rows of a microbatch times a rank's heads) matrices
    of ``queries`` x ``keys``; ``backward``: their gradients."""

    batch: int
    queries: int
    keys: int
    backward: bool = False


class Elementwise(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Memory-bound kernels: bytes read and written when pointwise chains are fused, and how many kernels share them.
    ``fused``: that is what runs, whatever the framework does elsewhere (the optimizer, quantisation). ``operator``:
    which of a model's operators this is (``rmsnorm``, ``rmsnorm backward``), for those who timed it; "" for none.
    ``scores``: those that it masks and takes the softmax of, among the rest."""

    num_bytes: float
    kernels: int = 1
    fused: bool = False
    operator: str = ""
    scores: Scores | None = None


class MeasuredBusBandwidth(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Measured bus bandwidths of collectives over every device under a level, by operation, in GB/s as nccl-tests
    counts them: of messages of ``REACHED_BYTES`` over ``ranks`` on ``nodes``, whose ports have ``gb_s``."""

    ranks: int
    nodes: int
    gb_s: float
    busbw_gb_s: tuple[tuple[str, float], ...]


#: Size of the buffer that measured bus bandwidths are of.
REACHED_BYTES = float(2**28)


class Hop(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One level a group of ranks spans. ``members`` children take part; ``gb_s`` is what one child's port gives
    this group, per direction, when all sibling groups send too; ``below`` group members sit under each child;
    ``reached`` is what was measured over this level or one that holds it, if anything was; ``steps`` is what a ring's
    step takes over what it would on idle nodes; ``messages`` pass the busiest child's whole port where ranks send to
    some others alone. Where the network's switches are described (``wired``), ``ringed`` and ``exchanged`` are how many
    times as long as a port the busiest link between switches takes, in a ring and in an all-to-all, and ``forwarded``
    is the share of what an all-to-all sends between nodes that is passed on inside a node first.
    ``carried`` is what the busiest child's port carries of an uneven exchange over that of an even one. ``children``
    has the level, members or not, where they share a host's bridges; else 0."""

    name: str
    members: int
    gb_s: float
    latency_us: float
    below: int
    topology: str
    reduces: bool = False
    scale_out: bool = False
    reached: MeasuredBusBandwidth | None = None
    steps: float = 1.0
    messages: float = 0.0
    wired: bool = False
    ringed: float = 1.0
    exchanged: float = 1.0
    forwarded: float = 0.0
    carried: float = 1.0
    children: int = 0


class HostLinks(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The links of one host over which sums of its devices are made in its memory: ``devices`` of it sum at the same
    time, ``members`` of them one buffer, in which ``paired`` have links of their own. Bandwidths in 1e9 bytes/s:
    ``copy_gb_s`` of one device each way, ``root_gb_s`` of one device's share of a root port, both ways together (0: no
    limit), ``memory_gb_s`` of the memory in all ``numa_nodes``, ``nic_gb_s`` of all network ports each way."""

    devices: int
    members: int
    paired: int
    copy_gb_s: float
    root_gb_s: float
    memory_gb_s: float
    numa_nodes: int
    nic_gb_s: float


class Group(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The ranks of one collective, as the levels they span from the inside out; where each sends to some others alone,
    ``fan`` of them at most; ``host``: the links of each host, where it goes through the host's memory."""

    size: int
    hops: tuple[Hop, ...]
    fan: float = 0.0
    host: HostLinks | None = None


class Routed(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The tokens that an all_to_all carries: every rank's ``tokens`` of ``hidden`` values, a copy for each of ``top_k``
    of ``experts`` spread evenly over the group; ``phase``: on their way there (``dispatch``) or back (``combine``)."""

    phase: str
    tokens: int
    hidden: int
    top_k: int
    experts: int


#: The operation of an all-reduce that hosts add up in their memory.
HOST_REDUCE = "host_reduce"


class Collective(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One collective. ``num_bytes`` is the size as nccl-tests counts it: all_reduce, host_reduce (an all-reduce that
    hosts add up), send and pushed (a message that memory starts): one rank's buffer; relay, in which a message goes
    from rank to rank: that message; hops, in which every rank sends one to the next at the same time, as often as there
    are others: one of these; all_gather, and gather_in_place, whose blocks lie where the result is to be: the gathered
    output; reduce_scatter: the input; all_to_all: one rank's send buffer; neighbours: one message of those that ranks
    send to the others that they meet. ``back_bytes`` go the other way at the same time, over links that carry both.
    ``routed``: what is sent are tokens on their way between experts, which libraries made for that may send fewer
    copies of. ``plain``: by the library of collectives at every size, where an engine has kernels of its own for small
    sums."""

    op: str
    num_bytes: float
    group: Group
    routed: Routed | None = None
    back_bytes: float = 0.0
    plain: bool = False


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """The copies around an exchange of fully sharded parameters, with the bookkeeping (torch's FSDP2 copy-in and
    copy-out): for a ``gather`` from shards into a buffer and from there into parameters, for a ``reduce`` from
    gradients into a buffer. And what surrounds the update of a ``step`` that moves so many bytes: the gradient's norm,
    masters into the parameters that the forward reads, the next batch."""

    what: str
    num_bytes: float


class TierCopy(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """State moved between tiers of memory, or streamed through by the host's processor, one ``way``: ``h2d``, ``d2h``,
    ``nvme_read``, ``nvme_write`` or ``host``. ``gb_s`` is what one rank has of the link, in 1e9 bytes/s, and
    ``latency_us`` what a transfer takes to begin. ``saved``: what moves are tensors saved for the backward, of which a
    framework may have more than fused kernels do."""

    num_bytes: float
    gb_s: float
    latency_us: float
    way: str
    saved: bool = False


class HostProduct(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Some columns of a product that the host's processors compute where the weights lie, which they read at ``gb_s``
    (1e9 bytes/s) and multiply at ``flops_s`` operations a second."""

    product: Gemm
    gb_s: float
    flops_s: float

    @property
    def flops(self) -> float:
        return self.product.flops

    @property
    def seconds(self) -> float:
        """Until the weights are read or the operations done, whichever takes longer."""
        read = self.product.k * self.product.n * weight_bytes(self.product) / (self.gb_s * 1e9)
        return max(read, self.flops / self.flops_s)


class Scan(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One sequence-mixing kernel whose state has a fixed size, over ``batch`` sequences of ``seq_len`` tokens.

    ``rule``: ``ssd`` (Mamba-2, 2405.21060), ``delta`` (gated delta rule, 2412.06464), both of ``heads`` matrices of
    ``k_dim`` x ``v_dim`` numbers that are multiplied ``chunk`` tokens at a time; ``selective`` (Mamba, 2312.00752), of
    ``heads`` channels with ``k_dim`` numbers each, token by token on the vector units. ``groups`` of heads share keys.
    """

    rule: str
    batch: int
    seq_len: int
    heads: int
    groups: int
    k_dim: int
    v_dim: int
    chunk: int
    backward: bool = False

    @property
    def flops(self) -> float:
        """Operations of the algorithm by chunks, products within a chunk in full; a backward is two and a half."""
        q, k, v = self.chunk, self.k_dim, self.v_dim
        if self.seq_len == 1:  # decay, an outer product, a product with the query: seven operations for each number
            each = 7.0 * k * v
        elif self.rule == "selective":
            each = 9.0 * k
        elif self.rule == "ssd":
            each = 2.0 * q * v + 4.0 * k * v + 2.0 * q * k * self.groups / self.heads
        else:  # keys with keys, the triangular inverse on keys and values, queries with keys, values; three with states
            each = 2.0 * q * (3 * k + 2 * v) + 6.0 * k * v
        return self.batch * self.seq_len * self.heads * each * (2.5 if self.backward else 1.0)

    @property
    def num_bytes(self) -> float:
        """Bytes that cross device memory: inputs, outputs and, chunk by chunk, the states in fp32."""
        tokens = float(self.batch) * self.seq_len
        moved = tokens * 2.0 * (2 * self.groups * self.k_dim + 2 * self.heads * self.v_dim + 2 * self.heads)
        states = 0.0 if self.rule == "selective" else tokens / self.chunk * self.heads * self.k_dim * self.v_dim * 8.0
        if self.seq_len == 1:  # one step: every sequence's state is read and written
            states = self.batch * self.heads * self.k_dim * self.v_dim * 8.0
        return (moved + states) * (2.5 if self.backward else 1.0)


class Convolution(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A short causal convolution of every channel by itself, and its activation: ``kernel`` taps over ``batch``
    sequences of ``seq_len`` tokens of ``channels``."""

    batch: int
    seq_len: int
    channels: int
    kernel: int
    backward: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.seq_len * self.channels * self.kernel * (2.0 if self.backward else 1.0)

    @property
    def num_bytes(self) -> float:
        """Bytes read and written in 16 bits: input and output forward, twice as many backward. A single token also
        reads the tokens before it that the sequence keeps, and moves them on."""
        kept = 2.0 * (self.kernel - 1) if self.seq_len == 1 else 0.0
        return self.batch * self.seq_len * self.channels * 2.0 * ((4.0 if self.backward else 2.0) + kept)


Work = (
    Scan
    | Convolution
    | Gemm
    | GroupedGemm
    | AttentionCore
    | VarlenAttention
    | Elementwise
    | Collective
    | Staging
    | TierCopy
    | HostProduct
)


def weight_bytes(work: Gemm | GroupedGemm) -> float:
    """Return the bytes of one weight of a product as they cross device memory."""
    return WEIGHT_BYTES[work.weights] if work.weights else multiplied_bytes(work.dtype)


def attended_pairs(q_len: int, context: float, *, causal: bool, window: int = 0, chunked: bool = False) -> float:
    """(query, key) pairs per head of a sequence of `q_len` tokens made of documents of `context` tokens on average
    (by token): causal q*c/2, bidirectional q*c; a sliding window w of causal attention q*w - w*w/2.
    """
    context = min(float(q_len), context) if context else float(q_len)
    if window and window < context:
        if chunked:
            return q_len * (window + 1) / 2
        documents = q_len / context
        return documents * (context * window - window * (window - 1) / 2)
    return q_len * (context + 1) / 2 if causal else q_len * context


def pairs(q_len: float, kv_len: float, *, causal: bool, window: float) -> float:
    """(query, key) pairs of the last `q_len` of `kv_len` tokens under a mask; a window w leaves each query w keys."""
    if not causal:
        return q_len * kv_len
    cached = kv_len - q_len
    if window <= 0 or window >= kv_len:
        return q_len * cached + q_len * (q_len + 1) / 2
    short = max(0.0, min(q_len, window - cached))  # queries that see fewer keys than the window
    return short * cached + short * (short + 1) / 2 + (q_len - short) * window
