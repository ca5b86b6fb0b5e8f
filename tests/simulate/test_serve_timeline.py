"""A serving simulation as a timeline."""

import numpy as np

from meshwright import trace
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_timeline import served_timeline
from meshwright.timeline import Identity
from tests.serving.costs import replica, requests


def test_requests_are_rows_and_samples_are_counters_and_both_are_a_trace(tmp_path):
    # iterations of a second each: the request of 0.5 s waits until 1 s, and has its token at 2 s; the first, of three
    # tokens, ends at 3 s
    served = simulate(replica("vllm-v1"), requests((0.0, 8, 3), (0.5, 8, 1)))
    line = served_timeline(served, Identity(workload="two requests"))
    table = line.records["request"]
    assert table["request"].tolist() == [0, 1] and table["arrival_s"].tolist() == [0.0, 0.5]
    assert table["scheduled_s"].tolist() == [0.0, 1.0] and table["end_s"].tolist() == [3.0, 2.0]
    running, waiting, cache = line.counters
    assert [c.name for c in line.counters] == ["running", "waiting", "cache"]
    assert running.value.max() == served.peak_batch and cache.value.max() == served.peak_blocks
    assert np.array_equal(waiting.time_s, served.sample_s)
    trace.write(line, tmp_path / "serve.json")
    back = trace.read(tmp_path / "serve.json")
    assert back.records["request"]["end_s"].tolist() == [3.0, 2.0] and len(back.counters) == 3
