"""Batching: the decider of what a serving engine computes in its next iteration, whatever the policies.

The batching policy alone decides who is computed; the order of those who wait, the cache and what happens to whoever is
evicted are decided apart, so that every policy works with each of them. Arrival, progress and end are the same for all.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

import msgspec

from meshwright.serving.borrowed_cache import BorrowedCache
from meshwright.serving.borrowing import Borrow, Resized, borrowing, resize, steady_iterations, tokens_away
from meshwright.serving.cache import CacheRules, EngineLimits, KvCache
from meshwright.serving.chunk_cache import ChunkCache
from meshwright.serving.cohort import Cohort
from meshwright.serving.engine_request import EngineRequest, NewRequest, nearest_end
from meshwright.serving.fcfs import FOR_EVER, OrderPolicy, WaitingQueue
from meshwright.serving.fcfs import POLICY as FCFS
from meshwright.serving.gate import AdmissionGate
from meshwright.serving.prefix_cache import PrefixCache
from meshwright.serving.pulling import Offered, Pull, gives_up, pulls
from meshwright.serving.reloading import forget

#: Past answers whose lengths an engine remembers.
REMEMBERED = 1000


class Share(msgspec.Struct, frozen=True):
    """A sequence's part of an iteration: ``new`` tokens computed, behind ``past`` that were before; ``samples``: a
    token is generated. The last ``drafted`` of the new ones are guesses, of which those that come true are generated
    too."""

    number: int
    new: int
    past: int
    samples: bool
    drafted: int = 0


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """Requests came."""

    requests: tuple[NewRequest, ...]


class Computed(msgspec.Struct, frozen=True, tag=True):
    """The iteration is over (as often as ``times``, where it was repeated), and these requests are answered.
    ``accepted`` are the guessed tokens that came true, by (number, tokens); ``withdrawn`` took part, and nobody needs
    their answers any more. ``reloaded``: there are new parameters, by which the whole cache is computed again."""

    finished: tuple[int, ...] = ()
    times: int = 1
    accepted: tuple[tuple[int, int], ...] = ()
    withdrawn: tuple[int, ...] = ()
    reloaded: bool = False


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answers of these requests any more; or their cache was sent to where they go on."""

    numbers: tuple[int, ...]


