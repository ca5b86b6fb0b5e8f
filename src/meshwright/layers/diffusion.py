"""Parts of diffusion transformers as pieces: patches of latents, adaptive norms, and the noise found (DiT, 2212.09748).

Their products for a sequence, not a token, are whole on every tensor-parallel rank: they are few rows, and what they
make is read by all.
"""

from __future__ import annotations

import msgspec

from meshwright.layers.kind import Flops, Held, Kind, Tokens
from meshwright.layers.pieces import Context, Piece, linear, norm
from meshwright.spec.diffusion import Denoised, DimSwitch, Latents, Modulation, NoisyClasses
from meshwright.work import Collective, Elementwise


def latent_pieces(c: Context, spec: Latents) -> list[Piece]:
    """A product of all patches, positions added, and the two products of the step; nothing behind an image waits for a
    gradient."""
    size, inputs = c.shard_tokens * c.hidden * c.element, c.tokens * spec.inner * c.element
    at, once = c.sequences_only(), c.sequences_only().tokens * c.hidden * c.element
    found = [
        *linear(c, "patches", c.hidden, spec.inner, bias=True, saved=inputs, held=inputs),
        Piece(name="positions", forward=Elementwise(num_bytes=3 * size), backward=Elementwise(num_bytes=size)),
        *linear(at, "step 1", c.hidden, spec.frequencies, bias=True),
        *linear(at, "step 2", c.hidden, c.hidden, bias=True, saved=once, held=once),
    ]
    return [msgspec.structs.replace(piece, backward=None) if piece.name == "patches" else piece for piece in found]


def modulation_pieces(c: Context, spec: Modulation) -> list[Piece]:
    """The product of each sequence's vector, and over its tokens two passes of a scale and a shift and two of a gate
    (of the last layer one scale and shift), each of which reads and writes them."""
    at, size = c.sequences_only(), c.shard_tokens * c.hidden * c.element
    once = at.tokens * c.hidden * c.element
    passes = 4 if spec.vectors == Modulation().vectors else 1
    # a gradient passes each of them, and is multiplied with what it met and summed over tokens
    over = Piece(
        name="modulate",
        forward=Elementwise(num_bytes=2 * passes * size, kernels=passes),
        backward=Elementwise(num_bytes=3 * passes * size, kernels=passes),
        saved=passes * size,
    )
    return [*linear(at, "modulation", spec.vectors * c.hidden, c.hidden, bias=True, saved=once, held=once), over]


def switch_pieces(c: Context, spec: DimSwitch) -> list[Piece]:
    """One all-to-all of the hidden states where ranks share the dim that comes next and shall share the other (Dynamic
    Sequence Parallelism, 2403.10266, section 3), and one of their gradients; nothing under other plans."""
    if c.plan.layout.cp == 1 or not c.plan.sequence.switches:
        return []
    swapped = Collective(op="all_to_all", num_bytes=c.shard_tokens * c.hidden * c.element, group=c.cp_outer)
    return [Piece(name=f"switch to {spec.over}", forward=swapped, backward=swapped, queue="cp")]


def nothing_held(spec: DimSwitch, c: Context) -> Held:
    """Return no parameters."""
    return Held()


def denoised_pieces(c: Context, spec: Denoised) -> list[Piece]:
    """Norm, modulation and the product of every token, then the squared error in fp32."""
    entry, out = c.tokens * c.hidden * c.element, c.tokens * spec.inner
    loss = Piece(
        name="squared error",
        forward=Elementwise(num_bytes=out * (c.element + 8.0), kernels=2),
        backward=Elementwise(num_bytes=out * (8.0 + c.element)),
        saved=out * 4.0,
    )
    product = linear(c, "noise", spec.inner, c.hidden, bias=True, saved=entry, held=entry)
    return [norm(c, "final norm"), *modulation_pieces(c, Modulation(vectors=2)), *product, loss]


def class_pieces(c: Context, spec: NoisyClasses) -> list[Piece]:
    """Norm and modulation of every token, their mean, and the product and cross-entropy of each sequence."""
    at, size = c.sequences_only(), c.shard_tokens * c.hidden * c.element
    once, out = at.tokens * c.hidden * c.element, float(at.tokens * spec.rows)
    mean = Piece(name="mean of tokens", forward=Elementwise(num_bytes=size), backward=Elementwise(num_bytes=size))
    loss = Piece(
        name="cross-entropy",
        forward=Elementwise(num_bytes=out * (c.element + 8.0), kernels=2),
        backward=Elementwise(num_bytes=out * (8.0 + c.element)),
        saved=out * 4.0,
    )
    product = linear(at, "classes", spec.rows, c.hidden, bias=True, saved=once, held=once)
    return [norm(c, "final norm"), *modulation_pieces(c, Modulation(vectors=2)), mean, *product, loss]


def class_flops(spec: NoisyClasses, tokens: Tokens) -> Flops:
    """Every sequence multiplies both products."""
    return Flops(weights=2 * spec.num_params(tokens.hidden) * tokens.rows)


def whole(spec: Latents | Modulation | Denoised | NoisyClasses, c: Context) -> Held:
    """Return the parameters, all of them on every tensor-parallel rank."""
    return Held(whole=float(spec.num_params(c.hidden)), low=False)


def latent_flops(spec: Latents, tokens: Tokens) -> Flops:
    """Every token multiplies the patches' product, every sequence those of its step."""
    patches = (spec.inner + 1) * tokens.hidden
    return Flops(weights=2 * (patches * tokens.count + spec.step_params(tokens.hidden) * tokens.rows))


def modulation_flops(spec: Modulation, tokens: Tokens) -> Flops:
    """Every sequence multiplies the product."""
    return Flops(weights=2 * spec.num_params(tokens.hidden) * tokens.rows)


def denoised_flops(spec: Denoised, tokens: Tokens) -> Flops:
    """Every token multiplies the product behind the norm, every sequence the norm's."""
    once = Modulation(vectors=2).num_params(tokens.hidden)
    return Flops(weights=2 * ((spec.num_params(tokens.hidden) - once) * tokens.count + once * tokens.rows))


KINDS = (
    Kind(name="latents", record=Latents, pieces=latent_pieces, params=whole, flops=latent_flops),
    Kind(name="modulation", record=Modulation, pieces=modulation_pieces, params=whole, flops=modulation_flops),
    Kind(name="dim switch", record=DimSwitch, pieces=switch_pieces, params=nothing_held),
    Kind(name="denoised", record=Denoised, pieces=denoised_pieces, params=whole, flops=denoised_flops),
    Kind(name="noisy classes", record=NoisyClasses, pieces=class_pieces, params=whole, flops=class_flops),
)
