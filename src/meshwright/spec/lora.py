"""Low-rank adapters, as the words of a workload say them."""

from __future__ import annotations

import msgspec

#: The matrices of the usual layers, which ``all`` means; those that make heads of the latents of latent attention; and
#: those of every expert, of which gate and up are one.
ALL_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
EXPERT_TARGETS = ("experts_up", "experts_down")
LORA_TARGETS = (*ALL_TARGETS, "q_up", "kv_up", *EXPERT_TARGETS)
#: Weights of a row that share a scale in these formats; 0: all of the row.
FROZEN_BLOCKS = {"nf4": 64, "nf4-dq": 64, "int4": 128, "int8": 0}


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al., 2021, arXiv 2106.09685): the base is frozen, so it has no weight gradient
    and no optimizer state; each target matrix gets two factors of the given rank, whose product times ``alpha`` / rank
    is added to what the matrix gives (``alpha`` 0: the rank, so that it is added as it is). ``dropout`` is the rate at
    which elements of an adapter's input are dropped."""

    rank: int = 16
    targets: tuple[str, ...] = ("q", "k", "v", "o")
    alpha: float = 0.0
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The number that an adapter's result is multiplied by."""
        return (self.alpha or self.rank) / self.rank

    def text(self) -> str:
        """The words that say it, of a workload: ``rank=8,targets=q+v,alpha=16``."""
        words = f"rank={self.rank},targets={'+'.join(self.targets)}"
        words += f",alpha={self.alpha:.12g}" if self.alpha else ""
        return words + (f",lora_dropout={self.dropout:.12g}" if self.dropout else "")


def read_targets(value: str) -> tuple[str, ...] | None:
    """Read targets that are joined by +, or all; None for anything else."""
    if value == "all":
        return ALL_TARGETS
    read = tuple(dict.fromkeys(value.lower().split("+")))
    return read if all(t in LORA_TARGETS for t in read) else None


def read_alpha(value: str) -> float | None:
    """Read the number that rank is compared with; None for one that is not above 0 and up to 1e6."""
    try:
        read = float(value)
    except ValueError:
        return None
    return read if 0 < read <= 1e6 else None
