"""ShadowKV's attention: keys of low rank on the device, values on the host (Sun et al., ICML 2025, 2410.21465).

Once a prompt is computed its keys, turned back to position 0, are written as so many numbers each over a basis of their
own, which is that of their largest singular values; of every chunk of tokens the device keeps the mean key (landmark),
and chunks whose keys are least like theirs (outliers) whole. Values lie in the host's memory. A next token scores the
landmarks of every head of keys, rebuilds the keys of the best chunks, fetches their values, and attends to these, to
the outliers and to the last tokens, which are whole as well. Tokens of an answer join the others chunk by chunk, over
the same basis. Chunks that were fetched for the token before are fetched again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

import torch

from meshwright.run.rotary import rotate
from meshwright.run.self_attention import HeadsCore
from meshwright.run.serve.packed import PackedRow
from meshwright.run.serve.paged import attended, kv_shape
from meshwright.run.serve.tables import BlockCopy, HostKey
from meshwright.serving.shadowkv import CHUNK, OUTLIERS, RANK

#: The name of the budget.
SHADOW = "shadowkv"
#: Last tokens that stay whole at least, beside those that do not fill a chunk.
RECENT = 32
#: Cosines and sines of positions, of layers that have any.
Turns = Callable[[HeadsCore, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]


class _Shadow(NamedTuple):
    """The tokens of a sequence in a layer that are not whole any more: keys as ``low`` [tokens, rank] over a ``basis``
    [rank, kv_heads * d], ``landmarks`` [chunks, kv_heads, d], ``values`` [tokens, kv_heads, d] on the host, and of each
    head the ``outliers`` [kv_heads, n] among the chunks with their keys and values [kv_heads, tokens, d]."""

    low: torch.Tensor
    basis: torch.Tensor
    landmarks: torch.Tensor
    values: torch.Tensor
    outliers: torch.Tensor
    outlier_keys: torch.Tensor
    outlier_values: torch.Tensor


class _Kept:
    """A sequence in a layer: the ``shadow`` of its first tokens, and ``keys`` and ``values`` [n, kv_heads, d] of the
    last ones."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.shadow: _Shadow | None = None
        self.keys, self.values = keys, values


class ShadowBlocks:
    """The caches of the layers of one rank under a budget that reads the ``share`` of a context: of every sequence, by
    its first block, what each layer keeps. Blocks are counted by the decider; what they stand for lies here."""

    def __init__(self, modules: Sequence[HeadsCore], *, share: float, dtype: torch.dtype, device: torch.device):
        self.share, self.dtype, self.device = share, dtype, device
        self.place = {id(module): place for place, module in enumerate(modules)}
        self.kept: list[dict[int, _Kept]] = [{} for _ in modules]
        self.shapes = [kv_shape(module) for module in modules]

    def copy(self, copies: Sequence[BlockCopy], dropped: Sequence[HostKey] = ()) -> None:
        """Nothing of whole sequences lies on the host: words that would have it are refused."""

    def forget(self, firsts: Sequence[int]) -> None:
        """Give back what is kept of sequences that left, by their first blocks."""
        for layer in self.kept:
            for first in firsts:
                layer.pop(first, None)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        held = [one for layer in self.kept for one in layer.values()]
        parts = [part for one in held for part in (one.keys, one.values)]
        parts += [part for one in held if one.shadow for part in one.shadow if part is not one.shadow.values]
        return sum(part.numel() * part.element_size() for part in parts)


