"""Lending: the decider of which replica's cache blocks hold what another one has no room for.

Infinite-LLM (Lin et al. 2024, 2401.02669, section 5): every instance reports its blocks to a global manager, which
matches those that run out (debtors) with those that have blocks to spare (creditors). The oldest request that lacks
blocks comes first, and is lent all of them or none, so that of two that cannot both be held one goes on. A creditor
serves one debtor at a time, the one with the most to spare is asked first, and whoever borrows does not lend.
"""

from __future__ import annotations

import msgspec

#: The number of no request: behind all others.
NOBODY = 1 << 62


class BlockReport(msgspec.Struct, frozen=True):
    """A report of a replica: it lacks ``wanted`` blocks for the request ``oldest``, could ``spare`` so many, and gives
    ``returned`` borrowed ones back."""

    replica: int
    wanted: int = 0
    oldest: int = NOBODY
    spare: int = 0
    returned: int = 0


class Reported(msgspec.Struct, frozen=True, tag=True):
    """Replicas reported; what the others said before still holds, but for what they spare."""

    reports: tuple[BlockReport, ...]


class Lend(msgspec.Struct, frozen=True, tag=True):
    """The ``debtor`` may give out so many blocks of the ``creditor``; below 0 the creditor has them back."""

    creditor: int
    debtor: int
    blocks: int


class Loans:
    """The state of the manager: ``lent`` blocks by (creditor, debtor), and (oldest request, blocks) ``wanted``."""

    def __init__(self) -> None:
        self.lent: dict[tuple[int, int], int] = {}
        self.wanted: dict[int, tuple[int, int]] = {}

    def of_debtor(self, replica: int) -> dict[int, int]:
        """Return what a replica borrows, by creditor."""
        return {creditor: blocks for (creditor, debtor), blocks in self.lent.items() if debtor == replica}

    def of_creditor(self, replica: int) -> dict[int, int]:
        """Return what a replica lends, by debtor."""
        return {debtor: blocks for (creditor, debtor), blocks in self.lent.items() if creditor == replica}


class LendingManager(msgspec.Struct, frozen=True):
    """The decider over the blocks of all replicas. It moves its state on in place; its log replays from the
    beginning."""

    def begin(self) -> Loans:
        """The state in which nothing is lent."""
        return Loans()

    def decide(self, state: Loans, event: Reported) -> tuple[Loans, tuple[Lend, ...]]:
        """The state after reports, and what is lent and comes back."""
        found, spare = [], {}
        for said in event.reports:
            found += self._repaid(state, said)
            spare[said.replica] = said.spare
            state.wanted.pop(said.replica, None)
            if said.wanted:
                state.wanted[said.replica] = said.oldest, said.wanted
        if found:
            return state, tuple(found)  # those who have blocks back may want them, and say so first
        for debtor in sorted(state.wanted, key=lambda one: (state.wanted[one][0], one)):
            if debtor in state.wanted and not self._granted(state, debtor, spare, found):
                break  # what comes free is kept for the oldest until there is enough
        return state, tuple(found)

    def _repaid(self, state: Loans, said: BlockReport) -> list[Lend]:
        """Note what a replica gives back, to its smallest creditors first, so that they are soon free of it."""
        left, found = said.returned, []
        for creditor, blocks in sorted(state.of_debtor(said.replica).items(), key=lambda one: (one[1], one[0])):
            back = min(left, blocks)
            if back:
                found.append(self._lent(state, creditor, said.replica, -back))
                left -= back
        return found

    def _granted(self, state: Loans, debtor: int, spare: dict[int, int], found: list[Lend]) -> bool:
        """Lend a replica what others can spare, if that is all it wants; whether it is."""
        _, wanted = state.wanted[debtor]
        own = state.of_debtor(debtor)
        creditors = [
            one
            for one in sorted(spare, key=lambda one: (one not in own, -spare[one], one))
            if spare[one] and one != debtor and _lends(state, one, debtor)
        ]
        if sum(spare[one] for one in creditors) < wanted:
            return False
        for creditor in creditors:
            blocks = min(wanted, spare[creditor])
            if blocks:
                found.append(self._lent(state, creditor, debtor, blocks))
                spare[creditor] -= blocks
                wanted -= blocks
                state.wanted.pop(creditor, None)  # it lacks more now, and says how much
        del state.wanted[debtor]
        return True

    def _lent(self, state: Loans, creditor: int, debtor: int, blocks: int) -> Lend:
        left = state.lent.pop((creditor, debtor), 0) + blocks
        if left:
            state.lent[creditor, debtor] = left
        return Lend(creditor, debtor, blocks)


def _lends(state: Loans, creditor: int, debtor: int) -> bool:
    """Whether one borrows nothing, and lends to nobody else than another one."""
    return not state.of_debtor(creditor) and not state.of_creditor(creditor).keys() - {debtor}
