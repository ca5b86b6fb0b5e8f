"""A diffusion transformer behind a frozen encoder, taken apart: the network that is trained, and what it trains on.

``DiTPipeline`` models (:mod:`meshwright.spec.families.latent_diffusion`) read images; their trained layers read the
latents that the frozen ones make, and are the diffusion transformer of the same sizes (DiT, 2212.09748).
"""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model, stack
from meshwright.spec.diffusion import LATENT_PIXELS, Latents
from meshwright.spec.ends import Stream
from meshwright.spec.unet import MapConvolution
from meshwright.spec.workload import Train

#: The family of such models, and that of their trained layers.
ENCODED, ALONE = "dit_pipeline", "dit"
#: What names of the frozen encoder's weights begin with: diffusers' word for that component of a pipeline.
COMPONENT = "vae."


def is_encoded(model: Model) -> bool:
    """Whether a model is a diffusion transformer behind its frozen encoder."""
    return model.family == ENCODED


def denoiser_of(model: Model) -> Model:
    """The trained layers as a model that reads latents; a model without a frozen encoder is that model."""
    if not is_encoded(model):
        return model
    trained = [model.block(layer) for layer in range(model.frozen, model.num_layers)]
    entered, *others = trained[0].before
    trained[0] = msgspec.structs.replace(trained[0], before=tuple(others))
    blocks, pattern = stack(msgspec.structs.replace(block, stream=0) for block in trained)
    return msgspec.structs.replace(
        model,
        family=ALONE,
        embedding=msgspec.structs.replace(entered, stream=0, source=-1),
        blocks=blocks,
        pattern=pattern,
        head=msgspec.structs.replace(model.head, stream=0),
        streams=(Stream(name="image", hidden=model.hidden, causal=False),),
        frozen=0,
    )


def entry_of(model: Model) -> Latents:
    """The layer that reads latents."""
    return denoiser_of(model).embedding


def image_channels(model: Model) -> int:
    """Channels of the images that the encoder reads."""
    parts = (part for block in model.blocks for part in block.before if isinstance(part, MapConvolution))
    return next(part.inputs for part in parts if part.reads_data)


def side_of(model: Model, train: Train) -> int:
    """Latents along a side of an image."""
    return train.image // LATENT_PIXELS


def latent_work(model: Model, train: Train) -> Train:
    """The workload of the trained layers: as many tokens as the latents of an image have patches."""
    if not is_encoded(model):
        return train
    patches = side_of(model, train) // entry_of(model).patch
    return msgspec.structs.replace(train, image=0, seq_len=patches**2)
