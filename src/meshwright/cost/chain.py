"""The chain itself: asks each link in turn, remembers every answer, says where it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from meshwright.cost import collectives, roofline
from meshwright.cost.framework import Framework
from meshwright.cost.framework import load as load_framework
from meshwright.cost.softmax import softmax_apart
from meshwright.spec.hardware import Device
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import (
    SEQUENCES_TOGETHER,
    AttentionCore,
    Collective,
    Convolution,
    Elementwise,
    Gemm,
    GroupedGemm,
    HostProduct,
    Scan,
    Staging,
    TierCopy,
    VarlenAttention,
    Work,
)


class Estimate(NamedTuple):
    """Seconds of one work item. ``cause`` is the class its error is shared with (gemm, attention, elementwise,
    network), ``sigma`` the relative spread of that error, ``source`` the link of the chain that answered. ``wait`` are
    those of the seconds in which the device is free for others: known of collectives between processor cores.
    ``issued``: what issuing its kernels costs the host is among the seconds. ``as_run``: it was timed as the framework
    runs it, with as many kernels."""

    seconds: float
    cause: str
    source: str
    sigma: float
    wait: float = 0.0
    issued: bool = False
    as_run: bool = False


#: Relative spread (one standard deviation of the log) of the roofline against published kernels, by class. Not
#: fitted: half the gap between the best and the typical published fraction of peak for each class.
ROOFLINE_SIGMA = {"gemm": 0.10, "attention": 0.15, "elementwise": 0.15, "network": 0.20, "host": 0.40}

#: The same of scans and their convolutions, of which few kernels have been measured, none in a backward: the spread of
#: kernels of three libraries for one rule on one device (1.5 to 2 times, tables of NVIDIA AIConfigurator).
SCAN_SIGMA = 0.35

#: The same of transfers between tiers of memory: what servers of one kind differ by in how their copies share sockets
#: and switches.
TRANSFER_SIGMA = 0.2

#: How the source of a price ends that no measured size, rank count or fabric covers.
EXTRAPOLATED = ", extrapolated"

Link = Callable[[Work, Device], Estimate | None]


class Costs:
    """Prices work items on devices; equal items are priced once.

    `links` are asked in order before the roofline, which answers everything. `profile` names what is behind the
    prices. `remembered` is for sums of prices that others keep as long as the costs live. `outside_s`: what a device
    computes in a step outside of its passes (update, codes), where that was timed as a whole.
    """

    def __init__(
        self,
        framework: Framework | None = None,
        links: tuple[Link, ...] = (),
        *,
        profile: str = "roofline",
        outside_s: float | None = None,
    ):
        self.framework, self.outside_s = framework or load_framework("default"), outside_s
        self.profile = profile
        self._links = links
        self._known: dict[tuple[str, Work], Estimate] = {}
        self._answers: dict[tuple[str, Work], Estimate] | None = None
        self.remembered: dict[Any, Any] = {}

    def faster(self, name: str, factor: float) -> Costs:
        """Return these costs with one class of work, one level of links, or the host `factor` times faster."""
        framework = self.framework
        if name == "host":
            times = [f for f in Framework.__struct_fields__ if f.startswith("host_us_")]
            times.remove("host_us_per_backward_kernel")
            faster = {field: getattr(framework, field) / factor for field in times}
            faster["host_us_per_backward_kernel"] = framework.backward_kernel_us / factor
            framework = msgspec.structs.replace(framework, **faster)
        return _Faster(self, framework, name, factor)

    def first(self, link: Link, **framework: Any) -> Costs:
        """Return these costs with a link of the chain that is asked before the others, and other constants of the
        framework."""
        other = msgspec.structs.replace(self.framework, **framework)
        return Costs(other, (link, *self._links), profile=self.profile, outside_s=self.outside_s)

    def under(self, framework: Framework) -> Costs:
        """Return these costs with other constants of the framework; what the links answer is asked once for all of
        them."""
        found = Costs(framework, self._links, profile=self.profile, outside_s=self.outside_s)
        self._answers = found._answers = {} if self._answers is None else self._answers
        return found

    def without_links(self) -> Costs:
        """Return these costs with exchanges that take no time, so that a step is its devices' time alone."""
        return _Linkless(self)

    def adds_apart(self, work: Work) -> bool:
        """Whether a weight gradient is added to the sum of the microbatches by a kernel of its own."""
        return isinstance(work, Gemm) and work.accumulate and self.framework.defaults.accumulation == "separate"

    def price(self, work: Work, device: Device) -> Estimate:
        key = (device.name, work)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._where(work, device)
        return found

    def _where(self, work: Work, device: Device) -> Estimate:
        """Price an operator on the processor of a device that takes less time for it."""
        if isinstance(work, Gemm) and work.fixed:
            return self._projected(work, device)
        if device.near is not None:
            return self._either(work, device)
        return self._ask(work, device) if device.optics is None else self.price(work, device.alone)

    def _projected(self, work: Gemm, device: Device) -> Estimate:
        """Price a product with a fixed random matrix: as any other, or by light."""
        own = self.price(msgspec.structs.replace(work, fixed=False), device)
        seconds = roofline.optical_seconds(work, device)
        if seconds >= own.seconds:
            return own
        return Estimate(seconds, own.cause, "rate that was said of a processor of light", ROOFLINE_SIGMA[own.cause])

    def _either(self, work: Work, device: Device) -> Estimate:
        """Price an operator on the processor that takes less time for it, the device's or that near its memory."""
        if isinstance(work, VarlenAttention):
            return self._varlen(work, device)  # each length goes where it suits
        own = self.price(work, device.alone)
        if not isinstance(work, Gemm | GroupedGemm | AttentionCore):
            return own
        seconds = roofline.near_seconds(work, device)
        if seconds >= own.seconds:
            return own
        return Estimate(seconds, own.cause, "roofline of the processor near memory", ROOFLINE_SIGMA[own.cause])

    def _ask(self, work: Work, device: Device) -> Estimate:
        if isinstance(work, Collective) and self.framework.ring_steps != 1.0:
            return self._answer(_with_slower_steps(work, self.framework.ring_steps), device)
        if isinstance(work, Gemm) and work.slices > 1 and self.framework.defaults.streams:
            whole = self.price(msgspec.structs.replace(work, m=work.m * work.slices, slices=1), device)
            return whole._replace(seconds=whole.seconds / work.slices)
        if isinstance(work, VarlenAttention):
            return self._varlen(work, device)
        if isinstance(work, Gemm) and work.batch > 1 and not _aligned(work):
            work = msgspec.structs.replace(work, dtype="fp32")
        if isinstance(work, Elementwise) and (apart := self.as_issued(work)) is not work:
            return self.price(apart, device)
        if isinstance(work, Elementwise) and self.passes(work) != 1.0:
            timed = self._answer(work, device) if work.operator else None
            if timed is not None and timed.as_run:
                return timed
            passes = self.passes(work)
            work = Elementwise(num_bytes=work.num_bytes * passes, kernels=round(work.kernels * passes), fused=True)
        if self.adds_apart(work):
            return self._added(work, device)
        return self._answer(work, device)

    def as_issued(self, work: Elementwise) -> Elementwise:
        """Return memory-bound kernels as the framework issues them: where its fused softmax does not take the scores,
        scale, mask and softmax are kernels of their own; and sequences that are contiguous already are not copied."""
        usual = self.framework.defaults
        if work.operator == SEQUENCES_TOGETHER and work.kernels and not usual.sequence_first:
            return msgspec.structs.replace(work, num_bytes=0.0, kernels=0)
        longest = usual.softmax_keys
        return softmax_apart(work, longest) if longest and work.scores is not None else work

    def passes(self, work: Elementwise) -> float:
        """Return how many times as many kernels and bytes a chain of pointwise kernels has as where it is fused."""
        fused = work.fused or work.operator in self.framework.defaults.fused
        return 1.0 if fused else self.framework.elementwise_passes

    def _varlen(self, work: VarlenAttention, device: Device) -> Estimate:
        """Price a kernel over documents of several lengths: each length takes its share of a kernel that has as many
        queries of this length alone, so that the lengths fill the device together and the kernel starts once."""
        queries = sum(group.batch * group.q_len for group in work.groups)
        seconds = spread = 0.0
        for group in work.groups:
            alone = max(1, round(queries / group.q_len))
            found = self.price(msgspec.structs.replace(group, batch=alone), device)
            mine = found.seconds * group.batch / alone
            seconds, spread = seconds + mine, spread + mine * found.sigma
        return found._replace(seconds=seconds, sigma=spread / seconds if seconds else 0.0)

    def _answer(self, work: Work, device: Device) -> Estimate:
        if self._answers is None:
            return self._linked(work, device)
        key = (device.name, work)
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._linked(work, device)
        return found

    def _linked(self, work: Work, device: Device) -> Estimate:
        for link in self._links:
            answer = link(work, device)
            if answer is not None:
                return answer
        return roofline_estimate(work, device)

    def _added(self, work: Gemm, device: Device) -> Estimate:
        """A weight gradient in the operands' precision, then a kernel that reads it and adds it to the sum."""
        element = max(2.0, DTYPE_BYTES[work.dtype])
        alone = self._answer(msgspec.structs.replace(work, out_bytes=element, accumulate=False), device)
        size = work.batch * work.m * work.n * (element + 2 * work.out_bytes)
        added = self._answer(Elementwise(num_bytes=size, fused=True), device)
        return alone._replace(seconds=alone.seconds + added.seconds)


