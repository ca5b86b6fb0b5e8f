"""Settings of a run beside model, plan and workload."""

from __future__ import annotations

import msgspec
import torch

from meshwright.spec.decay import rate_at

#: Types a run may compute in, by the workload's word; float64 is for checking.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
#: Products of 8 bits are between tensors of 16.
DTYPES |= {"fp8": torch.bfloat16, "fp8_row": torch.bfloat16}


#: How a learning rate follows the batch: the power of batch / base batch that it is multiplied by. Linear: Goyal et al.
#: 1706.02677; square root: Krizhevsky 1404.5997, and You et al. 1904.00962 for LAMB.
SCALES = {"linear": 1.0, "sqrt": 0.5}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``seed`` decides initial weights, data order and dropout. ``lr`` is reached after ``warmup`` steps, which begin
    at ``warmup_from`` of it (Goyal et al. 1706.02677 begin at the rate of the small batch), and, when ``decay_steps``
    is given, falls to ``min_lr`` of itself by then, as ``schedule`` says: along a ``cosine`` (SGDR's single cycle,
    Loshchilov and Hutter 1608.03983), along a ``linear`` line, or, as ``wsd``, along a line over the last tenth of the
    steps alone (warm up, stay, decay: Hu et al. 2404.06395). ``clip`` limits the gradient's norm, 0 = never.
    ``precision`` overrides the plan's (``float64``). ``drives`` is the folder of state that lies on drives, "" that of
    the system for temporary files. ``dropout`` is the rate where the workload has dropout. ``node_ranks`` are the
    devices of a node that the plan is for, by which experts are placed; 0: all are on one."""

    seed: int = 0
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: int = 0
    warmup_from: float = 0.0
    decay_steps: int = 0
    schedule: str = "cosine"
    min_lr: float = 0.1
    precision: str = ""
    drives: str = ""
    dropout: float = 0.1
    node_ranks: int = 0

    def scaled(self, rule: str, batch: float, base: float) -> Settings:
        """Return the settings for a batch that is another than the `base` whose learning rate these have, by a rule of
        :data:`SCALES`; the warm-up begins at the base's rate."""
        times = (batch / base) ** SCALES[rule]
        return msgspec.structs.replace(self, lr=self.lr * times, warmup_from=min(1.0, 1 / times))

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return rate_at(
            step,
            self.lr,
            warmup=self.warmup,
            begin=self.warmup_from,
            decay_steps=self.decay_steps,
            schedule=self.schedule,
            floor=self.min_lr,
        )
