"""Actions: the passes of each rank, in order. A schedule is data with a text form that round-trips.

One line per rank, actions separated by spaces: ``F0 F1 B0 W0 B1 W1``. ``F`` is a forward, ``B`` the backward
to the inputs, ``W`` the backward to the weights, and the number is the microbatch. A ``B`` without its ``W``
is the full backward (both gradients at once). A rank that holds other stages than its own number says which:
``F0@3`` is microbatch 0 through stage 3. A first line ``# name`` names the schedule; other ``#`` lines and
empty lines are comments.

The split of a backward into B and W follows Qi et al., 2023 (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

F, B, W, BW = 0, 1, 2, 3
"""Forward; backward to the inputs; backward to the weights; full backward (both)."""

LETTERS = "FBWB"


class Actions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A schedule's actions: flat arrays in program order, CSR by rank. Stages count every chunk.

    ``rank_ptr`` int64 [num_ranks + 1] bounds each rank's slice of ``kind`` uint8 [n], ``stage`` int32 [n] and
    ``microbatch`` int32 [n]. ``stage_ranks[s]`` are the ranks that hold stage s: one, or two where the
    pipeline runs in both directions. The arrays are read-only.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_ptr: np.ndarray
    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    stage_ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for column in (self.rank_ptr, self.kind, self.stage, self.microbatch):
            column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Actions):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        columns = (self.rank_ptr, self.kind, self.stage, self.microbatch)
        return self.name, self.num_stages, self.num_microbatches, self.stage_ranks, *(c.tobytes() for c in columns)

    def rank_of(self) -> np.ndarray:
        """The rank of every action, int32 [n]."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.rank_ptr))

    def forwards(self) -> Actions:
        """Return the forwards alone, in their order, which are the schedule where nothing is trained."""
        kept = self.kind == F
        before = np.append(0, np.cumsum(kept))
        return msgspec.structs.replace(
            self,
            rank_ptr=before[self.rank_ptr],
            kind=self.kind[kept],
            stage=self.stage[kept],
            microbatch=self.microbatch[kept],
        )

    def to_inputs(self) -> Actions:
        """Return the schedule without gradients of weights: all backwards are to inputs alone."""
        kept = self.kind != W
        before = np.append(0, np.cumsum(kept))
        return msgspec.structs.replace(
            self,
            rank_ptr=before[self.rank_ptr],
            kind=np.where(self.kind == BW, B, self.kind).astype(np.uint8)[kept],
            stage=self.stage[kept],
            microbatch=self.microbatch[kept],
        )

    def then(self, other: Actions) -> Actions:
        """Return the schedule with another one behind it on every rank, of microbatches that are numbered on."""
        columns = {}
        for name in ("kind", "stage", "microbatch"):
            mine, theirs = getattr(self, name), getattr(other, name)
            theirs = theirs + (self.num_microbatches if name == "microbatch" else 0)
            parts = zip(np.split(mine, self.rank_ptr[1:-1]), np.split(theirs, other.rank_ptr[1:-1]))
            columns[name] = np.concatenate([one for pair in parts for one in pair]).astype(mine.dtype)
        return msgspec.structs.replace(
            self,
            num_microbatches=self.num_microbatches + other.num_microbatches,
            rank_ptr=self.rank_ptr + other.rank_ptr,
            **columns,
        )

    def ahead(self, count: int) -> Actions:
        """The same forwards in their order and the same backwards in theirs, with `count` more microbatches forward
        before each backward, as far as there are any: room for a round trip through what comes after the last stage."""
        if not count:
            return self
        rank, forward = self.rank_of(), self.kind == F
        held = np.array([len({*self.stage[rank == r].tolist()}) for r in range(self.num_ranks)])
        done = np.cumsum(forward) - np.append(0, np.cumsum(forward))[self.rank_ptr[:-1]][rank]
        most = np.bincount(rank[forward], minlength=self.num_ranks)
        turn = np.where(forward, done - 1.0, np.minimum(done + count * held[rank], most[rank]) - 0.5)
        order = np.lexsort((np.arange(len(self)), turn, rank))
        columns = {name: getattr(self, name)[order] for name in ("kind", "stage", "microbatch")}
        return msgspec.structs.replace(self, **columns)

    def text(self) -> str:
        """The text form: the schedule's name, then one line per rank. `parse` reads it back exactly."""
        lines = [f"# {self.name}"]
        for rank in range(self.num_ranks):
            part = slice(self.rank_ptr[rank], self.rank_ptr[rank + 1])
            kinds, stages, microbatches = (c[part].tolist() for c in (self.kind, self.stage, self.microbatch))
            if all(stage == rank for stage in stages):
                words = [f"{LETTERS[k]}{i}" for k, i in zip(kinds, microbatches)]
            else:
                words = [f"{LETTERS[k]}{i}@{s}" for k, s, i in zip(kinds, stages, microbatches)]
            lines.append(" ".join(words))
        return "\n".join(lines) + "\n"

    @classmethod
    def of(
        cls,
        name: str,
        kind: Sequence[np.ndarray],
        stage: Sequence[np.ndarray],
        microbatch: Sequence[np.ndarray],
        *,
        num_stages: int,
        num_microbatches: int,
    ) -> Actions:
        """Actions from one sequence per rank of kinds, stages and microbatches (2-D arrays [ranks, n] will do)."""
        lengths = [len(k) for k in kind]
        flat_stage = np.concatenate(stage).astype(np.int32)
        rank = np.repeat(np.arange(len(lengths)), lengths)
        held = np.zeros((num_stages, len(lengths)), dtype=bool)
        held[flat_stage, rank] = True
        stage_ranks: list[list[int]] = [[] for _ in range(num_stages)]
        for s, r in np.argwhere(held).tolist():
            stage_ranks[s].append(r)
        return cls(
            name=name,
            num_ranks=len(lengths),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            rank_ptr=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            kind=np.concatenate(kind).astype(np.uint8),
            stage=flat_stage,
            microbatch=np.concatenate(microbatch).astype(np.int32),
            stage_ranks=tuple(map(tuple, stage_ranks)),
        )
