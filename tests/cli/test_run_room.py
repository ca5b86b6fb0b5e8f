"""Memory that a run lacks is said as what ranks hold, of which the kinds named beside it are parts."""

import re

from meshwright.answer.predict import predict
from meshwright.cli.run_room import without_room
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.model import load as load_model
from meshwright.spec.workload import parse as parse_train


def test_kinds_of_memory_on_a_processor_are_the_mean_of_ranks_as_the_sum_is(monkeypatch):
    monkeypatch.setattr("meshwright.run.room.host_bytes", lambda: 2)
    # the last of 8 stages of 6 layers has a head of 151,936 x 2,048 and its logits: the fullest holds far more
    work = parse_train("batch=512,seq=4096")
    answer = predict(load_model("qwen3-30b-a3b"), load_cluster("4x8xh100"), work, parse("tp2 pp8 mb8 zero1 full"))
    (found,) = without_room(answer, "cpu")
    held, *kinds = [float(number) for number in re.findall(r"([\d.]+) GiB", found.message)[:4]]
    assert sum(kinds) <= held + 0.1 and "on the mean" in found.message
