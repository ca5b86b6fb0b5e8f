"""Compute tasks: the schedule's actions, cut where exchanges run between layers."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.graph import GraphBuilder
from meshwright.lower.facts import Facts
from meshwright.lower.roles import UPDATED, PassRole, Roles
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.sync.due import due_after, first_of
from meshwright.sync.fragments import STEP

PASS_NAMES = {F: "F", B: "B", W: "W", BW: "BW"}


class Compute(msgspec.Struct):
    """The compute tasks of one slice class, by number: (first, last) task of each ``forward`` and ``backward`` by
    (stage, microbatch), ``done`` the last task of each pipeline rank, and the expanded tasks."""

    forward: tuple[np.ndarray, np.ndarray]
    backward: tuple[np.ndarray, np.ndarray]
    home: np.ndarray
    task: np.ndarray
    action: np.ndarray
    segment: np.ndarray
    done: np.ndarray


def segments_of(actions: Actions, facts: Facts) -> np.ndarray:
    """Return the number of segments of each action's stage."""
    return np.array([len(c.segments) for c in facts.compositions])[actions.stage]


def cut_of(actions: Actions, facts: Facts) -> np.ndarray:
    """Return which actions are cut into segments, one per layer: those that a gather or a reduction is overlapped
    with."""
    none = np.zeros(len(actions), bool)
    if facts.early:
        return due_after(actions, STEP)
    if not facts.exchanges:
        return none
    if not facts.overlap_dp:
        return ~none if facts.pp == 1 and facts.scatters else none
    forward = actions.kind == F
    cut = forward if facts.again else forward & first_of(actions, forward) & (facts.zero >= 1 and facts.gathers_ahead)
    cut |= due_after(actions, facts.due)
    if facts.again:
        cut |= np.isin(actions.kind, (B, BW))
    return cut


def add_compute(builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, index: int) -> Compute:
    """Every action of one slice class as one task, or one per segment, on its rank's compute queue."""
    pp = facts.pp
    cut = cut_of(actions, facts)
    # where state moves between tiers it does so layer by layer
    count = np.where(cut | (facts.offload is not None), segments_of(actions, facts), 1)
    action = np.repeat(np.arange(len(actions)), count)
    starts = np.cumsum(count) - count
    position = np.arange(len(action)) - starts[action]
    kind, stage, rank = actions.kind[action], actions.stage[action], actions.rank_of()[action]
    whole = count[action] == 1
    segment = np.where(kind == F, position, count[action] - 1 - position)
    # a stage of one layer is updated where its pass ends, too
    one = np.where(whole & ~(cut[action] & facts.early), -1, segment)
    ids = builder.extend(
        kind,
        _pass_roles(roles, facts, index, kind, stage, rank, one, cut[action]),
        stream=np.array([builder.stream(index * pp + r, "compute") for r in range(pp)])[rank],
        stage=stage,
        chunk=stage // pp,
        microbatch=actions.microbatch[action],
        layer=np.where(whole, -1, np.array(facts.first_layers)[stage] + segment),
    )
    shape = (actions.num_stages, actions.num_microbatches)
    where = {}
    for name, kinds in (("forward", (F,)), ("backward", (B, BW))):
        chosen = np.flatnonzero(np.logical_or.reduce([actions.kind == k for k in kinds]))
        first, last = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        at = (actions.stage[chosen], actions.microbatch[chosen])
        first[at], last[at] = ids[starts[chosen]], ids[starts[chosen] + count[chosen] - 1]
        where[name] = (first, last)
        if name == "forward":
            home = np.zeros(shape, np.int64)
            home[at] = actions.rank_of()[chosen]
    done = ids[np.array([np.flatnonzero(rank == r)[-1] for r in range(pp)])]
    return Compute(task=ids, action=action, segment=segment, home=home, done=done, **where)


def _pass_roles(roles: Roles, facts: Facts, index: int, kind, stage, rank, segment, cut) -> np.ndarray:
    """Numbers of the roles of compute tasks; `segment` -1 is the whole stage, and those `cut` have exchanges beside
    them."""
    compositions, ranks = facts.compositions, 1 if facts.alike else facts.pp
    most = int(segment.max(initial=-1)) + 1
    segment = np.where(cut | (segment < 0), segment, segment + most)
    shape = (4, len(compositions), ranks, int(segment.max(initial=-1)) + 2)
    code = np.ravel_multi_index((kind, stage, rank if ranks > 1 else np.zeros_like(rank), segment + 1), shape)
    role_of = np.zeros(int(np.prod(shape)), np.int64)
    for value in np.flatnonzero(np.bincount(code, minlength=len(role_of))).tolist():
        rest, seg = divmod(value, shape[3])
        rest, r = divmod(rest, shape[2])
        k, s = divmod(rest, shape[1])
        units = compositions[s].units if seg == 0 else compositions[s].segments[(seg - 1) % most]
        beside = _beside(facts, k) if 0 < seg <= most else ()
        share = 1 / len(compositions[s].segments) if seg else 1.0
        role_of[value] = roles(PassRole(PASS_NAMES[k], units, index, r, beside, share))
    return role_of[code]


def _beside(facts: Facts, kind: int) -> tuple[str, ...]:
    """Return the exchanges overlapped with an expanded pass, or the update that it ends with."""
    if facts.early:
        return (UPDATED,)
    if kind == F:
        return ("gather",)
    return ("gather", "reduce") if facts.again else ("reduce",)
