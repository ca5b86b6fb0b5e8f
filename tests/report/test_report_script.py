"""The page's script, run by node where there is one: it reads the columns and says why a task waited."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files

import numpy as np
import pytest

from meshwright.report import columns, html
from tests.report.sample import prediction

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

STATIC = files("meshwright.report").joinpath("static")
ASK = """
const data = JSON.parse(require("fs").readFileSync(0, "utf8"));
Meshwright.columns.read = () => data;
Meshwright.Spans.load("").then((spans) => {
  const all = Array.from({ length: spans.count }, (_, i) => i);
  console.log(JSON.stringify({
    start: [...spans.start], end: [...spans.end], names: all.map((i) => spans.name(i)),
    why: all.map((i) => spans.why(i)),
    short: all.map((i) => spans.short(i)), gap: all.map((i) => spans.gap(i)), causes: spans.causesOf(0),
    found: spans.lanes.map((lane) => spans.at(lane, spans.start[lane.last] + 1e-4, 0) === lane.last),
    legend: spans.legend(),
  }));
});
"""


@pytest.fixture(scope="module")
def told():
    timeline = prediction().timeline
    parts = [STATIC.joinpath(name).read_text(encoding="utf-8") for name in ("columns.js", "spans.js")]
    source = "\n".join(["const Meshwright = {};", *(part.replace('"use strict";', "") for part in parts), ASK])
    done = subprocess.run(
        ["node", "-e", source], input=json.dumps(columns.payload(timeline)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return timeline, json.loads(done.stdout)


@pytest.mark.parametrize("name", html.SCRIPTS)
def test_every_script_parses(name, tmp_path):
    file = tmp_path / name
    file.write_text(STATIC.joinpath(name).read_text(encoding="utf-8"), encoding="utf-8")
    assert subprocess.run(["node", "--check", str(file)], capture_output=True, timeout=60).returncode == 0


def test_times_in_the_page_are_the_timeline_s_to_a_tick(told):
    timeline, said = told
    order = np.lexsort((timeline.start_s, timeline.queue, timeline.rank))
    assert np.allclose(said["start"], timeline.start_s[order], rtol=0, atol=timeline.makespan_s / 2**32)
    assert np.allclose(said["end"], timeline.end_s[order], rtol=0, atol=timeline.makespan_s / 2**32)


def test_the_first_backward_of_the_first_stage_says_that_it_waited_for_the_second_stage_s_send(told):
    # sample: stage 0 runs F0..F3, then stands idle until stage 1 sends the gradient of microbatch 0
    _, said = told
    at = said["names"].index("Backward · microbatch 0 · stage 0")
    assert said["why"][at].startswith(
        "Waited 759 ms for Send · microbatch 0 · stage 1 (stage 1, to previous stage queue)"
    )
    assert said["gap"][at] == pytest.approx(said["start"][at] - said["end"][at - 1])


def test_a_task_that_follows_at_once_says_that_it_did_not_wait(told):
    _, said = told
    assert said["why"][0] == "Did not wait: it starts with the step."
    assert said["why"][1] == "Did not wait: it follows Forward · microbatch 0 · stage 0 on the same queue."


def test_a_span_is_found_by_lane_and_time_and_labelled_as_schedules_write_it(told):
    _, said = told
    assert all(said["found"])
    assert {"F0", "BW7"} <= set(said["short"])


def test_parts_of_a_pass_are_its_causes_the_largest_first(told):
    # sample: a forward of 0.121 x 1.06 s on stage 0, 61% of it matrix multiplications
    _, said = told
    name, seconds, _ = said["causes"][0]
    assert name == "gemm" and seconds == pytest.approx(0.121 * 1.06 * 0.61, rel=1e-6)
    assert ["Forward", "blue"] in said["legend"]