def _aligned(work: Gemm) -> bool:
    """Whether the rows of a 16-bit product start at multiples of 16 bytes. cuBLAS before version 11 left the matrix
    units idle otherwise (NVIDIA's matrix multiplication guide, section 3), and batched products with a stride still
    went to fp32 kernels in 2022: BLOOM's runs with heads 108 and 150 wide (bigscience chronicles-prequel)."""
    return DTYPE_BYTES[work.dtype] != 2 or (work.n * 2 % 16 == 0 and work.k * 2 % 16 == 0)


class _Faster(Costs):
    """Other costs with one thing faster; whatever that does not touch is asked of the other."""

    def __init__(self, base: Costs, framework: Framework, name: str, factor: float):
        super().__init__(framework, profile=base.profile)
        self._base, self._name, self._factor = base, name, factor

    def _ask(self, work: Work, device: Device) -> Estimate:
        if isinstance(work, Collective):
            if any(h.name == self._name for h in work.group.hops):
                return self._base.price(_with_faster_links(work, {self._name: self._factor}), device)
            return self._base.price(work, device)
        answer = self._base.price(work, device)
        return answer._replace(seconds=answer.seconds / self._factor) if answer.cause == self._name else answer


class _Linkless(Costs):
    """Other costs, of which exchanges between devices are free."""

    def __init__(self, base: Costs):
        super().__init__(base.framework, profile=base.profile)
        self._base = base

    def _ask(self, work: Work, device: Device) -> Estimate:
        if isinstance(work, Collective):
            return Estimate(0.0, "network", "no links", 0.0)
        return self._base.price(work, device)


