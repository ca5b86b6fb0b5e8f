"""The profile of a server fitted to probes: physical terms through the common simulator, errors on probes left out.

Every probe is served by the simulator under a profile, and the terms are moved until times to the first token and per
token are those measured: of an iteration of prompts a start, a token and its square, of an iteration of next tokens a
start, a sequence and a token of context, and what clients wait for besides. The policy, its budget and how prefixes are
kept are those under which the probes come out best. The error is that of probes which the fit has not seen: each kind
is left out in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.server import server_replica
from meshwright.calibrate.fitting import fit_constants
from meshwright.calibrate.server_probes import MadeProbe
from meshwright.cost.curve import Constant, CurveShape
from meshwright.cost.engine import EngineProfile, MeasuredServer, PublishedIterations
from meshwright.errors import MeshwrightError
from meshwright.simulate.serve import simulate
from meshwright.traffic.timeline import open_over_time

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
#: Times a bound may be what single requests say a term is at most.
ROOM = 10.0
#: Policies that are tried, and their budgets of tokens; vllm-v0 within one computes a prompt at a time.
POLICIES = (
    ("orca", 0),
    ("vllm-v0", 8192),
    ("vllm-v0", 1),
    *product(("vllm-v1", "sarathi"), (64, 256, 512, 2048, 8192)),
    ("static", 0),
)
#: How prefixes may be kept: not at all, of the last request alone, as long as there is room.
PREFIXES = ((False, 0), (True, 1), (True, 0))
#: The least by which a way of keeping prefixes has to be better than a simpler one, as a share of the error.
BETTER = 0.05
#: The share of the expected requests at a time below which a cache is full.
FULL = 0.8
#: Requests at a time of a server that took all that probes asked for.
UNKNOWN = 256
#: The share by which a server's pace may change while it is probed without being said.
DRIFT = 0.1
#: Requests that have to be answered.
FEWEST = 12
#: The normal distribution's central 80% lies within so many standard deviations.
NORMAL_80 = 1.2816


class ServerFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted profile, and by kind of probe the requests and the mean relative errors (predicted over measured, less
    one) of mean times to the first token and per token, in sample and ``left_out``. ``drift`` is by how much longer
    the same requests took at the end of the probes than at their beginning, as a share."""

    profile: EngineProfile
    in_sample: dict[str, ProbeError]
    left_out: dict[str, ProbeError]
    drift: float = 0.0


class ProbeError(NamedTuple):
    """Requests of a kind of probe, the measured and predicted mean seconds to the first token and per token, and the
    median absolute relative errors of single requests."""

    requests: int
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    ttft_each: float
    tpot_each: float


class _Server(NamedTuple):
    """The parts of a server that are not fitted but tried."""

    model: str
    policy: str
    budget: int
    max_batch: int
    reached: bool
    prefix: bool
    slots: int
    kv_tokens: int = 0


def fit_server(
    probes: list[MadeProbe], *, model: str, url: str, name: str, say: Callable[[str], None] = lambda line: None
) -> ServerFit:
    """Return the profile of the server that was probed.

    Raises:
        MeshwrightError: T009 where too few requests were answered.
    """
    if sum(len(p.requests) for p in probes) < FEWEST or not any(p.name == "single" for p in probes):
        found = sum(len(p.requests) for p in probes)
        help = "look at the server's log; or more time: --seconds 300"
        raise MeshwrightError.one("T009", f"{found} probes were answered, {FEWEST} are needed", place=url, help=help)
    asked = max(len(p.requests) for p in probes if _kind(p) == "ladder") if _has(probes, "ladder") else 1
    most = max(p.most_answered for p in probes)
    base = _Server(model, "orca", 0, max(most, 1), most >= asked > 1, False, 0)
    if asked == 1:
        base = base._replace(max_batch=1, reached=True)
    start = _start(probes)
    plain = [p for p in probes if p.name not in ("prefix", "room")]
    server, values = base, start
    if base.max_batch > 1:
        server, values = _policy(plain, base, start, say)
    else:
        values = _fitted(plain, base, start, sweeps=12)
    if _has(probes, "prefix"):
        server = _prefixes(probes, server, values.values)
    if _has(probes, "room"):
        server = server._replace(kv_tokens=_room(next(p for p in probes if p.name == "room"), server, values.values))
    say(f"fitting {sum(len(p.requests) for p in probes)} requests under {server.policy}")
    fitted = _fitted(probes, server, values)
    values = fitted.values
    left_out, logs = {}, []
    for kind in dict.fromkeys(map(_kind, probes)):
        rest = [p for p in probes if _kind(p) != kind]
        if kind == "single" or sum(len(p.requests) for p in rest) < FEWEST:
            continue  # without single requests nothing tells the terms apart
        others = _fitted(rest, server, fitted, sweeps=10).values
        mine = [p for p in probes if _kind(p) == kind]
        left_out[kind] = _error(mine, server, others)
        logs += [_logs(p, server, others) for p in mine]
    in_sample = {
        k: _error([p for p in probes if _kind(p) == k], server, values) for k in dict.fromkeys(map(_kind, probes))
    }
    return ServerFit(
        profile=_stored(
            server, values, name, url, left_out, logs or [_logs(p, server, values) for p in probes], probes
        ),
        in_sample=in_sample,
        left_out=left_out,
        drift=_drift(probes),
    )


