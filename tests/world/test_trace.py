"""Worlds in words and in files: every wrong word and line at once, with its place."""

from itertools import islice

import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.world.trace import JobWorld, WorldEvent, changes, duration_s, read


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
