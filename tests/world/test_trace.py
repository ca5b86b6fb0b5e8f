"""Worlds in words and in files: every wrong word and line at once, with its place."""

from itertools import islice

import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.simulate.job import JobSizes, run_job
from meshwright.world.recovery import Recovery
from meshwright.world.trace import JobWorld, WorldEvent, changes, duration_s, read, read_trace, unknown_nodes


def wrong(text, **more):
    with pytest.raises(MeshwrightError) as error:
        read(text, **more)
    return [(d.code, d.place) for d in error.value.diagnostics]


def test_words_say_a_world():
    assert read("mtbf=3h, spares=4,repair=12h,save=30s,checkpoint=10m,restart=5min,draws=7,seed=3") == JobWorld(
        mtbf_s=10_800, spares=4, repair_s=43_200, save_s=30, checkpoint_s=600, restart_s=300, draws=7, seed=3
    )
    assert read("catalog") == JobWorld()


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2d", 172_800), ("1w", 604_800)])
def test_durations_have_units(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "h", "-3h", "1e9d", "nan s", "3 h h", "900w9"])
def test_what_is_no_duration_is_refused(text):
    assert duration_s(text) is None


def test_everything_wrong_with_the_words_is_said_at_once():
    found = wrong("mtbf=x,spares=-1,foo=2,draws=0,mtbf=0s,nofile.csv")
    assert [code for code, _ in found] == ["O001", "O001", "O001", "O001", "O001", "O002"]
    assert [code for code, _ in wrong("mtbf=3h,mtbf=4h")] == ["O001"]


def test_a_trace_file_is_read_in_order(tmp_path):
    (tmp_path / "w.csv").write_text("seconds,event\n10,fail\n10, slow 1.5\n\n20.5,slow 1\n")
    found = read("w.csv,spares=2", base=tmp_path)
    assert found.trace == (WorldEvent(10.0), WorldEvent(10.0, 1.5), WorldEvent(20.5, 1.0))
    assert (found.spares, list(changes(found, None, 5))) == (2, list(found.trace))


def test_every_wrong_line_of_a_trace_is_told_with_its_number(tmp_path):
    lines = ["seconds,event", "5,fail", "3,fail", "-1,fail", "x,fail", "9,burn", "9,slow", "9,slow 0", "9", "nan,fail"]
    (tmp_path / "w.csv").write_text("\n".join(lines))
    found = wrong("w.csv", base=tmp_path)
    assert [place.split(":")[-2] for _, place in found] == [str(n) for n in range(3, 11)]


def test_a_trace_without_events_or_beside_a_failure_rate_is_refused(tmp_path):
    (tmp_path / "w.csv").write_text("seconds,event\n")
    assert wrong("w.csv", base=tmp_path)[0][0] == "O002"
    (tmp_path / "w.csv").write_text("1,fail\n")
    assert wrong("w.csv,mtbf=3h", base=tmp_path)[0][0] == "O001"


def test_drawn_failures_are_exponential_each_draw_its_own_and_the_same_again():
    world = JobWorld(seed=4)
    first, again, other = (np.array([c.at_s for c in islice(changes(world, 100.0, draw), 4000)]) for draw in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    gaps = np.diff(first)
    # mean and deviation of an exponential are equal; 4,000 gaps know them to about 1.6%
    assert gaps.mean() == pytest.approx(100, rel=0.05) and gaps.std() == pytest.approx(100, rel=0.05)


def test_nothing_happens_where_nobody_knows_how_often_nodes_fail():
    assert list(changes(JobWorld(), None, 0)) == []


def test_a_line_longer_than_any_number_is_one_error(tmp_path):
    (tmp_path / "w.csv").write_text("6" * 140_000)
    assert wrong("w.csv", base=tmp_path)[0][0] == "O002"


def test_a_trace_names_nodes_and_when_they_are_back(tmp_path):
    file = tmp_path / "w.csv"
    file.write_text("seconds,event\n10,fail 3\n12,fail\n20,fail 1\n30,back 3\n40,slow 2\n50,fail 3\n")
    found = read_trace(str(file))
    assert [(one.at_s, one.node, one.back_s) for one in found] == [
        (10, 3, 30), (12, -1, None), (20, 1, None), (40, -1, None), (50, 3, None)
    ]  # fmt: skip
    told = unknown_nodes(found, 3, "w.csv")
    assert [d.message for d in told] == [
        "node 3 fails at 10 s, and there are 3 nodes",
        "node 3 fails at 50 s, and there are 3 nodes",
    ]


def test_outages_that_overlap_and_nodes_that_were_never_out_are_all_told_at_once(tmp_path):
    file = tmp_path / "w.csv"
    file.write_text("10,fail 3\n15,fail 3\n16,back 2\n17,back x\n18,back 3\n19,back 3\n")
    with pytest.raises(MeshwrightError) as error:
        read_trace(str(file))
    told = [d.message for d in error.value.diagnostics]
    assert told[0] == "outages of node 3 overlap: it is out since 10, and fails again at 15"
    assert told[1] == "node 2 is back, and it is not out" and "the number of a node" in told[2]
    assert told[3] == "node 3 is back, and it is not out" and len(told) == 4


def test_a_node_is_back_when_the_trace_says_so():
    # one that waits goes on when the first of two is back, whenever a repair would have ended
    job = JobSizes(num_steps=10, step_s=10.0, save_s=0.0, restart_s=5.0, repair_s=1e6)
    events = iter([WorldEvent(20.0, node=1, back_s=80.0)])
    found = run_job(job, Recovery(save_every=1, spares=0), events)
    assert found.by_cause["waiting"] == 60.0 and found.seconds == 20 + 60 + 5 + 80
