"""Conversations: requests that wait for an answer, and whose prompts hold all that was said before.

A turn adds ``prompt`` tokens to what its conversation has, and its prompt is all of it. It comes when the turn before
is answered and its user has thought. Conversations begin at a rate, or users have one after the other (a closed
loop).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec.request_limits import USUAL_REQUESTS
from meshwright.spec.requests import Requests
from meshwright.spec.serve_values import Pause, Turns

if TYPE_CHECKING:
    from meshwright.spec.serve import Serve

#: Draws (prompt, output) of so many requests.
Lengthy = Callable[["Serve", np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def in_sessions(
    serve: Serve, rng: np.random.Generator, arrivals: Callable[[int], np.ndarray], lengths: Lengthy
) -> Requests:
    """Draw conversations that begin as `arrivals` draws them: so many requests in all, or all of a window."""
    wanted = serve.requests or (0 if serve.window_s else USUAL_REQUESTS)
    starts = arrivals(wanted if serve.turns.geometric else -(-wanted // int(serve.turns.mean)))
    session, turn = _turns(serve.turns, rng, len(starts), wanted or None)
    first = turn == 0
    wait = np.where(first, 0.0, _pauses(serve.think, rng, len(session)))
    arrival = np.where(first, starts[session], wait)
    after = np.where(first, -1, np.arange(len(session)) - 1)
    return _conversations(arrival, session, after, *lengths(serve, rng, len(session)))


def in_users(serve: Serve, rng: np.random.Generator, prompt: np.ndarray, output: np.ndarray) -> Requests:
    """Draw the conversations of a closed loop [n]: each user has one after the other, and thinks between requests. User
    u has every so-many-th of them from the u-th on; the first of each come evenly over the ramp."""
    count, users = len(prompt), serve.concurrency
    session, _ = _turns(serve.turns or Turns(1.0), rng, count, count)
    user = session % users
    order = np.argsort(user, kind="stable")
    begins = np.r_[True, np.diff(user[order]) != 0]
    after = np.empty(count, np.int64)
    after[order] = np.where(begins, -1, np.r_[-1, order[:-1]])
    starts = np.minimum(user * (serve.ramp_s / users), serve.ramp_s)
    arrival = np.where(after < 0, starts, _pauses(serve.think, rng, count))
    return _conversations(arrival, session, after, prompt, output)


def _turns(
    turns: Turns, rng: np.random.Generator, sessions: int, requests: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw how many turns each conversation has, and return the conversation and the turn of every request, by
    conversation; of the first so many `requests`."""
    if turns.geometric:
        each = rng.geometric(1.0 / turns.mean, sessions)
    else:
        most = sessions if requests is None else min(sessions, -(-requests // int(turns.mean)))
        each = np.full(most, int(turns.mean), np.int64)
    session = np.repeat(np.arange(len(each)), each)[:requests]
    begins = np.cumsum(each) - each
    return session, np.arange(len(session)) - begins[session]


def _pauses(think: Pause | None, rng: np.random.Generator, count: int) -> np.ndarray:
    if think is None:
        return np.zeros(count)
    if think.cv == 0.0:
        return np.full(count, think.mean_s)
    return rng.gamma(1.0 / think.cv**2, think.mean_s * think.cv**2, count)


def _conversations(
    arrival: np.ndarray, session: np.ndarray, after: np.ndarray, prompt: np.ndarray, output: np.ndarray
) -> Requests:
    """Return requests, given by conversation, in the order in which they would come; prompts hold the conversation so
    far."""
    said = np.cumsum(prompt + output) - prompt - output
    begins = np.r_[True, np.diff(session) != 0]
    said -= np.maximum.accumulate(np.where(begins, said, 0))
    whole = Requests(arrival_s=arrival, prompt=said + prompt, output=output, program=session, after=after)
    return whole.chosen(np.argsort(whole.earliest_s(), kind="stable"))