class ShadowCore:
    """The attention core of one iteration under ShadowKV's budget (:class:`~meshwright.run.parts.Pass`'s ``core``)."""

    def __init__(self, kv: ShadowBlocks, rows: Sequence[PackedRow], turns: Turns):
        self.kv, self.rows, self.turns = kv, rows, turns

    def __call__(self, module: HeadsCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from q [1, n, heads, d] to what the sequences have, k and v [1, n, kv_heads, d] with it."""
        layer = self.kv.kept[self.kv.place[id(module)]]
        q, k, v = q[0], k[0], v[0]
        out, first = q.new_empty((*q.shape[:2], v.shape[-1])), 0
        for row in self.rows:
            some = slice(first, first + row.new)
            first += row.new
            if not row.past:
                layer[row.table[0]] = _Kept(k[:0], v[:0])
            kept = layer[row.table[0]]
            begun = max(0, min(row.new, row.prompt - row.past)) if kept.shadow is None else 0
            whole = slice(some.start, some.start + begun)
            if begun:
                out[whole] = self._prompt(module, kept, q[whole], k[whole], v[whole])
                if row.past + begun >= row.prompt:
                    self._shadowed(module, kept)
            for at in range(some.start + begun, some.stop):
                one = slice(at, at + 1)
                out[one] = self._next(module, kept, q[one], k[one], v[one])
        return out.unsqueeze(0)

    def _prompt(self, module: HeadsCore, kept: _Kept, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """The attention of tokens of a prompt to all before them."""
        count, before = len(q), len(kept.keys)
        kept.keys, kept.values = torch.cat((kept.keys, k)), torch.cat((kept.values, v))
        mask = None
        if before:
            at = torch.arange(before + count, device=q.device)
            unseen = at > torch.arange(before, before + count, device=q.device)[:, None]
            mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill_(unseen, float("-inf"))
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, kept.keys, kept.values))
        return attended(*heads, mask, causal=mask is None, **_said(module))[0].transpose(0, 1)

    def _next(self, module: HeadsCore, kept: _Kept, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """The attention of a token of an answer."""
        kept.keys, kept.values = torch.cat((kept.keys, k)), torch.cat((kept.values, v))
        near, far = kept.keys.transpose(0, 1), kept.values.transpose(0, 1)  # [kv_heads, tokens, d]
        if kept.shadow is not None:
            keys, values = self._chosen(module, kept.shadow, q[0])
            near = torch.cat((kept.shadow.outlier_keys, keys, near), 1)
            far = torch.cat((kept.shadow.outlier_values, values, far), 1)
        found = attended(q.transpose(0, 1).unsqueeze(0), near[None], far[None], None, causal=False, **_said(module))
        if kept.shadow is None and len(kept.keys) >= 2 * RECENT:  # its prompt was short
            self._shadowed(module, kept)
        elif kept.shadow is not None and len(kept.keys) >= RECENT + CHUNK:
            self._joined(module, kept)
        return found[0].transpose(0, 1)

    def _chosen(self, module: HeadsCore, shadow: _Shadow, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [kv_heads, tokens, d] of the chunks that q [heads, d] scores best by their landmarks: the
        most attention that any of the queries of a head gives a chunk."""
        chunks, shared, d = shadow.landmarks.shape
        scale = _said(module)["scale"]
        scores = (q.unflatten(0, (shared, -1)) @ shadow.landmarks.permute(1, 2, 0)) * scale  # [shared, queries, chunks]
        best = scores.double().softmax(-1).amax(1).scatter(1, shadow.outliers, -1.0)
        count = min(ceil(self.kv.share * chunks), chunks - shadow.outliers.shape[1])
        if not count:
            return shadow.outlier_keys[:, :0], shadow.outlier_values[:, :0]
        chosen = best.topk(count).indices.sort().values  # [shared, count]
        at = (chosen.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=q.device)).flatten(1)
        basis = shadow.basis.unflatten(1, (shared, d)).transpose(0, 1)  # [shared, rank, d]
        keys = shadow.low[at] @ basis  # [shared, tokens, d]
        turn = self.turns(module, at.flatten())
        if turn is not None:
            cos, sin = (table.view(*at.shape, 1, -1) for table in turn)
            keys = rotate(keys.unsqueeze(2), cos, sin).squeeze(2)
        heads = torch.arange(shared).unsqueeze(1)
        return keys, shadow.values[at.cpu(), heads].to(q.device)

    def _shadowed(self, module: HeadsCore, kept: _Kept) -> None:
        """Give up the whole keys and values of a prompt, but for the last tokens."""
        count = (len(kept.keys) - RECENT) // CHUNK * CHUNK
        if count <= 0:
            return
        keys = kept.keys[:count]
        plain = self._turned_back(module, keys, 0).flatten(1)
        width = plain.shape[1]
        rank = width if self.kv.share >= 1 else min(RANK, width)
        wide = plain.to(torch.promote_types(plain.dtype, torch.float32))
        basis = torch.linalg.eigh(wide.mT @ wide).eigenvectors[:, -rank:].mT.to(plain.dtype)
        landmarks = keys.unflatten(0, (-1, CHUNK)).mean(1)
        away = torch.cosine_similarity(keys.unflatten(0, (-1, CHUNK)), landmarks.unsqueeze(1), dim=-1).amin(1)
        outliers = away.T.topk(min(len(landmarks), ceil(OUTLIERS * len(landmarks))), largest=False).indices
        at = (outliers.unsqueeze(-1) * CHUNK + torch.arange(CHUNK, device=keys.device)).flatten(1)
        heads = torch.arange(keys.shape[1], device=keys.device).unsqueeze(1)
        values = kept.values[:count]
        kept.shadow = _Shadow(
            plain @ basis.mT, basis, landmarks, values.cpu(), outliers, keys[at, heads], values[at, heads]
        )
        kept.keys, kept.values = kept.keys[count:].clone(), kept.values[count:].clone()

    def _joined(self, module: HeadsCore, kept: _Kept) -> None:
        """Let the first chunk of the whole tokens join those that are not."""
        shadow, keys, values = kept.shadow, kept.keys[:CHUNK], kept.values[:CHUNK]
        assert shadow is not None
        low = self._turned_back(module, keys, len(shadow.low)).flatten(1) @ shadow.basis.mT
        kept.shadow = shadow._replace(
            low=torch.cat((shadow.low, low)),
            landmarks=torch.cat((shadow.landmarks, keys.mean(0, keepdim=True))),
            values=torch.cat((shadow.values, values.cpu())),
        )
        kept.keys, kept.values = kept.keys[CHUNK:].clone(), kept.values[CHUNK:].clone()

    def _turned_back(self, module: HeadsCore, keys: torch.Tensor, first: int) -> torch.Tensor:
        """Keys [n, kv_heads, d] of positions from `first` on as they were before they were turned by these."""
        turn = self.turns(module, torch.arange(first, first + len(keys), device=keys.device))
        if turn is None:
            return keys
        cos, sin = turn
        size = cos[..., :1].square() + sin[..., :1].square()  # some families stretch what they turn
        return rotate(keys.unsqueeze(0), cos / size, -sin / size)[0]


def _said(module: HeadsCore) -> dict[str, float]:
    return {"scale": module.said["scale"], "cap": module.said["cap"]}
