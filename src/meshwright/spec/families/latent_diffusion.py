"""Diffusion models with their frozen encoders, as diffusers' pipelines name their components.

``StableDiffusionPipeline`` (Rombach et al., 2021, 2112.10752), ``StableDiffusionControlNetPipeline`` (Zhang et al.,
2023, 2302.05543) and ``DiTPipeline`` (Peebles and Xie, 2212.09748).

A configuration has each component's own under the name that ``model_index.json`` gives it: ``text_encoder``, ``vae``,
``unet``, ``controlnet`` or ``transformer``. The first layers encode texts and images and are never trained
(:attr:`~meshwright.spec.architecture.Model.frozen`); decoders of images take no part in training and are left out.
"""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from meshwright.spec.architecture import Model
from meshwright.spec.diffusion import LATENT_PIXELS
from meshwright.spec.ends import Boundary, Bridge, Embedding, Stream
from meshwright.spec.families.convolutional import maps
from meshwright.spec.families.diffusion import dit
from meshwright.spec.families.encoders import CLIP_TEXT, attention_block, completed
from meshwright.spec.families.parts import model
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.families.unet import Builder, Shape, head_of, shape_of, stem_of
from meshwright.spec.layers import Attention, Block
from meshwright.spec.unet import MapConvolution

#: Levels of an autoencoder whose latents are of :data:`LATENT_PIXELS` pixels a side.
LEVELS = LATENT_PIXELS.bit_length()
#: Channels of an image.
CHANNELS = 3
#: Widths of the convolutions that read a picture, where a ControlNet does not say them (diffusers).
PICTURE = [16, 32, 96, 256]


class _Encoders:
    """The frozen layers while they are being made, with the streams of all layers."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.blocks: list[Block] = []
        self.text = self.latents = -1

    def stream(self, one: Stream) -> int:
        self.streams.append(one)
        return len(self.streams) - 1

    def words(self, r: ConfigReader) -> Embedding:
        """CLIP's text tower without its projection; returns the embedding of its words."""
        hidden, positions = r.int("hidden_size"), r.int("max_position_embeddings")
        self.text = self.stream(Stream(name="text", hidden=hidden, tokens=positions))
        self.blocks += [replace(attention_block(r, activation="quick_gelu"), stream=self.text)] * r.layers()
        return Embedding(rows=r.int("vocab_size"), positions=positions, stream=self.text)

    def images(self, r: ConfigReader) -> None:
        """The encoder of an autoencoder: residual blocks and halvings down to latents, of which one is drawn."""
        r.words("down_block_types", length=LEVELS, choices=("DownEncoderBlock2D",))
        widths = r.ints("block_out_channels", length=LEVELS, low=1) or [128, 256, 512, 512]
        deep, groups = r.int("layers_per_block", default=2), r.int("norm_num_groups", default=32)
        latent, channels = r.int("latent_channels", default=4), r.int("in_channels", default=CHANNELS)
        r.ignore(*("up_block_types", "sample_size", "out_channels", "scaling_factor", "shift_factor", "latents_mean"))
        r.ignore("latents_std", "force_upcast", "use_post_quant_conv", "use_quant_conv", "mid_block_add_attention")
        if r.text("act_fn", default="silu") != "silu":
            r.fault("M005", "act_fn is not modelled", "act_fn", "modelled: silu")
        if any(width % groups for width in widths):
            r.fault("M003", f"norm_num_groups={groups} does not divide every width", "norm_num_groups", "as 32 of 128")
            groups = 1
        image = self.stream(maps(1, channels))
        shape = Shape(widths, [], [], [deep] * LEVELS, [], [], groups, told=False)
        made = Builder(shape, self.streams, text=self.text, now=self.stream(maps(1, widths[0])))
        first = MapConvolution(inputs=channels, outputs=widths[0], stream=image, reads_data=True)
        # the last norm of the words is the first thing behind their tower
        made.put(*([Bridge(stream=self.text, norm_vectors=2)] if self.text >= 0 else []), first)
        for level, width in enumerate(widths):
            for _ in range(deep):
                made.residual(2**level, width)
            if level < LEVELS - 1:
                made.resample(2 ** (level + 1))
        last = made.residual(LATENT_PIXELS, widths[-1])
        width = widths[-1]
        alone = Attention(
            heads=1, kv_heads=1, head_dim=width, v_head_dim=width, rotary=False, qkv_bias=True, out_bias=True
        )
        made.put(attention=alone, norms=1, norm_vectors=2)
        made.residual(LATENT_PIXELS, width, into=last)
        moments = self.stream(maps(LATENT_PIXELS, 2 * latent))
        self.latents = self.stream(maps(LATENT_PIXELS, latent))
        out = MapConvolution(inputs=width, outputs=2 * latent, groups=groups, stream=last)
        told = MapConvolution(inputs=2 * latent, outputs=2 * latent, kernel=1, stream=moments)
        made.put(out, told, stream=self.latents)
        self.blocks += made.blocks


