"""Records of the serving simulator: the replica that serves, and what became of the requests."""

from __future__ import annotations

from math import ceil

import msgspec
import numpy as np

from meshwright.serving.batching import Batching, BatchPolicy, DraftPolicy
from meshwright.serving.cache import CacheRules, EngineLimits
from meshwright.serving.fcfs import POLICY as FCFS
from meshwright.serving.fcfs import OrderPolicy
from meshwright.serving.speculative import POLICY as SPECULATIVE
from meshwright.serving.speculative import Drafts
from meshwright.simulate.guessing import Guesses
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.lora import LoraCosts
from meshwright.simulate.serve_loop import SARATHI, TRTLLM, V1
from meshwright.spec.requests import Requests

#: Samples of the state over time that are kept of a replica.
MOST_SAMPLES = 2048
#: Edges of the histogram of gaps between tokens, 2% apart.
GAP_EDGES = 1e-5 * 1.02 ** np.arange(900)
#: Names of where a replica's time goes, as the loop counts them.
SPENT = ("linear", "sampled", "decode", "prefill", "host", "idle", "moves", "adapters", "elsewhere", "slower")


def thinned(samples: np.ndarray) -> np.ndarray:
    """Return :data:`MOST_SAMPLES` of samples [s, ...] at most: every second one, or third, ...."""
    return samples[:: max(1, ceil(len(samples) / MOST_SAMPLES))]


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The host's part of an iteration in seconds: ``step_s`` for each iteration, ``request_s`` for every request in it.

    ``eager_s`` bounds the device's part from below where no CUDA graph is replayed, which is the case with prompts and
    beyond ``graph_tokens`` tokens. A request stands ``serial_s`` and ``serial_token_s`` for each token of its prompt at
    the engine's front, one after the other, before the scheduler sees it; tokens leave one after the other too,
    ``stream_s`` each. Clients see tokens ``front_s`` after that, and ``token_s`` for each token of the prompt and
    ``front_steps`` iterations later still."""

    step_s: float = 0.0
    request_s: float = 0.0
    eager_s: float = 0.0
    graph_tokens: int = 0
    serial_s: float = 0.0
    serial_token_s: float = 0.0
    stream_s: float = 0.0
    front_s: float = 0.0
    token_s: float = 0.0
    front_steps: float = 0.0


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: its policies, limits, iteration costs, pipeline stages and host.

    ``wanted_s`` are the seconds in which a first token is wanted, by class of objectives (0: any time). ``block_s`` are
    the seconds in which a cache block goes to the host's memory or comes back. Under a KV budget a next token's
    attention reads the share ``kv_read`` of its context, for each token of which ``fetch_s`` seconds of other links
    pass; where drives compute it (``in_drive``) it takes the device no time, and where a layer's queries choose it
    (``fetch_chosen``) attention waits for it.
    """

    policy: BatchPolicy
    limits: EngineLimits
    costs: IterationCosts
    host: HostTimes = HostTimes()
    stages: int = 1
    order: OrderPolicy = FCFS
    rules: CacheRules = CacheRules()
    drafts: DraftPolicy | None = None
    guessing: Guesses | None = None
    wanted_s: tuple[float, ...] = ()
    lora: LoraCosts | None = None
    block_s: float = 0.0
    kv_read: float = 1.0
    fetch_s: float = 0.0
    in_drive: bool = False
    fetch_chosen: bool = False

    @property
    def compiled(self) -> bool:
        """Whether the compiled loop knows all of its policies."""
        return (
            bool(self.policy.code)
            and self.order is FCFS
            and self.rules == CacheRules()
            and self.guesses_compiled
            and self.lora is None
            and (self.kv_read, self.fetch_s) == (1.0, 0.0)
        )

    @property
    def guesses_compiled(self) -> bool:
        """Whether the compiled loop knows how next tokens are guessed, if they are: as many of each sequence, one after
        the other, by what has tables, under policies that compute next tokens and prompts together."""
        guesses = self.guessing
        if self.drafts is None or guesses is None:
            return self.drafts is None
        known = isinstance(self.drafts, Drafts) and guesses.policy is SPECULATIVE and guesses.draft is not None
        return known and not guesses.forgets and self.policy.code in (V1, SARATHI, TRTLLM)

    def decider(self, *, parks: bool = False, together: bool = True) -> Batching:
        """Return what decides over its iterations."""
        return Batching(
            policy=self.policy,
            limits=self.limits,
            order=self.order,
            rules=self.rules,
            drafts=self.drafts,
            parks=parks,
            together=together,
        )


class ServedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """The times of n served requests in seconds of the virtual clock: arrival, first scheduled, first token and last
    token; how often each was evicted, and how many of its tokens were found in the cache. All of these are [n].

    ``gaps`` is the histogram of times between tokens over :data:`GAP_EDGES`; ``spent_s`` where the replica's time went,
    by :data:`SPENT`; ``tokens_seen`` how many iterations computed so many tokens. ``sample_s`` [s] and ``sample``
    [s, 3] are the requests running and waiting and the cache blocks held over time.
    """

    arrival_s: np.ndarray
    scheduled_s: np.ndarray
    first_s: np.ndarray
    end_s: np.ndarray
    evicted: np.ndarray
    gaps: np.ndarray
    spent_s: np.ndarray
    tokens_seen: np.ndarray
    iterations: int
    runs: int
    evictions: int
    peak_blocks: int
    peak_batch: int
    sample_s: np.ndarray
    sample: np.ndarray
    cached: np.ndarray
    swaps: int = 0

    def seen(self, requests: Requests, host: HostTimes) -> ServedRequests:
        """Return the records as clients see them: all tokens of a request as much later as its first one is. An
        iteration takes as long as one of the request's own tokens does on average."""
        if not (host.front_s or host.token_s or host.front_steps):
            return self
        step = (self.end_s - self.first_s) / np.maximum(requests.output - 1, 1)
        late = host.front_s + host.token_s * requests.prompt + host.front_steps * step
        return msgspec.structs.replace(self, first_s=self.first_s + late, end_s=self.end_s + late)

    def chosen(self, which: np.ndarray) -> ServedRequests:
        """Return the records of the requests of the given indices; the rest is the replica's."""
        columns = ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached")
        return msgspec.structs.replace(self, **{name: getattr(self, name)[which] for name in columns})
