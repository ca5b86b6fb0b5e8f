"""Pipelines through lowering and the project's own engine, against the schedules' own clock and Zero Bubble's table."""

import numpy as np
import pytest

from meshwright import plan as plans
from meshwright.lower import lower
from meshwright.papers import figures
from meshwright.plan import check
from meshwright.schedules import get
from meshwright.schedules.timing import in_order_times
from meshwright.simulate.engine import times
from meshwright.spec.model import transformer
from meshwright.spec.workload import Train
from meshwright.timeline import from_times
from tests.random_plans import SCHEDULES, sized

PUBLISHED = figures.load("zero_bubble")


def pipeline(name, num_ranks, num_microbatches, vpp=None, overlap="dp,pp"):
    """The lowered step of a schedule on `num_ranks` devices, one layer a stage."""
    vpp = vpp or get(name).default_vpp
    model = transformer(layers=num_ranks * vpp, hidden=64, heads=4, vocab=128, tied_embeddings=False)
    plan = plans.parse(f"pp{num_ranks} dp1 {name} vpp{vpp} mb1 overlap={overlap}")
    train = Train(global_batch=num_microbatches, seq_len=64)
    assert check(plan, model, sized(plan), train) == []
    return lower(plan, model, sized(plan), train)


def durations(lowered, t_f, t_b, t_w, t_comm):
    """Given times for passes and messages, nothing for the rest."""
    of = {"F": t_f, "B": t_b, "W": t_w, "BW": t_b + t_w}
    return np.array(
        [of[p.which] if p.kind == "pass" else t_comm if p.kind == "send" else 0.0 for p in lowered.programs]
    )


def passes(lowered, start, end):
    """{(kind, stage, microbatch): (start, end)} of the compute tasks of the schedule."""
    graph = lowered.graph
    chosen = np.flatnonzero(graph.kind < 4)
    where = zip(graph.kind[chosen], graph.attribute("stage")[chosen], graph.attribute("microbatch")[chosen])
    return dict(zip(((int(k), int(s), int(i)) for k, s, i in where), zip(start[chosen], end[chosen])))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 2), (2, 4), (4, 8), (4, 12)])
def test_the_engine_gives_every_schedule_the_times_its_own_clock_gives(name, num_ranks, num_microbatches):
    # A message occupies its queue, one after the other; none waits as long as it is shorter than a pass.
    if get(name).legality(num_ranks, num_microbatches):
        pytest.skip("no such shape")
    lowered = pipeline(name, num_ranks, num_microbatches)
    t = (1.0, 1.25, 0.75, 0.5)
    found = passes(lowered, *times(lowered.graph, durations(lowered, *t)))
    actions = lowered.actions
    expected = in_order_times(actions, *t)
    keys = zip(actions.kind.tolist(), actions.stage.tolist(), actions.microbatch.tolist())
    assert found == {key: pytest.approx(span) for key, span in zip(keys, zip(*expected))}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("overlap", ["dp,pp", "none"])
def test_every_schedule_runs_with_and_without_overlap(name, overlap):
    for num_ranks, num_microbatches in ((1, 1), (1, 3), (2, 2), (3, 6), (4, 4), (6, 12)):
        if get(name).legality(num_ranks, num_microbatches):
            continue
        lowered = pipeline(name, num_ranks, num_microbatches, overlap=overlap)
        _, end = times(lowered.graph, durations(lowered, 1.0, 1.0, 1.0, 0.5))
        work = num_microbatches * 3 * get(name).default_vpp
        assert np.isfinite(end).all() and end.max() >= work


@pytest.mark.parametrize("name", SCHEDULES)
def test_blocking_sends_never_make_a_pipeline_faster(name):
    t = (1.0, 1.0, 1.0, 0.5)
    free, blocking = (pipeline(name, 4, 8, overlap=overlap) for overlap in ("dp,pp", "none"))
    ends = [times(one.graph, durations(one, *t))[1].max() for one in (free, blocking)]
    assert ends[0] <= ends[1]


@pytest.mark.parametrize("row", PUBLISHED["rows"], ids=lambda row: f"{row['model']}-m{row['m']}")
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
def test_zero_bubbles_published_rates_come_out_of_the_step_graph(name, row):
    # Qi et al. 2023 (2401.10241), Table 5 from the times of Table 9, to the four published digits.
    lowered = pipeline(name.lower(), row["p"], row["m"])
    start, end = times(lowered.graph, durations(lowered, row["t_f"], row["t_b"], row["t_w"], row["t_comm"]))
    assert round(from_times(lowered.graph, start, end).bubble(), 4) == row["bubble"][name]


def test_the_bubble_of_1f1b_is_the_textbook_one():
    # (p - 1) / (m + p - 1) for equal stages without communication (Narayanan et al. 2104.04473, section 2.2.1)
    for p, m in ((2, 4), (4, 8), (8, 32)):
        lowered = pipeline("1f1b", p, m)
        found = from_times(lowered.graph, *times(lowered.graph, durations(lowered, 1.0, 1.0, 1.0, 0.0))).bubble()
        assert found == pytest.approx((p - 1) / (m + p - 1))


def test_interleaving_divides_the_bubble_by_the_chunks():
    # section 2.2.2 of the same: v chunks make the bubble's time 1/v of (p - 1)(t_F + t_B)
    p, m = 4, 8
    for v in (2, 3):
        lowered = pipeline("interleaved", p, m, vpp=v)
        _, end = times(lowered.graph, durations(lowered, 1.0 / v, 1.0 / v, 1.0 / v, 0.0))
        assert end.max() - 3 * m == pytest.approx(3 * (p - 1) / v)


def test_every_stage_but_the_last_sends_forward_once_a_microbatch_and_gets_its_gradient_back():
    for name in ("1f1b", "interleaved", "gpipe"):
        lowered = pipeline(name, 4, 8)
        graph = lowered.graph
        sent = graph.kind == 5
        count = 2 * (lowered.actions.num_stages - 1) * 8
        assert sent.sum() == count
    v = pipeline("zb-v", 4, 8)  # the turn of the V stays on one rank: 7 boundaries, 6 of them between ranks
    assert (v.graph.kind == 5).sum() == 2 * 6 * 8
