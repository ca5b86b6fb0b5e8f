"""U-Nets of latent diffusion, as diffusers' ``UNet2DConditionModel`` says them: Stable Diffusion 2.1 (Rombach et al.,
2021, arXiv 2112.10752) and SDXL (Podell et al., 2023, arXiv 2307.01952)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Shape(NamedTuple):
    """A U-Net's configuration, level by level: ``widths``, whether there are transformers on the way ``down`` and
    ``up``, residual blocks (``deep``), ``heads`` and transformers behind each (``count``). ``context`` is the width of
    a text's words; of blocks that are not ``told`` the step the width of its embedding is 0."""

    widths: list[int]
    down: list[bool]
    up: list[bool]
    deep: list[int]
    heads: list[int]
    count: list[int]
    groups: int
    context: int = 0
    told: bool = True

    @property
    def step(self) -> int:
        """Width of the step's embedding."""
        return STEP_WIDER * self.widths[0] if self.told else 0


class Builder:
    """The blocks and the streams of a U-Net while they are being made. Blocks read the stream ``text``; where there are
    blocks before, maps go on from the stream ``now``."""

    def __init__(self, shape: Shape, streams: list[Stream], *, text: int, now: int):
        self.shape, self.streams, self.text, self.now = shape, streams, text, now
        self.blocks: list[Block] = []
        #: Whether the blocks to come are not trained while gradients pass them.
        self.locked = False

    def next(self, scale: int, channels: int) -> int:
        """A new stream of maps."""
        self.streams.append(maps(scale, channels))
        return len(self.streams) - 1

    def residual(self, scale: int, channels: int, *, skip: int = -1, into: int = -1) -> int:
        """A residual block into a stream of its own, or one that is there; returns that."""
        inputs = self.streams[self.now].hidden + (self.streams[skip].hidden if skip >= 0 else 0)
        part = TimedResidual(
            inputs=inputs,
            outputs=channels,
            step=self.shape.step,
            groups=self.shape.groups,
            stream=self.now,
            skip=skip,
        )
        self.now = into if into >= 0 else self.next(scale, channels)
        self.put(part)
        return self.now

    def put(self, *before: Any, **parts: Any) -> None:
        """A block on the maps that are now."""
        said = {"norms": 0, "norm": "layernorm", "stream": self.now, "locked": self.locked, **parts}
        self.blocks.append(Block(before=before, **said))

    def transformers(self, count: int, heads: int) -> None:
        """Blocks of attention over places, attention over the text and a gated MLP, between two projections."""
        width, context = self.streams[self.now].hidden, self.shape.context
        each = {"heads": heads, "kv_heads": heads, "head_dim": width // heads, "v_head_dim": width // heads}
        attention = Attention(rotary=False, out_bias=True, **each)
        cross = Attention(rotary=False, out_bias=True, kv_inputs=context, **each)
        mlp = Dense(ffn=MLP_WIDER * width, gated=True, activation="gelu", bias=True)
        place = {"channels": width, "groups": self.shape.groups, "stream": self.now}
        self.put(MapProjection(enters=True, **place))
        for _ in range(count):
            self.put(attention=attention, cross=cross, source=self.text, mlp=mlp, norms=3, norm_vectors=2)
        self.put(MapProjection(enters=False, **place))

    def resample(self, scale: int, *, up: bool = False) -> int:
        """Maps of another scale with as many channels; returns their stream."""
        channels = self.streams[self.now].hidden
        part = Resampling(channels=channels, stream=self.now, up=up)
        self.now = self.next(scale, channels)
        self.put(part)
        return self.now

    @property
    def _scales(self) -> list[int]:
        return [LATENT_PIXELS * 2**level for level in range(len(self.shape.widths))]

    def down(self, left: Callable[[int], None]) -> None:
        """Put the levels on the way down; every stream that the way up reads beside its own is told to `left`."""
        shape, scales = self.shape, self._scales
        left(self.now)
        for level, width in enumerate(shape.widths):
            for _ in range(shape.deep[level]):
                self.residual(scales[level], width)
                if shape.down[level]:
                    self.transformers(shape.count[level], shape.heads[level])
                left(self.now)
            if level < len(scales) - 1:
                left(self.resample(scales[level + 1]))

    def middle(self) -> None:
        """Put the middle, on the smallest maps."""
        shape, scale = self.shape, self._scales[-1]
        middle = self.residual(scale, shape.widths[-1])
        self.transformers(shape.count[-1], shape.heads[-1])
        self.residual(scale, shape.widths[-1], into=middle)

    def up(self, left: list[int]) -> None:
        """Put the levels on the way up, each block beside one of what was left, the last first."""
        shape, scales = self.shape, self._scales
        last = len(scales) - 1
        for level in reversed(range(len(scales))):
            into = -1
            for _ in range(shape.deep[level] + 1):
                into = self.residual(scales[level], shape.widths[level], skip=left.pop(), into=into)
                if shape.up[last - level]:
                    self.transformers(shape.count[level], shape.heads[level])
            if level:
                self.resample(scales[level - 1], up=True)


def shape_of(r: ConfigReader, *, up: bool = True) -> Shape:
    """The shape that a configuration says; of one without a way `up` (a ControlNet) its way down and its middle."""
    widths = r.ints("block_out_channels", low=1) or [320, 640, 1280, 1280]
    levels = len(widths)
    down = r.words("down_block_types", length=levels, choices=tuple(DOWN)) or ["DownBlock2D"] * levels
    ups = ["UpBlock2D"] * levels
    if up:
        ups = r.words("up_block_types", length=levels, choices=tuple(UP)) or ups
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
    context = r.int("cross_attention_dim", default=1280)
    is_down, is_up = [DOWN[one] for one in down], [UP[one] for one in ups]
    return Shape(widths, is_down, is_up, deep, heads, count, groups, context)


def stem_of(r: ConfigReader, shape: Shape, *, stream: int = 0) -> LatentStem:
    """The first layer, on the latents of a stream."""
    told = r.config.get("addition_embed_type") == "text_time"
    conditions = r.int("projection_class_embeddings_input_dim") if told else 0
    r.ignore("projection_class_embeddings_input_dim")
    inner = r.int("in_channels", default=4)
    return LatentStem(inner=inner, outputs=shape.widths[0], step=shape.step, conditions=conditions, stream=stream)


def head_of(r: ConfigReader, shape: Shape, *, stream: int, locked: bool = False) -> LatentNoise:
    """The last layer, on the maps of a stream."""
    outputs = r.int("out_channels", default=4)
    return LatentNoise(channels=shape.widths[0], outputs=outputs, groups=shape.groups, stream=stream, locked=locked)


def unet(r: ConfigReader) -> Model:
    """A U-Net of conditions: down through its levels, a middle, and up again beside what each left."""
    shape = shape_of(r)
    r.raise_faults()
    text = Stream(name="text", hidden=shape.context, tokens=WORDS, causal=False)
    made, left = Builder(shape, [maps(LATENT_PIXELS, shape.widths[0]), text], text=1, now=0), []
    made.down(left.append)
    made.middle()
    made.up(left)
    return model(
        r,
        made.blocks,
        embedding=stem_of(r, shape),
        head=head_of(r, shape, stream=made.now),
        hidden=shape.widths[0],
        max_seq_len=0,
        streams=tuple(made.streams),
    )


def _each(r: ConfigReader, key: str, levels: int, default: int) -> list[int]:
    """A number for every level, from a list or from one for all."""
    if isinstance(r.config.get(key), list):
        found = r.ints(key, length=levels, low=1)
        return found or [default] * levels
    return [r.int(key, default=default)] * levels
