"""The report of a fitted server: its times and limits as lines of text, and what keeps it from being believed.

A profile is believed where every term is a time that probes can tell, single requests take what it says within the
probes' own range, and probes that the fit never saw are predicted within a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.calibrate.server_probes import MadeProbe
from meshwright.calibrate.server_terms import Terms
from meshwright.cost.engine import EngineProfile
from meshwright.quantity import each

#: The share by which a server's pace may change while it is probed without being said.
DRIFT = 0.1
#: The most by which mean times of kinds of probes that were left out may be off: in the mean over the kinds, and each.
#: The first is twice what predictions are to keep to; the second is a factor of two.
MOST_OFF, MOST_OFF_EACH = 0.3, 1.0
#: The share of its bound from which on a term lies on it.
ON_BOUND = 0.99


class ServerFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted profile, and by kind of probe the requests and the mean relative errors (predicted over measured, less
    one) of mean times to the first token and per token, in sample and ``left_out``. ``drift`` is by how much longer
    the same requests took in the slowest round of probes than in the fastest, as a share. ``without`` are the terms
    that were left out, and ``doubts`` what keeps the profile from being believed."""

    profile: EngineProfile
    in_sample: dict[str, ProbeError]
    left_out: dict[str, ProbeError]
    drift: float = 0.0
    without: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


class ProbeError(NamedTuple):
    """Requests of a kind of probe, the measured and predicted mean seconds to the first token and per token, and the
    median absolute relative errors of single requests."""

    requests: int
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    ttft_each: float
    tpot_each: float


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
        f"  a prompt     {each(a * 1e-3)} + {each(b * 1e-3)} a token + {each(c * 1e-3)} for its square",
        f"  a next token {each(d * 1e-3)} + {each(f * 1e-3)} a sequence + {each(e * 1e-3)} a token of context",
        f"  besides      {each(fit.profile.front_us * 1e-6)} a request"
        f" + {each(fit.profile.token_us * 1e-6)} a token of it",
        f"{'probe':10s}{'requests':>9s}"
        + "".join(f"{name + ' measured, predicted':>29s}" for name in ("TTFT", "TPOT"))
        + f"{'left out: TTFT, TPOT':>25s}",
    ]
    for kind, one in fit.in_sample.items():
        out = fit.left_out.get(kind)
        apart = "-" if out is None else f"{_apart(out.ttft_s):+.1%} {_apart(out.tpot_s):+.1%}"
        lines.append(f"{kind:10s}{one.requests:9d}{_pair(one.ttft_s):>29s}{_pair(one.tpot_s):>29s}{apart:>25s}")
    if fit.without:
        lines.append(f"  without {', '.join(fit.without)}: with them the fit could not be believed")
    if server.reached == 1 and server.max_batch > 1:
        lines.append(
            "! there was no time to ask for several at once: how many requests are computed at a time is not known, "
            "and none is taken to wait. More time: --seconds 600"
        )
    if fit.drift > DRIFT:
        lines.append(
            f"! the same requests took {fit.drift:+.0%} in the slowest round of probes, against the fastest: the "
            f"server's pace changes, as where other work shares its machine. The profile is of the median pace"
        )
    lines += [f"! not to be believed: {one}" for one in fit.doubts]
    return lines


def _pair(times: tuple[float, float]) -> str:
    return f"{times[0] * 1e3:.4g} {times[1] * 1e3:.4g} ms {_apart(times):+.1%}"


def _apart(times: tuple[float, float]) -> float:
    return times[1] / times[0] - 1 if times[0] else 0.0


def doubts(
    probes: list[MadeProbe], profile: EngineProfile, terms: Terms, checked: dict[str, ProbeError]
) -> tuple[str, ...]:
    """Return what keeps a fitted profile from being believed; `checked` are the errors of kinds of probes that it is
    judged by."""
    found = [
        f"the term {c.name} ({c.meaning}) lies on its bound of {c.high:.3g} us, which single requests put on it"
        for c, value in zip(terms.shape.constants, terms.values)
        if c.high > 0 and value >= ON_BOUND * c.high
    ]
    for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        apart = {kind: abs(_apart(getattr(one, field))) for kind, one in checked.items() if getattr(one, field)[0]}
        if not apart:
            continue
        found += unseen(name, "probe", apart)
    return tuple(found + _outside(probes, profile))


def unseen(what: str, kind: str, apart: dict[str, float]) -> list[str]:
    """Return what keeps a fit from being believed whose `what` of each `kind` that it did not see is off by `apart`."""
    mean, (worst, most) = float(np.mean(list(apart.values()))), max(apart.items(), key=lambda one: one[1])
    if mean > MOST_OFF:
        return [f"{what} of {kind}s that the fit did not see is off by {mean:.0%} in the mean (most {MOST_OFF:.0%})"]
    if most > MOST_OFF_EACH:
        return [f"{what} of the {kind} {worst}, left out of the fit, is off by {most:.0%} (most {MOST_OFF_EACH:.0%})"]
    return []


def _outside(probes: list[MadeProbe], profile: EngineProfile) -> list[str]:
    """Return which times of a single request, of the shortest and the longest prompt, lie outside of what was measured
    of them by more than the bound."""
    alone, found = [p for p in probes if p.name == "single"], []
    prompt, output, ttft, tpot = (
        np.concatenate(one) for one in zip(*((p.requests.prompt, p.requests.output, p.ttft, p.tpot) for p in alone))
    )
    times = profile.iterations[0]
    (start, each, square), (step, context, sequence) = times.prefill_ms, times.decode_ms
    for length in (int(prompt.min()), int(prompt.max())):
        mine = prompt == length
        front = profile.front_us * 1e-3 + profile.token_us * 1e-3 * length
        said = {
            "time to the first token": (front + start + each * length + square * length**2, ttft[mine] * 1e3),
            "time per token": (step + sequence + context * (length + float(output[mine].mean()) / 2), tpot[mine] * 1e3),
        }
        for name, (predicted, measured) in said.items():
            measured = measured[~np.isnan(measured)]
            if not len(measured):
                continue
            low, high = measured.min() / (1 + MOST_OFF), measured.max() * (1 + MOST_OFF)
            if not low <= predicted <= high:
                between = f"{measured.min():.3g} to {measured.max():.3g} ms were measured"
                found.append(
                    f"the {name} of a single prompt of {length} tokens comes out as {predicted:.3g} ms, and {between}"
                )
    return found
