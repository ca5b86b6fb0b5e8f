"""The engine: a decider says what is computed next, an executor computes it, and answers go out piece by piece.

One step is one iteration. Whoever came or was cancelled since the last one is told to the decider first, then what the
last iteration computed, so that a request waits for no more than the iteration under way. The decider is that of the
simulator, driven by the same events; block tables follow it, and nothing here decides who is computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from meshwright.endpoint.prefixes import chain, decidable
from meshwright.endpoint.seam import EngineFacts, EngineFigures, Generated, Prompted
from meshwright.run.serve.computers import Drafter, Executor
from meshwright.run.serve.distance import ScoreDistance
from meshwright.run.serve.grammar import Grammars
from meshwright.run.serve.packed import PackedRow, PackedTokens
from meshwright.run.serve.sampling import choose, told
from meshwright.run.serve.sequence import ServedSequence
from meshwright.run.serve.tables import BlockTables
from meshwright.serving.batching import Admit, Arrived, Batching, Computed, Evict, Iterate, Share, Withdrawn
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.pulling import Offered, Pull

#: Iterations, and answered requests, whose records are kept.
KEPT = 1 << 13


class IterationRecord(NamedTuple):
    """An iteration as it was: seconds since the engine's start at its begin and end, tokens computed, the requests
    whose tokens those are, each with its new tokens, the computed ones before, and the tokens of its answer that came
    of it; and who was ``running`` and ``waiting``, and the cache ``blocks`` held."""

    begin_s: float
    end_s: float
    tokens: int
    requests: tuple[tuple[int, int, int, int], ...]
    running: int = 0
    waiting: int = 0
    blocks: int = 0


class AnsweredRequest(NamedTuple):
    """A request that was answered: its tokens, seconds since the engine's start when it came, was first computed, had
    its first token and its last, how often it was preempted, and the tokens of its prompt found in the cache."""

    prompt: int
    output: int
    arrival_s: float
    scheduled_s: float
    first_s: float
    end_s: float
    evicted: int
    cached: int


class _Part(NamedTuple):
    """A sequence's part of an iteration: where its scores begin among those wanted, and its guesses."""

    sequence: ServedSequence
    share: Share
    first: int
    guesses: list[int]
    scored: int


