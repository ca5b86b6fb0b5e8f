"""The workload of a diffusion model that makes images: how many, how large, and in how many denoising steps.

``images=1,size=1024,steps=50`` makes one image of 1024 x 1024 in 50 steps. Every step passes all tokens of all images,
twice where guidance without the class is asked for besides (classifier-free guidance, Ho and Salimans, 2207.12598).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.diffusion import LATENT_PIXELS, Latents
from meshwright.spec.model import Model
from meshwright.spec.unet import LatentStem
from meshwright.spec.words import SaidWords
from meshwright.spec.workload import TRAINED_DTYPES, Train

#: The phase of a workload that is a denoising step, which no text of a training workload says.
DENOISE = "denoise"
#: Largest image, count of images and of steps: above, a slip of the keyboard.
MOST = 100_000
_YES_NO = {"yes": True, "no": False}


class Denoise(msgspec.Struct, frozen=True, kw_only=True):
    """Images that are made together: ``size`` pixels along a side, in ``steps`` steps, of which the first ``warmup``
    wait for every exchange whatever the plan says. ``guidance``: each image passes the model twice a step. ``frames``:
    videos of so many are made in place of images, where the model makes any."""

    images: int = 1
    size: int
    steps: int = 50
    warmup: int = 4
    guidance: bool = True
    dtype: str = "bf16"
    frames: int = 0

    @property
    def rows(self) -> int:
        """Sequences that pass the model in a step."""
        return self.images * (2 if self.guidance else 1)

    def tokens(self, model: Model) -> int:
        """Return the tokens of one image, or of one video.

        Raises:
            MeshwrightError: W019 for a model that denoises nothing, for a size that patches do not divide, and for
                frames of a model of images or none of one of videos.
        """
        maps = isinstance(model.embedding, LatentStem)
        if not maps and not isinstance(model.embedding, Latents):
            message = f"{model.name} denoises no images"
            help = "a diffusion transformer, such as dit-xl-2-256, or a U-Net, such as sdxl"
            if model.frozen:
                message = f"{model.name} has the encoders of texts and images that it is trained with"
                help = "the network alone makes images: dit-xl-2-256, sd-2-1, or a config.json of the component"
            raise MeshwrightError.one("W019", message, place=f"model {model.name}", help=help)
        each = LATENT_PIXELS * (1 if maps else model.embedding.patch)
        least = max(flow.scale for flow in model.flows) if maps else each
        if self.size % least:
            what = f"halved to maps of 1/{least}" if maps else f"made of patches of {least}"
            message = f"an image of {self.size} pixels a side is not {what}"
            near = max(least, round(self.size / least) * least)
            raise MeshwrightError.one("W019", message, place=f"--denoise size={self.size}", help=f"say size={near}")
        if bool(self.frames) != bool(model.embedding.frames):
            what = "videos, and frames are not said" if model.embedding.frames else "images, which have no frames"
            help = f"say frames={model.embedding.frames}" if model.embedding.frames else "drop frames="
            place = f"--denoise frames={self.frames}"
            raise MeshwrightError.one("W019", f"{model.name} makes {what}", place=place, help=help)
        return (self.size // each) ** 2 * max(1, self.frames)

    def train(self, model: Model) -> Train:
        """Return one step as a workload of sequences, which nothing is trained by; of a model of feature maps they are
        images of so many pixels."""
        tokens, maps = self.tokens(model), isinstance(model.embedding, LatentStem)
        return Train(
            global_batch=self.rows,
            seq_len=self.size**2 if maps else tokens,
            dtype=self.dtype,
            phase=DENOISE,
            frames=self.frames,
            image=self.size if maps else 0,
        )

    def text(self) -> str:
        """Return the form that :func:`parse` reads back."""
        words = [f"images={self.images}", f"size={self.size}", f"steps={self.steps}"]
        words += [f"frames={self.frames}"] if self.frames else []
        words += [f"warmup={self.warmup}"] if self.warmup != Denoise(size=1).warmup else []
        words += ["guidance=no"] if not self.guidance else []
        return ",".join(words + ([f"dtype={self.dtype}"] if self.dtype != "bf16" else []))


def _count(least: int) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        return int(text) if text.isascii() and text.isdecimal() and least <= int(text[:12]) <= MOST else None

    return read


#: Word -> what reads its value, and what that is.
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "images": (_count(1), f"a whole number from 1 to {MOST:,}"),
    "size": (_count(1), f"pixels along a side, up to {MOST:,}"),
    "steps": (_count(1), f"a whole number from 1 to {MOST:,}"),
    "warmup": (_count(0), f"a whole number from 0 to {MOST:,}"),
    "frames": (_count(1), f"a whole number from 1 to {MOST:,}"),
    "guidance": (_YES_NO.get, "yes or no"),
    "dtype": (lambda text: text if text in TRAINED_DTYPES else None, f"one of {', '.join(TRAINED_DTYPES)}"),
}


def parse(text: str, *, place: str = "--denoise") -> Denoise:
    """Return what a text such as ``images=1,size=1024,steps=50`` says.

    Raises:
        MeshwrightError: W001 unknown key, W002 bad value, W003 without a size, W005 contradiction; all at once.
    """
    said = SaidWords(text, READERS, place=place, of="a workload of images")
    values = said.values
    if "size" not in said.keys:
        said.refuse("W003", "the workload does not say size", "for example images=1,size=1024,steps=50")
    if not said.wrong and values.get("warmup", 0) > values.get("steps", Denoise(size=1).steps):
        said.refuse("W005", f"warmup={values['warmup']} of fewer steps", "say as many steps, or a smaller warmup")
    if said.wrong:
        raise MeshwrightError(said.wrong)
    return Denoise(**values)
