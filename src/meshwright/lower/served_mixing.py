"""Mixing of a request's tokens in a serving iteration: attention over its cache, and scans with a state.

Attention depends on how many tokens a request computes and how many are behind them; a scan (Mamba, gated delta rule)
on the first alone, as its state has a fixed size. Context-parallel ranks share a request's cache: a prompt's keys and
values go around in a ring or are gathered (Liu et al. 2310.01889; Llama 3, 2407.21783), and a decoded token's query is
gathered by all, whose partial results are merged (Infinite-LLM 2401.02669; vLLM's decode context parallelism).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshwright import layers
from meshwright.layers.attention import kv_heads
from meshwright.layers.pieces import Context
from meshwright.lower import served_latent
from meshwright.lower.entry import Entry
from meshwright.spec.layers import Attention, Block
from meshwright.spec.mixers import SharedTransformer
from meshwright.work import (
    AttentionCore,
    Collective,
    Convolution,
    Elementwise,
    Gemm,
    Scan,
    VarlenAttention,
    Work,
    pairs,
)

#: Work on a request's tokens together, which tokens one by one do not have.
MIXED = (AttentionCore, VarlenAttention, Scan, Convolution)
#: Queries of a block of attention kernels, and keys that one goes through at least where they are cut in parts.
BLOCK_QUERIES, BLOCK_KEYS = 128, 256
#: Numbers of 16 bits that lie together in 16 bytes, of which matrix units take whole ones (NVIDIA's matrix
#: multiplication guide; pad_to_multiple_of in Hugging Face's tokenizers).
VECTOR = 8
#: Bytes of a number of a scan's state: engines keep it in fp32.
STATE_BYTES = 4.0


class Mixing(NamedTuple):
    """One kind of mixing, and how many layers have it: an attention (``spec``), or the ``kernels`` of a mixer for one
    sequence of one token."""

    spec: Attention | None
    kernels: tuple[Scan | Convolution, ...]
    layers: int


def attentions(block: Block) -> tuple[Attention, ...]:
    """Return the softmax attentions of a block, those inside a shared transformer too."""
    shared = [part.attention for part in (*block.before, block.mixer) if isinstance(part, SharedTransformer)]
    return (*shared, *block.attentions)


def mixings(c: Context, blocks: tuple[Block, ...], counts: tuple[int, ...]) -> tuple[Mixing, ...]:
    """Return the distinct kinds of mixing of blocks, each there so many times, on ranks at work on one token."""
    found: dict[tuple, int] = {}
    for block, times in zip(blocks, counts):
        kinds = [(spec, ()) for spec in attentions(block)]
        if block.mixer is not None:
            made = (piece.forward for piece in layers.of(block.mixer).pieces(c, block.mixer))
            kernels = tuple(work for work in made if isinstance(work, Scan | Convolution))
            kinds += [(None, kernels)] if kernels else []
        for kind in kinds:
            found[kind] = found.get(kind, 0) + times
    return tuple(Mixing(spec, kernels, times) for (spec, kernels), times in found.items())


def sees(spec: Attention, context: int) -> int:
    """Return the earlier tokens that a query of this attention sees, itself among them; 0 where it sees all. Of a
    chunk it sees half on average."""
    window = spec.window
    if window and spec.chunked and context > window:
        window = -(-(window + 1) // 2)
    return min(n for n in (window, spec.index_top_k) if n) if window or spec.index_top_k else 0


def core(
    c: Context, spec: Attention, batch: int, new: int, past: int, *, low: bool, sparse_heads: int = 1
) -> AttentionCore:
    """Return the attention of `batch` requests that compute `new` tokens each behind `past` others, on a rank that has
    all of their cache. `low`: the cache is in 8 bits, which decoding multiplies as they are. Prompts whose queries
    choose what they attend to are computed by a kernel of so many `sparse_heads`, or several times as many."""
    heads, kv, width, v_width = spec.heads // c.tp, kv_heads(c, spec), spec.head_dim, spec.v_head_dim
    if spec.kv_lora_rank:
        # decoding reads the latent once for all heads (DeepSeek-V2, 2405.04434, section 2.1.2); prompts expand it, but
        # where each query attends to tokens of its own choice (DeepSeek-V3.2, 2512.02556, section 2.1)
        absorbed = new == 1 or 0 < spec.index_top_k < past + new
        kv = 1 if absorbed else heads
        if absorbed:
            width, v_width = spec.kv_lora_rank + spec.rope_head_dim, spec.kv_lora_rank
            heads = -(-heads // sparse_heads) * sparse_heads if new > 1 else heads
    window = sees(spec, past + new)
    keys = min(past + new, spec.window + new - 1) if spec.window else past + new
    return AttentionCore(
        batch=batch,
        q_len=new,
        kv_len=keys,
        heads=heads,
        kv_heads=min(heads, kv),
        head_dim=width,
        v_head_dim=v_width,
        pairs=pairs(new, past + new, causal=c.causal, window=window),
        dtype="fp8" if low and new == 1 else c.attention_dtype,
    )


def entries(
    c: Context,
    mixing: Mixing,
    batch: int,
    new: int,
    past: int,
    *,
    low: bool,
    unfused: bool = False,
    sparse_heads: int = 1,
) -> list[Entry]:
    """Return the tasks by which the ranks of `c` mix the tokens of `batch` requests; `unfused` attention stores its
    scores. `sparse_heads` are those of :func:`core`."""
    if mixing.spec is None:
        rows = {"batch": batch, "seq_len": new}
        return _chain([("scan", "compute", msgspec.structs.replace(work, **rows)) for work in mixing.kernels])
    whole = core(c, mixing.spec, batch, new, past, low=low, sparse_heads=sparse_heads)
    chosen = _chosen(c, mixing.spec, batch, new, past)
    if unfused:
        return _behind(chosen, _unfused(c, whole))
    if c.plan.layout.cp == 1:
        return _chain([*chosen, ("attention", "compute", whole)])
    return _behind(chosen, _decoded(c, whole) if new == 1 else _prompted(c, mixing.spec, whole))


def _chosen(c: Context, spec: Attention, batch: int, new: int, past: int) -> list[tuple[str, str, Work]]:
    """The tasks of an indexer that choose tokens, by products of 8 bits where the model's are of no more."""
    seen = pairs(new, past + new, causal=c.causal, window=spec.window)
    low = "fp8" if c.low < c.element else c.attention_dtype
    return served_latent.choice(c, spec, batch, new, past, seen, low)


