"""Decoding all positions at once: a chain of computations solved as equations."""

from __future__ import annotations

import numpy as np

from meshwright.papers.outcome import AT_MOST, Check, Fact, Figure, Outcome, below

VOCAB, WIDTH, LENGTH = 11, 12, 40


class Chain:
    """A recurrent model with greedy output: each token follows from all before it."""

    def __init__(self, memory: float, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.embed = rng.standard_normal((VOCAB, WIDTH))
        self.carry = memory * np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
        self.head = rng.standard_normal((WIDTH, VOCAB))

    def after(self, tokens: np.ndarray) -> np.ndarray:
        """The token that follows each prefix of `tokens`: one pass over all positions."""
        state, out = np.zeros(WIDTH), []
        for token in tokens:
            state = np.tanh(self.carry @ state + self.embed[token])
            out.append(int((state @ self.head).argmax()))
        return np.array(out)

    def one_by_one(self) -> np.ndarray:
        tokens = [0]
        while len(tokens) < LENGTH:
            tokens.append(int(self.after(np.array(tokens))[-1]))
        return np.array(tokens)

    def jacobi(self) -> tuple[np.ndarray, int]:
        """All positions guessed and recomputed until they agree; and how many passes it took."""
        tokens, passes = np.zeros(LENGTH, int), 0
        while True:
            passes += 1
            new = np.concatenate(([0], self.after(tokens)[:-1]))
            if (new == tokens).all():
                return tokens, passes
            tokens = new


def jacobi() -> Outcome:
    chains = [Chain(memory, seed) for memory in (0.1, 0.5, 0.9) for seed in range(6)]
    wanted = [one.one_by_one() for one in chains]
    found = [one.jacobi() for one in chains]
    passes = [count for _, count in found]
    short = np.mean(passes[:6])
    return Outcome(
        figures=(
            Figure(
                "most passes over positions, of as many positions and one to see it",
                LENGTH + 1,
                max(passes),
                "",
                AT_MOST,
                restated=True,
            ),
            below("passes of a chain with short memory, of one position at a time", float(short / LENGTH)),
        ),
        facts=(
            Fact(
                "output equals decoding one by one, for 18 chains",
                all((a == b).all() for a, (b, _) in zip(wanted, found)),
            ),
        ),
        baseline="one position after the other",
        assumptions=(
            "recurrent chains of 40 tokens, greedy output; the paper's 2.1x to 26x, of its own models, are not judged",
        ),
    )


CHECKS = {"jacobi-feedforward": Check(jacobi)}
