"""The profile of a server fitted to probes: physical terms through the common simulator, errors on probes left out.

Every probe is served by the simulator under a profile, and the terms are moved until times to the first token and per
token are those measured: of an iteration of prompts a start, a token and its square, of an iteration of next tokens a
start, a sequence and a token of context, and what clients wait for besides. The policy, its budget and how prefixes are
kept are those under which the probes come out best. The error is that of probes which the fit has not seen: each kind
is left out in turn. Where what comes out cannot be believed, it is fitted again with fewer terms.

Probes are made in rounds, which all begin with the same single requests: how long those take says at what pace the
server was between them, and every probe is brought to the median pace before anything is fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import msgspec
import numpy as np

from meshwright.calibrate.server_probes import MadeProbe
from meshwright.calibrate.server_report import ProbeError, ServerFit, doubts
from meshwright.calibrate.server_terms import (
    FEWER,
    ProbeLoss,
    Terms,
    TriedServer,
    begun,
    joined,
    kind_of,
    predicted,
    profile_of,
)
from meshwright.cost.engine import EngineProfile
from meshwright.errors import MeshwrightError
from meshwright.traffic.timeline import open_over_time

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
#: Requests that are sent within so many seconds of the one before are of one instant.
INSTANT_S = 5e-3
#: The share of the expected requests at a time below which a cache is full.
FULL = 0.8
#: Requests that have to be answered.
FEWEST = 12
#: The normal distribution's central 80% lies within so many standard deviations.
NORMAL_80 = 1.2816


def fit_server(
    probes: list[MadeProbe], *, model: str, url: str, name: str, say: Callable[[str], None] = lambda line: None
) -> ServerFit:
    """Return the profile of the server that was probed, with what keeps it from being believed, if anything does.

    Raises:
        MeshwrightError: T009 where too few requests were answered.
    """
    if sum(len(p.requests) for p in probes) < FEWEST or not any(p.name == "single" for p in probes):
        found = sum(len(p.requests) for p in probes)
        help = "look at the server's log; or more time: --seconds 300"
        raise MeshwrightError.one("T009", f"{found} probes were answered, {FEWEST} are needed", place=url, help=help)
    pace = pace_sigma(probes)
    probes, drift = steadied([in_turn(p) for p in probes])
    ladder = [p for p in probes if kind_of(p) == "ladder"]
    asked = max((len(p.requests) for p in ladder), default=1)
    most = max(p.most_answered for p in probes)
    server = TriedServer(model, "orca", 0, max(most, 1), most >= asked > 1, False, 0)
    if asked == 1:
        server = server._replace(max_batch=1, reached=True)
    terms = begun(probes)
    plain = [p for p in probes if p.name not in ("prefix", "room")]
    if server.max_batch > 1:
        server, terms = _policy(plain, server, terms, say)
    else:
        terms = terms.fitted(plain, server)
    server = _prefixes(probes, server, terms.values)
    if room := [p for p in probes if p.name == "room"]:
        server = server._replace(
            kv_tokens=min((_room(p, server, terms.values) for p in room), key=lambda k: k or 1 << 62)
        )
    say(f"fitting {sum(len(p.requests) for p in probes)} requests under {server.policy}")
    tried = []
    for count in range(len(FEWER) + 1):
        if count:
            say(f"{tried[-1].doubts[0]}; without {', '.join(FEWER[:count])}")
        found = _fit(probes, server, terms.without(FEWER[:count]), name, url)
        profile = msgspec.structs.replace(found.profile, pace_sigma=round(pace, 3))
        tried.append(msgspec.structs.replace(found, profile=profile, drift=drift, without=FEWER[:count]))
        if not found.doubts:
            return tried[-1]
    return min(tried, key=lambda one: len(one.doubts))


def _fit(probes: list[MadeProbe], server: TriedServer, terms: Terms, name: str, url: str) -> ServerFit:
    """Fit the terms that are not fixed, to all probes and to those without each kind."""
    fitted, left_out, logs = terms.fitted(probes, server), {}, []
    for kind in dict.fromkeys(map(kind_of, probes)):
        rest = [p for p in probes if kind_of(p) != kind]
        if kind == "single" or sum(len(p.requests) for p in rest) < FEWEST:
            continue  # without single requests nothing tells the terms apart
        others = fitted.fitted(rest, server, steps=4, sweeps=3).values
        mine = [p for p in probes if kind_of(p) == kind]
        left_out[kind] = _error(mine, server, others)
        logs.append(_logs(mine, server, others))
    values = fitted.values
    in_sample = {
        k: _error([p for p in probes if kind_of(p) == k], server, values) for k in dict.fromkeys(map(kind_of, probes))
    }
    profile = _stored(server, values, name, url, left_out, logs or [_logs(probes, server, values)], probes)
    return ServerFit(
        profile=profile,
        in_sample=in_sample,
        left_out=left_out,
        doubts=doubts(probes, profile, fitted, left_out or in_sample),
    )


def in_turn(probe: MadeProbe) -> MadeProbe:
    """Return a probe whose requests of one instant stand in the order in which they were answered: which of them a
    server takes first is chance, and who is simulated in another's place says nothing of its times."""
    requests, count = probe.requests, len(probe.requests)
    if len(requests.hashes) or count < 2:
        return probe
    sent = np.argsort(requests.arrival_s, kind="stable")
    instant = np.cumsum(np.diff(requests.arrival_s[sent], prepend=requests.arrival_s[sent[0]]) > INSTANT_S)
    first = (requests.arrival_s + probe.ttft)[sent]
    order = sent[np.lexsort((first, instant))]
    turned = msgspec.structs.replace(
        requests, arrival_s=requests.arrival_s[sent], prompt=requests.prompt[order], output=requests.output[order]
    )
    times = {name: getattr(probe, name)[order] for name in ("ttft", "tpot", "e2e", "cached")}
    return probe._replace(requests=turned, **times)


