"""The timeline of an engine: what it did, of the type that the serving simulator returns, to be laid beside that."""

from __future__ import annotations

import numpy as np

from meshwright.answer.serving_why import over_time
from meshwright.run.serve.engine import AnsweredRequest, TorchEngine
from meshwright.simulate.served import GAP_EDGES, SPENT, ServedRequests
from meshwright.timeline import Identity, RankClass, Timeline


def timeline(engine: TorchEngine, who: Identity) -> Timeline:
    """Return who ran and waited and the cache blocks held over time, a record of every answered request, and how often
    each gap between the tokens of an answer was, as far back as an engine keeps records."""
    columns = {
        name: np.array([getattr(one, name) for one in engine.answered], np.int64 if kind == "int" else np.float64)
        for name, kind in AnsweredRequest.__annotations__.items()
    }
    columns = {f"{n}_tokens" if n in ("prompt", "output") else n: column for n, column in columns.items()}
    kept = engine.records
    times = ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached")
    served = ServedRequests(
        **{name: columns[name] for name in times},
        gaps=_gaps(engine),
        spent_s=np.zeros(len(SPENT)),
        tokens_seen=np.bincount([one.tokens for one in kept], minlength=1).astype(np.float64),
        iterations=len(kept),
        runs=len(kept),
        evictions=int(columns["evicted"].sum()),
        peak_blocks=max((one.blocks for one in kept), default=0),
        peak_batch=max((one.running for one in kept), default=0),
        sample_s=np.array([one.begin_s for one in kept]),
        sample=np.array([(one.running, one.waiting, one.blocks) for one in kept], np.int64).reshape(-1, 3),
    )
    columns = {"replica": np.zeros(len(engine.answered), np.int64)} | columns
    return over_time([RankClass(label="replica 0")], [served], columns, who)


def _gaps(engine: TorchEngine) -> np.ndarray:
    """Count the gaps between tokens by the edges of the simulator's histogram; those of one iteration come together."""
    last: dict[int, float] = {}
    gaps, together = [], 0
    for record in engine.records:
        for number, _, _, made in record.requests:
            if made and number in last:
                gaps.append(record.end_s - last[number])
            together += max(0, made - 1)
            if made:
                last[number] = record.end_s
    place = np.maximum(np.searchsorted(GAP_EDGES, gaps, side="right") - 1, 0)
    found = np.bincount(place, minlength=len(GAP_EDGES))
    found[0] += together
    return found
