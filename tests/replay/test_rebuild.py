"""The graph behind a timeline is found again: of simulated timelines, whose graph is known, exactly."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.predict import predict
from meshwright.compare.measured import class_of, real_rank, step_times, steps, tasks
from meshwright.graph import RankClass
from meshwright.plan import parse
from meshwright.replay.rebuild import rebuild
from meshwright.replay.timed import plan_of, timed, typical
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train
from meshwright.timeline import UNKNOWN, StepBounds

PLANS = (
    "pp4 dp2 mb1 1f1b zero1",
    "pp4 vpp2 dp2 mb1 interleaved",
    "tp2 pp2 dp2 mb1 gpipe zero1",
    "pp4 dp2 mb1 zb-h1",
    "pp4 dp2 mb1 zb-v",
    "pp4 dp2 mb1 dualpipe",
    "pp8 mb1 hanayo",
    "cp2 pp2 dp2 mb1 zero2",
    "dp8 zero3",
    "dp8 zero3 shard4 mb1",
    "dp8 zero3 overlap=none",
    "dp8 zero2 mb1",
    "dp8 zero1 overlap=none",
    "pp4 dp2 mb1 1f1b zero1 overlap=tp",
    "pp2 dp4 mb1 1f1b overlap=dp",
)


def answer(plan, model="llama3-8b"):
    return predict(
        load_model(model), load_cluster("8xh100"), parse_train("batch=16,seq=4096"), parse(plan), detail=False
    )


def blind(timeline):
    """Without what it says of who waited for whom: all that a measured timeline has."""
    identity = msgspec.structs.replace(timeline.identity, plan="")
    return msgspec.structs.replace(timeline, waited_for=np.full_like(timeline.waited_for, -1), identity=identity)


@pytest.mark.parametrize("plan", PLANS)
def test_a_simulated_timeline_replays_exactly_from_its_spans_alone(plan):
    """Every start and end again, and no time that no dependency explains."""
    timeline = blind(answer(plan).timeline)
    rebuilt = typical(timeline)
    again = timed(rebuilt)
    assert rebuilt.wait_s.max() < 1e-9
    assert again.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    there = tasks(again)
    for key, spans in tasks(timeline).items():
        found = there[key]
        np.testing.assert_allclose(again.start_s[found], timeline.start_s[spans], atol=1e-9)
        np.testing.assert_allclose(again.end_s[found], timeline.end_s[spans], atol=1e-9)


@pytest.mark.parametrize("plan", PLANS)
def test_other_durations_give_what_the_simulation_gives(plan):
    """The oracle is the lowered graph itself: dependencies that were not binding must have been found too."""
    from meshwright.cost import standard
    from meshwright.simulate.engine import times
    from meshwright.simulate.step import simulate

    asked = answer(plan)
    run = simulate(asked.plan, asked.model, asked.cluster, asked.train, standard())
    rebuilt = typical(blind(asked.timeline))
    rng = np.random.default_rng(0)
    for scale in (1.0, 20.0):
        durations = run.priced.durations * rng.uniform(0.5, 1.5, len(run.priced.durations))
        sends = np.array(["send" in k or "reduce" in k or "gather" in k for k in run.lowered.graph.keys])
        durations = np.where(sends, durations * scale, durations)
        _, end = times(run.lowered.graph, durations)
        key = {name: i for i, name in enumerate(run.lowered.graph.keys)}
        again = timed(rebuilt, np.array([durations[key[t.key]] for t in rebuilt.tasks]))
        assert again.makespan_s == pytest.approx(float(end.max()), rel=1e-9)


def test_a_pass_is_cut_where_its_exchange_begins():
    """Measured passes are whole; the exchange of a layer's gradients begins in the middle of one."""
    timeline = answer("dp8 zero0").timeline
    whole = merged(timeline)
    rebuilt = rebuild(whole)
    assert timed(rebuilt).makespan_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    slow = np.array([t.seconds * (0.5 if t.queue == "compute" else 1.0) for t in rebuilt.tasks])
    segmented = typical(timeline)
    same = np.array([t.seconds * (0.5 if t.queue == "compute" else 1.0) for t in segmented.tasks])
    assert timed(rebuilt, slow).makespan_s == pytest.approx(timed(segmented, same).makespan_s, rel=1e-9)