def _components(r: ConfigReader, *names: str) -> list[ConfigReader]:
    """The configurations of some components; M001 for one that is missing."""
    for name in names:
        if not isinstance(r.config.get(name), dict):
            help = f"put the component's own config.json under {name!r}: its parts are {', '.join(names)}"
            r.fault("M001", f"{r.family} has no {name}", name, help)
    r.raise_faults()
    r.ignore("scheduler", "tokenizer", "safety_checker", "feature_extractor", "requires_safety_checker")
    return [completed(r, name, CLIP_TEXT) if name == "text_encoder" else r.section(name) for name in names]


def _shape(r: ConfigReader, made: _Encoders, *, up: bool = True) -> Shape:
    """The shape of a U-Net that reads the words and latents of the encoders."""
    shape, width = shape_of(r, up=up), made.streams[made.text].hidden
    if shape.context != width:
        message = f"it reads words of a width of {shape.context}, and the text encoder makes {width}"
        r.fault("M003", message, "cross_attention_dim", f"say {width}, or take another text encoder")
    latent = made.streams[made.latents].hidden
    if r.int("in_channels", default=4) != latent:
        message = f"it reads {r.int('in_channels', default=4)} channels, and the autoencoder makes {latent}"
        r.fault("M003", message, "in_channels", f"say {latent}, or latent_channels of the autoencoder")
    return shape


def _before(made: _Encoders, shape: Shape) -> Builder:
    """A network's builder, before its first layer."""
    return Builder(shape, made.streams, text=made.text, now=made.stream(maps(LATENT_PIXELS, shape.widths[0])))


def stable_diffusion(r: ConfigReader) -> Model:
    """A frozen text encoder and a frozen encoder of images before a U-Net that is trained."""
    words, images, network = _components(r, "text_encoder", "vae", "unet")
    made = _Encoders()
    embedding = made.words(words)
    made.images(images)
    shape = _shape(network, made)
    r.raise_faults()
    own, left = _before(made, shape), []
    own.put(stem_of(network, shape, stream=made.latents))
    own.down(left.append)
    own.middle()
    own.up(left)
    return model(
        r,
        [*made.blocks, *own.blocks],
        embedding=embedding,
        head=head_of(network, shape, stream=own.now),
        hidden=shape.widths[0],
        max_seq_len=0,
        streams=tuple(made.streams),
        frozen=len(made.blocks),
    )


