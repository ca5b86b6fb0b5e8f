"""The time of an iteration of a replica, part by part, by its costs and what its decider computes in it."""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import NamedTuple

from meshwright.serving.batching import Iterate
from meshwright.simulate.served import Replica


class Took(NamedTuple):
    """Seconds of an iteration by part, and its ``tokens`` in a microbatch of it.

    If it is repeated with a token more behind every sequence, decoding takes ``slope`` seconds more each time, and the
    whole iteration ``growth``; that holds ``room`` times. ``elsewhere`` are seconds for blocks of other replicas, and
    ``slower`` those that it takes longer on a part of its devices.
    """

    linear: float
    sampled: float
    decode: float
    prefill: float
    host: float
    moves: float
    tokens: int
    slope: float
    growth: float
    room: float
    adapters: float = 0.0
    elsewhere: float = 0.0
    slower: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        device = self.linear + self.sampled + self.decode + self.prefill
        return device + self.host + self.moves + self.adapters + self.elsewhere + self.slower


def iteration_seconds(replica: Replica, run: Iterate) -> Took:
    """Return what an iteration takes: its tokens, those that decode with their contexts, its prompts, guesses of next
    tokens, and blocks that come from the host's memory and go there."""
    costs, host, shares = replica.costs, replica.host, run.shares
    together, sequences = len(run.decoding), run.sequences
    decoding, context = together, run.context + together
    tokens = sampled = together
    prompts = queries = past = 0
    for s in shares:
        tokens += s.new
        sampled += s.samples + s.drafted
        if s.new - s.drafted == 1 and s.past:
            decoding += 1
            context += s.past + 1
        else:
            prompts += 1
            queries += s.new
            past += s.past
    computed, rows, fullest, longer = tokens, decoding, prompts, 0.0
    if run.busiest is not None:
        computed, rows, fullest, longer = costs.evened(run.busiest, replica.limits.groups, tokens, prompts)
    parts = min(replica.stages, sequences)
    at = min(-(-computed // parts), costs.most_tokens)
    linear = costs.linear_s.item(at) + longer
    head, most = -(-sampled // parts), len(costs.sampled_s) - 1
    head = costs.sampled_s.item(head) if head <= most else costs.sampled_s.item(most) * head / most
    decode = prefill = slope = 0.0
    room = inf
    if decoding:
        share, node = replica.kv_read, costs.nodes[0]
        mean = context / decoding * min(share, 1.0)
        most = inf if share <= 1.0 else share - mean  # tokens of a context that are read yet, where they are counted
        share, mean = (0.0, share) if most <= 0.0 else (min(share, 1.0), mean)
        low = min(max(bisect_right(node, mean) - 1, 0), len(node) - 2)
        row = -(-rows // parts)
        decode = costs.decode_s.item(row, low)
        slope = (costs.decode_s.item(row, low + 1) - decode) / (node[low + 1] - node[low])
        decode += (mean - node[low]) * slope
        if low + 2 < len(node):
            room = (node[low + 1] - mean) / share if share else inf
        room = min(room, most) if most > 0.0 else room
        slope *= share
        if replica.fetch_s:
            decode, slope, room = _fetched(replica, decode, slope, room, context, decoding)
    if prompts:
        prefill = costs.prefilling(-(-fullest // parts), queries / max(parts, prompts), past / prompts)
    device = linear + head + decode + prefill
    eager = host.eager_s if prompts or tokens > host.graph_tokens else 0.0
    growth = slope
    if eager > device:
        growth = 0.0
        room = min(room, (eager - device) / slope) if slope > 0 else room
    added = host.step_s + host.request_s * sequences + max(0.0, eager - device)
    if replica.guessing is not None and prompts:
        added += replica.guessing.prompt_s(shares)
    moves = (run.moved_in + run.moved_out) * replica.block_s
    if replica.rules.chunks:
        moves = max(0.0, moves - device)  # a layer's texts come while the layers before it are computed
    return Took(linear, head, decode, prefill, added, moves, at, slope, growth, room)


def _fetched(
    replica: Replica, decode: float, slope: float, room: float, context: int, sequences: int
) -> tuple[float, float, float]:
    """Attention beside what it fetches over other links, layer by layer: the longer of the two, or one behind the other
    where a layer's queries choose what is fetched."""
    fetch, growth = replica.fetch_s * context, replica.fetch_s * sequences
    if replica.in_drive:
        return fetch, growth, inf
    if replica.fetch_chosen:
        return decode + fetch, slope + growth, room
    crossing = (fetch - decode) / (slope - growth) if slope != growth else inf
    crossing = crossing if crossing > 0 else inf
    if fetch >= decode:
        return fetch, growth, min(room, crossing) if crossing < inf else inf
    return decode, slope, min(room, crossing)
