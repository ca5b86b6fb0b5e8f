"""What-ifs from a timeline give what the simulation gives when it is asked directly."""

import json

import msgspec
import numpy as np
import pytest

from meshwright import trace
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.graph import ATTRIBUTES, KIND, QUEUE, RankClass
from meshwright.replay.answer import Asked, replay
from meshwright.replay.rebuild import rebuild
from meshwright.replay.reschedule import reschedule
from meshwright.replay.shares import shares
from meshwright.replay.timed import timed, typical
from meshwright.replay.whatif import line, rebucketed, scaled
from meshwright.timeline import Identity, Timeline
from tests.compare.test_compare import replicas
from tests.replay.test_rebuild import answer, blind, repeated


@pytest.mark.parametrize(
    "before, after, name",
    [
        ("pp4 dp2 mb1 1f1b zero1", "pp4 dp2 mb1 gpipe zero1", "gpipe"),
        ("pp4 dp2 mb1 gpipe zero1", "pp4 dp2 mb1 1f1b zero1", "1f1b"),
        ("pp8 mb1 1f1b", "pp8 mb1 gpipe", "gpipe"),
        ("tp2 pp4 mb1 zb-h1", "tp2 pp4 mb1 zb-h2", "zb-h2"),
        ("pp4 vpp2 dp2 mb1 interleaved", "pp4 vpp2 dp2 mb1 breadth-first", "breadth-first"),
        ("pp4 dp2 mb1 1f1b zero1 overlap=tp", "pp4 dp2 mb1 gpipe zero1 overlap=tp", "gpipe"),
        ("pp2 dp4 mb1 1f1b overlap=dp", "pp2 dp4 mb1 gpipe overlap=dp", "gpipe"),
    ],
)
def test_another_schedule_of_the_same_passes_is_the_simulation_s(before, after, name):
    """Spans alone are known, as of a run; the oracle is the prediction of the other plan."""
    measured, oracle = answer(before).timeline, answer(after).timeline
    found = timed(reschedule(typical(blind_but_planned(measured)), name))
    assert found.makespan_s == pytest.approx(oracle.makespan_s, rel=1e-9)
    assert found.bubble() == pytest.approx(oracle.bubble(), rel=1e-9)
    np.testing.assert_allclose(np.sort(found.end_s), np.sort(oracle.end_s), rtol=1e-9)


def blind_but_planned(timeline):
    """What a run's trace has: spans and the plan."""
    return msgspec.structs.replace(blind(timeline), identity=Identity(plan=timeline.identity.plan))


@pytest.mark.parametrize(
    "before, after, name, vpp",
    [
        # whole backwards from their halves: two kernels' launch and memory traffic are counted twice
        ("pp4 dp2 mb1 zb-h1", "pp4 dp2 mb1 1f1b", "1f1b", None),
        # the optimizer stays where it was, though the embedding and the head come to lie on one rank
        ("pp8 vpp2 mb1 interleaved", "pp8 mb1 hanayo", "hanayo", None),
        # stages cut in two where the exchange of gradients shows their layers; of a forward the head takes more than of
        # the backward that shows it
        ("pp4 dp2 mb1 1f1b", "pp4 vpp2 dp2 mb1 interleaved", "interleaved", 2),
    ],
)
def test_what_has_to_be_put_together_or_taken_apart_comes_close(before, after, name, vpp):
    measured, oracle = answer(before).timeline, answer(after).timeline
    found = timed(reschedule(typical(measured), name, vpp=vpp))
    assert found.makespan_s == pytest.approx(oracle.makespan_s, rel=0.02)


def test_the_same_schedule_again_is_the_same_step():
    for plan in ("pp4 dp2 mb1 1f1b zero1", "pp4 vpp2 dp2 mb1 interleaved", "pp4 dp2 mb1 zb-h1"):
        timeline = answer(plan).timeline
        name = plan.split()[-1] if "zero1" not in plan else "1f1b"
        assert timed(reschedule(typical(timeline), name)).makespan_s == pytest.approx(timeline.makespan_s, rel=1e-9)


def test_exchanges_move_with_the_stage_they_are_of():
    """A stage of one rank becomes two on two ranks, and each rank exchanges what it holds now."""
    found = timed(reschedule(typical(answer("pp4 dp2 mb1 1f1b").timeline), "interleaved", vpp=2))
    oracle = answer("pp4 vpp2 dp2 mb1 interleaved").timeline
    for timeline in (found, oracle):
        exchange = (timeline.queue == QUEUE["dp"]) & (timeline.attribute("stage") >= 0)
        pairs = set(zip(timeline.rank[exchange].tolist(), timeline.attribute("stage")[exchange].tolist()))
        assert pairs == {(s % 4, s) for s in range(8)}
        assert exchange.sum() == 32


