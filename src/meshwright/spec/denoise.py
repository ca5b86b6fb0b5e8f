"""The workload of a diffusion model that makes images: how many, how large, and in how many denoising steps.

``images=1,size=1024,steps=50`` makes one image of 1024 x 1024 in 50 steps. Every step passes all tokens of all images,
twice where guidance without the class is asked for besides (classifier-free guidance, Ho and Salimans, 2207.12598).
``experts=8,active=1,router=dit-router.json`` makes them by an ensemble of models of one kind, each trained on a cluster
of the data, whose predictions of the noise are weighed in each step by what a router says of the noisy image
(decentralised diffusion models, McAllister et al., 2501.05450).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.diffusion import LATENT_PIXELS, Latents, NoisyClasses
from meshwright.spec.model import Model, load
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
    videos of so many are made in place of images, where the model makes any. ``experts``: models whose predictions a
    ``router``, a model by its name or the folder of its weights, weighs in each step; an image passes the ``active``
    ones that weigh most, 0 for all of them."""

    images: int = 1
    size: int
    steps: int = 50
    warmup: int = 4
    guidance: bool = True
    dtype: str = "bf16"
    frames: int = 0
    experts: int = 1
    active: int = 0
    router: str = ""

    @property
    def rows(self) -> int:
        """Sequences that pass the model in a step."""
        return self.images * (2 if self.guidance else 1)

    @property
    def whole(self) -> bool:
        """Whether every image passes all experts."""
        return self.active in (0, self.experts)

    def passes(self, replicas: int) -> tuple[int, int]:
        """Return how many experts a replica passes in a step, and images each, where as many images go to one expert as
        to another: experts are dealt out to the replicas."""
        held = self.experts // replicas
        if self.whole:
            return held, self.images
        pairs = -(-self.images * self.active // replicas)
        count = min(held, pairs)
        return count, -(-pairs // count)

    def router_model(self, model: Model) -> Model | None:
        """Return the router of experts that are such models; None where it is not said.

        Raises:
            MeshwrightError: M codes for its name; W019 for a model that is no router of them.
        """
        if not self.router:
            return None
        found, place = load(self.router), f"--denoise router={self.router}"
        why, head, spec = "", found.head, model.embedding
        if not isinstance(head, NoisyClasses):
            why = "does not tell clusters of noisy images: its configuration says no num_labels"
        elif head.rows != self.experts:
            why = f"tells {head.rows} clusters, and there are {self.experts} experts"
        elif (found.embedding.channels, found.embedding.frames) != (spec.channels, spec.frames):
            why = f"reads {found.embedding.channels} channels and {found.embedding.frames} frames, and {model.name} "
            why += f"{spec.channels} and {spec.frames}"
        if why:
            help = f"a diffusion transformer with num_labels {self.experts}, trained on the clusters of the experts"
            raise MeshwrightError.one("W019", f"{found.name} {why}", place=place, help=help)
        return found

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

    def train(self, model: Model, replicas: int = 1) -> Train:
        """Return one step as a workload of sequences, which nothing is trained by; of a model of feature maps they are
        images of so many pixels. Of an ensemble each of the replicas passes all rows, and else its share of them."""
        tokens, maps = self.tokens(model), isinstance(model.embedding, LatentStem)
        return Train(
            global_batch=self.rows * (replicas if self.experts > 1 else 1),
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
        words += [f"experts={self.experts}"] if self.experts > 1 else []
        words += [f"active={self.active}"] if self.active else []
        words += [f"router={self.router}"] if self.router else []
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
    "experts": (_count(1), f"a whole number from 1 to {MOST:,}"),
    "active": (_count(1), f"a whole number from 1 to {MOST:,}"),
    "router": (lambda text: text or None, "a model, or the folder of its weights"),
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
    experts = values.get("experts", 1)
    for word in ("active", "router"):
        if not said.wrong and word in values and experts == 1:
            said.refuse("W005", f"{word}={values[word]} of one model", "say experts=8, or drop it")
    if not said.wrong and values.get("active", 0) > experts:
        said.refuse("W005", f"active={values['active']} of {experts} experts", f"say active={experts} or fewer")
    if said.wrong:
        raise MeshwrightError(said.wrong)
    return Denoise(**values)
