"""Family: one schedule of the literature, as a record: its names, its paper, its legal shapes, its builder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic

if TYPE_CHECKING:
    from meshwright.schedules.actions import Actions


class ScheduleShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and parameters a schedule is built for. ``vpp`` is chunks per rank: num_stages / num_ranks."""

    num_ranks: int
    num_microbatches: int
    vpp: int
    params: dict[str, Any] = {}

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.vpp


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline schedule by name.

    ``placement`` says which rank holds stage s of p ranks: ``linear`` (s), ``loop`` (s mod p), ``v`` (down and
    back up), ``wave`` (down and up again and again), ``bidirectional`` (two ranks hold each stage). ``vpps``
    are the legal chunks per rank, empty for any. ``rules`` gives what is illegal beyond the counts being
    positive and vpp being legal. ``order`` builds the actions of a legal shape. ``params`` are the further
    arguments it takes, each with its default. ``hides_experts``: the order pairs a forward with another microbatch's
    backward so that one's expert exchange is overlapped with the other's kernels, which a plan that leaves ``overlap=``
    open then means. All families compute the same gradients.
    """

    name: str
    title: str
    paper: str
    placement: str
    splits_backward: bool
    order: Callable[[ScheduleShape], Actions]
    aliases: tuple[str, ...] = ()
    default_vpp: int = 1
    vpps: tuple[int, ...] = ()
    rules: Callable[[ScheduleShape], list[Diagnostic]] | None = None
    params: dict[str, Any] = {}
    hides_experts: bool = False

    def legality(
        self, num_ranks: int, num_microbatches: int, vpp: int | None = None, **params: Any
    ) -> list[Diagnostic]:
        """Every violation of this shape (S010 a count below 1, S011 vpp, S012 an unknown parameter, else the
        family's own rules); empty when `build` will succeed. `vpp` None is the family's default."""
        shape = self.shape(num_ranks, num_microbatches, vpp, **params)
        found = self._counts(shape) + self._stages_per_rank(shape) + self._unknown(params)
        return found if found or self.rules is None else self.rules(shape)

    def _counts(self, shape: ScheduleShape) -> list[Diagnostic]:
        return [
            Diagnostic(
                code="S010",
                message=f"{key}={getattr(shape, key)} for {self.name}: at least 1 is needed",
                place=f"schedule.{key} = {getattr(shape, key)}",
                help="1 is the least of ranks, of microbatches and of stages per rank",
            )
            for key in ("num_ranks", "num_microbatches", "vpp")
            if getattr(shape, key) < 1
        ]

    def _stages_per_rank(self, shape: ScheduleShape) -> list[Diagnostic]:
        if not self.vpps or shape.vpp < 1 or shape.vpp in self.vpps:
            return []
        legal, held = (" or ".join(f"{word}{v}" for v in self.vpps) for word in ("vpp", ""))
        return [
            Diagnostic(
                code="S011",
                message=f"{self.name} holds {held} stages on each rank, not vpp={shape.vpp}",
                place=f"schedule.vpp = {shape.vpp}",
                help=f"write {legal}" + (", or take `interleaved` for more" if self.vpps == (1,) else ""),
            )
        ]

    def _unknown(self, params: dict[str, Any]) -> list[Diagnostic]:
        return [
            Diagnostic(
                code="S012",
                message=f"{self.name} takes no parameter {key!r}",
                place=f"schedule.{key}",
                help="it takes " + (", ".join(self.params) or "none"),
            )
            for key in params
            if key not in self.params
        ]

    def ranks_of_stage(self, num_ranks: int, vpp: int) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each stage: one, or the two where microbatches come from both ends."""
        down = list(range(num_ranks))
        turns = self.placement in ("v", "wave", "bidirectional")
        ranks = [r for chunk in range(vpp) for r in (down[::-1] if turns and chunk % 2 else down)]
        if self.placement == "bidirectional":
            return tuple((r, num_ranks - 1 - r) for r in ranks)
        return tuple((r,) for r in ranks)

    def rank_of_stage(self, num_ranks: int, vpp: int) -> list[int] | None:
        """The rank that holds each stage; None where two ranks do."""
        if self.placement == "bidirectional":
            return None
        return [rank for (rank,) in self.ranks_of_stage(num_ranks, vpp)]

    def shape(self, num_ranks: int, num_microbatches: int, vpp: int | None = None, **params: Any) -> ScheduleShape:
        """The shape with the family's defaults filled in."""
        return ScheduleShape(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            vpp=self.default_vpp if vpp is None else vpp,
            params=self.params | params,
        )