def _with_slower_steps(work: Collective, times: float) -> Collective:
    hops = tuple(msgspec.structs.replace(h, steps=times) if h.scale_out else h for h in work.group.hops)
    return msgspec.structs.replace(work, group=msgspec.structs.replace(work.group, hops=hops))


def _with_faster_links(work: Collective, speedup: dict[str, float]) -> Collective:
    hops = tuple(msgspec.structs.replace(h, gb_s=h.gb_s * speedup.get(h.name, 1.0)) for h in work.group.hops)
    return msgspec.structs.replace(work, group=msgspec.structs.replace(work.group, hops=hops))


def roofline_estimate(work: Work, device: Device) -> Estimate:
    """The last link: physics and published fractions of peak."""
    match work:
        case Gemm():
            return _estimate(roofline.gemm_seconds(work, device), "gemm")
        case GroupedGemm():
            return _estimate(roofline.grouped_gemm_seconds(work, device), "gemm")
        case AttentionCore():
            return _estimate(roofline.attention_seconds(work, device), "attention")
        case Scan():
            return Estimate(roofline.scan_seconds(work, device), "attention", "roofline", SCAN_SIGMA)
        case Convolution():
            return Estimate(roofline.convolution_seconds(work, device), "elementwise", "roofline", SCAN_SIGMA)
        case Elementwise():
            return _estimate(roofline.elementwise_seconds(work, device), "elementwise")
        case Collective():
            return _estimate(collectives.collective_seconds(work), "network")
        case Staging():  # a stream of its own hides it
            return Estimate(0.0, "host", "roofline", 0.0)
        case TierCopy():
            seconds = work.latency_us * 1e-6 + work.num_bytes / (work.gb_s * 1e9)
            return Estimate(seconds, "network", "roofline", TRANSFER_SIGMA)
        case HostProduct():
            return Estimate(work.seconds, "gemm", "roofline", ROOFLINE_SIGMA["gemm"])


def _estimate(seconds: float, cause: str) -> Estimate:
    return Estimate(seconds, cause, "roofline", ROOFLINE_SIGMA[cause])