def test_a_schedule_the_trace_cannot_tell_is_refused():
    whole = typical(answer("pp4 dp2 mb1 1f1b").timeline)
    with pytest.raises(MeshwrightError, match="whole backwards"):
        reschedule(whole, "zb-h1")
    halves = reschedule(whole, "zb-h1", weight_share=0.5)
    split = [t.kind for t in halves.tasks if t.is_pass]
    assert {"B", "W", "F"} == set(split)
    with pytest.raises(MeshwrightError, match="hold a stage"):
        reschedule(whole, "dualpipe", weight_share=0.5)
    with pytest.raises(MeshwrightError, match="no pipeline"):
        reschedule(typical(answer("dp8 mb1").timeline), "gpipe")
    with pytest.raises(MeshwrightError, match="no schedule is called"):
        reschedule(whole, "1f1c")


def test_shares_of_stages_by_their_layers():
    assert shares([np.ones(1)] * 2, 2).tolist() == [[1, 0], [0, 1]]
    # one layer of three takes half: the first new stage of 2 has all of old 0's first layer and half its second
    cut = shares([np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.2, 0.6])], 4)
    np.testing.assert_allclose(cut[:, 0], [0.5 + 0.125, 0.125 + 0.25, 0, 0])
    np.testing.assert_allclose(cut[:, 1], [0, 0, 0.2 + 0.1, 0.1 + 0.6])
    np.testing.assert_allclose(shares([np.ones(1)] * 4, 2), [[1, 1, 0, 0], [0, 0, 1, 1]])


@pytest.mark.parametrize("plan", ["pp4 dp2 mb1 1f1b zero1", "dp8 zero3", "pp4 dp2 mb1 zb-h1"])
def test_a_slower_link_is_the_simulation_with_slower_tasks(plan):
    """The oracle is the engine on the lowered graph, its communication keys eight times as long."""
    from meshwright.cost import standard_on
    from meshwright.simulate.engine import times
    from meshwright.simulate.step import simulate

    asked = answer(plan)
    run = simulate(asked.plan, asked.model, asked.cluster, asked.train, standard_on(asked.cluster))
    graph = run.lowered.graph
    compute = np.zeros(len(graph.keys), bool)
    compute[graph.cost_key[np.isin(graph.kind, [KIND[k] for k in ("F", "B", "W", "BW", "optimizer")])]] = True
    _, end = times(graph, np.where(compute, run.priced.durations, 8 * run.priced.durations))
    found = replay(blind_but_planned(asked.timeline), Asked(factors={"link": 8.0}))
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.step_time_s == pytest.approx(float(end.max()), rel=1e-9)


def hand(rows, keys):
    """A timeline of (rank, queue, kind, stage, microbatch, layer, start, end, task, key)."""
    column = list(zip(*rows))
    return Timeline(
        ranks=tuple(RankClass(at=(("dp", place),)) for place in range(max(column[0]) + 1)),
        task=np.array(column[8], np.int32),
        rank=np.array(column[0], np.int32),
        queue=np.array([QUEUE[q] for q in column[1]], np.int32),
        kind=np.array([KIND[k] for k in column[2]], np.uint8),
        attributes=np.array([column[3], [-1] * len(rows), column[4], column[5], [-1] * len(rows)], np.int32).reshape(
            len(ATTRIBUTES), -1
        ),
        start_s=np.array(column[6], float),
        end_s=np.array(column[7], float),
        waited_for=np.full(len(rows), -1, np.int32),
        cost_key=np.array(column[9], np.int32),
        keys=keys,
    )


def test_collectives_inside_a_pass_are_part_of_it():
    """A pass of 10 with 4 of tensor-parallel traffic inside: half as fast links make it 14, kernels 16."""
    timeline = hand(
        [
            (0, "compute", "F", 0, 0, -1, 0.0, 10.0, 0, 0),
            (0, "tp", "all_reduce", -1, -1, -1, 2.0, 4.0, 1, 1),
            (0, "tp", "all_reduce", -1, -1, -1, 7.0, 9.0, 2, 1),
        ],
        ("F", "all_reduce"),
    )
    rebuilt = rebuild(timeline)
    assert [t.kind for t in rebuilt.tasks] == ["F"]
    for factors, seconds in (
        ({"link": 2.0}, 14.0),
        ({"tp": 0.5}, 8.0),
        ({"F": 2.0}, 16.0),
        ({"F": 2.0, "tp": 2}, 20.0),
    ):
        assert timed(scaled(rebuilt, factors)).makespan_s == pytest.approx(seconds)


def buckets(sizes, alpha=1.0, beta=0.01):
    """A backward of 10 a layer, each layer's gradients exchanged when they are there at alpha + beta bytes."""
    rows, keys, free = [], ["BW", "optimizer"], 0.0
    for i in range(len(sizes)):
        rows.append((0, "compute", "BW", 0, 0, len(sizes) - 1 - i, 10.0 * i, 10.0 * (i + 1), len(rows), 0))
    for i, size in enumerate(sizes):
        start = max(free, 10.0 * (i + 1))
        free = start + alpha + beta * size
        keys.append(f"all_reduce {size} bytes")
        rows.append((0, "dp", "all_reduce", 0, 0, len(sizes) - 1 - i, start, free, len(rows), len(keys) - 1))
    rows.append((0, "compute", "optimizer", -1, -1, -1, free, free + 2.0, len(rows), 1))
    return hand(rows, tuple(keys))


