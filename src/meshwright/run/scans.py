"""Scans whose memory of a sequence has a fixed size, by chunks: Mamba-2's (2405.21060) and the gated delta rule's
(2412.06464), with the convolution before them; and the modules of the layers that have them.

Inside a chunk tokens meet in products of matrices, from chunk to chunk a state is handed on, and so it is from rank to
rank where these share a sequence (:mod:`.handed`), or keys and values go round them. Decays are added up in float64, so
that the border of a document can be a decay to nothing.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.plan.facets.sequence import RINGED
from meshwright.run.attention import attend
from meshwright.run.handed import last_before, mine, passed_round, state_before
from meshwright.run.mesh import AxisGroup
from meshwright.run.plain import Linear, vector
from meshwright.run.rotary import rotate
from meshwright.spec.layers import Attention
from meshwright.spec.mixers import GatedDelta, Mamba2

ALONE = AxisGroup(name="alone", ranks=(0,), index=0)
#: Logarithm of a decay after which nothing is left, in any precision.
FORGET = -1e4


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    documents: torch.Tensor | None,
    cp: AxisGroup = ALONE,
):
    """SiLU of a causal convolution of every channel of x [b, s, c] by weight [c, 1, k]; taps stay in a document.
    `documents` [b, S] are those of all tokens, of which each rank of `cp` holds as many, one after the other."""
    taps, count = weight.shape[-1], x.shape[1]
    longer = torch.cat((last_before(x, taps - 1, cp), x), 1)
    if documents is None:
        return F.silu(F.conv1d(longer.transpose(1, 2), weight, bias, groups=weight.shape[0]).transpose(1, 2))
    numbers = mine(documents, count, cp, taps - 1)
    out = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for back in range(taps):
        some = slice(taps - 1 - back, taps - 1 - back + count)
        same = numbers[:, some] == numbers[:, taps - 1 :]
        out = out + longer[:, some] * same.unsqueeze(-1).to(x.dtype) * weight[:, 0, taps - 1 - back]
    return F.silu(out)


def forgetting(decay: torch.Tensor, documents: torch.Tensor | None, cp: AxisGroup = ALONE) -> torch.Tensor:
    """Logarithms of decay [b, s, h] in float64, with nothing left of one document in the next."""
    decay = decay.double()
    if documents is None:
        return decay
    begins = mine(F.pad(documents[:, 1:] != documents[:, :-1], (1, 0)), decay.shape[1], cp)
    return torch.where(begins.unsqueeze(-1), decay + FORGET, decay)


def _between(decay: torch.Tensor) -> torch.Tensor:
    """[b, h, q, q]: what is left at a token of what an earlier one of the chunk wrote, from sums of decay [b, q, h]."""
    total = decay.cumsum(1).transpose(1, 2)
    apart = total.unsqueeze(-1) - total.unsqueeze(-2)
    seen = torch.ones(apart.shape[-2:], dtype=torch.bool, device=decay.device).tril()
    return apart.masked_fill(~seen, float("-inf")).exp()


def ssd(x, maps_in, maps_out, decay, chunk: int, cp: AxisGroup = ALONE, *, shares: int = 0) -> torch.Tensor:
    """y_t = C_t h_t of h_t = exp(decay_t) h_{t-1} + B_t x_t, by chunks.

    x [b, s, h, p], maps_in and maps_out (B, C) [b, s, h, n], decay [b, s, h] in float64. Returns [b, s, h, p]. Each
    rank of `cp` has as many tokens, one after the other, and hands its state on; with `shares`, the heads that have one
    map in common, what its tokens add goes round a ring in place of that.
    """
    out, state, kind = [], x.new_zeros(x.shape[0], x.shape[2], maps_in.shape[-1], x.shape[-1]), x.dtype
    for at in range(0, x.shape[1], chunk):
        some = slice(at, at + chunk)
        values, into, off, d = x[:, some], maps_in[:, some], maps_out[:, some], decay[:, some]
        total = d.cumsum(1)
        within = torch.einsum("bthn,bshn->bhts", off, into) * _between(d).to(kind)
        y = torch.einsum("bhts,bshp->bthp", within, values)
        y = y + torch.einsum("bthn,bhnp->bthp", off * total.exp().to(kind).unsqueeze(-1), state)
        left = (total[:, -1:] - total).exp().to(kind).unsqueeze(-1)
        state = state * total[:, -1].exp().to(kind)[..., None, None] + torch.einsum(
            "bshn,bshp->bhnp", into * left, values
        )
        out.append(y)
    whole = torch.cat(out, 1)
    if cp.alone:
        return whole
    if shares:
        return whole + _from_before(x, maps_in[:, :, ::shares], maps_out, decay, cp)
    total = decay.cumsum(1).exp().to(kind)
    before = state_before(total[:, -1][..., None, None], state, cp)
    return whole + torch.einsum("bthn,bhnp->bthp", maps_out * total.unsqueeze(-1), before)


def _from_before(x, maps_in, maps_out, decay, cp: AxisGroup) -> torch.Tensor:
    """Outputs [b, s, h, p] of tokens by those of the ranks before, whose keys (maps_in [b, s, groups, n]), values and
    decays go round and are met pair by pair."""
    (rows, count, heads, width), (groups, states), kind = x.shape, maps_in.shape[2:], x.dtype
    total = decay.cumsum(1)
    left, gone = (total[:, -1:] - total).exp().to(kind), total[:, -1:].exp().to(kind)  # to the end; by all tokens
    out, asked, between = torch.zeros_like(x), maps_out * total.exp().to(kind).unsqueeze(-1), torch.ones_like(gone)
    block = torch.cat([part.reshape(rows, -1) for part in (maps_in, x, left, gone)], 1)
    sizes = [count * groups * states, count * heads * width, count * heads, heads]
    for hop in range(1, cp.size):
        block = passed_round(block, cp)
        if cp.index < hop:  # it is of tokens behind these; that it came is all that its way back needs to know
            out = out + block[:, :0].sum()
            continue
        keys, values, rest, all_gone = block.split(sizes, 1)
        keys = keys.view(rows, count, groups, states).repeat_interleave(heads // groups, 2)
        scores = torch.einsum("bthn,bshn->bhts", asked, keys * rest.view(rows, count, heads, 1))
        seen = torch.einsum("bhts,bshp->bthp", scores, values.view(rows, count, heads, width))
        out = out + seen * between.unsqueeze(-1)
        between = between * all_gone.view(rows, 1, heads)
    return out


def gated_delta(q, k, v, decay, beta, chunk: int, cp: AxisGroup = ALONE) -> torch.Tensor:
    """o_t = S_t^T q_t of S_t = exp(decay_t) S_{t-1} + beta_t k_t (v_t - (exp(decay_t) S_{t-1})^T k_t)^T, by chunks.

    What the tokens of a chunk write is the solution of a triangular system (Yang et al. 2024, section 3.3). q, k
    [b, s, h, d], v [b, s, h, p], decay [b, s, h] in float64, beta [b, s, h]. Returns [b, s, h, p]. Each rank of `cp`
    has as many tokens, one after the other: what they see and leave of the state before them is what they do of an
    identity, scanned beside without values.
    """
    out, state = _gated_delta(q, k, v, decay, beta, chunk)
    if cp.alone:
        return out
    unit = torch.eye(k.shape[-1], dtype=v.dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)
    seen, left = _gated_delta(q, k, torch.zeros_like(k), decay, beta, chunk, unit)
    return out + torch.einsum("bthd,bhdp->bthp", seen, state_before(left, state, cp))


def _gated_delta(q, k, v, decay, beta, chunk: int, state=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what tokens see, and the state [b, h, d, p] behind them."""
    out, kind = [], v.dtype
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]) if state is None else state
    for at in range(0, v.shape[1], chunk):
        some = slice(at, at + chunk)
        qs, ks, vs, d, b = (t[:, some].transpose(1, 2) for t in (q, k, v, decay, beta))
        total = d.cumsum(-1)
        left = _between(decay[:, some]).to(kind)
        grown = total.exp().to(kind).unsqueeze(-1)
        recalled = torch.einsum("bhtd,bhsd->bhts", ks, ks) * left * b.unsqueeze(-1)
        unit = torch.eye(recalled.shape[-1], dtype=kind, device=v.device)
        system = unit + recalled.tril(-1)
        wanted = b.unsqueeze(-1) * (vs - grown * torch.einsum("bhtd,bhdp->bhtp", ks, state))
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        seen = torch.einsum("bhtd,bhsd->bhts", qs, ks) * left
        o = grown * torch.einsum("bhtd,bhdp->bhtp", qs, state) + torch.einsum("bhts,bhsp->bhtp", seen, written)
        rest = (total[..., -1:] - total).exp().to(kind).unsqueeze(-1)
        state = state * grown[..., -1:, :] + torch.einsum("bhsd,bhsp->bhdp", ks * rest, written)
        out.append(o.transpose(1, 2))
    return torch.cat(out, 1), state


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Mamba2Mixer(nn.Module):
    """A Mamba-2 layer, with the tensors that Hugging Face's has."""

    def __init__(self, shared, name: str, spec: Mamba2):
        super().__init__()
        self.spec, self.eps, hidden = spec, shared.model.numerics.norm_eps, shared.model.hidden
        self.cp, self.ringed = shared.mesh["cp"], shared.plan.sequence.scans == RINGED
        width = spec.inner + spec.conv_width + spec.heads
        self.into = Linear(shared, f"{name}in_proj", width, hidden, bias=spec.bias)
        self.taps = shared.conv(f"{name}conv1d.weight", spec.conv_width, spec.kernel)
        self.taps_bias = vector(shared, f"{name}conv1d.bias", spec.conv_width, "zeros") if spec.conv_bias else None
        self.step = vector(shared, f"{name}dt_bias", spec.heads, "normal")
        self.decay = vector(shared, f"{name}A_log", spec.heads, "normal")
        self.skip = vector(shared, f"{name}D", spec.heads, "ones")
        self.norm = vector(shared, f"{name}norm.weight", spec.inner, "ones")
        self.out = Linear(shared, f"{name}out_proj", hidden, spec.inner, bias=spec.bias, deep=True)

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        spec = self.spec
        gate, mixed, step = self.into(x).transpose(0, 1).split([spec.inner, spec.conv_width, spec.heads], -1)
        mixed = convolved(mixed, self.taps, self.taps_bias, p.documents, self.cp)
        maps = spec.groups * spec.state
        values, into, off = mixed.split([spec.inner, maps, maps], -1)
        values = values.unflatten(-1, (spec.heads, -1))
        shares = spec.heads // spec.groups
        into, off = (m.unflatten(-1, (spec.groups, -1)).repeat_interleave(shares, 2) for m in (into, off))
        step = F.softplus(step + self.step)
        decay = forgetting(-step * self.decay.exp(), p.documents, self.cp)
        entered, way = values * step.unsqueeze(-1), {"shares": shares if self.ringed else 0}
        y = ssd(entered, into, off, decay, spec.chunk, self.cp, **way) + values * self.skip.unsqueeze(-1)
        grouped = (y.flatten(-2) * F.silu(gate)).unflatten(-1, (spec.groups, -1))  # normalised group by group
        y = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2) * self.norm
        return self.out(y.transpose(0, 1))


