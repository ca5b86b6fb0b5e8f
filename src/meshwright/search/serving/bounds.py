"""Bounds of serving plans: figures that no run of the simulator can be better than, whatever requests meet in a batch.

An iteration takes at least its host's time, and its token-wise part grows with its tokens: the least seconds that a
token takes in any iteration of the table bound what many tokens take together, as do the iterations that answers need
at a full batch. Attention of a token that decodes is at
least a line below all of the table's values per request, so that a mean of contexts is bounded by the sum of the
requests' own. With a pipeline of p stages an iteration is up to p microbatches, so that what one of them takes is
divided by p. ``tests/search/test_serving_bounds.py`` holds the bounds against simulations of every policy.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, floor, inf
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.quantity import latency
from meshwright.serving.cache import CacheRules
from meshwright.simulate.iterations import MOST_TOKENS
from meshwright.simulate.served import Replica
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Objective, Serve


class Floor(NamedTuple):
    """The least value of an objective's percentile, in seconds."""

    metric: str
    objective: Objective
    value_s: float

    @property
    def missed(self) -> bool:
        """Whether no run can keep the objective."""
        return self.value_s > self.objective.seconds

    @property
    def ratio(self) -> float:
        """The value over the bound."""
        return self.value_s / self.objective.seconds

    @property
    def why(self) -> str:
        """The reason in words, with its figures."""
        at = f"{self.metric[:-2].upper()} p{self.objective.share * 100:g}"
        return f"{at} is at least {latency(self.value_s)}, and {latency(self.objective.seconds)} are asked"


