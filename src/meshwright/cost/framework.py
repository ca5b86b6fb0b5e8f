"""Framework profiles: what a training framework adds to the kernels, and what it does when nobody says otherwise.

A profile is data (``catalog/frameworks/*.toml``): at most six constants that measured steps pin, each a physical
quantity with a unit and a source, shared by every model, plan and size; and the documented defaults that fill what a
plan leaves open. What a profile does not say are the round figures of ``default``, flagged in every prediction's
assumptions.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from meshwright import catalog
from meshwright.errors import MeshwrightError, nearest
from meshwright.plan import Overlap, Plan
from meshwright.plan.facets.overlap import OVERLAPS, gathers_once
from meshwright.plan.pool_words import words_of
from meshwright.plan.text import says
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model

FORMAT_VERSION = 1
#: No software that is predicted here is older.
FIRST_YEAR = 2015


class Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults of a framework, which hold where a plan does not say otherwise.

    Attributes:
        attention: the attention kernel; ``flash`` the generation of FlashAttention it is on every device (0: the newest
            that the device has).
        loss, dropout: the loss kernels; whether dropout is applied.
        softmax_keys: the longest rows of stored scores that its fused softmax takes, by fours, and operators of their
            own take the others (``cost/softmax.py``); 0 where one kernel takes all.
        sequence_first: activations are [sequence, row, feature], so that kernels which want a row's tokens together
            have them copied where there are several rows.
        parallel: attention and the MLP of a block are computed side by side.
        fused: operators that are one kernel though chains of pointwise kernels are not (``ring merge``).
        streams: slices of a product run on several streams.
        graphs: layers without experts are issued as CUDA graphs, one launch a pass.
        accumulation: of a microbatch's weight gradients: ``fused`` into the product, or a ``separate`` kernel that
            reads them again.
        overlap: plan words, and ``ep between nodes``: the experts' exchange where it leaves a scale-up domain.
        gather: when parameters that a step gathers once are gathered (a plan's ``gather=``).
        recompute, selective: the recompute mode; what the framework calls ``selective``, in a plan's words.
        sp: sequence parallelism under tensor parallelism.
        params, grads, master, moments: precisions.
        partition: how layers are cut into stages: ``even``, or ``thresholds`` of summed costs (``lower/partition.py``).
        cuts: whether a pipeline cuts the batch that a rank is given at once into as many microbatches as it has ranks.
        gathers: the parts in which ZeRO-3 gathers parameters and scatters gradients: a ``layer`` (FSDP wraps blocks)
            or a ``matrix``, where each product gathers its own (DeepSpeed's modules, a sharded array under XLA).
        adapter_dropout: the rate at which inputs of LoRA's adapters are dropped.
        gathered: whether inputs of products are gathered again for their weight gradients or saved (plan words).
        dispatch: how tokens reach experts on other nodes: "" for an all-to-all of a copy for each expert, ``normal``
            for DeepEP's kernels, which send one copy to a node and spread it there, from ``dispatch_from`` expert
            ranks on.
        bucket_bytes: size of the buckets in which whole gradients are summed over replicas (0: a layer's at once;
            otherwise torch's DistributedDataParallel, whose buckets are memory of their own).
        gather_buffers: how many buffers of a microbatch's full width stay allocated for tensor-parallel products under
            sequence parallelism.
        workspaces: whose workspaces for products lie among its tensors: ``torch``'s, or the ``engine``'s beside them
            (Transformer Engine); "": nobody said, so that they are part of the context.
        etp: over how many ranks each expert is split (0: over ``tp``).
        logs: whose memory the framework logs: the ``first`` pipeline stage's, the ``last`` one's or the ``fullest``
            rank's.
        source: where these defaults are documented.
    """

    attention: str = "flash"
    flash: int = 0
    loss: str = "eager"
    dropout: bool = False
    softmax_keys: int = 0
    sequence_first: bool = False
    overlap: tuple[str, ...] = ("dp", "pp")
    parallel: bool = False
    fused: tuple[str, ...] = ()
    streams: bool = True
    graphs: bool = False
    accumulation: str = "fused"
    gather: str = "ahead"
    recompute: str = "none"
    selective: str = "selective"
    sp: bool = True
    params: str = "bf16"
    grads: str = "fp32"
    master: str = "fp32"
    moments: str = "fp32"
    partition: str = "even"
    cuts: bool = False
    gathers: str = "layer"
    adapter_dropout: float = 0.0
    gathered: str = "again"
    dispatch: str = ""
    dispatch_from: int = 2
    bucket_bytes: int = 0
    gather_buffers: int = 0
    workspaces: str = ""
    etp: int = 0
    logs: str = "fullest"
    source: str = ""


