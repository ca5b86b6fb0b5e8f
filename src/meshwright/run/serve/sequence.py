"""A sequence in the engine: a request's tokens so far, what was told of them, and when its answer ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.endpoint.seam import Finish, Prompted, TokenScore
from meshwright.run.serve.grammar import AnswerGrammar
from meshwright.run.serve.sampling import TokenChoice


class ServedSequence:
    """A request being answered: its ``tokens`` are those of the prompt and of the answer. ``ends`` are the tokens that
    end it. ``cached`` tokens of the prompt were found in the cache; ``first``: nothing of the answer is told yet.
    A draft model has the keys and values of ``drafted`` of its tokens; n-grams of the first ``looked`` are ``seen``,
    with where each ended last. Where scores depend on the tokens that are there, ``counts`` are those of the answer up
    to ``counted``; ``grammar`` says what may follow. Times are seconds since the engine's start, -1 where it is not so
    far."""

    __slots__ = (
        *("adapter", "arrival_s", "asked", "cached", "drafted", "ends", "evicted", "first", "first_s", "looked"),
        *("counted", "counts", "grammar", "prompt", "prompt_scores", "question", "scheduled_s", "seen", "tokens"),
    )

    def __init__(
        self,
        asked: Prompted,
        end_ids: Sequence[int],
        adapter: int = -1,
        arrival_s: float = 0.0,
        grammar: AnswerGrammar | None = None,
    ):
        self.asked, self.adapter = asked, adapter
        self.tokens, self.prompt = list(asked.prompt), len(asked.prompt)
        self.arrival_s, self.scheduled_s, self.first_s, self.evicted = arrival_s, -1.0, -1.0, 0
        self.first, self.cached, self.drafted, self.looked = True, 0, 0, 0
        self.seen: dict[tuple[int, ...], int] = {}
        said = asked.sampling
        self.ends = frozenset(said.stop_ids) | (frozenset() if said.ignore_eos else frozenset(end_ids))
        self.prompt_scores: list[TokenScore | None] = [None]
        self.counted, self.counts = self.prompt - asked.answered, Counter[int]()
        self.grammar = grammar
        self.question = frozenset(asked.prompt[: self.counted]) if said.repetition_penalty != 1.0 else frozenset()

    @property
    def generated(self) -> int:
        """Tokens of the answer that this engine generated."""
        return len(self.tokens) - self.prompt

    def choice(self, guesses: Sequence[int] = ()) -> TokenChoice:
        """Return how the next token is chosen, behind `guesses` that stand before it."""
        said = self.asked.sampling
        place = self.asked.answered + self.generated + len(guesses)
        barred = tuple(sorted(self.ends)) if place < said.min_tokens else ()
        allowed = b"" if self.grammar is None else self.grammar.allowed(guesses)
        if not said.penalised:
            return TokenChoice(said, place, barred, allowed=allowed)
        self.counts.update(self.tokens[self.counted :])
        self.counted = len(self.tokens)
        return TokenChoice(
            said, place, barred, self.counts + Counter(guesses) if guesses else self.counts, self.question, allowed
        )

    def take(self, token: int) -> Finish:
        """Add a token to the answer; returns why it ends with it, "" where it goes on."""
        self.tokens.append(token)
        if (self.grammar is not None and self.grammar.take(token)) or token in self.ends:
            return "stop"
        return "length" if self.generated >= self.asked.limit else ""