class TorchEngine:
    """A serving engine (:class:`~meshwright.endpoint.seam.ServingEngine`) of one decider and one executor.

    ``adapters`` are the names of LoRA adapters; ``unit`` tokens have a name in the prefix cache (0: none is kept).
    Where the cache keeps a part alone (``approximate``), scores are compared with those of whole caches. ``clock``
    gives seconds."""

    def __init__(
        self,
        decider: Batching,
        executor: Executor,
        facts: EngineFacts,
        *,
        drafter: Drafter | None = None,
        approximate: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.decider, self.executor, self.facts, self.drafter, self.clock = decider, executor, facts, drafter, clock
        rules, limits = decider.rules, decider.limits
        self.unit = rules.unit if rules.prefix else 0
        self.state = decider.begin()
        self.tables = BlockTables(limits.blocks, rules.unit // limits.block if rules.prefix else 1)
        self.sequences: dict[int, ServedSequence] = {}
        self.arrived: dict[int, NewRequest] = {}
        self.parked: dict[int, ServedSequence] = {}  # answered here as far as they are to be, and not sent on yet
        self.pulls: list[int] = []
        self.pieces: list[Generated] = []
        self.iterate: Iterate | None = None
        self.outcome: Computed | None = None
        self.adapters: frozenset[int] = frozenset()
        self.records: deque[IterationRecord] = deque(maxlen=KEPT)
        self.answered: deque[AnsweredRequest] = deque(maxlen=KEPT)
        self.totals = dict.fromkeys(EngineFigures.__struct_fields__, 0)
        self.distance = ScoreDistance(limits.budget) if approximate else None
        self.grammars: Grammars | None = None
        self.firsts: set[int] | None = None  # first blocks of sequences, where an executor keeps something by them
        self.began = clock()

    # -- the protocol

    def submit(self, asked: Prompted) -> None:
        """Let a request come; what is wrong with it is told in a piece."""
        wrong = self._wrong(asked)
        if wrong:
            self.pieces.append(Generated(number=asked.number, finish="error", error=wrong))
            return
        adapter = self._adapter(asked)
        begun, said = asked.prompt[len(asked.prompt) - asked.answered :], asked.sampling
        grammar = self.grammars.begin(said.schema, begun) if said.schema and self.grammars else None
        self.sequences[asked.number] = ServedSequence(asked, self.facts.end_ids, adapter, self._now(), grammar)
        named = self.unit and asked.sampling.prompt_logprobs is None  # what is cached has no scores
        self.arrived[asked.number] = decidable(
            asked,
            adapter,
            chain(asked.prompt, self.unit, asked.adapter) if named else (),
            limit=min(asked.limit, 2) if self.decider.parks else asked.limit,
            deadline_s=self._now() + asked.deadline_s if asked.deadline_s else 0.0,
        )

    def cancel(self, number: int) -> None:
        """Let a request leave; nothing more is told of it."""
        if self.sequences.pop(number, None) is None and self.parked.pop(number, None) is None:
            return
        if self.arrived.pop(number, None) is None:
            self._tell(Withdrawn((number,)))

    def step(self) -> list[Generated]:
        """Compute an iteration, where there is something to compute; returns what is new of the answers."""
        begin = self.clock()
        if self.arrived:
            came, self.arrived = tuple(self.arrived.values()), {}
            self._tell(Arrived(came))
        if self.outcome is not None:
            outcome, self.outcome = self.outcome, None
            self._tell(outcome)
        if self.iterate is not None:
            run, self.iterate = self.iterate, None
            self._run(run, begin)
        elif self.sequences and not (self.state.busy or self.state.parked or self.state.coming):
            self._stuck()
        if self.outcome is not None and not self.sequences and not self.arrived:
            outcome, self.outcome = self.outcome, None
            self._tell(outcome)
        found, self.pieces = self.pieces, []
        self.totals["busy_s"] += self.clock() - begin
        return found

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.sequences or self.pieces or self.outcome or self.iterate)

    @property
    def computes(self) -> bool:
        """Whether the next step has something to do, and does not wait for another engine."""
        return bool(self.arrived or self.pieces or self.outcome or self.iterate)

    def figures(self) -> EngineFigures:
        """Return what the engine does now and did since its start."""
        state, blocks = self.state, self.decider.limits.blocks
        now = {
            "running": len(state.running),
            "waiting": len(state.waiting) + len(state.gate.unseen) + len(self.arrived),
            "blocks": blocks,
            "blocks_used": blocks - state.cache.free,
        }
        if self.distance is not None:
            now |= {"compared": self.distance.compared, "score_distance": self.distance.relative}
        return EngineFigures(**(self.totals | now))

    def close(self) -> None:
        """Let all requests go, and give back what is held."""
        self.sequences.clear()
        self.executor.close()

    # -- what is decided

    def _wrong(self, asked: Prompted) -> str:
        """Return what keeps a request from being served, "" where nothing does."""
        facts, length = self.facts, len(asked.prompt) + asked.limit
        if asked.number in self.sequences or asked.number in self.parked:
            return f"request {asked.number} is being served already"
        if not asked.prompt or asked.limit < 1:
            return "a request has a token of prompt at least, and may generate one at least"
        bad = next((token for token in asked.prompt if not 0 <= token < facts.vocabulary), None)
        if bad is not None:
            return f"token {bad} is not among the {facts.vocabulary:,} of the vocabulary"
        if facts.context and length > facts.context:
            return f"prompt and answer are {length:,} tokens, and the model's context {facts.context:,}"
        if length > facts.room:
            return f"prompt and answer are {length:,} tokens, and the cache has room for {facts.room:,}"
        said = asked.sampling
        bad = next((token for token in said.stop_ids if not 0 <= token < facts.vocabulary), None)
        if bad is not None:
            return f"stop token {bad} is not among the {facts.vocabulary:,} of the vocabulary"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(said, name)
            if count is not None and not 0 <= count <= facts.most_logprobs:
                return f"{name} is {count}, and an engine tells 0 to {facts.most_logprobs}"
        if asked.adapter and asked.adapter not in facts.adapters:
            return f"no adapter {asked.adapter!r}; there are {', '.join(facts.adapters) or 'none'}"
        return ""

    def _adapter(self, asked: Prompted) -> int:
        """Return the number of a request's adapter, -1 for none."""
        return self.facts.adapters.index(asked.adapter) if asked.adapter else -1

    def _now(self) -> float:
        """Return seconds since the engine's start."""
        return self.clock() - self.began

    def _tell(self, event: Arrived | Computed | Withdrawn | Offered) -> None:
        """Tell the decider what happened, and have the block tables follow."""
        self.state, decisions = self.decider.decide(self.state, event)
        for decision in decisions:
            if isinstance(decision, Iterate):
                self.iterate = decision
            elif isinstance(decision, Pull):
                self.pulls.append(decision.number)
            elif isinstance(decision, Evict):
                self.totals["preempted"] += 1
                if decision.number in self.sequences:
                    self.sequences[decision.number].evicted += 1
            elif isinstance(decision, Admit) and (one := self.sequences.get(decision.number)):
                one.scheduled_s = self._now() if one.scheduled_s < 0 else one.scheduled_s
                if one.first:
                    one.cached = decision.cached
                    self.totals["cache_queries"] += one.prompt if self.unit else 0
                    self.totals["cache_hits"] += decision.cached
        copies = self.tables.follow(self.state, decisions)
        if self.firsts is not None:
            now = {held.table[0] for held in self.tables.held.values() if held.table}
            if gone := self.firsts - now:
                self.executor.forget(sorted(gone))
            self.firsts = now
        if copies or self.tables.dropped:
            self.executor.copy(copies, self.tables.dropped)
            if self.drafter is not None:
                self.drafter.copy(copies, self.tables.dropped)
            self.tables.dropped = []
        pool = self.state.cache.adapters
        if pool is not None:
            here = frozenset(number for number in (*pool.used, *pool.idle) if number >= 0)
            if here != self.adapters:
                self.adapters = here
                self.executor.hold(sorted(here))

    def _stuck(self) -> None:
        """Fail whoever waits, as the decider sees no way to run anybody."""
        for number in list(self.sequences):
            text = "the engine's policy finds no room for the request"
            self.pieces.append(Generated(number=number, finish="error", error=text))
            self.cancel(number)

    # -- what is computed

    def _run(self, run: Iterate, begin: float) -> None:
        """Compute an iteration, and note what it made."""
        packed, parts = self._packed(run)
        counted, made = len(packed.tokens), {}
        self.outcome = Computed()
        if counted:
            self.outcome, made = self._answered(parts, self.executor.compute(packed))
            if self.distance is not None:
                self.distance.compare(self.executor, bool(self.facts.adapters))
        for share in run.shares:
            self.tables.computed(share.number, share.past + share.new - share.drafted)
        self.totals["iterations"] += 1
        requests = tuple((p.share.number, p.share.new, p.share.past, made.get(p.share.number, 0)) for p in parts)
        end, state = self._now(), self.state
        held = self.decider.limits.blocks - state.cache.free, len(state.running), len(state.waiting)
        self.records.append(IterationRecord(begin - self.began, end, counted, requests, held[1], held[2], held[0]))
        for part in parts:
            one = part.sequence
            if part.share.number in made and one.first_s < 0:
                one.first_s = end
            if part.share.number not in self.sequences:
                times = one.arrival_s, one.scheduled_s, one.first_s, end
                self.answered.append(AnsweredRequest(one.prompt, one.generated, *times, one.evicted, one.cached))

    def _packed(self, run: Iterate) -> tuple[PackedTokens, list[_Part]]:
        """Put the tokens of an iteration behind one another; requests that left since it was decided are left out."""
        tokens, positions, rows, wanted, parts, adapters = [], [], [], [], [], []
        shares = [share for share in run.shares if share.number in self.sequences or self._in_vain(share)]
        guesses = self._guessed(shares)
        for share in shares:
            table = self.tables.held[share.number].table
            one = self.sequences.get(share.number)
            past, new = share.past, share.new - share.drafted
            if one is None:  # a place in a static batch is computed in vain, as far as its blocks reach
                past = min(past, self.decider.limits.longest(len(table)) - 1)
                rows.append(PackedRow(1, past, table))
                tokens.append(0)
                positions.append(past)
                adapters.append(-1)
                continue
            guessed = guesses.get(share.number, [])
            first = len(wanted)
            scored = self._scored(one, share, len(tokens), wanted)
            if share.samples:
                wanted += range(len(tokens) + new - 1, len(tokens) + new + len(guessed))
            tokens += one.tokens[past : past + new] + guessed
            positions += range(past, past + new + len(guessed))
            rows.append(PackedRow(new + len(guessed), past, table, one.prompt - one.asked.answered))
            adapters.append(one.adapter)
            parts.append(_Part(one, share, first, guessed, scored))
            self.totals["prompt_tokens"] += max(0, min(past + new, one.prompt) - past) if one.first else 0
        if self.drafter is not None:
            plain = [part for part in parts if not part.share.drafted]
            self.drafter.follow([(p.sequence, p.share, self.tables.held[p.share.number].table) for p in plain])
        return PackedTokens(tokens, positions, rows, wanted, adapters if self.facts.adapters else []), parts

    def _in_vain(self, share: Share) -> bool:
        """Return whether a share is of an answered request that keeps its place in a static batch."""
        holding = self.tables.held.get(share.number)
        return holding is not None and holding.one.done

    def _guessed(self, shares: Sequence[Share]) -> dict[int, list[int]]:
        """Return the guesses for sequences that are drafted."""
        drafted = [share for share in shares if share.drafted]
        if not drafted or self.drafter is None:
            return {}
        asked = [(self.sequences[s.number], s, self.tables.held[s.number].table) for s in drafted]
        found = dict(zip((s.number for s in drafted), self.drafter.guess(asked), strict=True))
        self.totals["drafted"] += sum(map(len, found.values()))
        return found

    def _scored(self, one: ServedSequence, share: Share, first: int, wanted: list[int]) -> int:
        """Want the scores of prompt tokens, where they are asked for and not there yet; returns how many."""
        if one.asked.sampling.prompt_logprobs is None:
            return 0
        known = len(one.prompt_scores)
        some = [at for at in range(share.past, min(share.past + share.new, one.prompt - 1)) if at + 1 >= known]
        wanted += [first + at - share.past for at in some]
        return len(some)

    def _answered(self, parts: Sequence[_Part], scores: torch.Tensor) -> tuple[Computed, dict[int, int]]:
        """Choose next tokens, and put them into pieces; returns what the decider is told, and the number of new tokens
        of every answer."""
        choices, at = [], []
        for part in parts:
            first = part.first + part.scored
            self._score_prompt(part, scores)
            if part.share.samples:
                for ahead in range(len(part.guesses) + 1):
                    choices.append(part.sequence.choice(part.guesses[:ahead]))
                    at.append(first + ahead)
        if not choices:
            return Computed(), {}
        chosen_of = scores if len(at) == len(scores) else scores[at]
        chosen, place = choose(chosen_of, choices), 0
        finished, accepted, counts = [], [], {}
        for part in parts:
            if not part.share.samples:
                continue
            count = len(part.guesses) + 1
            mine = slice(place, place + count)
            made, finish = self._taken(part, chosen[mine], chosen_of[mine])
            place += count
            counts[part.share.number] = made
            if part.share.drafted:
                accepted.append((part.share.number, made - 1))
                self.totals["accepted"] += made - 1
            if finish and self.distance is not None:
                self.distance.note(part.sequence, chosen_of[mine][made - 1])
            if finish or self.decider.parks:
                finished.append(part.share.number)
                one = self.sequences.pop(part.share.number)
                if not finish:
                    self.parked[part.share.number] = one
        return Computed(tuple(finished), 1, tuple(accepted)), counts

    def _score_prompt(self, part: _Part, scores: torch.Tensor) -> None:
        if part.scored:
            one = part.sequence
            begin = len(one.prompt_scores)
            tokens = one.tokens[begin : begin + part.scored]
            some = scores[part.first : part.first + part.scored]
            one.prompt_scores += told(some, tokens, one.asked.sampling.prompt_logprobs)

    def _taken(self, part: _Part, chosen: list[int], scores: torch.Tensor) -> tuple[int, str]:
        """Add to an answer what was chosen, as far as the guesses before it came true; returns how many tokens, and why
        it ends."""
        one, finish, made = part.sequence, "", 0
        for token in chosen:
            finish = one.take(token)
            made += 1
            if finish or made > len(part.guesses) or token != part.guesses[made - 1]:
                break
        said = one.asked.sampling
        piece = Generated(
            number=part.share.number,
            tokens=tuple(one.tokens[-made:]),
            scores=() if said.logprobs is None else tuple(told(scores[:made], chosen[:made], said.logprobs)),
            finish=finish,
            cached=one.cached if one.first else 0,
            prompt_scores=tuple(one.prompt_scores) if one.first and said.prompt_logprobs is not None else (),
        )
        one.first = False
        self.totals["tokens"] += made
        self.pieces.append(piece)
        return made, finish
