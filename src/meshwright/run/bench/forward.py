"""Iterations of serving, timed on a GPU: a stack of a decoder's layers over a key-value cache.

The kernels are torch's own: its products, its fused attention, its grouped products of experts; chains of pointwise
operators are compiled into one kernel each, as serving engines have them. An iteration is timed as it is issued one
kernel after the other, and as a CUDA graph that was captured once. Of the graph there are two parts beside the whole:
the products alone, and attention alone. What is left is norms, rotations, activations, the cache's writes and, of
experts, their dispatch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from meshwright.run.environment import prefer
from meshwright.run.world import World
from meshwright.spec.layers import Dense, Moe
from meshwright.spec.model import Model

#: Runs of a graph, or of an iteration issued kernel by kernel, of which the median counts.
REPLAYS, EAGER = 15, 7
#: Attention of torch that is tried; the fastest that takes a shape counts.
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
EPSILON = 1e-5


class IterationShape(NamedTuple):
    """One kind of iteration: ``batch`` requests that compute ``new`` tokens each behind ``past`` others."""

    batch: int
    new: int
    past: int


class TimedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a layer in an iteration: as a graph (``whole_s``), issued kernel by kernel (``eager_s``), its products
    (``linear_s``) and its ``attention_s`` alone, by the name of the kernel the fastest one first."""

    model: str
    batch: int
    new: int
    past: int
    whole_s: float
    eager_s: float
    linear_s: float
    attention_s: dict[str, float]


class LayerWidths(NamedTuple):
    """The widths of a layer: hidden states, query heads, key-value heads, a head, an MLP; experts, those of a token."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    experts: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, model: Model) -> LayerWidths:
        """Return the widths of a decoder's last layer.

        Raises:
            ValueError: a layer that is not an attention followed by a gated MLP or experts without a shared one.
        """
        block = model.blocks[model.layers_by_kind.index(max(model.layers_by_kind))]
        (attention,), mlp = block.attentions, block.mlp
        if isinstance(mlp, Moe) and not mlp.shared_ffn:
            experts, top_k = mlp.experts, mlp.top_k
        elif isinstance(mlp, Dense) and mlp.gated:
            experts = top_k = 0
        else:
            raise ValueError(f"the layers of {model.name} are not timed: {type(mlp).__name__}")
        return cls(
            model.hidden, attention.heads, attention.kv_heads, attention.head_dim, mlp.ffn, experts=experts, top_k=top_k
        )


class Layer:
    """Weights of one layer, 16 bits, random."""

    def __init__(self, w: LayerWidths, device: torch.device):
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.02)

        self.widths, self.norms = w, [torch.ones(w.hidden, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.qkv, self.out = drawn((w.heads + 2 * w.kv_heads) * w.head, w.hidden), drawn(w.hidden, w.heads * w.head)
        if w.experts:
            self.router = drawn(w.experts, w.hidden)
            self.up, self.down = drawn(w.experts, w.hidden, 2 * w.ffn), drawn(w.experts, w.ffn, w.hidden)
        else:
            self.up, self.down = drawn(2 * w.ffn, w.hidden), drawn(w.hidden, w.ffn)


class IterationBuffers:
    """The memory of an iteration beside the weights: hidden states, angles and every layer's cache."""

    def __init__(self, w: LayerWidths, at: IterationShape, layers: int, device: torch.device):
        self.at, tokens = at, at.batch * at.new
        self.hidden = torch.randn(tokens, w.hidden, device=device, dtype=torch.bfloat16)
        angles = torch.rand(tokens, 1, w.head // 2, device=device)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        shape = (2, at.batch, at.past + at.new, w.kv_heads, w.head)
        self.caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers)]
        self.queries = torch.randn(at.batch, at.new, w.heads, w.head, device=device, dtype=torch.bfloat16)


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight, total


def _gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@cache
def _fused(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=True)


