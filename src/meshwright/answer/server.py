"""Predict a server that was measured: its own times of iterations and its limits, in the common simulator.

No model, cluster or plan is priced: the profile says what an iteration of that server takes, its policy says which ones
it computes, and the workload is another one than it was measured under.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.latency import objectives_kept, serving_metrics, with_intervals
from meshwright.answer.prediction import Assumption
from meshwright.answer.serving_answer import Kept, ServingMetrics
from meshwright.answer.serving_why import over_time
from meshwright.cost.engine import EngineProfile, MeasuredServer
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.quantity import each
from meshwright.serving.cache import CacheRules, EngineLimits
from meshwright.simulate import published
from meshwright.simulate.serve import simulate
from meshwright.simulate.served import HostTimes, Replica, ServedRequests
from meshwright.spec.engine_words import EngineWords
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.timeline import Identity, RankClass, Timeline
from meshwright.version import VERSION

#: Words of the engine that may be said over what was measured.
OVER = ("policy", "max_batch", "budget", "kv_blocks", "block", "prefix_cache", "order")
#: Cache blocks of a server whose cache never was full.
ROOMY = 1 << 22


class ServerPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a measured server's profile: metrics of requests, ``objectives``, the share of the prompts' tokens
    that it finds in its cache (``hit_rate``), its largest batch and how often it takes a request's cache away, and
    seconds by what they go to. ``timeline`` is that of every serving prediction."""

    profile: EngineProfile
    serve: Serve
    num_requests: int
    metrics: ServingMetrics
    objectives: tuple[Kept, ...]
    hit_rate: float
    peak_batch: int
    iterations: int
    preemptions: int
    attribution: dict[str, float]
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    timeline: Timeline
    identity: Identity

    @property
    def good(self) -> bool:
        """Whether every objective is kept."""
        return all(one.met for one in self.objectives)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values, without the timeline."""
        names = ("hit_rate", "peak_batch", "iterations", "preemptions", "attribution", "assumptions", "warnings")
        said = {name: msgspec.to_builtins(getattr(self, name)) for name in names}
        return {
            "format_version": 1,
            "good": self.good,
            "engine_profile": self.profile.name,
            "requests": self.num_requests,
            **msgspec.to_builtins(self.metrics),
            "objectives": [one._asdict() | {"met": one.met} for one in self.objectives],
            **said,
            "serve": self.serve.text(),
            "identity": self.identity.said(),
        }


def server_replica(profile: EngineProfile, requests: Requests, *, split: bool = True) -> Replica:
    """Return the replica of the simulator that stands for a measured server, for requests. Without `split` times are
    not told by causes, which intervals need."""
    server = profile.server
    assert server is not None
    length = int((requests.prompt + requests.output).max())
    policy = serving.get("batching", server.policy)
    budget = server.budget or policy.budget
    batch = min(server.max_batch, len(requests))
    prompts = int(np.sort(requests.prompt)[::-1][: max(batch, 1)].sum())
    tokens = max(budget + batch, length) if budget else prompts + batch
    block = gcd(requests.hash_block, 16) if server.prefix_cache else 16
    return Replica(
        policy=policy,
        limits=EngineLimits(
            max_batch=server.max_batch,
            budget=budget,
            block=block,
            blocks=server.kv_tokens // block or ROOMY,
        ),
        costs=published.table(profile.iterations[0], tokens=tokens, batch=batch, context=length, split=split),
        host=HostTimes(
            step_s=profile.step_us * 1e-6,
            request_s=profile.request_us * 1e-6,
            serial_s=profile.serial_us * 1e-6,
            serial_token_s=profile.serial_token_us * 1e-6,
            stream_s=profile.stream_us * 1e-6,
            front_s=profile.front_us * 1e-6,
            token_s=profile.token_us * 1e-6,
            front_steps=profile.front_steps,
        ),
        rules=CacheRules(prefix=server.prefix_cache, unit=requests.hash_block, slots=server.slots)
        if server.prefix_cache
        else CacheRules(),
    )


def predict_server(profile: EngineProfile, serve: Serve, requests: Requests | None = None) -> ServerPrediction:
    """Return what a measured server does under a workload.

    Raises:
        MeshwrightError: W012 for requests that its cache can never hold, W014 for words of an engine that a measured
            server does not have, W013 for a policy that there is not.
    """
    profile = with_words(profile, serve.engine)
    requests = serve.drawn() if requests is None else requests
    replica = server_replica(profile, requests)
    if serve.engine.order != EngineWords().order:
        replica = msgspec.structs.replace(replica, order=serving.get("order", serve.engine.order))
    done = simulate(replica, requests)
    shares, served = [requests], [done]
    metrics = with_intervals(serving_metrics(serve, shares, served), serve, replica, shares, profile)
    server = profile.server
    assert server is not None
    who = Identity(code=VERSION, costs=f"engine profile {profile.name}", model=server.model, workload=serve.text())
    return ServerPrediction(
        profile=profile,
        serve=serve,
        num_requests=len(requests),
        metrics=metrics,
        objectives=tuple(objectives_kept(serve, shares, served)),
        hit_rate=float(done.cached.sum() / max(int(requests.prompt.sum()), 1)),
        peak_batch=done.peak_batch,
        iterations=done.iterations,
        preemptions=done.evictions,
        attribution=_attribution(done),
        assumptions=assumptions(profile, server),
        warnings=_warnings(server, requests, done, serve),
        timeline=_timeline(requests, done, who),
        identity=who,
    )


def with_words(profile: EngineProfile, words: EngineWords) -> EngineProfile:
    """Return the profile with what the words of an engine say over it: ``max_batch=8`` asks what the server would do
    with eight at a time.

    Raises:
        MeshwrightError: W014 for the words that a measured server does not have.
    """
    usual, server = EngineWords(), profile.server
    assert server is not None
    said = {name for name in words.__struct_fields__ if getattr(words, name) != getattr(usual, name)}
    wrong = [
        Diagnostic(
            code="W014",
            message=f"{name}= says nothing of a measured server: its profile has no such part",
            place="--serve",
            help=f"drop it; {', '.join(f'{one}=' for one in OVER)} may be said over what was measured",
        )
        for name in sorted(said - set(OVER))
    ]
    if wrong:
        raise MeshwrightError(wrong)
    over = {name: getattr(words, name) for name in ("policy", "max_batch", "budget", "prefix_cache") if name in said}
    if "kv_blocks" in said:
        over["kv_tokens"] = words.kv_blocks * words.block
    return msgspec.structs.replace(profile, server=msgspec.structs.replace(server, **over))


def assumptions(profile: EngineProfile, server: MeasuredServer) -> tuple[Assumption, ...]:
    """Return what the answer of a measured server rests on."""
    times = profile.iterations[0]
    (a, b, c), (d, e, f) = times.prefill_ms, times.decode_ms
    said = (
        f"prompts {each(a * 1e-3)}, {each(b * 1e-3)} a token and {each(c * 1e-3)} for its square; next tokens "
        f"{each(d * 1e-3)}, {each(f * 1e-3)} a sequence and {each(e * 1e-3)} a token of context; clients see tokens "
        f"{each(profile.front_us * 1e-6)} and {each(profile.token_us * 1e-6)} a token of the prompt later"
    )
    known = not 0 < server.reached < server.max_batch
    most = f"{server.max_batch}" if known else f"at least {server.reached}"
    prefixes = f"kept of the last {server.slots}" if server.slots else "kept" if server.prefix_cache else "not kept"
    room = f"a cache of {server.kv_tokens:,} tokens" if server.kv_tokens else "a cache that never was full"
    budget = f" of {server.budget:,} tokens an iteration" if server.budget else ""
    limits = f"policy {server.policy}{budget}, {most} requests at a time, {room}, common prefixes {prefixes}"
    return (
        Assumption(f"engine profile {profile.name!r}", said, profile.source, profile.flagged),
        Assumption("server", limits, profile.source, profile.flagged),
    )


def _attribution(served: ServedRequests) -> dict[str, float]:
    """Return the server's seconds by what they go to. What an iteration of next tokens takes beyond one of prompts is
    counted with the sequences."""
    spent = served.spent_s
    return {"iterations": float(spent[0] + spent[2] + spent[3]), "host": float(spent[4]), "idle": float(spent[5])}


def _warnings(server: MeasuredServer, requests: Requests, served: ServedRequests, serve: Serve) -> tuple[str, ...]:
    found = []
    if 0 < server.reached < served.peak_batch:
        found.append(
            f"{served.peak_batch} requests at a time, of which probes saw no more than {server.reached}: whether the "
            f"server takes so many, and what they take, is not measured"
        )
    if len(requests) > 50 and not len(requests.after) and requests.arrival_s[-1] > 0:
        offered = len(requests) / float(requests.arrival_s[-1])
        rate = len(requests) / float(served.end_s.max())
        if rate < 0.9 * offered and not requests.concurrency:
            found.append(
                f"requests arrive faster ({offered:.3g}/s) than they are answered ({rate:.3g}/s): latencies grow with "
                f"the length of the run"
            )
    if len(requests.hashes) and not server.prefix_cache:
        found.append("prompts begin alike, and this server keeps no prefixes")
    return tuple(found)


def _timeline(requests: Requests, served: ServedRequests, who: Identity) -> Timeline:
    columns = {
        "replica": np.zeros(len(requests), np.int64),
        "prompt_tokens": requests.prompt,
        "output_tokens": requests.output,
        **{n: getattr(served, n) for n in ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached")},
    }
    return over_time([RankClass(label="server")], [served], columns, who)