class Framework(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The profile of a framework: what it adds to the time and the memory of a step's kernels, and its defaults.

    ``elementwise_passes``: bytes its memory-bound kernels move over what fused ones need (1 = every chain of
    pointwise operators is one kernel). ``host_us_per_kernel``: CPU time to issue one kernel (what an unfused small
    layer is bound by). ``host_us_per_backward_kernel``: the same in a backward, where PyTorch's engine issues them and
    not Python; None where nobody told them apart. ``host_us_per_collective``: CPU time to issue one collective.
    ``exchanges_at_once``: collectives of one group that are under way together, where ports are shared: NCCL's are one
    after the other, gloo has threads for two.
    ``host_us_per_pass``: CPU time per microbatch and pass over a stage that nothing hides (schedule bookkeeping,
    waiting on messages).
    ``kernel_slowdown``: share by which kernels take longer inside a model than one after the other alone: caches hold
    others' data, clocks fall under load, and where the core that runs them issues them, it does the host's work too.
    ``host_us_per_step``: CPU time of a step outside of its passes, which nothing hides: issuing the optimizer's
    kernels, waiting for the gradients' norm, reading the next batch, writing the log.
    ``host_us_per_dispatch``: time a device waits in a forward of a mixture whose experts drop no token: the host reads
    how many each expert got before it can size the exchange and the products, and its queue of kernels is empty then.
    ``ring_steps``: time of a ring's step between nodes beside a training step over what it is on idle nodes, which is
    what ``busbw_gb_s`` of a cluster tells: the threads that feed the NICs share cores with those that train.
    ``exchange_share``: share of the bandwidth between nodes that the exchange of parameters and gradients reaches
    which ZeRO-3 does layer by layer in every microbatch; ``gather_share``: that which the gather of all parameters
    after an update does.
    ``activation_copies``: bytes its kernels keep for the backward over what fused ones keep. ``context_bytes``:
    device memory a process holds before the first tensor (CUDA context, library workspaces).
    ``communicator_bytes``: buffers of one process group. ``allocator_slack``: reserved over allocated bytes that
    fragmentation leaves unused. ``ahead_layers``: the host's launch-ahead, in layers whose collectives' tensors it has
    freed and the device has yet to use. ``step_sigma``: relative error of whole steps of models that
    the constants never saw, ``memory_sigma`` of peaks of memory. ``flagged``: nobody measured these.
    ``whole_steps``: what is flagged was laid beside steps of software it stands for, so that its ``step_sigma`` holds
    the errors of kernels and collectives too, as a fitted profile's does. ``constants_of``: the profile of another
    version with the same kernels, to whose steps and this one's together the constants are fitted: the versions differ
    in their defaults alone.
    ``family``: the software that this is a version or a mode of ("": itself); ``version_since``: the year from which on
    it is what its family's name means, 0 for a mode that no date tells. ``kernels`` between products: ``eager``,
    ``compiled`` or ``fused``; ``bits`` of the operands in the measured steps; ``pinned``: the constants that those
    say something of. The middle of all stacks weighs them by these (``cost/unknown.py``); ``passes_sigma`` and
    ``host_sigma`` are how far stacks lie apart in passes and host times (the log's standard deviation), 0 for one;
    of a profile whose steps were launches alone, the error of its host times.
    ``like``: nobody measured this, and its times are those of the middle of stacks of this kind (``eager``; ``any``).
    """

    name: str
    title: str = ""
    aliases: tuple[str, ...] = ()
    constants_of: str = ""
    family: str = ""
    version_since: float = 0.0
    kernels: str = ""
    bits: tuple[int, ...] = (16,)
    pinned: tuple[str, ...] = ()
    passes_sigma: float = 0.0
    host_sigma: float = 0.0
    like: str = ""
    elementwise_passes: float = 1.5
    host_us_per_kernel: float = 10.0
    host_us_per_backward_kernel: float | None = None
    host_us_per_collective: float = 40.0
    host_us_per_pass: float = 300.0
    host_us_per_dispatch: float = 0.0
    host_us_per_step: float = 0.0
    kernel_slowdown: float = 0.0
    ring_steps: float = 1.0
    exchange_share: float = 1.0
    gather_share: float = 1.0
    exchanges_at_once: int = 1
    activation_copies: float = 1.0
    context_bytes: float = 1.0 * 2**30
    communicator_bytes: float = 256.0 * 2**20
    allocator_slack: float = 0.03
    ahead_layers: float = 0.0
    step_sigma: float = 0.15
    memory_sigma: float = 0.15
    source: str = ""
    flagged: bool = True
    whole_steps: bool = False
    defaults: Defaults = Defaults()

    @property
    def backward_kernel_us(self) -> float:
        """CPU time to issue a kernel of a backward."""
        told = self.host_us_per_backward_kernel
        return self.host_us_per_kernel if told is None else told


def usual_overlap(framework: Framework, plan: Plan, model: Model, domain_size: int) -> Overlap:
    """Communication that the framework overlaps with compute unless told otherwise, for a plan on a cluster whose
    scale-up domains hold `domain_size` devices: experts spread over more of them exchange between nodes. The exchange
    of one microbatch's experts runs beside the attention of another, where a layer has both."""
    usual, gather = set(framework.defaults.overlap), "ahead"
    if gathers_once(plan.layout.zero, plan.layout.pp):
        gather = framework.defaults.gather
    if "ep between nodes" in usual and plan.experts.ep > domain_size:
        usual.add("ep")
    if any(block.mlp in model.mixtures and not block.attentions for block in model.blocks):
        usual.discard("ep")
    if plan.layout.tp == 1:
        usual.discard("tp")
    return Overlap(**{name: name in usual for name in OVERLAPS}, gather=gather)


def overlapped_as_usual(framework: Framework, plan: Plan, words: str, model: Model, cluster: Cluster) -> Plan:
    """Return `plan`, which its `words` say, with the framework's overlap of exchanges where they leave that open."""
    if plan.several:
        own = words_of(words)
        pools = (
            msgspec.structs.replace(
                pool, plan=overlapped_as_usual(framework, pool.plan, own[pool.name], model, cluster)
            )
            for pool in plan.several
        )
        return msgspec.structs.replace(plan, several=tuple(pools))
    usual = usual_overlap(framework, plan, model, min(island.domain_size for island in cluster.islands))
    if says(words, "overlap"):
        usual = msgspec.structs.replace(plan.overlap, gather=usual.gather)
    if says(words, "gather"):
        usual = msgspec.structs.replace(usual, gather=plan.overlap.gather)
    return msgspec.structs.replace(plan, overlap=msgspec.structs.replace(usual, ep=usual.ep or plan.overlap.ep))


@cache
def frameworks() -> dict[str, Framework]:
    """Every profile of the catalog by name."""
    out = {}
    shipped = sorted(catalog.folder("frameworks").iterdir(), key=lambda f: f.name)
    measured = catalog.measured_here() / "framework.toml"
    for file in [*shipped, *([measured] if measured.is_file() else ())]:
        if file.name.endswith(".toml"):
            profile = _read(file.read_text(encoding="utf-8"), file.name)
            out[profile.name] = profile
    return out


def _read(text: str, name: str) -> Framework:
    """The profile that a file holds.

    Raises:
        MeshwrightError: X024 for one that is none.
    """
    help = "meshwright calibrate --runs runs.csv --out FILE writes one"
    try:
        table = tomllib.loads(text)
        if table.pop("format_version", None) != FORMAT_VERSION:
            raise MeshwrightError.one("X024", f"{name} is of another format_version", place=name, help=help)
        return msgspec.convert(table, Framework)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise MeshwrightError.one("X024", f"no framework profile: {error}", place=name, help=help) from None


def _of_file(name: str) -> Framework:
    """The profile in a file.

    Raises:
        MeshwrightError: X024 for a file that cannot be read or is no profile.
    """
    try:
        return _read(Path(name).read_text(encoding="utf-8-sig"), name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise MeshwrightError.one("X024", f"cannot read the framework profile: {reason}", place=name) from None


def load(name: str, year: float | None = None) -> Framework:
    """The profile called `name` or by an alias, in any case and with underscores for hyphens; a version or suffix after
    the name is ignored (``Megatron_Bridge 26.04``). A name that ends with ``.toml`` is a file's. Of software with dated
    versions a bare name means the newest of `year` (``name@2022.5`` says it too), today's where nobody says one.

    Raises:
        MeshwrightError: X020 when no profile fits; names the nearest. X024 for a file that is none.
    """
    if name.endswith(".toml"):
        return _of_file(name)
    bare, year = dated(name, year)
    spelt = {word: profile for profile in frameworks().values() for word in (profile.name, *profile.aliases)}
    known = {word.replace("_", "-"): profile for word, profile in spelt.items()}
    wanted = bare.lower().strip().replace("_", "-")
    for word in sorted(known, key=len, reverse=True):
        if wanted == word:
            return _of_year(known[word], year)
        if wanted.startswith((word + " ", word + "-", word + "(", word + ".")):
            return known[word]
    raise MeshwrightError.one(
        "X020", f"no framework profile {name!r}", place=f"--framework {name}", help=nearest(wanted, list(known))
    )


def dated(name: str, year: float | None = None) -> tuple[str, float | None]:
    """Return a name without the year that it may end with, and that year, else the one given.

    Raises:
        MeshwrightError: X020 when what follows the @ is no year.
    """
    bare, at, said = name.partition("@")
    if not at:
        return name, year
    try:
        found = float(said)
    except ValueError:
        found = 0.0
    if not FIRST_YEAR <= found < FIRST_YEAR + 100:
        raise MeshwrightError.one(
            "X020",
            f"{said!r} is no year",
            place=f"--framework {name}",
            help="name@2024, or with a part of the year name@2024.5",
        )
    return bare, found


def _of_year(profile: Framework, year: float | None) -> Framework:
    """The version of a profile's software that was the newest in a year; the profile itself where no date tells."""
    if not profile.version_since or profile.family:
        return profile
    versions = [f for f in frameworks().values() if f.version_since and profile.name in (f.family, f.name)]
    versions = [f for f in versions if year is None or f.version_since <= year] or [profile]
    return max(versions, key=lambda f: f.version_since)
