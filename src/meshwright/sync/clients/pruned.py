"""Cohorts whose model is pruned: after each round the server cuts what its mask leaves out, and clients are told the
mask when they have another (FedDIP, Long et al. 2309.06805)."""

from __future__ import annotations

import msgspec

from meshwright.sync.clients import ClientDecision, ClientEvent, CutMask, TrainOn
from meshwright.sync.clients.cohort import Rota, RotaState
from meshwright.sync.pruning import Pruning


class PrunedState(msgspec.Struct, frozen=True):
    """The cohort's state, and the mask that each client was told last, -1 for none."""

    cohort: RotaState
    masks: tuple[int, ...]


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: the cohorts of another, with a mask."""

    cohorts: Rota
    pruning: Pruning

    def begin(self) -> PrunedState:
        return PrunedState(self.cohorts.begin(), (-1,) * self.cohorts.num_clients)

    def decide(self, state: PrunedState, event: ClientEvent) -> tuple[PrunedState, tuple[ClientDecision, ...]]:
        cohort, decisions = self.cohorts.decide(state.cohort, event)
        masks, out, ended = list(state.masks), [], False
        for decision in decisions:
            if isinstance(decision, TrainOn):
                if decision.task and not ended:
                    out.append(CutMask(decision.task - 1))
                    ended = True
                mask = self.pruning.mask_of(decision.task)
                told = masks[decision.client] != mask
                masks[decision.client] = mask
                decision = msgspec.structs.replace(decision, mask=mask, told=told)
            out.append(decision)
        return PrunedState(cohort, tuple(masks)), tuple(out)
