"""The terms of a server's profile, the bounds between which they are moved, and how far they are from probes.

Probes are served by the simulator in one run, each long after the one before, so that moving a term costs one
simulation and not one a probe. Where a server's pace changed while it was probed, every probe is first brought to the
pace of all: a machine that is slower by a factor takes that factor longer for everything, which is the same as requests
that come that much sooner at a server of the usual pace.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.server import server_replica
from meshwright.calibrate.fitting import bounded_step, fit_constants
from meshwright.calibrate.server_probes import MadeProbe
from meshwright.cost.curve import Constant, CurveShape
from meshwright.cost.engine import EngineProfile, MeasuredServer, PublishedIterations
from meshwright.simulate.serve import simulate
from meshwright.spec.requests import Requests

#: The terms, in microseconds, and of what each of them is: the seconds of single requests that bound it are a time to
#: the first token, that for each token of a prompt, a time per token, and that for each token of context.
TERMS = (
    ("front_us", "a request, beside the server's iterations", "first"),
    ("token_us", "a token of the prompt, beside them", "first_token"),
    ("prefill_us", "an iteration with prompts", "first"),
    ("prefill_token_us", "a token of a prompt", "first_token"),
    ("prefill_pair_us", "a prompt's tokens squared", "first_pair"),
    ("decode_us", "an iteration of next tokens", "next"),
    ("sequence_us", "a sequence in it", "next"),
    ("context_us", "a token of context in it", "next_token"),
)
#: Terms that a fit does without, one more each time, where it cannot be believed: first what probes tell least of.
FEWER = ("prefill_pair_us", "token_us", "context_us", "sequence_us")
#: Times a bound may be what single requests say a term is at most.
ROOM = 10.0
#: Steps of a fit, the share of the error by which one has to be better, and the error below which none weighs more.
STEPS, SETTLED, SMALL = 12, 0.01, 0.01
#: Requests at a time of a server that took all that probes asked for.
UNKNOWN = 256
#: How much a kind of probe weighs beside others that weigh 1: predictions are of random traffic.
WEIGHTS = {"random": 3.0}
#: Seconds between two probes that are served in one run, more than any of them takes.
APART_S = 1e6


class TriedServer(NamedTuple):
    """The parts of a server that are not fitted but tried: its ``policy`` and ``budget`` of tokens, the most requests
    at a time (``reached``: probes ran into it), how prefixes are kept, and the tokens of its cache (0: never full)."""

    model: str
    policy: str
    budget: int
    max_batch: int
    reached: bool
    prefix: bool
    slots: int
    kv_tokens: int = 0


def profile_of(server: TriedServer, values: np.ndarray, name: str = "server") -> EngineProfile:
    """Return the profile of terms in microseconds."""
    front, token, start, each, pair, decode, sequence, context = (float(v) for v in values)
    decoding = (decode * 1e-3, context * 1e-3, sequence * 1e-3)
    return EngineProfile(
        name=name,
        step_us=0.0,
        request_us=0.0,
        layer_us=0.0,
        front_us=front,
        token_us=token,
        iterations=(
            PublishedIterations(
                model=server.model,
                device="server",
                tp=1,
                prefill_ms=(start * 1e-3, each * 1e-3, pair * 1e-3),
                decode_ms=decoding,
                large_decode_ms=decoding,
                large_from=1 << 30,
            ),
        ),
        server=MeasuredServer(
            model=server.model,
            policy=server.policy,
            budget=server.budget,
            max_batch=max(UNKNOWN, server.max_batch) if server.reached else server.max_batch,
            reached=server.max_batch,
            kv_tokens=server.kv_tokens,
            prefix_cache=server.prefix,
            slots=server.slots,
        ),
    )


class ProbeRun(NamedTuple):
    """Probes in one run of the simulator: their ``requests``, and each request's ``probe``, whose ``kind`` is that of
    each probe [p]; ``measured`` [2, n] are the seconds to the first token and per token (NaN: they tell nothing)."""

    requests: Requests
    probe: np.ndarray
    kind: np.ndarray
    measured: np.ndarray


def joined(probes: list[MadeProbe]) -> ProbeRun:
    """Return probes one long after the other; beginnings are shared within a probe and not between two."""
    names = list(dict.fromkeys(kind_of(p) for p in probes))
    counts = [len(p.requests) for p in probes]
    hashes, sizes, above = [], [], 0
    for one in probes:
        requests = one.requests
        hashes.append(requests.hashes + above)
        sizes.append(np.diff(requests.hash_ptr) if len(requests.hashes) else np.zeros(len(requests), np.int64))
        above += int(requests.hashes.max(initial=-1)) + 1
    named = np.concatenate(hashes)
    return ProbeRun(
        requests=Requests(
            arrival_s=np.concatenate([place * APART_S + p.requests.arrival_s for place, p in enumerate(probes)]),
            prompt=np.concatenate([p.requests.prompt for p in probes]),
            output=np.concatenate([p.requests.output for p in probes]),
            hashes=named,
            hash_ptr=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]) if len(named) else np.zeros(1, np.int64),
            hash_block=max(p.requests.hash_block for p in probes),
        ),
        probe=np.repeat(np.arange(len(probes)), counts),
        kind=np.array([names.index(kind_of(p)) for p in probes]),
        measured=np.stack([np.concatenate([p.ttft for p in probes]), np.concatenate([p.tpot for p in probes])]),
    )


def kind_of(probe: MadeProbe) -> str:
    """Return what a probe is one of several of."""
    return probe.name.partition(" ")[0]


def predicted(run: ProbeRun, server: TriedServer, values: np.ndarray) -> np.ndarray:
    """Return the seconds to the first token and per token [2, n] that terms in microseconds say."""
    requests = run.requests
    if not server.prefix and len(requests.hashes):
        requests = msgspec.structs.replace(requests, hashes=np.empty(0, np.int64), hash_ptr=np.zeros(1, np.int64))
    if server.prefix and not len(requests.hashes):  # nobody begins alike: the fast loop serves them
        server = server._replace(prefix=False, slots=0)
    served = simulate(server_replica(profile_of(server, values), requests, split=False), requests)
    return np.stack(
        [served.first_s - served.arrival_s, (served.end_s - served.first_s) / np.maximum(requests.output - 1, 1)]
    )


class ProbeLoss:
    """How far terms are from probes: the mean absolute logarithm of predicted over measured, each kind of probe as much
    as its weight; and that of the means of each probe, which single requests' scatter leaves alone. An error x counts
    as x / (1 + x): a probe during which the server stood still pulls no more than one that is off by some times."""

    def __init__(self, probes: list[MadeProbe], server: TriedServer):
        alike = [p for p in probes if server.prefix and len(p.requests.hashes)]
        plain = [p for p in probes if not (server.prefix and len(p.requests.hashes))]
        probes = [*plain, *alike]
        self.server, self.run = server, joined(probes)
        self.runs = [joined(some) for some in (plain, alike) if some]  # the compiled loop serves who shares nothing
        self.known = ~np.isnan(self.run.measured) & (self.run.measured > 0)
        self.logs = np.log(np.where(self.known, self.run.measured, 1.0))
        count = len(self.run.kind)
        self.count = np.stack([np.bincount(self.run.probe, known, minlength=count) for known in self.known])
        self.whole = np.log(self._means(np.where(self.known, self.run.measured, 0.0)))
        there = np.bincount(self.run.kind, (self.count > 0).sum(0))[self.run.kind]
        kinds, heavy = np.unique(self.run.kind[self.count.any(0)]), _weights(probes)
        share = (self.count > 0) / np.maximum(there, 1) * heavy[self.run.kind] / heavy[kinds].sum()
        each = np.where(self.known, (share / np.maximum(self.count, 1))[:, self.run.probe], 0.0)
        self.weight = np.concatenate([each.ravel(), share.ravel()])

    def __call__(self, values: np.ndarray) -> float:
        """Return the error of terms in microseconds."""
        error = np.abs(self.errors(values))
        return float((self.weight * error / (1 + error)).sum())

    def errors(self, values: np.ndarray) -> np.ndarray:
        """Return the logarithms of predicted over measured times of requests, then of means of probes, to be weighed by
        ``weight``; 0 where nothing was measured."""
        times = np.concatenate([predicted(run, self.server, values) for run in self.runs], axis=1)
        times = np.where(self.known, np.maximum(times, 1e-7), 1.0)
        whole = np.log(self._means(np.where(self.known, times, 0.0)))
        return np.concatenate([(np.log(times) - self.logs).ravel(), (whole - self.whole).ravel()])

    def _means(self, times: np.ndarray) -> np.ndarray:
        """Return the means by probe [2, p], 1 where there are none."""
        count = len(self.run.kind)
        sums = np.stack([np.bincount(self.run.probe, one, minlength=count) for one in times])
        return np.where(self.count > 0, sums / np.maximum(self.count, 1), 1.0)


def _weights(probes: list[MadeProbe]) -> np.ndarray:
    """Weights of the kinds of probes, in the order in which :func:`joined` counts them."""
    return np.array([WEIGHTS.get(name, 1.0) for name in dict.fromkeys(kind_of(p) for p in probes)])


class Terms(NamedTuple):
    """Terms in microseconds, and the bounds between which they are moved."""

    shape: CurveShape
    values: np.ndarray

    def fitted(self, probes: list[MadeProbe], server: TriedServer, *, steps: int = STEPS, sweeps: int = 8) -> Terms:
        """Return the terms under which probes come out best: so many steps along the derivatives of all terms together,
        as some make up for others, and then sweeps over one after the other, as batches change by leaps."""
        loss = ProbeLoss(probes, server)
        best, least, values = self.values, loss(self.values), self.values
        for _ in range(steps):
            values = np.clip(best + self._step(loss, best), 0.0, [c.high for c in self.shape.constants])
            for _ in range(3):
                if (now := loss(values)) < least:
                    break
                values = (values + best) / 2
            if now >= least * (1 - SETTLED):
                break
            best, least = values, now
        return self._replace(values=fit_constants(self.shape, loss, best, sweeps=sweeps))

    def _step(self, loss: ProbeLoss, values: np.ndarray) -> np.ndarray:
        """Return the change of all terms that lowers the error most, where it follows its derivatives."""
        high = np.array([c.high for c in self.shape.constants])
        unit = np.maximum(0.02 * values, 1e-3 * high)
        free, error = np.flatnonzero(high > 0), loss.errors(values)
        slopes = np.array([(loss.errors(values + unit * (np.arange(len(unit)) == one)) - error) for one in free])
        low, up = -values[free] / unit[free], (high - values)[free] / unit[free]
        move = np.zeros(len(values))
        move[free] = bounded_step(error, slopes, loss.weight * len(error), low, up, small=SMALL)
        return move * unit

    def without(self, names: tuple[str, ...]) -> Terms:
        """Return them with those of the names at nothing, where they stay."""
        constants = tuple(c._replace(high=0.0) if c.name in names else c for c in self.shape.constants)
        kept = np.array([0.0 if c.name in names else v for c, v in zip(constants, self.values)])
        return Terms(self.shape._replace(constants=constants), kept)


def begun(probes: list[MadeProbe]) -> Terms:
    """Return the terms that single requests say by themselves: straight lines through their times."""
    alone = [p for p in probes if p.name == "single"]
    prompt = np.concatenate([p.requests.prompt for p in alone]).astype(float)
    output, ttft, tpot = (np.concatenate(one) for one in zip(*((p.requests.output, p.ttft, p.tpot) for p in alone)))
    known, longest = ~np.isnan(tpot), float(prompt.max())
    context = prompt + output / 2
    step, per_context = _line(context[known], tpot[known]) if known.any() else (1e-3, 0.0)
    first, per_token = _line(prompt, ttft)
    slowest = float(np.nanmax(tpot)) if known.any() else 1e-3
    most = {
        "first": float(np.median(ttft[prompt <= np.median(prompt)])),
        "first_token": float(ttft.max()) / longest,
        "first_pair": float(ttft.max()) / longest**2,
        "next": slowest,
        "next_token": slowest / longest,
    }
    square = 0.1 * per_token / longest
    seconds = (0.3 * first, 0.02 * per_token, 0.7 * first, 0.9 * per_token, square, 0.9 * step, 0.1 * step, per_context)
    constants = tuple(Constant(name, "us", meaning, 0.0, 0.0, ROOM * most[of] * 1e6) for name, meaning, of in TERMS)
    shape = CurveShape("server", lambda x, h, p: 0.0, lambda x: (), (), constants, ())
    return Terms(shape, np.array([max(s * 1e6, 1e-3 * c.high) for s, c in zip(seconds, constants)]))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The line through points by the median of slopes between them (Theil 1950, Sen 1968), neither part negative."""
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i) if x[i] != x[j]]
    slope = max(float(np.median(slopes)), 0.0) if slopes else 0.0
    return max(float(np.median(y - slope * x)), 1e-6), slope