def _drift(probes: list[MadeProbe]) -> float:
    """Return by how much longer requests took when they were made again, in the median; 0 where none were."""
    first, last = (next((p for p in probes if p.name == name), None) for name in ("single", "again"))
    if first is None or last is None:
        return 0.0
    ratios = []
    for number, length in enumerate(last.requests.prompt):
        same = (first.requests.prompt == length) & (first.requests.output == last.requests.output[number])
        ratios += [last.e2e[number] / np.median(first.e2e[same])] if same.any() else []
    return float(np.median(ratios) - 1) if ratios else 0.0


def _kind(probe: MadeProbe) -> str:
    return probe.name.partition(" ")[0]


def _has(probes: list[MadeProbe], kind: str) -> bool:
    return any(_kind(p) == kind for p in probes)


def profile_of(server: _Server, values: np.ndarray, name: str = "server") -> EngineProfile:
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


def _predicted(probe: MadeProbe, profile: EngineProfile) -> tuple[np.ndarray, np.ndarray]:
    """Times to the first token and per token of a probe's requests."""
    requests, server = probe.requests, profile.server
    assert server is not None
    if server.prefix_cache and not len(requests.hashes):  # nobody begins alike: the fast loop serves them
        profile = msgspec.structs.replace(profile, server=msgspec.structs.replace(server, prefix_cache=False, slots=0))
    elif not server.prefix_cache and len(requests.hashes):
        requests = msgspec.structs.replace(requests, hashes=np.empty(0, np.int64), hash_ptr=np.zeros(1, np.int64))
    served = simulate(server_replica(profile, requests, split=False), requests)
    more = np.maximum(requests.output - 1, 1)
    return served.first_s - served.arrival_s, (served.end_s - served.first_s) / more


def _logs(probe: MadeProbe, server: _Server, values: np.ndarray) -> np.ndarray:
    """Natural logarithms of predicted over measured [requests, 2]: to the first token, and per token (NaN of answers of
    one)."""
    ttft, tpot = _predicted(probe, profile_of(server, values))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack([np.log(ttft / probe.ttft), np.log(tpot / probe.tpot)], axis=1)


def _loss(probes: list[MadeProbe], server: _Server, values: np.ndarray) -> float:
    """Mean absolute logarithm of predicted over measured, each kind of probe as much as another; and that of the means
    of each probe, which single requests' scatter leaves alone. An error x counts as x / (1 + x): a probe during which
    the server stood still pulls no more than one that is off by some times."""
    by_kind: dict[str, list[float]] = {}
    for probe in probes:
        profile = profile_of(server, values)
        for predicted, measured in zip(_predicted(probe, profile), (probe.ttft, probe.tpot)):
            known = ~np.isnan(measured) & (measured > 0)
            if not known.any():
                continue
            p, m = np.maximum(predicted[known], 1e-7), np.maximum(measured[known], 1e-7)
            each, whole = np.abs(np.log(p / m)), abs(float(np.log(p.mean() / m.mean())))
            by_kind.setdefault(_kind(probe), []).append(float((each / (1 + each)).mean()) + whole / (1 + whole))
    return float(np.mean([np.mean(found) for found in by_kind.values()]))


def _fitted(probes: list[MadeProbe], server: _Server, start: _Start, sweeps: int = 40) -> _Start:
    found = fit_constants(start.shape, lambda values: _loss(probes, server, values), start.values, sweeps=sweeps)
    return start._replace(values=found)


class _Start(NamedTuple):
    """Terms in microseconds, and the bounds between which they are moved."""

    shape: CurveShape
    values: np.ndarray


