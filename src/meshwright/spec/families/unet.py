"""U-Nets of latent diffusion, as diffusers' ``UNet2DConditionModel`` says them: Stable Diffusion 2.1 (Rombach et al.,
2021, arXiv 2112.10752) and SDXL (Podell et al., 2023, arXiv 2307.01952)."""

from __future__ import annotations

from typing import Any

from meshwright.spec.architecture import Model
from meshwright.spec.diffusion import LATENT_PIXELS
from meshwright.spec.ends import Stream
from meshwright.spec.families.convolutional import MAX_STAGES, maps
from meshwright.spec.families.parts import model
from meshwright.spec.families.reader import MAX_LAYERS, ConfigReader
from meshwright.spec.layers import Attention, Block, Dense
from meshwright.spec.unet import LatentNoise, LatentStem, MapProjection, Resampling, TimedResidual

#: Kinds of the blocks on the way down and up: with and without transformers.
DOWN, UP = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}, {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
#: How many times wider than the first maps the step's embedding is, and than its width a transformer's MLP.
STEP_WIDER, MLP_WIDER = 4, 4
#: Words of a text, as CLIP's text towers have them (2103.00020).
WORDS = 77
#: What a configuration may say besides that leaves the shape alone.
_ASIDE = (
    *("center_input_sample", "downsample_padding", "flip_sin_to_cos", "freq_shift", "mid_block_scale_factor"),
    *("norm_eps", "upcast_attention", "dropout", "sample_size", "addition_time_embed_dim"),
)
#: What would give it another shape, with the values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "act_fn": ("silu",),
    "addition_embed_type": ("text_time",),
    "class_embed_type": (),
    "num_class_embeds": (),
    "dual_cross_attention": (False,),
    "only_cross_attention": (False,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "encoder_hid_dim": (),
    "time_cond_proj_dim": (),
    "time_embedding_type": ("positional",),
    "resnet_time_scale_shift": ("default",),
}


class _Builder:
    """The blocks and the streams of a U-Net while they are being made."""

    def __init__(self, r: ConfigReader, widths: list[int], step: int, groups: int, context: int):
        self.step, self.groups = step, groups
        self.streams = [maps(LATENT_PIXELS, widths[0]), Stream(name="text", hidden=context, tokens=WORDS, causal=False)]
        self.blocks: list[Block] = []
        self.now = 0

    def _next(self, scale: int, channels: int) -> int:
        self.streams.append(maps(scale, channels))
        return len(self.streams) - 1

    def residual(self, scale: int, channels: int, *, skip: int = -1, into: int = -1) -> int:
        """A residual block into a stream of its own, or one that is there; returns that."""
        inputs = self.streams[self.now].hidden + (self.streams[skip].hidden if skip >= 0 else 0)
        part = TimedResidual(
            inputs=inputs, outputs=channels, step=self.step, groups=self.groups, stream=self.now, skip=skip
        )
        self.now = into if into >= 0 else self._next(scale, channels)
        self._put(part)
        return self.now

    def _put(self, *before: Any, **parts: Any) -> None:
        self.blocks.append(Block(before=before, norm="layernorm", stream=self.now, **{"norms": 0, **parts}))

    def transformers(self, count: int, heads: int) -> None:
        """Blocks of attention over places, attention over the text and a gated MLP, between two projections."""
        width, context = self.streams[self.now].hidden, self.streams[1].hidden
        each = {"heads": heads, "kv_heads": heads, "head_dim": width // heads, "v_head_dim": width // heads}
        attention = Attention(rotary=False, out_bias=True, **each)
        cross = Attention(rotary=False, out_bias=True, kv_inputs=context, **each)
        mlp = Dense(ffn=MLP_WIDER * width, gated=True, activation="gelu", bias=True)
        place = {"channels": width, "groups": self.groups, "stream": self.now}
        self._put(MapProjection(enters=True, **place))
        for _ in range(count):
            self._put(attention=attention, cross=cross, source=1, mlp=mlp, norms=3, norm_vectors=2)
        self._put(MapProjection(enters=False, **place))

    def resample(self, scale: int, *, up: bool = False) -> int:
        """Maps of another scale with as many channels; returns their stream."""
        channels = self.streams[self.now].hidden
        part = Resampling(channels=channels, stream=self.now, up=up)
        self.now = self._next(scale, channels)
        self._put(part)
        return self.now


def unet(r: ConfigReader) -> Model:
    """A U-Net of conditions: down through its levels, a middle, and up again beside what each left."""
    widths = r.ints("block_out_channels", low=1) or [320, 640, 1280, 1280]
    levels = len(widths)
    down = r.words("down_block_types", length=levels, choices=tuple(DOWN)) or ["DownBlock2D"] * levels
    up = r.words("up_block_types", length=levels, choices=tuple(UP)) or ["UpBlock2D"] * levels
    deep = _each(r, "layers_per_block", levels, 2)
    heads = _each(r, "num_attention_heads" if r.config.get("num_attention_heads") else "attention_head_dim", levels, 8)
    count = _each(r, "transformer_layers_per_block", levels, 1)
    groups = r.int("norm_num_groups", default=32)
    if levels > MAX_STAGES or sum(deep) * max(count) > MAX_LAYERS:
        message = f"more than {MAX_STAGES} levels or {MAX_LAYERS} layers"
        r.fault("M002", message, "layers_per_block", "as 2 in each of 4 levels")
    if any(width % groups for width in widths):
        r.fault("M003", f"norm_num_groups={groups} does not divide every width", "norm_num_groups", "as 32 of 320")
    if any(width % head for width, head in zip(widths, heads)):
        r.fault("M003", "heads do not divide the widths of their levels", "attention_head_dim", "as 5 of 320")
    for key, plain in _PLAIN.items():
        if r.config.get(key) not in (None, *plain):
            r.fault("M005", f"{key} is not modelled", key, f"modelled: {', '.join(map(str, plain)) or 'none'}")
    if r.config.get("mid_block_type", "") is None:
        r.fault("M005", "a U-Net without a middle is not modelled", "mid_block_type", "leave it out")
    if not r.flag("use_linear_projection", default=False):
        r.notes.append("projections into transformers are convolutions of one place, which cost what linear layers do")
    r.ignore(*_ASIDE, *_PLAIN)
    r.raise_faults()
    step = STEP_WIDER * widths[0]
    made = _Builder(r, widths, step, groups, r.int("cross_attention_dim", default=1280))
    _levels(made, widths, [DOWN[one] for one in down], [UP[one] for one in up], deep, heads, count)
    told = r.config.get("addition_embed_type") == "text_time"
    conditions = r.int("projection_class_embeddings_input_dim") if told else 0
    r.ignore("projection_class_embeddings_input_dim")
    stem = LatentStem(inner=r.int("in_channels", default=4), outputs=widths[0], step=step, conditions=conditions)
    head = LatentNoise(channels=widths[0], outputs=r.int("out_channels", default=4), groups=groups, stream=made.now)
    return model(
        r,
        made.blocks,
        embedding=stem,
        head=head,
        hidden=widths[0],
        max_seq_len=0,
        streams=tuple(made.streams),
    )


def _levels(
    made: _Builder,
    widths: list[int],
    down: list[bool],
    up: list[bool],
    deep: list[int],
    heads: list[int],
    count: list[int],
) -> None:
    """Put the levels into `made`, down, in the middle and up."""
    scales, last = [LATENT_PIXELS * 2**level for level in range(len(widths))], len(widths) - 1
    left = [0]
    for level, width in enumerate(widths):
        for _ in range(deep[level]):
            left.append(made.residual(scales[level], width))
            if down[level]:
                made.transformers(count[level], heads[level])
        if level < last:
            left.append(made.resample(scales[level + 1]))
    middle = made.residual(scales[last], widths[last])
    made.transformers(count[last], heads[last])
    made.residual(scales[last], widths[last], into=middle)
    for level in reversed(range(len(widths))):
        into = -1
        for _ in range(deep[level] + 1):
            into = made.residual(scales[level], widths[level], skip=left.pop(), into=into)
            if up[last - level]:
                made.transformers(count[level], heads[level])
        if level:
            made.resample(scales[level - 1], up=True)


def _each(r: ConfigReader, key: str, levels: int, default: int) -> list[int]:
    """A number for every level, from a list or from one for all."""
    if isinstance(r.config.get(key), list):
        found = r.ints(key, length=levels, low=1)
        return found or [default] * levels
    return [r.int(key, default=default)] * levels