def _unfused(c: Context, whole: AttentionCore) -> list[Entry]:
    """Scores, their softmax and the weighted sum as kernels of their own, which store every score: keys that a mask
    hides are computed too. The softmax adds the mask, finds the maximum and divides by the sum. Scores lie in rows of
    whole vectors, as frameworks pad sequences: matrix units take no others."""
    rows = {"batch": int(whole.batch * whole.heads), "dtype": whole.dtype, "out_bytes": c.element}
    queries, keys = _padded(whole.q_len), _padded(whole.kv_len)
    scores = float(rows["batch"]) * queries * keys
    return _chain(
        [
            ("scores", "compute", Gemm(m=queries, n=keys, k=whole.head_dim, **rows)),
            ("softmax", "compute", Elementwise(num_bytes=4 * scores * c.element, kernels=3, fused=True)),
            ("weighted sum", "compute", Gemm(m=queries, n=whole.v_head_dim, k=keys, **rows)),
        ]
    )


def _padded(tokens: int) -> int:
    """Return the rows of scores of so many tokens: one of a next token stays one."""
    return tokens if tokens == 1 else -(-tokens // VECTOR) * VECTOR


def _decoded(c: Context, whole: AttentionCore) -> list[Entry]:
    """Every rank's share of the keys for all queries; outputs are merged in fp32, with the sum of each."""
    cp, group = c.plan.layout.cp, c.cp_outer
    mine = msgspec.structs.replace(whole, kv_len=-(-whole.kv_len // cp), pairs=whole.pairs / cp)
    queries = whole.batch * whole.heads * whole.head_dim * c.element
    merged = whole.batch * whole.heads * (whole.v_head_dim + 1) * 4.0
    return _chain(
        [
            ("queries gather", "cp", Collective(op="all_gather", num_bytes=queries, group=group)),
            ("attention", "compute", mine),
            ("outputs merge", "cp", Collective(op="reduce_scatter", num_bytes=merged, group=group)),
        ]
    )


def _prompted(c: Context, spec: Attention, whole: AttentionCore) -> list[Entry]:
    """Every rank's share of the queries against all keys, which come around or are gathered first."""
    cp, group = c.plan.layout.cp, c.cp_outer
    queries = -(-whole.q_len // cp)
    width = whole.kv_heads * (whole.head_dim + whole.v_head_dim)
    if spec.kv_lora_rank:
        width = spec.kv_lora_rank + spec.rope_head_dim
    cached = whole.batch * whole.kv_len * width * c.element
    mine = msgspec.structs.replace(whole, q_len=queries, pairs=whole.pairs / cp)
    if c.plan.sequence.algorithm == "allgather":
        gather = Collective(op="all_gather", num_bytes=cached, group=group)
        return _chain([("keys gather", "cp", gather), ("attention", "compute", mine)])
    block = msgspec.structs.replace(mine, kv_len=-(-mine.kv_len // cp), pairs=mine.pairs / cp)
    sent = Collective(op="send", num_bytes=cached / cp, group=group)
    found: list[Entry] = []
    arrived: tuple[int, ...] = ()
    for step in range(cp):
        found.append(Entry(f"attention {step + 1}/{cp}", "compute", block, arrived))
        if step + 1 < cp:
            found.append(Entry(f"keys to the next {step + 1}", "cp", sent, arrived))
            arrived = (len(found) - 1,)
    return found


def prefix_once(c: Context, mixing: Mixing, batch: int, shared: int, behind: int, cores: int) -> list[Entry]:
    """Return the tasks that attend from the next token of each of `batch` requests to a prefix that all share, as one
    product of all queries with its keys (Juravsky et al. 2402.05099); `behind` entries stand before them. Keys are cut
    in parts as long as these find some of the `cores` multiprocessors idle, and a part has a block's keys at least
    (Flash-Decoding, Dao et al. 2023; the cascades of FlashInfer). Joining the results reads and writes each."""
    spec = mixing.spec
    together = core(c, spec, 1, max(batch, 2), 0, low=False)  # a prompt's kernel: many queries at a time
    blocks = together.heads * -(-batch // BLOCK_QUERIES)
    parts = max(1, min(cores // blocks, shared // BLOCK_KEYS))
    each = -(-shared // parts)
    together = msgspec.structs.replace(together, batch=parts, q_len=batch, kv_len=each, pairs=float(batch) * each)
    outputs = (1 + parts) * batch * together.heads * (together.v_head_dim * c.element + 4.0)
    merged = Elementwise(num_bytes=outputs + batch * together.heads * together.v_head_dim * c.element, fused=True)
    after = (behind - 1,) if behind else ()
    return [
        Entry("shared prefix", "compute", together, after),
        Entry("prefix merge", "compute", merged, (behind,)),
    ]


def _chain(tasks: list[tuple[str, str, Work]]) -> list[Entry]:
    return [Entry(name, queue, work, (i - 1,) if i else ()) for i, (name, queue, work) in enumerate(tasks)]


def _behind(tasks: list[tuple[str, str, Work]], entries: list[Entry]) -> list[Entry]:
    """Entries that begin when the last of some tasks, one behind the other, is done."""
    first = _chain(tasks)
    size, last = len(first), (len(first) - 1,) if first else ()
    moved = [e._replace(after=tuple(a + size for a in e.after) or last) for e in entries]
    return [*first, *moved] if first else entries


def kept_bytes(c: Context, block: Block, tokens: float, element: float) -> float:
    """Return the bytes that a rank keeps of a request of so many tokens in one layer: keys and values (the latent) of
    as many as any later token sees, of `element` bytes each, and the state of a mixer."""
    total = 0.0
    for spec in attentions(block):
        share = 1.0 if spec.kv_lora_rank else kv_heads(c, spec) / spec.kv_heads
        seen = min(tokens, float(spec.window)) if spec.window else tokens
        total += layers.of(spec).state(spec).per_token * share * seen * element
    if block.mixer is not None:
        total += layers.of(block.mixer).state(block.mixer).constant / c.tp * STATE_BYTES
    return total / c.plan.layout.cp if c.causal else 0.0