def test_buckets_are_cut_anew_by_hand():
    """Four layers of 100, 200, 100 and 400 bytes exchanged in 2, 3, 2 and 5; the backward ends at 40, the optimizer
    takes 2. In buckets of 400 bytes: the first closes with layer 1's 100 at 30 and ends at 35; the last closes at 40
    and ends at 45. In buckets of 800, one: 40 + 9. In buckets of 200: the last two of four both close at 40 and take 3
    each."""
    timeline = buckets([100, 200, 100, 400])
    rebuilt = typical(timeline)
    assert timed(rebuilt).makespan_s == pytest.approx(47.0)
    for size, ends, step in (
        (400, [35.0, 45.0], 47.0),
        (800, [49.0], 51.0),
        (10_000, [49.0], 51.0),
        (200, [23.0, 33.0, 43.0, 46.0], 48.0),
    ):
        found = timed(rebucketed(rebuilt, size))
        assert found.makespan_s == pytest.approx(step)
        exchanges = found.queue == QUEUE["dp"]
        assert np.sort(found.end_s[exchanges]).tolist() == pytest.approx(ends)


def test_another_bucket_size_needs_sizes():
    one_size = typical(buckets([100, 100]))
    with pytest.raises(MeshwrightError, match="all of one size"):
        rebucketed(one_size, 200)
    with pytest.raises(MeshwrightError, match="how many bytes"):
        rebucketed(typical(answer("dp8 zero1").timeline), 10**6)


def test_latency_and_bandwidth_of_a_line():
    sizes = np.array([100.0, 200.0, 400.0])
    assert line(sizes, 3.0 + 0.5 * sizes) == (pytest.approx(3.0), pytest.approx(0.5))
    # a line that would cross below 0 goes through it, one that would fall is level
    alpha, beta = line(sizes, sizes - 50.0)
    assert alpha == 0.0 and beta > 0
    assert line(sizes, np.array([3.0, 2.0, 1.0])) == (pytest.approx(2.0), 0.0)


def test_a_replay_of_several_steps_compares_with_their_median():
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    found = replay(repeated(timeline, [1.0, 3.0, 1.1, 0.9, 1.05]), Asked())
    assert found.measured_s == pytest.approx(1.05 * timeline.makespan_s)
    # the middle three of five: 1, 1.05 and 1.1
    assert found.replayed_s == pytest.approx(1.05 * timeline.makespan_s) and abs(found.error) < 1e-9
    assert found.changes == () and found.change == 0.0


def test_processes_that_share_the_number_of_a_task_have_their_own_passes():
    """An emulation numbers the tasks of all processes of a class alike; only collectives are one task."""
    timeline = answer("pp4 dp2 mb1 1f1b zero1").timeline
    both = replicas(timeline, 2)
    both = msgspec.structs.replace(both, task=np.tile(timeline.task, 2), waited_for=np.full_like(both.waited_for, -1))
    one, two = typical(timeline), typical(both)
    passes = sum(t.is_pass for t in one.tasks)
    assert sum(t.is_pass for t in two.tasks) == 2 * passes
    assert timed(two).makespan_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    oracle = answer("pp4 dp2 mb1 gpipe zero1").timeline
    assert timed(reschedule(two, "gpipe")).makespan_s == pytest.approx(oracle.makespan_s, rel=1e-9)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "m.json.gz"
    trace.write(repeated(answer("pp4 dp2 mb1 1f1b zero1").timeline, [1.0, 1.1, 1.2]), path)
    return path


def test_the_command_says_the_replay_first_and_then_the_what_if(file, capsys):
    out = file.parent / "then.json.gz"
    asked = ["replay", str(file), "--link-scale", "0.1", "--set", "BW=0.5", "--schedule", "gpipe", "--trace", str(out)]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "replayed" in lines[0] and "+0.0%" in lines[0]
    assert lines[1].startswith("link takes x10, BW takes x0.5, schedule gpipe: ")
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_steps"] == 3 and abs(found["error"]) < 1e-6
    assert trace.read(out).makespan_s == pytest.approx(found["step_time_s"], rel=1e-6)


@pytest.mark.parametrize(
    "words, code",
    [
        (["--set", "FF=2"], "X106"),
        (["--set", "F=fast"], "X106"),
        (["--set", "F=0"], "X106"),
        (["--link-scale", "0"], "X106"),
        (["--bucket", "many"], "X106"),
        (["--bucket", "25mb"], "X107"),
        (["--schedule", "zb-h1"], "X107"),
        (["--schedule", "1f1bb"], "S001"),
        (["--vpp", "-1"], "X106"),
    ],
)
def test_a_what_if_that_makes_no_sense_is_refused(file, words, code, capsys):
    assert main(["replay", str(file), *words]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