class DeltaMixer(nn.Module):
    """A layer of the gated delta rule, with the tensors that Qwen3.5 has."""

    def __init__(self, shared, name: str, spec: GatedDelta):
        super().__init__()
        self.spec, self.eps, hidden = spec, shared.model.numerics.norm_eps, shared.model.hidden
        self.cp = shared.mesh["cp"]
        self.qkv = Linear(shared, f"{name}in_proj_qkv", spec.conv_width, hidden)
        self.gate = Linear(shared, f"{name}in_proj_z", spec.value_width, hidden)
        self.beta = Linear(shared, f"{name}in_proj_b", spec.heads, hidden)
        self.rate = Linear(shared, f"{name}in_proj_a", spec.heads, hidden)
        self.taps = shared.conv(f"{name}conv1d.weight", spec.conv_width, spec.kernel)
        self.step = vector(shared, f"{name}dt_bias", spec.heads, "ones")
        self.decay = vector(shared, f"{name}A_log", spec.heads, "normal")
        self.norm = vector(shared, f"{name}norm.weight", spec.v_head_dim, "ones")
        self.out = Linear(shared, f"{name}out_proj", hidden, spec.value_width, deep=True)

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        spec = self.spec
        mixed, gate, beta, rate = (layer(x).transpose(0, 1) for layer in (self.qkv, self.gate, self.beta, self.rate))
        mixed = convolved(mixed, self.taps, None, p.documents, self.cp)
        q, k, v = mixed.split([spec.key_width, spec.key_width, spec.value_width], -1)
        shares = spec.heads // spec.k_heads
        q, k = (_unit(t.unflatten(-1, (spec.k_heads, -1))).repeat_interleave(shares, 2) for t in (q, k))
        v = v.unflatten(-1, (spec.heads, -1))
        decay = forgetting(-self.decay.exp() * F.softplus(rate + self.step), p.documents, self.cp)
        out = gated_delta(q * spec.k_head_dim**-0.5, k, v, decay, beta.sigmoid(), spec.chunk, self.cp)
        out = _rms(out, self.norm, self.eps) * F.silu(gate.unflatten(-1, (spec.heads, -1)))
        return self.out(out.flatten(-2).transpose(0, 1))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class GatedAttention(nn.Module):
    """Softmax attention whose output a gate scales, with the tensors that Qwen3.5 has."""

    def __init__(self, shared, name: str, spec: Attention):
        super().__init__()
        self.shared, self.spec, hidden = shared, spec, shared.model.hidden
        self.eps = shared.model.numerics.norm_eps
        self.q = Linear(shared, f"{name}q_proj", spec.heads * spec.head_dim * 2, hidden)
        self.k = Linear(shared, f"{name}k_proj", spec.kv_heads * spec.head_dim, hidden)
        self.v = Linear(shared, f"{name}v_proj", spec.kv_heads * spec.v_head_dim, hidden)
        self.out = Linear(shared, f"{name}o_proj", hidden, spec.heads * spec.v_head_dim, deep=True)
        self.q_norm = vector(shared, f"{name}q_norm.weight", spec.head_dim, "zeros")
        self.k_norm = vector(shared, f"{name}k_norm.weight", spec.head_dim, "zeros")

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        spec, mesh = self.spec, self.shared.mesh
        q, gate = self.q(x).transpose(0, 1).unflatten(-1, (spec.heads, -1)).chunk(2, -1)
        k, v = (layer(x).transpose(0, 1).unflatten(-1, (spec.kv_heads, -1)) for layer in (self.k, self.v))
        q, k = (
            rotate(_rms(q, 1 + self.q_norm, self.eps), *p.rotary),
            rotate(_rms(k, 1 + self.k_norm, self.eps), *p.rotary),
        )
        out = attend(
            q,
            k,
            v.contiguous(),
            cp=mesh["cp_outer"],
            inner=mesh["cp_inner"],
            algorithm=self.shared.plan.sequence.algorithm,
            scale=spec.head_dim**-0.5,
            documents=p.documents,
        )
        return self.out((out * torch.sigmoid(gate)).flatten(-2).transpose(0, 1))
