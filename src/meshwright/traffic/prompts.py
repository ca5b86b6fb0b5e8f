"""Prompts with as many tokens as a workload says, as one server counts them, which share what the workload shares.

A prompt is made of pieces that are one token each wherever they stand, of which the server's tokenizer is asked: by a
``tokenizer.json``, by the server's ``/tokenize``, or by the usage that it reports. Where no text is known to be so,
token ids are the prompt. A request's names of blocks (``Requests.hashes``) decide which pieces stand in them, so that
prompts with equal names begin with equal texts, and what has no name is of one request alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.spec.requests import Requests
from meshwright.traffic.handshake import ServerDialect, tokens_of
from meshwright.traffic.http import HttpClient, HttpFault

_COMMON = """
the of and to in is that it for was on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know
"""
#: Words that most tokenizers have as one token with the space before them, then letters, which byte-level ones have.
WORDS = tuple(f" {word}" for word in _COMMON.split())
LETTERS = tuple("etaoinshrdlucmfwypvbgkjqxz")
#: Token ids that stand for pieces where texts do not: beyond those that are special, within any vocabulary.
IDS = tuple(range(40, 120))
#: Pieces that are enough to tell prompts apart, and questions that are asked to find them.
ENOUGH, MOST_QUESTIONS = 12, 60

_MIX = tuple(np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

Counter = Callable[[str], Awaitable[int | None]]


class PromptMaker(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of pieces from a ``pool`` of texts or ids, each a token, behind ``constant`` tokens that the server adds
    to every prompt. ``salt`` makes the texts of one run others than those of another, so that no cache knows them."""

    pool: tuple[str, ...] | tuple[int, ...]
    constant: int = 0
    how: str = ""
    salt: int = 0

    def prompt(self, requests: Requests, number: int) -> str | list[int]:
        """Return the prompt of a request."""
        wanted = max(int(requests.prompt[number]) - self.constant, 1)
        names = (
            requests.hashes[requests.hash_ptr[number] : requests.hash_ptr[number + 1]] if len(requests.hashes) else ()
        )
        named = np.repeat(np.asarray(names, np.int64), requests.hash_block)
        place = np.arange(len(named)) % requests.hash_block
        # what the server adds stands in the first block
        named, place = named[self.constant :][:wanted], place[self.constant :][:wanted]
        own = np.arange(wanted - len(named))
        key = np.concatenate([2 * named, np.full(len(own), 2 * number + 1, np.int64)]).astype(np.uint64)
        at = np.concatenate([place, own]).astype(np.uint64)
        chosen = (
            _mixed(_mixed(key + np.uint64(self.salt * int(_MIX[1]) % 2**64)) + at) % np.uint64(len(self.pool))
        ).tolist()
        pool: Sequence[Any] = self.pool
        pieces = [pool[i] for i in chosen]
        return "".join(pieces) if isinstance(pool[0], str) else pieces


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return whole numbers that look drawn, the same for the same ones (SplitMix64: Steele, Lea and Flood 2014)."""
    z = values + _MIX[0]
    z = (z ^ (z >> np.uint64(30))) * _MIX[1]
    z = (z ^ (z >> np.uint64(27))) * _MIX[2]
    return z ^ (z >> np.uint64(31))


async def prompt_maker(
    client: HttpClient, dialect: ServerDialect, *, tokenizer: str = "", salt: int = 0
) -> PromptMaker:
    """Return a maker of prompts for a server, by the first way that it lets us count its tokens.

    Raises:
        MeshwrightError: T007 for a ``tokenizer.json`` that cannot be read, or where a server's prompts cannot be
            counted at all.
    """
    questions: list[tuple[str, Counter]] = []
    if tokenizer:
        questions.append((f"texts by {Path(tokenizer).name}", _by_file(tokenizer)))
    else:
        served = await _by_server(client, dialect)
        questions += [("texts by the server's tokenizer", served)] if served is not None else []

        async def by_usage(text: str) -> int | None:
            return await tokens_of(client, dialect, text)

        questions.append(("texts by the usage that the server reports", by_usage))
    for how, count in questions:
        for family in (WORDS, LETTERS):
            pool = await _single(family, count)
            if len(pool) < ENOUGH:
                continue
            text = "".join(pool)
            whole = await tokens_of(client, dialect, text)  # with what a template or a first token adds
            whole = await count(text) if whole is None else whole
            constant = (whole or 0) - len(pool)
            if constant >= 0:
                return PromptMaker(pool=tuple(pool), constant=constant, how=how, salt=salt)
    if not dialect.chat:
        counted = await tokens_of(client, dialect, list(IDS))
        if counted is not None and counted >= len(IDS):
            return PromptMaker(pool=IDS, constant=counted - len(IDS), how="token ids", salt=salt)
    message = (
        "how many tokens a prompt has cannot be found out: the server has no /tokenize, reports no usage that fits"
    )
    help = "name its tokenizer: --tokenizer tokenizer.json"
    raise MeshwrightError.one("T007", f"{message}, and takes no token ids", place=client.where.text, help=help)


async def _single(family: Sequence[str], count: Counter) -> list[str]:
    """Return the pieces of a family that are one token each, whatever stands beside them: a run of them, said twice,
    has as many more tokens as there are of them. Where a run is not, its halves are asked."""
    left, asked, found = [list(family)], 0, []
    while left and asked < MOST_QUESTIONS and len(found) < 4 * ENOUGH:
        run = left.pop()
        once, twice = await count("".join(run)), await count("".join(run + run))
        asked += 2
        if once is None or twice is None:
            return []
        if twice - once == len(run) and once >= len(run):
            found += run
        elif len(run) > 1:
            left += [run[len(run) // 2 :], run[: len(run) // 2]]
    if len(found) < ENOUGH or len(found) == len(family):
        return found
    mixed = found[::-1]  # pieces that are single in their runs may still merge with those of others
    once, twice = await count("".join(mixed)), await count("".join(mixed + mixed))
    return found if once is not None and twice is not None and twice - once == len(found) else []


def _by_file(path: str) -> Counter:
    """A counter by a ``tokenizer.json``."""
    place = f"--tokenizer {path}"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        help = 'pip install "meshwright[run]", or leave it out where the server says its tokens'
        raise MeshwrightError.one(
            "T007", "a tokenizer needs tokenizers, not installed here", place=place, help=help
        ) from None
    try:
        known = Tokenizer.from_file(path)
    except Exception as error:  # the library raises no type of its own
        help = "the tokenizer.json of the model's folder"
        raise MeshwrightError.one("T007", f"cannot read {path}: {error}", place=place, help=help) from None

    async def count(text: str) -> int | None:
        return len(known.encode(text, add_special_tokens=False).ids)

    return count


async def _by_server(client: HttpClient, dialect: ServerDialect) -> Counter | None:
    """A counter by the server's endpoint, as vLLM, llama.cpp or its Python server have it; None where there is none."""
    for path, field in (("/tokenize", "prompt"), ("/tokenize", "content"), ("/extras/tokenize", "input")):

        async def count(text: str, path: str = path, field: str = field) -> int | None:
            try:
                reply = await client.ask(path, msgspec.json.encode({"model": dialect.model, field: text}))
                said = msgspec.json.decode(reply.body) if reply.status == 200 else None
            except (HttpFault, msgspec.MsgspecError, UnicodeDecodeError):
                return None
            tokens = said.get("tokens") if isinstance(said, dict) else None
            return len(tokens) if isinstance(tokens, list) else None

        if await count("a b c"):
            return count
    return None