class Iterate(msgspec.Struct, frozen=True, tag=True):
    """Compute an iteration, after ``moved_in`` and ``moved_out`` cache blocks went from the host's memory and there,
    and ``loads`` adapters were brought to the device.

    Those ``decoding`` compute their last token alone and generate one, behind ``context`` tokens together; all others
    have ``shares``. As far as the engine can see the same follows ``repeat`` times, each sequence with one token more,
    if nobody comes or leaves. Of a request's tokens, these with them, so many are ``away``, by (number, tokens). Any
    attention group has the ``busiest`` tokens, next tokens and prompts at most."""

    shares: tuple[Share, ...]
    repeat: int = 1
    moved_in: int = 0
    moved_out: int = 0
    decoding: tuple[int, ...] = ()
    context: int = 0
    loads: int = 0
    away: tuple[tuple[int, int], ...] = ()
    busiest: tuple[int, int, int] | None = None

    @property
    def sequences(self) -> int:
        """How many sequences take part."""
        return len(self.decoding) + len(self.shares)


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Drop the cache of a request, which is computed again later; or it was ``swapped`` to the host's memory. So many
    computed tokens of it were ``void``, as there are new parameters."""

    number: int
    swapped: bool = False
    void: int = 0


class Admit(msgspec.Struct, frozen=True, tag=True):
    """A request runs from now on; so many of its tokens were ``cached``."""

    number: int
    cached: int = 0


#: What an engine decides.
Decision = Iterate | Evict | Admit | Pull | Borrow


class EngineState:
    """The state of an engine: who waits, who runs, the cache, the iteration under way, and the lengths of the last
    answers. ``busy``: an iteration is under way, with ``shares`` of those ``sharing`` in it. ``parked`` are answered
    here and keep their cache until it is sent; ``offered`` keep theirs elsewhere, and that of those who are ``coming``
    is on its way. ``asked`` is what other replicas were last asked for."""

    def __init__(self, queue: WaitingQueue, cache: KvCache, cohort: Cohort):
        self.waiting, self.cache, self.cohort, self.gate = queue, cache, cohort, AdmissionGate(cache.limits)
        self.running: list[EngineRequest] = []
        self.shares, self.sharing = tuple[Share, ...](), list[EngineRequest]()
        self.busy = self.unsorted = False
        self.history: deque[int] = deque(maxlen=REMEMBERED)
        self.parked: dict[int, EngineRequest] = {}
        self.offered: deque[NewRequest] = deque()
        self.coming: dict[int, EngineRequest] = {}
        self.came = 0
        self.asked = Borrow(0)

    @property
    def free(self) -> int:
        """Cache blocks that can be given out."""
        return self.cache.free


class NextBatch:
    """An iteration being planned; a policy writes it. ``history`` are the lengths of the last answers."""

    def __init__(self, state: EngineState, drafts: DraftPolicy | None, ahead: bool = False):
        self.waiting, self.running, self.cache = state.waiting, state.running, state.cache
        self.history, self.drafts, self.cohort = state.history, drafts, state.cohort
        self.together, self.ahead, self.gate = 0, ahead, state.gate
        self.shares, self.sharing = list[Share](), list[EngineRequest]()
        self.evicted, self.admitted, self._left = list[Evict](), list[Admit](), 0

    def next(self) -> EngineRequest | None:
        """Return who is to run next, with what the cache has of it as computed; None where nobody waits."""
        one = self.gate.first(self, self.waiting, self.cache)
        if one is None or not self.cache.allows(one):
            return None
        self.cache.look(one)
        return one

    def wanted(self, one: EngineRequest) -> int:
        """Return the tokens to be computed of a sequence: what it needs, and guesses behind it."""
        if self.drafts is None or not one.decodes or one.done:
            return one.target - one.computed
        self._left = self._left or nearest_end(self.running)  # until somebody comes or goes
        return 1 + min(self.drafts.guesses(one, self._left), max(one.limit - one.generated - 1, 0))

    def fits(self, one: EngineRequest, tokens: int, spare: int = 0) -> bool:
        """Return whether there are blocks to hold so many tokens of a sequence, and `spare` ones beside."""
        return self.cache.needs(one, tokens) + spare <= self.cache.free

    def hold(self, one: EngineRequest, tokens: int) -> None:
        """Give a sequence blocks until it holds so many tokens."""
        self.cache.hold(one, tokens)

    def admit(self, one: EngineRequest, tokens: int) -> EngineRequest:
        """Let a sequence that waits run, with blocks for so many tokens."""
        self.waiting.take(one)
        if one.swapped:
            self.cache.back(one)
        self.cache.hold(one, tokens)
        self.admitted.append(Admit(one.number, 0 if one.new.computed else one.computed))
        one.running, self._left = True, 0
        self.running.append(one)
        return one

    def decode_together(self, budget: int) -> int:
        """Put the next tokens of those at the front that decode into the iteration, if they fit into a budget of tokens
        and there are blocks for all; returns how many sequences that were. The others are to be computed one by one."""
        cohort, running = self.cohort, self.running
        cohort.on = self.drafts is None and cohort.allowed and not self.cache.told_apart
        count, blocks = len(cohort), cohort.growth(1)
        if (
            not cohort.on
            or not count
            or count > budget
            or blocks > self.cache.free
            or any(one in cohort for one in running[count:])
        ):
            cohort.disband()
            return 0
        self.cache.take(blocks)
        cohort.ahead, self.together = 1, count
        return count

    def compute(self, one: EngineRequest, new: int) -> int:
        """Put so many tokens of a sequence into the iteration; returns them."""
        if one in self.cohort:
            self.cohort.leave(one)
        need = one.target - one.computed
        one.drafted = new - need if new > need else 0
        self.shares.append(Share(one.number, new, one.computed, new >= need, one.drafted))
        self.sharing.append(one)
        if self.ahead and not one.decodes:
            self.cache.named(one, min(one.computed + new, one.target))
        return new

    def evict(self) -> EngineRequest:
        """Take the cache blocks of the last of those who run, which then waits; returns it."""
        last = self.running.pop()
        if last in self.cohort:
            self.cohort.leave(last)
        last.running, self._left = False, 0
        self.cache.evict(last)
        self.waiting.back(last)
        self.evicted.append(Evict(last.number, last.swapped))
        return last

    def make_room(self, one: EngineRequest, new: int) -> bool:
        """Hold the blocks that so many more tokens of a sequence need, evicting from the end; whether it still runs."""
        tokens = one.computed + new
        if tokens <= one.blocks * self.cache.limits.block:
            return True
        while self.cache.needs(one, tokens) > self.cache.free:
            if self.evict() is one:
                return False
        self.cache.hold(one, tokens)
        return True


class DraftPolicy(Protocol):
    """A policy of how many tokens are guessed ahead of a sequence that decodes (speculative decoding)."""

    name: str
    title: str

    def guesses(self, one: EngineRequest, left: int) -> int:
        """Return the tokens to guess of one of those that run, whose nearest to its end may say `left` ones more."""


class BatchPolicy(Protocol):
    """A batching policy.

    ``code`` numbers those that the compiled simulator knows, 0 for all others. ``budget`` is its usual token budget, 0
    where it has none. ``reserves``: a request gets the blocks of its whole answer at once, and none is ever evicted.
    ``watermark``: admission leaves 1% of the blocks free. A policy whose decision may change while everybody decodes
    and nobody comes or leaves says ``steady = False``, one whose prompts are found by others from when they are
    scheduled, in the same iteration even, ``ahead = True``; one of a single ``engine`` says which.
    """

    name: str
    title: str
    code: int
    budget: int
    reserves: bool
    watermark: bool

    def plan(self, plan: NextBatch, limits: EngineLimits) -> None:
        """Write the next iteration into a plan: its shares, who is admitted, who is evicted."""

    def keeps(self, finished: bool, others: bool) -> bool:
        """Return whether a finished sequence stays in its place; `others`: some of its batch are not answered yet."""


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """The decider of one engine: its policies and its limits.

    It moves its state on in place; the log of what it was told replays from the beginning. An engine that ``parks``
    keeps the cache of whoever it computed a first token of a longer answer for until it is :class:`Withdrawn`, as the
    prefill half of a divided one does; the other half pulls what was :class:`Offered` to it, in order, as soon as there
    is room.
    Without ``together`` every sequence is advanced by itself, which comes to the same.
    """

    policy: BatchPolicy
    limits: EngineLimits
    order: OrderPolicy = FCFS
    rules: CacheRules = CacheRules()
    drafts: DraftPolicy | None = None
    parks: bool = False
    together: bool = True

    def begin(self) -> EngineState:
        """The state of an engine that nobody asked anything."""
        rules = self.rules
        cache = ChunkCache if rules.chunks else PrefixCache if rules.prefix else KvCache
        cache = BorrowedCache if rules.borrow else cache
        even = self.limits.blocks_for(1000 * self.limits.block) == 1000  # each token takes as much as the next one
        cohort = Cohort(self.limits.block, grows=not self.policy.reserves, allowed=self.together and even)
        return EngineState(self.order.open(), cache(self.limits, rules), cohort)

    def decide(
        self, state: EngineState, event: Arrived | Computed | Withdrawn | Offered | Resized
    ) -> tuple[EngineState, tuple[Decision, ...]]:
        """The state after an event, and the next iteration where the engine has none under way."""
        match event:
            case Offered(requests=new, times=times):
                state.offered.extend(new)
                if state.busy and self.rules.prefix:
                    return state, ()  # what shared blocks hold is known between iterations
                return state, pulls(state, self.policy, times)
            case Arrived(requests=new):
                for said in new:
                    one = state.coming.pop(said.number, None)
                    if one is not None:
                        state.waiting.add(one)
                        continue
                    state.gate.came(EngineRequest(said, state.came), state)
                    state.came += 1
                return (state, ()) if state.busy else self._next(state)
            case Computed():
                self._after(state, event)
                if event.withdrawn:
                    self._leave(state, set(event.withdrawn))
                gone = [Evict(number, void=void) for number, void in forget(state)] if event.reloaded else ()
                return state, (*gone, *self._next(state)[1])
            case Resized():
                resize(state, event)
                return (state, ()) if state.busy else self._next(state)
            case Withdrawn(numbers=numbers):
                self._leave(state, set(numbers))
                return (state, ()) if state.busy else self._next(state)

    def _after(self, state: EngineState, event: Computed) -> None:
        """Move the state behind an iteration: what it computed, and without those that leave."""
        finished, times, cache, queue = set(event.finished), event.times, state.cache, state.waiting
        state.gate.passed(times, any(share.new - share.drafted != 1 or not share.past for share in state.shares))
        guessed, cohort = dict(event.accepted), state.cohort
        if cohort.ahead:
            cohort.tick(times, cache)
            queue.decoded(cohort.tenants, times)
        pace = cohort.pace
        for share, one in zip(state.shares, state.sharing, strict=True):
            if one.pace is pace or not one.running:
                continue  # it was withdrawn meanwhile
            made = times if not share.drafted else 1 + guessed.get(share.number, 0)
            done = share.new - share.drafted + made - 1 if share.samples else share.new
            one.computed += done
            if times > 1 and not self.policy.reserves:
                cache.hold(one, one.computed)
            if share.samples:
                one.target += made
            if not one.done:
                cache.grown(one)
            queue.computed(one, done, made if share.samples else 0)
            if share.samples and cohort.on and cohort.takes(one):
                cohort.join(one, cache)
        state.shares, state.sharing, state.busy = (), [], False
        if finished:
            self._answered(state, finished)

    def _answered(self, state: EngineState, finished: set[int]) -> None:
        """Note who is answered."""
        known = state.cohort.members.get(min(finished)) if len(finished) == 1 else None
        for one in (known,) if known is not None else [one for one in state.running if one.number in finished]:
            one.done = True
            state.history.append(one.generated)
            state.waiting.left(one)
        self._release(state)

    def _release(self, state: EngineState) -> None:
        """Let those leave that are answered, unless they keep their places until others are."""
        done = [one for one in state.running if one.done]
        if not done or self.policy.keeps(True, len(done) < len(state.running)):
            return
        state.running[:] = [one for one in state.running if not one.done]
        for one in done:
            if one in state.cohort:
                state.cohort.leave(one)
            if self.parks and one.generated < one.limit:
                state.parked[one.number] = one
            else:
                state.cache.drop(one)

    def _leave(self, state: EngineState, numbers: set[int]) -> None:
        """Let requests leave at once, wherever they are."""
        for kept in (state.parked, state.coming):
            for number in numbers & kept.keys():
                state.cache.drop(kept.pop(number))
        state.offered = deque(one for one in state.offered if one.number not in numbers)
        state.gate.unseen[:] = [one for one in state.gate.unseen if one.number not in numbers]
        for one in [one for one in state.waiting if one.number in numbers]:
            state.waiting.drop(one)
            state.waiting.left(one)
            state.cache.drop(one)
            if one.swapped:
                state.cache.host_free += self.limits.blocks_for(one.computed)
        for one in [one for one in state.running if one.number in numbers]:
            state.running.remove(one)
            one.running = False
            state.waiting.left(one)
            if one in state.cohort:
                state.cohort.leave(one)
            state.cache.drop(one)
        self._release(state)

    def _next(self, state: EngineState) -> tuple[EngineState, tuple[Decision, ...]]:
        state.gate.look(state)
        if not state.running and not len(state.waiting):
            return state, (*pulls(state, self.policy), *borrowing(state, self.policy))
        if state.waiting.ranks and state.unsorted:
            state.running.sort(key=state.waiting.rank)
        evicted: list[Evict] = []
        while True:
            plan = NextBatch(state, self.drafts, getattr(self.policy, "ahead", False))
            self.policy.plan(plan, self.limits)
            evicted += plan.evicted
            lost = None if plan.shares or state.running else gives_up(state)
            if lost is None:
                break
            evicted.append(Evict(lost.number, lost.swapped))
        state.shares, state.sharing, state.unsorted = tuple(plan.shares), plan.sharing, bool(plan.admitted)
        pulled = pulls(state, self.policy)  # what makes room for it is moved with this iteration
        moved_in, moved_out = state.cache.moved()
        found: tuple[Decision, ...] = (*evicted, *plan.admitted, *pulled, *borrowing(state, self.policy))
        if state.shares or plan.together:
            state.busy = True
            decoding = (state.cohort.numbers, state.cohort.context) if plan.together else ((), 0)
            repeat = 1 if moved_in or moved_out else self._repeat(state, plan)  # the next ones move nothing
            more = state.cache.adapters_loaded(), tokens_away(state), state.gate.busiest(plan)
            found = (*found, Iterate(state.shares, repeat, moved_in, moved_out, *decoding, *more))
        return state, found

    def _repeat(self, state: EngineState, plan: NextBatch) -> int:
        """How often the same iteration follows, if nobody comes or leaves: as often as there are blocks to grow by."""
        if plan.admitted or plan.evicted or plan.together + len(state.shares) < len(state.running):
            return 1
        if not getattr(self.policy, "steady", True):
            return 1
        if not all(s.new == 1 and s.past and s.samples for s in state.shares):
            return 1
        found = state.gate.room(state)
        if len(state.waiting):
            tenants = Counter(one.new.tenant for one in state.running) if state.shares else state.cohort.tenants
            found = min(found, state.waiting.unchanged(tenants))
        if self.policy.reserves:
            return found if steady_iterations(state, FOR_EVER) > 1 else 1
        # whoever is next may fit once less of its prefix is there to be pinned, or more of it
        reads = len(state.waiting) and (state.waiting.reads_cache or self.rules.prefix)
        if reads and state.shares:
            return 1  # nobody says when the cache next has something new
        room = state.cache.bare if reads else state.cache.quiet
        if reads:
            found = min(found, state.cohort.until_named)
        return max(min(found, steady_iterations(state, max(room, 0))), 1)