def _start(probes: list[MadeProbe]) -> _Start:
    """Terms that single requests say by themselves: straight lines through their times."""
    alone = next(p for p in probes if p.name == "single")
    prompt = alone.requests.prompt.astype(float)
    known, longest = ~np.isnan(alone.tpot), float(prompt.max())
    context = prompt + alone.requests.output / 2
    step, per_context = _line(context[known], alone.tpot[known]) if known.any() else (1e-3, 0.0)
    first, per_token = _line(prompt, alone.ttft)
    most = {
        "first": float(np.median(alone.ttft[prompt <= np.median(prompt)])),
        "first_token": float(alone.ttft.max()) / longest,
        "first_pair": float(alone.ttft.max()) / longest**2,
        "next": float(np.nanmax(alone.tpot)) if known.any() else 1e-3,
        "next_token": (float(np.nanmax(alone.tpot)) if known.any() else 1e-3) / longest,
    }
    square = 0.1 * per_token / longest
    seconds = (0.3 * first, 0.02 * per_token, 0.7 * first, 0.9 * per_token, square, 0.9 * step, 0.1 * step, per_context)
    constants = tuple(Constant(name, "us", meaning, 0.0, 0.0, ROOM * most[of] * 1e6) for name, meaning, of in TERMS)
    shape = CurveShape("server", lambda x, h, p: 0.0, lambda x: (), (), constants, ())
    return _Start(shape, np.array([max(s * 1e6, 1e-3 * c.high) for s, c in zip(seconds, constants)]))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The line through points by the median of slopes between them (Theil 1950, Sen 1968), neither part negative."""
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i) if x[i] != x[j]]
    slope = max(float(np.median(slopes)), 0.0) if slopes else 0.0
    return max(float(np.median(y - slope * x)), 1e-6), slope


def _policy(
    probes: list[MadeProbe], base: _Server, start: _Start, say: Callable[[str], None]
) -> tuple[_Server, _Start]:
    """Return the policy under which probes come out best, and its terms; the earlier one in the list of two
    that are the same to these probes."""
    best: tuple[float, _Server, _Start] | None = None
    longest = max(int(p.requests.prompt.max()) for p in probes)
    seen = set()
    for policy, budget in POLICIES:
        kept = min(budget, 4 * longest) if budget > 4 * longest else budget  # larger ones are all the same
        if (policy, kept) in seen:
            continue
        seen.add((policy, kept))
        tried = base._replace(policy=policy, budget=budget)
        values = _fitted(probes, tried, start, sweeps=6)
        loss = _loss(probes, tried, values.values)
        say(f"policy {policy}{f', budget {budget}' if budget else ''}: error {loss / 2:.1%}")
        if best is None or loss < best[0] - 1e-9:
            best = (loss, tried, values)
    assert best is not None
    return best[1], best[2]


def _prefixes(probes: list[MadeProbe], server: _Server, values: np.ndarray) -> _Server:
    """Return how common prefixes are kept, as the probe of them comes out best; what the server says it had goes before
    what its times say. Times are compared among themselves, so that it does not matter whether the server was slower
    while this probe was made than while the others were."""
    probe = next(p for p in probes if p.name == "prefix")
    tried = PREFIXES
    if (probe.cached >= 0).any():
        tried = PREFIXES[1:] if probe.cached.max() >= 16 else PREFIXES[:1]
    found = []
    for kept, slots in tried:
        logs = _logs(probe, server._replace(prefix=kept, slots=slots), values)[:, 0]
        found.append((float(np.abs(logs - np.median(logs)).mean()), kept, slots))
    least = min(loss for loss, _, _ in found)
    return next(server._replace(prefix=k, slots=s) for loss, k, s in found if loss <= least * (1 + BETTER))


def _room(probe: MadeProbe, server: _Server, values: np.ndarray) -> int:
    """Return the tokens of the server's cache where long prompts were answered by fewer at a time than its other times
    let expect: those of all that were answered at once; 0 where it never was full."""
    first, per_token = _predicted(probe, profile_of(server, values))
    arrival, output = probe.requests.arrival_s, probe.requests.output
    ends = arrival + first + per_token * (output - 1)
    _, expected = open_over_time(arrival, arrival + first, ends)
    if probe.most_answered >= FULL * int(expected[:, 0].max()):
        return 0
    begin, end = arrival + probe.ttft, arrival + probe.e2e
    tokens = probe.requests.prompt + output
    return max(int(tokens[(begin <= at) & (at < end)].sum()) for at in begin)


def _error(probes: list[MadeProbe], server: _Server, values: np.ndarray) -> ProbeError:
    pairs = [_predicted(p, profile_of(server, values)) for p in probes]
    out = []
    for place, measured in enumerate(("ttft", "tpot")):
        m = np.concatenate([getattr(p, measured) for p in probes])
        p = np.concatenate([pair[place] for pair in pairs])
        known = ~np.isnan(m)
        each = float(np.median(np.abs(p[known] / m[known] - 1))) if known.any() else 0.0
        out.append(((float(m[known].mean()), float(p[known].mean())) if known.any() else (0.0, 0.0), each))
    (ttft, ttft_each), (tpot, tpot_each) = out
    return ProbeError(sum(len(p.requests) for p in probes), ttft, tpot, ttft_each, tpot_each)


def _stored(
    server: _Server,
    values: np.ndarray,
    name: str,
    url: str,
    left_out: dict[str, ProbeError],
    logs: list[np.ndarray],
    probes: list[MadeProbe],
) -> EngineProfile:
    """The profile as it is kept: its spreads cover 80% of the requests of probes left out."""
    rounded = np.array([float(f"{value:.4g}") for value in values])
    found = profile_of(server, rounded, name)
    ttft, tpot = (np.concatenate([log[:, place] for log in logs]) for place in (0, 1))
    requests = sum(len(p.requests) for p in probes)
    said = {
        f"probe {kind}": {"median": round(e.tpot_each, 4), "ttft_median": round(e.ttft_each, 4)}
        for kind, e in left_out.items()
    }
    return msgspec.structs.replace(
        found,
        title=f"{server.model} as {url} served it",
        sigma=_spread(tpot),
        front_sigma=_spread(ttft),
        source=f"fitted to {requests} probes of the server itself",
        flagged=False,
        left_out=said,
        server=msgspec.structs.replace(found.server, url=url),
    )


def _spread(logs: np.ndarray) -> float:
    known = logs[~np.isnan(logs)]
    return round(float(np.quantile(np.abs(known), 0.8)) / NORMAL_80, 3) if len(known) else 0.0


def report(fit: ServerFit) -> list[str]:
    """Return the fit as lines of text."""
    server, times = fit.profile.server, fit.profile.iterations[0]
    assert server is not None
    (a, b, c), (d, e, f) = times.prefill_ms, times.decode_ms
    lines = [
        f"{server.model}: policy {server.policy}"
        + (f" with {server.budget:,} tokens an iteration" if server.budget > 1 else "")
        + (" with a prompt at a time" if server.budget == 1 else "")
        + f", {server.max_batch if server.max_batch == server.reached else f'at least {server.reached}'} at a time"
        + (", prefixes kept" if server.prefix_cache else ", no prefixes kept")
        + (f" of the last {server.slots}" if server.slots else "")
        + (f", a cache of {server.kv_tokens:,} tokens" if server.kv_tokens else ", a cache that never was full"),
        f"  a prompt     {a:.4g} ms + {b * 1e3:.4g} us a token + {c * 1e6:.4g} ns for its square",
        f"  a next token {d:.4g} ms + {f * 1e3:.4g} us a sequence + {e * 1e6:.4g} ns a token of context",
        f"  besides      {fit.profile.front_us * 1e-3:.4g} ms a request + {fit.profile.token_us:.4g} us a token of it",
        f"{'probe':10s}{'requests':>9s}"
        + "".join(f"{name + ' measured, predicted':>29s}" for name in ("TTFT", "TPOT"))
        + f"{'left out: TTFT, TPOT':>25s}",
    ]
    for kind, one in fit.in_sample.items():
        out = fit.left_out.get(kind)
        apart = "-" if out is None else f"{_apart(out.ttft_s):+.1%} {_apart(out.tpot_s):+.1%}"
        lines.append(f"{kind:10s}{one.requests:9d}{_pair(one.ttft_s):>29s}{_pair(one.tpot_s):>29s}{apart:>25s}")
    if abs(fit.drift) > DRIFT:
        lines.append(
            f"! the same requests took {fit.drift:+.0%} at the end of the probes: the server's pace changes, as where "
            f"other work shares its machine, and a prediction is no better than that"
        )
    return lines


def _pair(times: tuple[float, float]) -> str:
    return f"{times[0] * 1e3:.4g} {times[1] * 1e3:.4g} ms {_apart(times):+.1%}"


def _apart(times: tuple[float, float]) -> float:
    return times[1] / times[0] - 1 if times[0] else 0.0
