"""The facets of a plan, one record each: layout, pipeline, sequence, experts, memory, precision, overlap.

A facet is a value; its meaning for tasks is in ``lower/``, its legality in ``plan/legality.py``, its words in
``plan/text.py``.
"""

from __future__ import annotations

import msgspec

#: Mesh axes from the innermost (closest devices) out, as Megatron-Core lays them (Narayanan et al. 2104.04473).
DEFAULT_ORDER = ("tp", "cp", "dp", "pp")
#: ``selective`` repeats the attention core (Korthikanti et al. 2205.05198), ``operators`` all but the outputs of the
#: attention core and of every second matrix product (TorchTitan's selective policy "op"), ``full`` the whole layer.
RECOMPUTE_MODES = ("none", "selective", "operators", "full")
CP_ALGORITHMS = ("ring", "ulysses", "allgather")
ATTENTION_KERNELS = ("flash", "unfused")
LOSS_KERNELS = ("eager", "copied", "in-place", "fused")
GATHERED = ("again", "kept")
OVERLAPS = ("dp", "tp", "pp", "ep")


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the mesh axes and what is sharded over them.

    ``zero`` is what is sharded over data parallelism: 0 nothing, 1 optimizer state, 2 and gradients, 3 and
    parameters (Rajbhandari et al. 1910.02054; 3 is FSDP, Zhao et al. 2304.11277). ``shard`` is the size of the
    sharding group when smaller than dp*cp (hybrid sharding, HSDP), 0 for all of it. ``sp`` shards the parts
    between tensor-parallel regions along the sequence (Korthikanti et al. 2205.05198). ``order`` places the
    axes on the cluster from the inside out. ``stages`` are layers per virtual stage when uneven, () for even.
    ``shares`` are microbatches of each kind of data-parallel slice (``plan/slices.py``) when uneven, () for even.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 0
    cp: int = 1
    sp: bool = True
    zero: int = 0
    shard: int = 0
    order: tuple[str, ...] = DEFAULT_ORDER
    stages: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shard_group(self) -> int:
        """Ranks over which ZeRO shards: dp*cp, or less with a hybrid scope."""
        return self.shard or self.dp * self.cp

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are kept sharded while they accumulate: with ZeRO-2, and with ZeRO-3 where there is no
        pipeline. Under one FSDP gathers parameters once a step and keeps gradients whole until the last microbatch, as
        TorchTitan does (2410.06511); Megatron-Core's distributed optimizer is ZeRO-1."""
        return (self.zero == 2 or (self.zero == 3 and self.pp == 1)) and self.shard_group > 1

    @property
    def gathers_again(self) -> bool:
        """Whether parameters are gathered for every microbatch: fully sharded ones without a pipeline. Under one they
        are gathered once a step and kept, as TorchTitan does, because every microbatch needs them (2410.06511)."""
        return self.zero == 3 and self.pp == 1 and self.shard_group > 1

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on an axis."""
        stride = 1
        for name in self.order:
            if name == axis:
                return stride
            stride *= getattr(self, name)
        raise KeyError(axis)


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Which schedule, how many chunks a rank holds (``vpp``), sequences per microbatch."""

    schedule: str = "1f1b"
    vpp: int = 1
    microbatch: int = 1


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """How context parallelism exchanges: ``ring`` (Ring Attention, Liu et al. 2310.01889, balanced zigzag),
    ``ulysses`` (all-to-all over heads, Jacobs et al. 2309.14509), ``allgather`` of keys and values (Llama 3,
    2407.21783). ``ulysses`` > 1: so many neighbouring ranks swap heads inside a ring or gather between such groups
    (the union of both, Fang & Zhao 2405.07719)."""

    algorithm: str = "ring"
    ulysses: int = 1


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Expert parallelism: ``ep`` ranks share the experts, ``etp`` ranks split each expert (0: as ``tp``).

    The expert mesh is its own factorisation of tp*cp*dp (Megatron-Core's parallel folding, 2504.14960).
    ``imbalance`` is tokens of the busiest rank over the mean (1 = balanced router).
    """

    ep: int = 1
    etp: int = 0
    imbalance: float = 1.0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What backward recomputes. ``selective`` drops the attention core (Korthikanti et al. 2205.05198), ``full``
    keeps a layer's input only. ``layers`` limits it to the first so many layers of every chunk (0: all). ``attention``
    and ``loss`` say which kernels run: separate ones that store what lies between them (of the loss also ``copied``:
    the gradient is written over the probabilities, and these are made beside the logits; ``in-place``: over them), or
    one that does not. Under sequence parallelism the input of a product is gathered over the tensor-parallel ranks; for
    the weight gradient it is gathered ``again`` (Korthikanti et al., section 4.2.2), or ``kept``, as a framework's
    automatic differentiation does by itself: ``gathered``."""

    recompute: str = "none"
    layers: int = 0
    attention: str = "flash"
    loss: str = "eager"
    gathered: str = "again"

    def mode(self, position: int) -> str:
        """What the backward recomputes of the layer at this position of its chunk."""
        return self.recompute if not self.layers or position < self.layers else "none"


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """``compute`` is the matmul precision ("" = the workload's). What is stored: working parameters ``params`` ("fp8":
    quantised only, as Transformer Engine's primary weights; else 16 bits with their quantised copies), gradients
    ``grads``, master copy ``master`` ("none": parameters are updated in place), optimizer ``moments``."""

    compute: str = ""
    params: str = "bf16"
    grads: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Which communication runs beside compute: ``dp`` gradient and parameter exchange, ``tp`` inside a layer
    (collective matmul, Wang et al. ASPLOS'23), ``pp`` sends between stages, ``ep`` the exchange of experts' tokens
    beside another microbatch's layers (DeepSeek-V3, 2412.19437, section 3.2.1; Megatron-Core's 1F1B overlap of it)."""

    dp: bool = True
    tp: bool = False
    pp: bool = True
    ep: bool = False