class Stack:
    """Some layers of a model, with what an iteration runs through them."""

    def __init__(self, widths: LayerWidths, layers: int, device: torch.device):
        self.widths, self.device = widths, device
        self.layers = [Layer(widths, device) for _ in range(layers)]
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attention(self, q: torch.Tensor, kv: torch.Tensor, backend: str) -> torch.Tensor:
        """Return the attention of queries [batch, new, heads, d] over a cache [2, batch, past + new, kv_heads, d]; the
        last new keys are the queries' own."""
        new, keys = q.shape[1], kv.shape[2]
        q, k, v = q.transpose(1, 2), kv[0].transpose(1, 2), kv[1].transpose(1, 2)
        mask = causal_lower_right(new, keys) if 1 < new < keys else None
        with sdpa_kernel(BACKENDS[backend]):
            found = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None and new > 1, enable_gqa=q.shape[1] != k.shape[1]
            )
        return found.transpose(1, 2)

    def attentions(self, buffers: IterationBuffers, backend: str) -> None:
        """Every layer's attention alone."""
        for kv in buffers.caches:
            self.attention(buffers.queries, kv, backend)

    def products(self, buffers: IterationBuffers) -> None:
        """Every layer's products alone."""
        for layer in self.layers:
            x = buffers.hidden
            F.linear(x, layer.qkv)
            mixed = buffers.queries.reshape(len(x), -1)
            y = F.linear(mixed, layer.out)
            if self.widths.experts:
                F.linear(y, layer.router)
                rows, ends = self._even(len(x))
                up = F.grouped_mm(rows, layer.up, offs=ends)
                F.grouped_mm(up[:, : self.widths.ffn], layer.down, offs=ends)
            else:
                up = F.linear(y, layer.up)
                F.linear(up[:, : self.widths.ffn], layer.down)

    def _even(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of as many tokens as experts are given, and where each expert's end: those of a random routing."""
        if tokens not in self._rows:
            w, draw = self.widths, torch.Generator(device=self.device).manual_seed(0)
            scores = torch.rand(tokens, w.experts, device=self.device, generator=draw)
            chosen = scores.topk(w.top_k).indices.flatten()
            ends = torch.bincount(chosen, minlength=w.experts).cumsum(0).to(torch.int32)
            rows = torch.randn(len(chosen), w.hidden, device=self.device, dtype=torch.bfloat16)
            self._rows[tokens] = rows, ends
        return self._rows[tokens]

    def forward(self, buffers: IterationBuffers, backend: str) -> torch.Tensor:
        """The whole iteration: the last hidden states [tokens, hidden]."""
        w, at = self.widths, buffers.at
        heads, kv_heads = w.heads, w.kv_heads
        norm, rotate = _fused(_norm), _fused(_rotate)
        x, residual = buffers.hidden, torch.zeros_like(buffers.hidden)
        for layer, kv in zip(self.layers, buffers.caches, strict=True):
            y, residual = norm(x, residual, layer.norms[0])
            q, k, v = (
                F.linear(y, layer.qkv).view(-1, heads + 2 * kv_heads, w.head).split((heads, kv_heads, kv_heads), 1)
            )
            q, k = rotate(q, buffers.cos, buffers.sin), rotate(k, buffers.cos, buffers.sin)
            kv[0, :, at.past :].copy_(k.view(at.batch, at.new, kv_heads, w.head))
            kv[1, :, at.past :].copy_(v.reshape(at.batch, at.new, kv_heads, w.head))
            mixed = self.attention(q.view(at.batch, at.new, heads, w.head), kv, backend)
            y, residual = norm(F.linear(mixed.reshape(len(x), -1), layer.out), residual, layer.norms[1])
            x = self._experts(layer, y) if w.experts else F.linear(_fused(_gate)(F.linear(y, layer.up)), layer.down)
        return x + residual

    def _experts(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        w = self.widths
        weight, chosen = F.linear(x, layer.router).float().softmax(-1).topk(w.top_k)
        order = chosen.flatten().argsort()
        ends = torch.searchsorted(
            chosen.flatten()[order], torch.arange(w.experts, device=x.device), right=True
        ).to(torch.int32)  # fmt: skip
        rows = order // w.top_k
        up = F.grouped_mm(x[rows], layer.up, offs=ends)
        down = F.grouped_mm(_fused(_gate)(up), layer.down, offs=ends)
        scaled = down * weight.flatten()[order].to(down.dtype)[:, None]
        return torch.zeros_like(x).index_add_(0, rows, scaled)


def iterations(
    world: World, model: Model, shapes: Sequence[IterationShape], layers: int, progress: Callable[[str, int, int], None]
) -> list[dict[str, object]]:
    """Time iterations of these shapes through so many layers of a model, on a GPU; :class:`TimedIteration` as plain
    values. A shape that the GPU's memory or no kernel takes is left out, and `progress` is told so.

    Raises:
        ValueError: layers that are not timed (:meth:`LayerWidths.of`).
    """
    prefer()
    torch.cuda.set_device(world.device)
    stack, out = Stack(LayerWidths.of(model), layers, world.device), []
    with torch.no_grad():
        for number, shape in enumerate(shapes):
            progress(f"iterations of {model.name}", number, len(shapes))
            try:
                out.append(msgspec.to_builtins(_timed(stack, model.name, shape, layers)))
            except (torch.OutOfMemoryError, RuntimeError) as wrong:
                progress(f"left out {tuple(shape)}: {str(wrong).partition(chr(10))[0][:120]}", number, len(shapes))
            torch.cuda.empty_cache()
    return out


def _timed(stack: Stack, name: str, shape: IterationShape, layers: int) -> TimedIteration:
    buffers = IterationBuffers(stack.widths, shape, layers, stack.device)
    attention: dict[str, float] = {}
    for backend in BACKENDS:
        try:
            attention[backend] = graph_s(lambda b=backend: stack.attentions(buffers, b)) / layers
        except RuntimeError:  # no kernel of this backend takes the shape
            torch.cuda.synchronize()
    fastest = sorted(attention, key=attention.__getitem__)
    if not fastest:
        raise RuntimeError("no attention kernel takes the shape")
    return TimedIteration(
        model=name,
        batch=shape.batch,
        new=shape.new,
        past=shape.past,
        whole_s=graph_s(lambda: stack.forward(buffers, fastest[0])) / layers,
        eager_s=eager_s(lambda: stack.forward(buffers, fastest[0])) / layers,
        linear_s=graph_s(lambda: stack.products(buffers)) / layers,
        attention_s={backend: attention[backend] for backend in fastest},
    )


def graph_s(run: Callable[[], object]) -> float:
    """Return the median seconds of a replay of what `run` issues, captured as a CUDA graph."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):  # compiled, tuned and allocated before the capture
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    seconds = sorted(a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks))
    return seconds[REPLAYS // 2]


def eager_s(run: Callable[[], object]) -> float:
    """Return the median seconds that pass from the first kernel that `run` issues to the end of the last."""
    seconds = []
    for _ in range(EAGER):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[EAGER // 2]


__all__ = ["IterationShape", "TimedIteration", "eager_s", "graph_s", "iterations"]