def pace_sigma(probes: list[MadeProbe]) -> float:
    """Return the relative standard deviation of a server's pace from one round of probes to another, 0 where there was
    one round: what a prediction of another time does not know of it."""
    paces = np.log([pace for _, pace in _paces(probes)])
    return float(np.std(paces, ddof=1)) if len(paces) > 1 else 0.0


def steadied(probes: list[MadeProbe]) -> tuple[list[MadeProbe], float]:
    """Return probes as they would have been at the server's median pace, and by how much longer the same requests took
    in the slowest round than in the fastest, as a share.

    Between two rounds the pace changes evenly. A server that takes a factor longer for everything answers as one that
    does not whose requests come that much sooner, in times that are that much shorter."""
    found = _paces(probes)
    if len(found) < 2:
        return probes, 0.0
    at, paces = (np.array(one) for one in zip(*found))
    drift = float(paces.max() / paces.min() - 1)
    return [_at_pace(p, float(np.interp(p.at_s, at, paces))) for p in probes], drift


def _paces(probes: list[MadeProbe]) -> list[tuple[float, float]]:
    """When each round of probes was made, and its pace: that of its single requests, each against the median of all
    that were the same, in the median."""
    alone = sorted((p for p in probes if p.name == "single"), key=lambda p: p.at_s)
    if not alone:
        return []
    asked = [(p.requests.prompt * (1 << 20) + p.requests.output, p.e2e) for p in alone]
    every, took = (np.concatenate(one) for one in zip(*asked))
    usual = {one: float(np.median(took[every == one])) for one in np.unique(every)}
    paces = [float(np.median(e2e / np.array([usual[one] for one in which]))) for which, e2e in asked]
    return [(p.at_s, pace) for p, pace in zip(alone, paces)]


def _at_pace(probe: MadeProbe, pace: float) -> MadeProbe:
    times = {name: getattr(probe, name) / pace for name in ("ttft", "tpot", "e2e")}
    requests = msgspec.structs.replace(probe.requests, arrival_s=probe.requests.arrival_s / pace)
    return probe._replace(requests=requests, **times)


