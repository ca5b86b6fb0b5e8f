"""Diffusion transformers over latents of images, as diffusers' configurations say them: DiT (2212.09748).

Latte (2401.03048) is DiT for videos: half of its blocks attend over the places of each frame, half over all frames of
each place, in turn. A block's norms have no weights of their own: a product from the step's and the class's embedding
makes them. Images of other sizes than the published ones have other numbers of tokens, which the workload says. With
``num_labels`` a model tells the class of a noisy sample in place of its noise.
"""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model
from meshwright.spec.diffusion import Denoised, DimSwitch, Latents, Modulation, NoisyClasses
from meshwright.spec.ends import Stream
from meshwright.spec.families.parts import model
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.items import SPACE, TIME
from meshwright.spec.layers import Attention, Block, Dense

#: The kind of norm that is modelled, of those that diffusers has.
ADAPTIVE = "ada_norm_zero"


def dit(r: ConfigReader) -> Model:
    """DiT: attention and an MLP of four times the width with biases, each scaled, shifted and gated."""
    return _denoiser(r)


def latte(r: ConfigReader) -> Model:
    """Latte, its variant 1: pairs of a block over space and a block over time (``num_layers`` counts pairs, as in
    diffusers)."""
    if r.int("caption_channels", default=0, low=0):
        r.fault(
            "M005", "caption_channels is not modelled", "caption_channels", "modelled: videos of classes, or of none"
        )
    return _denoiser(r, frames=r.int("video_length", default=16))


def _denoiser(r: ConfigReader, frames: int = 0) -> Model:
    heads, width = r.int("num_attention_heads", default=16), r.int("attention_head_dim", default=72)
    hidden = heads * width
    if r.text("norm_type", default=ADAPTIVE) != ADAPTIVE or r.config.get("cross_attention_dim"):
        said = "cross_attention_dim" if r.config.get("cross_attention_dim") else "norm_type"
        r.fault("M005", f"{said} is not modelled", said, f"modelled: norm_type {ADAPTIVE}, without cross attention")
    channels, patch = r.int("in_channels", default=4), r.int("patch_size", default=2)
    size = r.int("sample_size", default=32)
    r.divides("patch_size", "sample_size", patch, size)
    bias = r.flag("attention_bias", default=True)
    activation = r.text("activation_fn", default="gelu-approximate").replace("-approximate", "_tanh")
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=width, v_head_dim=width, rotary=False, qkv_bias=bias, out_bias=bias
    )
    block = Block(
        attention=attention,
        mlp=Dense(ffn=4 * hidden, gated=False, activation=activation, bias=True),
        norm="layernorm",
        norm_vectors=0,
        before=(Modulation(),),
    )
    blocks = [block] * r.layers()
    if frames:
        blocks = [_over(block, dim, number > 0) for number, dim in enumerate((SPACE, TIME) * r.layers())]
    r.ignore(
        *("norm_type", "cross_attention_dim", "num_vector_embeds", "only_cross_attention", "double_self_attention"),
        *("norm_num_groups", "norm_elementwise_affine", "upcast_attention", "use_linear_projection", "dropout"),
    )
    count = (size // patch) ** 2
    rows = r.int("num_labels", default=0, low=0)
    classes = r.int("num_embeds_ada_norm", default=0 if rows else 1000, low=0)
    if rows and classes:
        message = f"num_labels={rows}: a classifier of noisy samples is not told their class"
        r.fault("M005", message, "num_embeds_ada_norm", "say num_embeds_ada_norm 0, or drop num_labels")
    out = r.int("out_channels", default=2 * channels)
    return model(
        r,
        blocks,
        embedding=Latents(
            channels=channels, patch=patch, positions=count, classes=classes + bool(classes), frames=frames
        ),
        head=NoisyClasses(rows=rows) if rows else Denoised(channels=out, patch=patch),
        hidden=hidden,
        max_seq_len=0,
        streams=(Stream(name="video" if frames else "image", hidden=hidden, causal=False),),
    )


def _over(block: Block, dim: str, switched: bool) -> Block:
    """The block with attention over one dim, behind a switch where the block before attends over the other."""
    attention = msgspec.structs.replace(block.attention, over=dim)
    before = (DimSwitch(over=dim), *block.before) if switched else block.before
    return msgspec.structs.replace(block, attention=attention, before=before)
