"""Grammars in the engine: which tokens may follow in an answer that keeps to a JSON schema (llguidance)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.endpoint.grammar import OPTIONS


class AnswerGrammar:
    """The grammar of one answer, as far as the answer is."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def allowed(self, guesses: Sequence[int] = ()) -> bytes:
        """Return a byte for each token, 0 of those that may not come next behind `guesses`, as far as these may."""
        if not guesses:
            return self._matcher.compute_logit_bias()
        ahead = self._matcher.deep_copy()
        ahead.try_consume_tokens(list(guesses))
        return ahead.compute_logit_bias()

    def take(self, token: int) -> bool:
        """Go on by a token; returns whether the answer ends with it."""
        return not self._matcher.consume_token(token) or self._matcher.is_stopped()


class Grammars:
    """The grammars of a model's answers: the tokens of its ``tokenizer.json``, of which the first so many have
    scores."""

    def __init__(self, folder: Path, vocabulary: int, end_ids: Sequence[int]):
        self.folder, self.vocabulary, self.end_ids = folder, vocabulary, list(end_ids)
        self._tokenizer: Any = None

    def begin(self, schema: str, answered: Sequence[int]) -> AnswerGrammar:
        """Return the grammar of an answer to a schema, the tokens of which are `answered` so far."""
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            text = (self.folder / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self.vocabulary, eos_token=self.end_ids or None)
        found = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS), log_level=0)
        if answered:
            found.consume_tokens(list(answered))
        return AnswerGrammar(found)