class ReplicaBounds:
    """The bounds of replicas that serve `requests` under the objectives of a workload; of those that generate answers
    alone where prompts and first tokens are `computed` elsewhere."""

    def __init__(self, replica: Replica, requests: Requests, serve: Serve, computed: bool = False):
        self.replica, self.requests, self.serve = replica, requests, serve
        self.holds = _bounded(replica)
        table, host, parts = replica.costs, replica.host, max(1, replica.stages)
        self._fixed_s = host.step_s + host.request_s
        width = np.arange(1, len(table.linear_s))
        #: Least seconds of a token in an iteration with any others, the host's part of the iteration included.
        self.token_s = float(((host.step_s + table.linear_s[1:]) / (width * parts)).min())
        if table.most_tokens >= MOST_TOKENS:
            self.token_s = 0.0  # iterations beyond the table cost what its last one does
        self.linear_s = float(table.linear_s[1:].min())
        self.sampled_s = float(table.sampled_s[1:].min())
        each = np.arange(1, len(table.sampled_s))
        self.sample_s = float((table.sampled_s[1:] / (each * parts)).min())
        # requests whose prompts may be in the cache already compute one token of them at least
        self.cached = msgspec.structs.replace(replica.rules, borrow=False) != CacheRules()
        self.prompt = np.ones(len(requests)) if self.cached else requests.prompt.astype(np.float64)
        self.output = requests.output.astype(np.float64)
        self.made, self.computed = self.output, computed
        if computed:
            self.prompt, self.made = np.zeros(len(requests)), self.output - 1
        self._decode(table.decode_s, table.context_node, parts)
        self._per_answer(table.linear_s, parts)

    def _decode(self, decode_s: np.ndarray, node: np.ndarray, parts: int) -> None:
        """Find the least attention of an iteration in which anybody decodes, and that of every request's tokens [n].

        A token of a request that was evicted is computed with its whole context again, which is taken to be no less:
        where it is, attention is left out of the bound, as it is where a context may be in the cache already."""
        rows = np.arange(1, len(decode_s))
        first = decode_s[1:, 0] + (1.0 - node[0]) * (decode_s[1:, 1] - decode_s[1:, 0]) / (node[1] - node[0])
        values = np.concatenate([first[:, None], decode_s[1:]], axis=1)  # at a context of one token, then at the nodes
        least = max(0.0, float(values.min()))
        self.decode_s = min(least, self._fixed_s + self.linear_s + self.sampled_s)
        each, at = (values / rows[:, None]).min(axis=0), np.concatenate([[1.0], node])
        decoded, context = self.output - 1, self.requests.prompt + self.output / 2
        self.attention_s = np.zeros(len(self.output))
        if self.cached or not decoded.any():
            return
        slope, base = _line_below(at, each, float((decoded * context).sum() / decoded.sum()))
        ends = np.array([self.requests.prompt.min() + 1, (self.requests.prompt + self.output).max()])
        again = self.token_s * (ends - 1)
        if slope + base >= 0 and bool(((slope * ends + base) / parts <= again).all()):
            self.attention_s = decoded * (base + slope * context) / parts

    def _per_answer(self, linear_s: np.ndarray, parts: int) -> None:
        """Find seconds that every token of an answer and that every token takes, whatever shares its iteration: an
        iteration takes at least a line over its tokens, and samples no more than a full batch of tokens."""
        limits, count = self.replica.limits, np.arange(len(linear_s))
        held = (
            1 if self.cached or limits.device_share != 1.0 else max(1, int(self.requests.prompt.min()) // limits.block)
        )
        most = limits.max_batch if self.replica.rules.borrow else limits.blocks // held  # others may have blocks for it
        batch = max(1, min(limits.max_batch, most, len(self.requests)))
        bends = np.abs(np.diff(linear_s[1:], 2)) > 1e-9 * np.abs(linear_s).max()
        at = np.unique([1, *(np.flatnonzero(bends) + 2), len(linear_s) - 1])
        usual = batch * float((self.prompt + self.output).sum() / self.output.sum()) / parts  # tokens of a full batch
        slope = max(0.0, _line_below(at.astype(float), linear_s[at], usual)[0]) if len(at) > 1 else 0.0
        if self.replica.costs.most_tokens >= MOST_TOKENS:
            slope = 0.0
        base = float((linear_s[1:] - slope * count[1:]).min())
        self.answer_s = max(0.0, self.replica.host.step_s + base) / batch
        self.step_token_s = slope / parts if base + self.replica.host.step_s >= 0 else 0.0

    @cached_property
    def whole_s(self) -> np.ndarray:
        """Least seconds [n] of a replica's time that a request takes, alone or with others."""
        tokens = self.prompt + self.output - 1
        either = (self.token_s * tokens, self.answer_s * self.made + self.step_token_s * tokens)
        rest = (self.sample_s + self.replica.host.request_s) * self.made + self.attention_s
        return max(either, key=lambda seconds: float(seconds.sum())) + rest

    def floors(self) -> list[Floor]:
        """Return the least value of the percentile of every objective; nothing where no bound is known to hold."""
        if not self.holds:
            return []
        iteration = self._fixed_s + self.linear_s + self.sampled_s
        ttft = np.maximum(iteration, self.token_s * self.prompt)
        tpot = iteration + self.decode_s
        e2e = ttft + tpot * (self.output - 1)
        found = []
        for name, objective in self.serve.objectives.items():
            if self.computed and name != "tpot_s":
                continue
            if name == "tpot_s":
                value = tpot if (self.output > 1).any() else 0.0
            else:
                value = float(np.quantile(ttft if name == "ttft_s" else e2e, objective.share))
            found.append(Floor(name, objective, value))
        return found

    def demand(self) -> tuple[float, float]:
        """Return the least seconds of replicas' time that must have been spent so that every objective can be kept, and
        by how long after the last arrival; (0, infinity) where objectives do not say by when a request is done, or
        where requests wait for answers."""
        serve, count = self.serve, len(self.requests)
        if not self.holds or len(self.requests.after) or (serve.ttft is None and serve.e2e is None):
            return 0.0, inf
        allowed = sum(most_misses(o.share, self._judged(name)) for name, o in serve.objectives.items())
        kept = max(0, count - allowed)
        work, after = self.token_s * self.prompt, np.full(count, inf)
        if serve.ttft is not None:
            after = np.full(count, serve.ttft.seconds)
        if serve.ttft is not None and serve.tpot is not None:
            work, after = self.whole_s, after + serve.tpot.seconds * (self.output - 1)
        if serve.e2e is not None:
            known = after if work is self.whole_s else inf
            work, after = self.whole_s, np.minimum(known, np.full(count, serve.e2e.seconds))
        return float(np.sort(work)[:kept].sum()), float(after.max())

    def _judged(self, metric: str) -> int:
        return int((self.output > 1).sum()) if metric == "tpot_s" else len(self.output)

    def least_replicas(self) -> int:
        """Return the number of replicas below which an objective is missed, for they cannot do the work in time."""
        needed, after = self.demand()
        if self.requests.concurrency or not needed:
            return 1
        return max(1, ceil(needed / (float(self.requests.arrival_s[-1]) + after) * (1 - 1e-9)))

    def most_speed(self, replicas: int) -> float:
        """Return the factor on the rate of arrivals above which so many replicas cannot do the work in time."""
        needed, after = self.demand()
        left = needed / replicas - after
        span = float(self.requests.arrival_s[-1])
        return span / left if left > 0 else inf


def _bounded(replica: Replica) -> bool:
    """Whether the bounds are known to hold: nothing is set that saves an iteration work which they count (guesses that
    come true, a share of a context that is read)."""
    fields = msgspec.structs.fields(Replica)
    return all(getattr(replica, field.name) == field.default for field in fields if field.name not in _COUNTED)


#: Fields of a replica whatever their values the bounds hold.
_COUNTED = ("policy", "limits", "costs", "host", "stages", "order", "rules", "block_s", "wanted_s")


def most_misses(share: float, count: int) -> int:
    """Return how many of `count` values may be over a bound that the percentile of `share` keeps: beyond, the value
    below the percentile's place is over it too."""
    return count - floor(share * (count - 1)) - 1 if count else 0


def _line_below(at: np.ndarray, values: np.ndarray, where: float) -> tuple[float, float]:
    """Return slope and base of the line that is highest at `where` and above none of the points."""
    hull: list[int] = []
    for i in range(len(at)):
        while len(hull) > 1 and (values[hull[-1]] - values[hull[-2]]) * (at[i] - at[hull[-2]]) >= (
            values[i] - values[hull[-2]]
        ) * (at[hull[-1]] - at[hull[-2]]):
            hull.pop()
        hull.append(i)
    place = min(max(int(np.searchsorted(at[hull], where)), 1), len(hull) - 1)
    a, b = hull[place - 1], hull[place]
    slope = float((values[b] - values[a]) / (at[b] - at[a]))
    return slope, float(values[a] - slope * at[a])