def merged(timeline):
    """The same timeline with one span per pass, as a recorder that knows no layers has it."""
    first, drop = {}, []
    end, layer = timeline.end_s.copy(), timeline.attributes.copy()
    for i in np.argsort(timeline.start_s, kind="stable"):
        if timeline.queue[i] == 0 and timeline.attributes[3, i] >= 0:
            key = (timeline.rank[i], timeline.kind[i], *timeline.attributes[:3, i])
            if key in first:
                end[first[key]] = timeline.end_s[i]
                drop.append(i)
            first.setdefault(key, i)
            layer[3, i] = -1
    kept = np.setdiff1d(np.arange(timeline.num_spans), drop)
    columns = {n: getattr(timeline, n)[kept] for n in ("task", "rank", "queue", "kind", "start_s", "cost_key")}
    return msgspec.structs.replace(
        timeline,
        **columns,
        attributes=layer[:, kept],
        end_s=end[kept],
        waited_for=np.full(len(kept), -1, np.int32),
        identity=UNKNOWN,
    )


def repeated(timeline, factors, gap_s=0.25):
    """A timeline of several steps, each as long as the given one times a factor."""
    bounds, columns, at = [], [], 0.0
    for step, factor in enumerate(factors):
        attributes = timeline.attributes.copy()
        attributes[4] = step
        columns.append((timeline.start_s * factor + at, timeline.end_s * factor + at, attributes))
        bounds.append((at, at + timeline.makespan_s * factor))
        at = bounds[-1][1] + gap_s
    n, count = timeline.num_spans, len(factors)
    shift = np.repeat(np.arange(count), n) * n
    waited = np.tile(timeline.waited_for, count)
    return msgspec.structs.replace(
        timeline,
        **{name: np.tile(getattr(timeline, name), count) for name in ("rank", "queue", "kind", "cost_key")},
        task=np.tile(timeline.task, count) + shift,
        start_s=np.concatenate([c[0] for c in columns]),
        end_s=np.concatenate([c[1] for c in columns]),
        attributes=np.concatenate([c[2] for c in columns], axis=1),
        waited_for=np.where(waited >= 0, waited + shift, -1).astype(np.int32),
        steps=StepBounds.of(range(count), bounds),
    )


def test_steps_come_apart_and_the_typical_one_is_their_median():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    measured = repeated(timeline, [1.0, 1.5, 1.1, 0.9, 1.2])
    assert step_times(measured) == pytest.approx(timeline.makespan_s * np.array([1.0, 1.5, 1.1, 0.9, 1.2]))
    second = steps(measured)[1].timeline
    assert second.num_spans == timeline.num_spans
    np.testing.assert_allclose(second.end_s, timeline.end_s * 1.5, atol=1e-9)
    assert (second.waited_for == timeline.waited_for).all()
    assert timed(typical(measured)).makespan_s == pytest.approx(timeline.makespan_s * 1.1, rel=1e-9)


def test_host_time_before_a_task_is_kept():
    timeline = answer("pp2 dp4 mb1 1f1b").timeline
    late = msgspec.structs.replace(timeline, start_s=timeline.start_s + 0.5, end_s=timeline.end_s + 0.5)
    rebuilt = typical(late)
    assert rebuilt.wait_s[0] == pytest.approx(0.5)
    assert timed(rebuilt).makespan_s == pytest.approx(timeline.makespan_s + 0.5)


def test_ranks_are_named_by_their_place():
    # tensor parallel inside, then data parallel, then pipeline: 5 = tp 1 of pipeline place 1 of the first replica
    known = real_rank(parse("tp2 pp2 dp2").layout, 5)
    assert known.name == "rank 1 dp0 tp1" and known.lane == real_rank(parse("tp2 pp2 dp2").layout, 1).lane
    assert RankClass(slice=0, stage=2, device="h100_sxm").name == "slice 0 rank 2 (h100_sxm)"
    assert RankClass(pool="encoder", stage=1).name == "encoder rank 1" and RankClass(label="layer").name == "layer"


def test_the_class_of_a_rank_is_the_narrowest_that_stands_for_it():
    classes = (RankClass(stage=0, multiplicity=4), RankClass(stage=1), RankClass(stage=1, at=(("dp", 0),)))
    assert class_of(RankClass(stage=1, at=(("dp", 0), ("tp", 1))), classes) == 2
    assert class_of(RankClass(stage=1, at=(("dp", 1),)), classes) == 1
    assert class_of(RankClass(stage=10), classes) == -1
    # what is not said to be of a kind of slices may be of any
    assert class_of(RankClass(stage=0), (RankClass(slice=0, stage=0), RankClass(slice=1, stage=0))) == -1
    assert class_of(RankClass(pool="encoder"), classes) == -1
    assert plan_of(answer("pp2 dp4 mb1").timeline).layout.pp == 2
