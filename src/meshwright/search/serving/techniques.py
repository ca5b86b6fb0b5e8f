"""What-ifs of serving: techniques put over a plan and its engine one at a time, and which of them helps here.

Techniques are what a plan and an engine can say: every batching policy, order of those who wait, routing and cache
rule that is registered, and every value of the fields of a plan that change how a layer is served. Each is simulated
with the same requests (Lin et al., APEX, 2411.17651, simulate plans so), and ranked by the greatest rate at which the
objectives are kept, or by tokens a second where there are none. The results may be kept as records, from which
:mod:`.learned` chooses for another question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.answer.serving_check import refused
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facet import KEYED, NUMBERED
from meshwright.plan.facets import fields
from meshwright.plan.text import over
from meshwright.search.serving.evaluate import ServingEvaluator, rate_of
from meshwright.search.serving.space import Phase, ServingCandidate
from meshwright.serving.decided import budget_shares
from meshwright.spec.cluster import Cluster
from meshwright.spec.engine_words import ENGINE_READERS, KV_BYTES, EngineWords
from meshwright.spec.model import Model
from meshwright.spec.serve import KEYS, Serve, parse

#: A gain that is one: a percent.
HELPS = 1.01
#: Sizes of a replica, which a search chooses.
_SIZES = ("tp", "pp", "dp", "cp", "mb", "ep", "etp", "adp")


class Technique(msgspec.Struct, frozen=True):
    """Words that switch a technique on: of the engine, or of the plan. ``exact``: the model computes what it did."""

    words: str
    exact: bool


class ServedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A technique over a plan: its metrics, the greatest rate that keeps the objectives (None: not asked), and ``why``
    it cannot be put over this plan (metrics are None then, and where nothing fits)."""

    technique: Technique
    metrics: ServingMetrics | None
    rate: float | None
    good: bool
    why: str = ""


class ServedRanking(msgspec.Struct, frozen=True, kw_only=True):
    """Techniques over one plan, the best first; ``measure`` is what they are ranked by. ``stopped``: somebody ended the
    trials before all techniques had theirs."""

    before: ServedAttempt
    attempts: tuple[ServedAttempt, ...]
    measure: str
    stopped: bool = False

    def value(self, one: ServedAttempt) -> float:
        """Return what an attempt is ranked by, more being better."""
        if one.metrics is None:
            return 0.0
        return one.rate if one.rate is not None else one.metrics.throughput_tokens_per_s

    def gain(self, one: ServedAttempt) -> float:
        """Return an attempt's value over that of the plan as it is; 0 where that has none."""
        before = self.value(self.before)
        return self.value(one) / before if before else 0.0

    @property
    def helps(self) -> tuple[ServedAttempt, ...]:
        """The attempts that gain."""
        return tuple(one for one in self.attempts if self.value(one) > self.value(self.before) * HELPS)

    def changes(self, one: ServedAttempt) -> bool:
        """Whether a technique changes anything for these requests."""
        a, b = one.metrics, self.before.metrics
        if a is None or b is None:
            return a is not b
        known = [(m.throughput_tokens_per_s, m.ttft_s.p90, m.tpot_s.p90, m.e2e_s.mean) for m in (a, b)]
        return not np.allclose(*known, rtol=1e-6)  # the fast loop and the plain one add in another order

    def to_json(self) -> dict[str, Any]:
        """The ranking as plain values."""
        return {
            "format_version": 1,
            "measure": self.measure,
            "stopped": self.stopped,
            "before": self._row(self.before),
            "attempts": [self._row(one) | {"gain": self.gain(one)} for one in self.attempts],
        }

    def _row(self, one: ServedAttempt) -> dict[str, Any]:
        return {
            "technique": one.technique.words,
            "exact": one.technique.exact,
            "most_rate_req_per_s": one.rate,
            "good": one.good,
            "why_not": one.why or None,
            "metrics": None if one.metrics is None else msgspec.to_builtins(one.metrics),
        }


def techniques(model: Model, cluster: Cluster, serve: Serve) -> Iterator[Technique]:
    """Yield every technique that can be switched on by one word, but for what the engine says already."""
    engine = serve.engine
    for axis, now in (("policy", engine.policy), ("order", engine.order), ("routing", engine.routing)):
        for name in serving.names("batching" if axis == "policy" else axis):
            if name != now:
                yield Technique(f"{axis}={name}", True)
    if not engine.prefix_cache:
        yield Technique("prefix_cache=yes", True)
    for name in serving.names("kv_budget"):
        if name != engine.kv_budget.partition(":")[0]:
            yield Technique(f"kv_budget={name}", budget_shares(name, 1).exact)
    for name in KV_BYTES:
        if name != engine.kv and KV_BYTES[name] < KV_BYTES[engine.kv]:
            yield Technique(f"kv={name}", False)
    for field in fields().values():
        if not field.serving or field.name in _SIZES:
            continue
        known = field.form.names or (field.served(model, cluster) if field.served else ())
        if not known and field.spelled == NUMBERED:
            known = (field.usual + 1,)  # a number of parts: the fewest
        for value in known:
            said = value if isinstance(value, str) else field.form.write(value)  # yes and no are words of theirs
            if said not in ("", field.form.write(field.usual)):
                equals = "=" if field.spelled == KEYED else ""
                yield Technique(f"{field.name}{equals}{said}", field.facet != "precision")