def _logs(probes: list[MadeProbe], server: TriedServer, values: np.ndarray) -> np.ndarray:
    """Natural logarithms of predicted over measured [2, requests]: to the first token, and per token (NaN of answers of
    one)."""
    run = joined(probes)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(predicted(run, server, values) / run.measured)


def _policy(
    probes: list[MadeProbe], base: TriedServer, start: Terms, say: Callable[[str], None]
) -> tuple[TriedServer, Terms]:
    """Return the policy under which probes come out best, and its terms; the earlier one in the list of two
    that are the same to these probes."""
    best: tuple[float, TriedServer, Terms] | None = None
    longest = max(int(p.requests.prompt.max()) for p in probes)
    seen = set()
    for policy, budget in POLICIES:
        kept = min(budget, 4 * longest) if budget > 4 * longest else budget  # larger ones are all the same
        if (policy, kept) in seen:
            continue
        seen.add((policy, kept))
        tried = base._replace(policy=policy, budget=budget)
        values = start.fitted(probes, tried, steps=3, sweeps=1)
        loss = ProbeLoss(probes, tried)(values.values)
        say(f"policy {policy}{f', budget {budget}' if budget else ''}: error {loss / 2:.1%}")
        if best is None or loss < best[0] - 1e-9:
            best = (loss, tried, values)
    assert best is not None
    return best[1], best[2]


def _prefixes(probes: list[MadeProbe], server: TriedServer, values: np.ndarray) -> TriedServer:
    """Return how common prefixes are kept, as the probes of them come out best; what the server says it had goes before
    what its times say. Times are compared among themselves, so that it does not matter whether the server was slower
    while a probe was made than while the others were."""
    mine = [p for p in probes if p.name == "prefix"]
    if not mine:
        return server
    tried, cached = PREFIXES, np.concatenate([p.cached for p in mine])
    if (cached >= 0).any():
        tried = PREFIXES[1:] if cached.max() >= 16 else PREFIXES[:1]
    found = []
    for kept, slots in tried:
        logs = [_logs([p], server._replace(prefix=kept, slots=slots), values)[0] for p in mine]
        found.append((float(np.mean([np.abs(log - np.median(log)).mean() for log in logs])), kept, slots))
    least = min(loss for loss, _, _ in found)
    return next(server._replace(prefix=k, slots=s) for loss, k, s in found if loss <= least * (1 + BETTER))


def _room(probe: MadeProbe, server: TriedServer, values: np.ndarray) -> int:
    """Return the tokens of the server's cache where long prompts were answered by fewer at a time than its other times
    let expect: those of all that were answered at once; 0 where it never was full."""
    first, per_token = predicted(joined([probe]), server, values)
    arrival, output = probe.requests.arrival_s, probe.requests.output
    ends = arrival + first + per_token * (output - 1)
    _, expected = open_over_time(arrival, arrival + first, ends)
    if probe.most_answered >= FULL * int(expected[:, 0].max()):
        return 0
    begin, end = arrival + probe.ttft, arrival + probe.e2e
    tokens = probe.requests.prompt + output
    return max(int(tokens[(begin <= at) & (at < end)].sum()) for at in begin)


def _error(probes: list[MadeProbe], server: TriedServer, values: np.ndarray) -> ProbeError:
    run, out = joined(probes), []
    for m, p in zip(run.measured, predicted(run, server, values)):
        known = ~np.isnan(m)
        each = float(np.median(np.abs(p[known] / m[known] - 1))) if known.any() else 0.0
        out.append(((float(m[known].mean()), float(p[known].mean())) if known.any() else (0.0, 0.0), each))
    (ttft, ttft_each), (tpot, tpot_each) = out
    return ProbeError(len(run.requests), ttft, tpot, ttft_each, tpot_each)


def _stored(
    server: TriedServer,
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
    ttft, tpot = (np.concatenate([log[place] for log in logs]) for place in (0, 1))
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
