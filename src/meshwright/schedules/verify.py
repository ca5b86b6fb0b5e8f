"""Verification of a schedule: no work left out or split over two ranks, and no ranks that wait for each other."""

from __future__ import annotations

import numpy as np

from meshwright.errors import Diagnostic
from meshwright.schedules.actions import BW, LETTERS, Actions, B, F


def verify(actions: Actions) -> list[Diagnostic]:
    """S005 for a forward or backward that is missing or apart from the other, else S006 for a deadlock.

    Every (stage, microbatch) needs one forward and one backward, on one rank. Empty when the schedule is good.
    """
    forward, backward = _home(actions, (F,)), _home(actions, (B, BW))
    found = [
        Diagnostic(
            code="S005",
            message=f"microbatch {i} never goes {way} through stage {s}",
            place=f"schedule {actions.name}",
            help=f"add {'F' if way == 'forward' else 'B'}{i}@{s} on the rank that holds stage {s}",
        )
        for way, home in (("forward", forward), ("backward", backward))
        for s, i in np.argwhere(home < 0).tolist()
    ]
    found += [
        Diagnostic(
            code="S005",
            message=f"microbatch {i} goes forward through stage {s} on rank {forward[s, i]}, "
            f"backward on rank {backward[s, i]}",
            place=f"schedule {actions.name}",
            help="the activations stay where the forward ran; put both on one rank",
        )
        for s, i in np.argwhere((forward != backward) & (forward >= 0) & (backward >= 0)).tolist()
    ]
    return found or deadlocks(actions, _stops(actions))


def _home(actions: Actions, kinds: tuple[int, ...]) -> np.ndarray:
    """The rank that does one of `kinds` for each (stage, microbatch), -1 for none."""
    chosen = np.isin(actions.kind, kinds)
    home = np.full((actions.num_stages, actions.num_microbatches), -1, dtype=np.int32)
    home[actions.stage[chosen], actions.microbatch[chosen]] = actions.rank_of()[chosen]
    return home


def _stops(actions: Actions) -> np.ndarray:
    from meshwright.schedules.timing_loop import run_in_order

    comm = np.zeros(max(actions.num_stages - 1, 0))
    return run_in_order(actions, np.ones(len(actions)), comm)[2]


def deadlocks(actions: Actions, place: np.ndarray) -> list[Diagnostic]:
    """S006 for every rank that stopped before its end; `place` int64 [num_ranks] is where each stopped."""
    found = []
    for rank in np.flatnonzero(place < actions.rank_ptr[1:]).tolist():
        kind, stage, microbatch = (int(c[place[rank]]) for c in (actions.kind, actions.stage, actions.microbatch))
        found.append(
            Diagnostic(
                code="S006",
                message=f"rank {rank} waits for ever before {LETTERS[kind]}{microbatch}@{stage}",
                place=f"schedule {actions.name}, rank {rank}, action {place[rank] - actions.rank_ptr[rank] + 1}",
                help="what it needs comes later on a rank that waits too (or never); move that action forward",
            )
        )
    return found
