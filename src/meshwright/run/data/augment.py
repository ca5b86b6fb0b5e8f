"""Changes of images as they are trained on (augmentation): mirrored and shifted, each by the run's seed and its place
in the order that samples are taken in."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

FLIP, CROP = "flip", "crop"
#: Pixels that an image is shifted by at most.
MOST_SHIFT = 1024
_MASK = (1 << 64) - 1


class Augment(msgspec.Struct, frozen=True, kw_only=True):
    """``flip``: half of the images are mirrored; ``crop``: each is shifted by up to so many pixels in both directions,
    with zeros where there are none (padding and a random crop; Krizhevsky et al. 2012)."""

    flip: bool = False
    crop: int = 0

    def text(self) -> str:
        """The words that :func:`read` reads."""
        return "+".join([FLIP] * self.flip + [f"{CROP}={self.crop}"] * bool(self.crop))

    def changed(self, images: NDArray[Any], seed: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """Images [n, channels, height, width], each changed as its place says."""
        if not (self.flip or self.crop):
            return images
        out = images.copy()
        for number, place in enumerate(places.tolist()):
            rng = np.random.Generator(np.random.PCG64((seed, place & _MASK)))
            mirrored, (down, right) = rng.integers(2), rng.integers(-self.crop, self.crop + 1, 2)
            one = images[number, :, :, ::-1] if self.flip and mirrored else images[number]
            out[number] = _shifted(one, int(down), int(right)) if self.crop else one
        return out


#: No change.
AS_THEY_ARE = Augment()


def _shifted(image: NDArray[Any], down: int, right: int) -> NDArray[Any]:
    """An image [channels, height, width] shifted, with zeros at the edges that this leaves open."""
    out = np.zeros_like(image)
    _, height, width = image.shape
    if abs(down) < height and abs(right) < width:
        to = slice(max(down, 0), height + min(down, 0)), slice(max(right, 0), width + min(right, 0))
        of = slice(max(-down, 0), height + min(-down, 0)), slice(max(-right, 0), width + min(-right, 0))
        out[:, *to] = image[:, *of]
    return out


def read(text: str) -> Augment | None:
    """Read what ``flip+crop=4`` says; None for anything else."""
    said: dict[str, int] = {}
    for word in text.split("+") if text else ():
        name, mark, number = word.partition("=")
        if name in said or (name, bool(mark)) not in ((FLIP, False), (CROP, True)):
            return None
        if mark and not (number.isascii() and number.isdecimal() and 0 < int(number) <= MOST_SHIFT):
            return None
        said[name] = int(number) if mark else 1
    return Augment(flip=FLIP in said, crop=said.get(CROP, 0))
