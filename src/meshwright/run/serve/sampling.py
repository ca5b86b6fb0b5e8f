"""Sampling: which token follows, from scores over the vocabulary.

The likeliest one at temperature 0; else one drawn from the scores divided by the temperature, among the ``top_k``
likeliest and the fewest that have ``top_p`` of the probability together (nucleus sampling, Holtzman et al. 1904.09751),
and of at least ``min_p`` times the likeliest one's (Nguyen et al. 2407.01082).
The draw inverts the cumulative probabilities, of tokens by falling score, at a number in [0, 1) that follows from the
request's seed and the token's place in the answer alone: a batch, a preemption or a restart changes no answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from meshwright.endpoint.seam import Sampling, TokenScore


class TokenChoice(NamedTuple):
    """A token to be chosen: how, the ``place`` in its answer, and the tokens that may not be (``barred``). Where scores
    depend on them, the ``counts`` of the answer's tokens so far, and those of the ``question``. Where a grammar says
    what may come, ``allowed`` has a byte for each token, 0 of those that may not."""

    sampling: Sampling
    place: int
    barred: tuple[int, ...] = ()
    counts: Mapping[int, int] = {}
    question: frozenset[int] = frozenset()
    allowed: bytes = b""


def choose(scores: torch.Tensor, choices: Sequence[TokenChoice]) -> list[int]:
    """Return the tokens chosen from scores [choices, vocab]."""
    if any(c.barred or c.allowed or c.sampling.logit_bias or c.sampling.penalised for c in choices):
        scores = scores.clone()
        for row, choice in enumerate(choices):
            _change(scores[row], choice)
    found = scores.argmax(-1)
    drawn = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0]
    if drawn:
        some = scores if len(drawn) == len(choices) else scores[drawn]
        found[drawn] = _draw(some, [choices[row] for row in drawn])
    return found.tolist()


def _change(scores: torch.Tensor, choice: TokenChoice) -> None:
    """Change the scores [vocab] of a token by its bias and by the tokens that are there, in place."""
    said, counts = choice.sampling, choice.counts

    def tensor(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor([*values], dtype=scores.dtype, device=scores.device)

    def at(ids: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*ids], dtype=torch.int64, device=scores.device)

    if said.logit_bias:
        scores.index_add_(0, at(id for id, _ in said.logit_bias), tensor(bias for _, bias in said.logit_bias))
    if said.repetition_penalty != 1.0:
        there = at(choice.question.union(counts))
        mine, penalty = scores[there], said.repetition_penalty
        scores[there] = torch.where(mine < 0, mine * penalty, mine / penalty)
    if counts and (said.frequency_penalty or said.presence_penalty):
        lost = (said.frequency_penalty * count + said.presence_penalty for count in counts.values())
        scores.index_add_(0, at(counts), -tensor(lost))
    if choice.barred:
        scores[at(choice.barred)] = float("-inf")
    if choice.allowed:
        may = torch.frombuffer(bytearray(choice.allowed), dtype=torch.uint8)[: len(scores)].to(scores.device)
        scores[: len(may)].masked_fill_(may == 0, float("-inf"))
        scores[len(may) :] = float("-inf")


def _draw(scores: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Tokens drawn from scores [n, vocab], in float64."""
    device, vocab = scores.device, scores.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(-1)

    heat = column([max(c.sampling.temperature, 1e-6) for c in choices])
    shares, tokens = (scores.double() / heat).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = shares.cumsum(-1) - shares
    most = column([float(c.sampling.top_k or vocab) for c in choices])
    kept = (torch.arange(vocab, device=device) < most) & (before < column([c.sampling.top_p for c in choices]))
    kept &= shares >= column([c.sampling.min_p for c in choices]) * shares[:, :1]
    kept[:, 0] = True
    total = (shares * kept).cumsum(-1)
    wanted = column([uniform(c.sampling.seed, c.place) for c in choices]) * total[:, -1:]
    at = torch.searchsorted(total, wanted, right=True).clamp(max=kept.sum(-1, keepdim=True) - 1)
    return tokens.gather(-1, at).squeeze(-1)


def uniform(seed: int, place: int) -> float:
    """Return the number in [0, 1) behind a place of an answer."""
    digest = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def told(scores: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """Return the log-probabilities of tokens under the model's own distribution, from scores [n, vocab], each with
    those of the `count` likeliest."""
    logs = scores.double().log_softmax(-1)
    mine = logs.gather(-1, torch.tensor(tokens, device=logs.device).unsqueeze(-1)).squeeze(-1).tolist()
    if not count:
        return [TokenScore(one) for one in mine]
    best = logs.topk(min(count, logs.shape[-1]), -1)
    return [
        TokenScore(one, tuple(zip(ids, values)))
        for one, ids, values in zip(mine, best.indices.tolist(), best.values.tolist())
    ]
