"""The head: final norm, projection to the vocabulary and the loss."""

from __future__ import annotations

import msgspec

from meshwright.layers.pieces import Context, Piece, enter, entering, linear, norm, regather
from meshwright.work import Collective, Elementwise, Gemm


def head(c: Context) -> list[Piece]:
    """Final norm, projection to the vocabulary (split over tp), softmax cross-entropy in fp32.

    Separate loss kernels keep the fp32 probabilities: 4 bytes per token and vocabulary entry (Korthikanti et al.
    2205.05198, section 4.3). Their backward holds two gradients of as many bytes beside them, the loss's and the
    softmax's (12 bytes in all, which torch's profiler shows for ``cross_entropy``), or writes one over the
    probabilities and only casts it: then the most is held there (Megatron's vocab-parallel cross-entropy), or in the
    forward if that makes the probabilities beside the fp32 logits (nanotron's). A fused one reads the 16-bit logits
    for the maximum and again for the sum, and its backward writes their gradient over them.
    """
    width = -(-c.model.vocab // c.tp)
    entry = entering(c)
    logits = float(c.tokens) * width
    e = c.element
    wide = msgspec.structs.replace(
        c,
        plan=msgspec.structs.replace(
            c.plan, precision=msgspec.structs.replace(c.plan.precision, compute=c.attention_dtype)
        ),
    )
    projection = linear(wide, "head", width, c.hidden, saved=entry, held=entry)
    projection = [
        msgspec.structs.replace(p, regather=regather(c)) if isinstance(p.weight, Gemm) else p for p in projection
    ]
    if c.plan.memory.loss == "fused":
        forward = backward = Elementwise(num_bytes=logits * 2 * e, fused=True)
        kept, working = logits * e, logits * e
    else:
        # cast to fp32, maximum, difference, exponential, sum; normalise, scale, cast back
        name = "loss" if c.tp == 1 else "sharded loss"
        forward = Elementwise(num_bytes=logits * ((e + 4) + 4 + 8 + 8 + 4), kernels=5, fused=True, operator=name)
        backward = Elementwise(num_bytes=logits * (8 + 8 + (4 + e)), kernels=3, fused=True, operator=f"{name} backward")
        kept = logits * 4.0
        working = logits * {"eager": 8.0, "copied": 4.0, "in-place": e}[c.plan.memory.loss]
    loss = Piece(name="cross-entropy", forward=forward, backward=backward, saved=kept, logits=kept, working=working)
    pieces = [norm(c, "final norm"), *enter(c, "head"), *projection, loss]
    if c.tp > 1:
        # maximum, sum of exponentials and the target's logit, each a number per token
        small = Collective(op="all_reduce", num_bytes=c.tokens * 4.0 * 3, group=c.tp_group)
        pieces.append(Piece(name="loss sums", forward=small, queue="tp"))
    return pieces
