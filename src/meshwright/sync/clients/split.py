"""Cohorts whose tasks are merged at first: when the last merged round is over they are split by the affinities that
clients have measured, and the groups take turns (MAS, Zhuang et al. 2307.11285)."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.assign.splits import even, split
from meshwright.sync.clients import Answered, ClientDecision, ClientEvent, TrainOn, Turn
from meshwright.sync.clients.cohort import Rota, RotaState
from meshwright.sync.merged import ALL_TASKS, MergedTasks, bits_of

Groups = tuple[tuple[int, ...], ...]


class SplitState(msgspec.Struct, frozen=True):
    """The cohort's state, the job whose turn it is, sums of affinities, row by row, and of how many measurements; the
    groups, () before the split."""

    cohort: RotaState
    job: int = ALL_TASKS
    affinity: tuple[float, ...] = ()
    measured: int = 0
    groups: Groups = ()


class MergeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: the cohorts of another, with a job in each. ``known``: groups that were made before, where no client
    measures; without them and without affinities tasks are split evenly, in order."""

    cohorts: Rota
    merged: MergedTasks
    known: Groups = ()

    def begin(self) -> SplitState:
        return SplitState(self.cohorts.begin())

    def decide(self, state: SplitState, event: ClientEvent) -> tuple[SplitState, tuple[ClientDecision, ...]]:
        if isinstance(event, Answered) and event.affinity and event.client in state.cohort.waiting:
            before = state.affinity or (0.0,) * len(event.affinity)
            total = tuple(a + b for a, b in zip(before, event.affinity))
            state = msgspec.structs.replace(state, affinity=total, measured=state.measured + 1)
        cohort, decisions = self.cohorts.decide(state.cohort, event)
        state, out = msgspec.structs.replace(state, cohort=cohort), []
        for decision in decisions:
            if isinstance(decision, TrainOn):
                job = self.merged.job(decision.task)
                if job != state.job:
                    groups = state.groups or self._split(state)
                    state = msgspec.structs.replace(state, job=job, groups=groups)
                    out.append(Turn(job, groups[job]))
                heads = bits_of(state.groups[job]) if job != ALL_TASKS else 0
                measured = self.merged.measures(decision.task)
                decision = msgspec.structs.replace(decision, heads=heads, measured=measured)
            out.append(decision)
        return state, tuple(out)

    def _split(self, state: SplitState) -> Groups:
        many, count = self.merged.tasks, self.merged.groups
        if self.known or not state.measured:
            return self.known or even(many, count)
        return split(np.array(state.affinity).reshape(many, many) / state.measured, count)