def controlnet(r: ConfigReader) -> Model:
    """A copy of a U-Net's way down that reads a picture is trained, and adds what it finds to the maps of the U-Net
    itself: whose way down is frozen, and whose way up lets gradients pass and is not trained."""
    words, images, network, copy = _components(r, "text_encoder", "vae", "unet", "controlnet")
    made = _Encoders()
    embedding = made.words(words)
    made.images(images)
    shape, mine = _shape(network, made), _shape(copy, made, up=False)
    if (shape.widths, shape.deep) != (mine.widths, mine.deep):
        help = "a ControlNet is a copy of the U-Net's way down"
        copy.fault("M003", "its levels are not those of the U-Net", "block_out_channels", help)
    picture = copy.ints("conditioning_embedding_out_channels", low=1) or PICTURE
    if len(picture) != LEVELS:
        help = f"as {PICTURE}"
        copy.fault("M003", f"{LEVELS} widths lead to maps of latents", "conditioning_embedding_out_channels", help)
    channels = copy.int("conditioning_channels", default=CHANNELS)
    copy.ignore("controlnet_conditioning_channel_order", "global_pool_conditions", "encoder_hid_dim_type")
    r.raise_faults()
    locked, left = _before(made, shape), []
    locked.put(stem_of(network, shape, stream=made.latents))
    locked.down(left.append)
    locked.middle()
    frozen, locked.blocks = [*made.blocks, *locked.blocks], []
    own = _copied(copy, mine, made, picture, channels, [*left, locked.now])
    locked.locked = True
    locked.up(left)
    return model(
        r,
        [*frozen, *own.blocks, *locked.blocks],
        embedding=embedding,
        head=head_of(network, shape, stream=locked.now, locked=True),
        hidden=shape.widths[0],
        max_seq_len=0,
        streams=tuple(made.streams),
        frozen=len(frozen),
    )


def _copied(
    r: ConfigReader, shape: Shape, made: _Encoders, picture: list[int], channels: int, into: list[int]
) -> Builder:
    """The copy with the convolutions that read a picture, each of whose maps is added to one of the streams `into`."""
    own = Builder(shape, made.streams, text=made.text, now=made.stream(maps(1, channels)))
    scale, width = 1, channels
    sizes = [(picture[0], 1)] + [one for a, b in pairwise(picture) for one in ((a, 1), (b, 2))]
    for number, (outputs, stride) in enumerate(sizes):
        part = MapConvolution(
            inputs=width, outputs=outputs, stride=stride, stream=own.now, silu=True, reads_data=not number
        )
        scale, width = scale * stride, outputs
        own.now = own.next(scale, width)
        own.put(part)
    last = MapConvolution(inputs=width, outputs=shape.widths[0], stream=own.now)
    own.now = own.next(LATENT_PIXELS, shape.widths[0])
    own.put(stem_of(r, shape, stream=made.latents), last)
    places = iter(into)

    def added(stream: int) -> None:
        width = made.streams[stream].hidden
        own.put(MapConvolution(inputs=width, outputs=width, kernel=1, stream=stream), stream=next(places))

    own.down(added)
    own.middle()
    added(own.now)
    return own


def dit_pipeline(r: ConfigReader) -> Model:
    """A frozen encoder of images before a diffusion transformer that is trained on their classes."""
    images, network = _components(r, "vae", "transformer")
    made = _Encoders()
    made.images(images)
    network.spelling = {"num_hidden_layers": "num_layers"}
    own = dit(network)
    latent = made.streams[made.latents].hidden
    if own.embedding.channels != latent:
        message = f"it reads {own.embedding.channels} channels, and the autoencoder makes {latent}"
        network.fault("M003", message, "in_channels", f"say {latent}, or latent_channels of the autoencoder")
    now = made.stream(maps(LATENT_PIXELS * own.embedding.patch, own.hidden))
    blocks = [replace(own.block(layer), stream=now) for layer in range(own.num_layers)]
    entered = replace(own.embedding, stream=now, source=made.latents)
    blocks[0] = replace(blocks[0], before=(entered, *blocks[0].before))
    return model(
        r,
        [*made.blocks, *blocks],
        embedding=Boundary(stream=0),
        head=replace(own.head, stream=now),
        hidden=own.hidden,
        max_seq_len=0,
        streams=tuple(made.streams),
        frozen=len(made.blocks),
    )