def what_helps(
    evaluator: ServingEvaluator, plan: Plan, tried: list[Technique], report: Callable[[int, int], None] | None = None
) -> ServedRanking:
    """Return the techniques over a plan, each alone, the best first. `report` is told how many are done of how many,
    the plan as it is among them, before every simulation. Somebody who interrupts it gets those that are done."""
    total = len(tried) + 1

    def heard_of(done: int) -> Callable[[], None]:
        return lambda: report(done, total) if report is not None else None

    before = _attempt(evaluator, plan, Technique("", True), heard_of(0))
    found: list[ServedAttempt] = []
    stopped = False
    try:
        for done, one in enumerate(tried, 1):
            found.append(_attempt(evaluator, plan, one, heard_of(done)))
        heard_of(total)()
    except KeyboardInterrupt:
        stopped = True
    ranking = ServedRanking(before=before, attempts=(), measure=measure_of(before.rate is not None), stopped=stopped)
    found.sort(key=lambda one: (bool(one.why), -ranking.value(one), one.technique.words))
    return msgspec.structs.replace(ranking, attempts=tuple(found))


def measure_of(bounded: bool) -> str:
    """Return what techniques are ranked by, where objectives bound requests that come at a rate or not."""
    return "the greatest rate that keeps the objectives" if bounded else "tokens a second"


def put_over(serve: Serve, plan: Plan, words: str) -> tuple[Serve, Plan]:
    """Return a workload and a plan with words put over them: those with a key of the workload over its engine, the
    others over the plan.

    Raises:
        MeshwrightError: what is wrong with the words.
    """
    wrong: list[Diagnostic] = []
    engine: list[str] = []
    for part in filter(None, (one.strip() for one in words.split(","))):
        key = _key(part)
        if key in ENGINE_READERS and key != "engine":
            engine.append(part)
        elif key in KEYS:
            what = "another engine's costs" if key == "engine" else "the requests and their objectives"
            message, help = f"{key}= is of {what}, and no technique", "say it in --serve"
            wrong.append(Diagnostic(code="W001", message=message, place=f"--try {part}", help=help))
        else:
            try:
                plan = over(plan, part, place="--try")
            except MeshwrightError as error:
                wrong += error.diagnostics
    try:
        serve = msgspec.structs.replace(serve, engine=_engine_over(serve.engine, engine)) if engine else serve
    except MeshwrightError as error:
        wrong += error.diagnostics
    if wrong:
        raise MeshwrightError(wrong)
    return serve, plan


def _key(part: str) -> str:
    return part.partition("=")[0].strip().lower()


def _engine_over(engine: EngineWords, parts: list[str]) -> EngineWords:
    """An engine with words put over it; they may say what is usual, of an engine that has something else."""
    asked = "rate=1,prompt=1,output=1"
    said = msgspec.structs.asdict(parse(",".join([asked, *parts]), place="--try").engine)
    usual = msgspec.structs.asdict(parse(asked).engine)
    named = {ENGINE_READERS[_key(part)][0].partition(".")[2] for part in parts}
    return msgspec.structs.replace(engine, **{k: v for k, v in said.items() if k in named or v != usual[k]})


def _attempt(evaluator: ServingEvaluator, plan: Plan, technique: Technique, heard: Callable[[], None]) -> ServedAttempt:
    try:
        heard()
        serve, changed = put_over(evaluator.serve, plan, technique.words)
        wrong = refused(changed, evaluator.model, evaluator.cluster, serve)
        if wrong:
            raise MeshwrightError(wrong)
        layout = changed.layout
        one = msgspec.structs.replace(changed, layout=msgspec.structs.replace(layout, dp=1))
        candidate = ServingCandidate((Phase(one, layout.dp),), serve.engine)
        why = evaluator.no_room(candidate.phases[0], serve.engine)
        if why:
            return ServedAttempt(technique=technique, metrics=None, rate=None, good=False, why=why)
        judged = evaluator.judged(candidate, whole=True)
        rate = None
        if evaluator.serve.objectives and rate_of(evaluator.requests) < float("inf"):
            rate = evaluator.most_rate(candidate, heard=heard) * rate_of(evaluator.requests)
        return ServedAttempt(technique=technique, metrics=judged.metrics, rate=rate, good=judged.good)
    except MeshwrightError as error:
        return ServedAttempt(technique=technique, metrics=None, rate=None, good=False, why=error.diagnostics[0].message)
