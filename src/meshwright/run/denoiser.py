"""Modules of diffusion transformers: patches of noisy samples, blocks whose norms a step and a class decide, and the
loss of the noise that is found, or of a noisy sample's class (DiT, Peebles and Xie, 2212.09748; for videos Latte, Ma et
al., 2401.03048).

What flows between them is [1 + s, b, hidden]: first what each sample is told of its step and class, then its tokens.
The modulation of blocks and of the last layer begins at zero (adaLN-Zero), so that a block begins as the identity.
:attr:`Pass.tokens` are samples [b, (frames,) channels, height, width], ``targets`` int64 [b] their classes and ``rows``
their places in the global batch, by which their noise is drawn (:mod:`.noise`). Products of a sequence, and the ends,
are whole on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.run import noise
from meshwright.run.collect import sum_over
from meshwright.run.data.samples import PADDING
from meshwright.run.dims import DimCore, own_tokens, per_frame, switched
from meshwright.run.linear import matmul
from meshwright.run.parameters import INIT_STD
from meshwright.run.parts import Mlp, Pass, Shared
from meshwright.run.pieces import Part
from meshwright.run.self_attention import AttentionModule
from meshwright.spec.diffusion import DimSwitch, Modulation
from meshwright.spec.items import TIME

#: Added to a norm's variance: that of DiT's authors, whatever a configuration of diffusers says.
EPS = 1e-6
#: How products that modulate, and the last one, begin.
AT_FIRST = "zeros"


class WholeLinear(nn.Module):
    """A product with a bias that every tensor-parallel rank has whole; ``shape`` is that of its published weight."""

    def __init__(self, shared: Shared, name: str, shape: tuple[int, ...], *, init: str = "normal"):
        super().__init__()
        said = {"copies": shared.tp.size, "sums": shared.shard_sums}
        parts = [Part(f"{name}.weight", shape, (0,) * len(shape), (slice(None),))]
        self.weight = shared.make(f"{name}.weight", shape, parts, init=init, std=INIT_STD, **said)
        parts = [Part(f"{name}.bias", shape[:1], (0,), (slice(None),))]
        self.bias = shared.make(f"{name}.bias", shape[:1], parts, init="zeros" if init == "normal" else init, **said)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul(x, self.weight) + self.bias


class PatchLinear(WholeLinear):
    """The same of patches, whose weight is published as a convolution's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class DenoiserEmbedding(nn.Module):
    """Patches of noisy samples become hidden states, behind what each sample is told."""

    def __init__(self, shared: Shared):
        super().__init__()
        self.shared, self.spec, hidden = shared, shared.model.embedding, shared.model.hidden
        spec = self.spec
        self.patches = PatchLinear(shared, "x_embedder.proj", (hidden, spec.channels, spec.patch, spec.patch))
        self.steps = nn.ModuleList(
            WholeLinear(shared, f"t_embedder.mlp.{at}", (hidden, width))
            for at, width in ((0, spec.frequencies), (2, hidden))
        )
        self.classes = None
        if spec.classes:
            name, shape = "y_embedder.embedding_table.weight", (spec.classes, hidden)
            part = Part(name, shape, (0, 0), (slice(None),))
            self.classes = shared.make(name, shape, [part], copies=shared.tp.size, sums=shared.shard_sums)

    def forward(self, p: Pass) -> torch.Tensor:
        shared, spec = self.shared, self.spec
        found = noise.drawn(tuple(p.tokens.shape), p.rows, shared.seed, p.step, shared.train.global_batch)
        # rows that fill up a batch to judge by are of no class, and nothing is made of what is found in them
        told = torch.where(found.untold | padded(p.targets), max(0, spec.classes - 1), p.targets)
        cut = noise.patches(noise.noisy(p.tokens, found), spec.patch)
        return self.entered(cut[:, p.positions], found.steps, told, p.positions)

    def entered(
        self, cut: torch.Tensor, steps: torch.Tensor, classes: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [1 + s, b, hidden] of patches [b, s, channels, side, side] of noisy samples, in these steps [b]
        of their noise and of these classes [b]; ``tokens`` int64 [s] are their numbers in a sequence."""
        shared, spec, kind = self.shared, self.spec, self.patches.weight.dtype
        count = shared.train.seq_len // max(1, shared.train.frames)
        table = noise.positions(count, shared.model.hidden).to(cut.device)
        x = self.patches(shared.my_shard(cut.flatten(2).transpose(0, 1)).to(kind))
        x = x + table[shared.my_shard(tokens) % count].to(kind).unsqueeze(1)
        written = noise.waves(steps, spec.frequencies, cosines_first=True).to(kind)
        told = self.steps[1](F.silu(self.steps[0](written)))
        if self.classes is not None:
            told = told + F.embedding(classes, self.classes)
        return torch.cat((told.unsqueeze(0), x))


def padded(targets: torch.Tensor) -> torch.Tensor:
    """Which of some samples fill up a batch to judge by, bool [b]; values, unlike classes, have none."""
    return torch.zeros_like(targets, dtype=torch.bool) if targets.is_floating_point() else targets == PADDING


class DenoiserLayer(nn.Module):
    """x + gate * attention(norm(x)), then + gate * mlp(norm(x)), with norms scaled and shifted."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        block, prefix = shared.model.block(layer), shared.names.layer.format(layer)
        self.shared, self.recompute, hidden = shared, recompute, shared.model.hidden
        rows = Modulation().vectors * hidden
        self.modulation = WholeLinear(shared, f"{prefix}adaLN_modulation.1", (rows, hidden), init=AT_FIRST)
        self.attention = AttentionModule(shared, prefix, block.attention, block)
        self.over = block.attention.over
        if self.over:
            self.attention.core = DimCore(shared, block.attention)
        self.attention.core.drops_core = recompute == "selective"
        self.mlp = Mlp(shared, prefix, block.mlp)
        dims = [shared.model.block(one).attention.over for one in range(layer)]
        #: Whether it is the first over frames, which are numbered in front of it.
        self.counts = self.over == TIME and TIME not in dims
        self.switches = shared.plan.sequence.switches and any(isinstance(one, DimSwitch) for one in block.before)

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def _forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        told, x = x[0], x[1:]
        if self.switches:
            x = switched(x, self.over, self.shared)
        if self.counts:
            x = x + self._frames(x)
        six = self.modulation(F.silu(told)).chunk(Modulation().vectors, dim=-1)
        x = x + six[2] * self.attention(modulated(x, six[0], six[1]), p)
        x = x + six[5] * self.mlp(modulated(x, six[3], six[4]), p)
        return torch.cat((told.unsqueeze(0), x))

    def _frames(self, x: torch.Tensor) -> torch.Tensor:
        """The fixed table of frames, for each token of this rank: [s, 1, hidden]."""
        shared = self.shared
        frames = own_tokens(shared, self.over) // per_frame(shared)
        table = noise.waves(torch.arange(shared.train.frames, device=x.device), shared.model.hidden)
        return table[shared.my_shard(frames.to(x.device))].to(x.dtype).unsqueeze(1)


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The norm of x [s, b, hidden], scaled and shifted by vectors [b, hidden]."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


class DenoiserHead(nn.Module):
    """The noise that is found, and its mean squared error."""

    def __init__(self, shared: Shared, tied: nn.Module | None):
        """`tied`: None, as there is no table."""
        super().__init__()
        self.shared, self.spec, hidden = shared, shared.model.head, shared.model.hidden
        two = Modulation(vectors=2).vectors * hidden
        self.modulation = WholeLinear(shared, "final_layer.adaLN_modulation.1", (two, hidden), init=AT_FIRST)
        self.out = WholeLinear(shared, "final_layer.linear", (self.spec.inner, hidden), init=AT_FIRST)
        #: Called with the mean squared error of each sample [1, b], where somebody wants it.
        self.told: Callable[[torch.Tensor], None] | None = None

    def found(self, x: torch.Tensor) -> torch.Tensor:
        """The output for each token, [s, b, numbers of a patch]: the noise, and whatever else the model tells."""
        told, x = x[0], x[1:]
        return self.out(modulated(x, *self.modulation(F.silu(told)).chunk(2, dim=-1)))

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The mean squared error of each token's noise, summed over this rank's tokens, times ``p.scale``. A variance
        that a model also tells is not trained."""
        shared, channels = self.shared, self.shared.model.embedding.channels
        said = noise.drawn(tuple(p.tokens.shape), p.rows, shared.seed, p.step, shared.train.global_batch)
        wanted = noise.patches(said.noise, self.spec.patch)
        tokens = p.positions if not shared.plan.sequence.switches else self._last().to(p.positions.device)
        wanted = wanted[:, shared.my_shard(tokens)].transpose(0, 1)
        found = noise.from_found(self.found(x), self.spec, channels)
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        each = (found - wanted.to(found.dtype)).square().mean((-3, -2, -1)).masked_fill(padded(p.targets), 0.0)
        if self.told is not None:
            of = each.sum(0, keepdim=True) / shared.train.seq_len
            self.told(sum_over(of, shared.tp) if shared.sp else of)
        lost = each.sum() * p.scale
        return sum_over(lost, shared.tp) if shared.sp else lost

    def _last(self) -> torch.Tensor:
        model = self.shared.model
        return own_tokens(self.shared, model.block(model.num_layers - 1).attention.over)


class NoisyClassesHead(nn.Module):
    """The class of noisy samples, by the mean of their tokens, and its cross-entropy."""

    def __init__(self, shared: Shared, tied: nn.Module | None):
        """`tied`: None, as there is no table."""
        super().__init__()
        self.shared, hidden = shared, shared.model.hidden
        two = Modulation(vectors=2).vectors * hidden
        self.modulation = WholeLinear(shared, "final_layer.adaLN_modulation.1", (two, hidden), init=AT_FIRST)
        self.out = WholeLinear(shared, "final_layer.linear", (shared.model.head.rows, hidden), init=AT_FIRST)
        #: Held-out samples that were classified rightly since somebody set it to 0.
        self.right: torch.Tensor | int = 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[b, classes] of hidden states [1 + s, b, hidden], in 32 bits at least."""
        told, x = x[0], x[1:]
        found = self.out(modulated(x, *self.modulation(F.silu(told)).chunk(2, dim=-1)).mean(0))
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The loss of a microbatch times ``p.scale``, which counts a sample's tokens."""
        logits = self.logits(x)
        if p.step < 0:
            self.right = self.right + (logits.argmax(1) == p.targets).sum()
        return F.cross_entropy(logits, p.targets, reduction="sum") * (p.scale * self.shared.train.seq_len)
