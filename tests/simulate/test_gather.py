"""When parameters are gathered that a step gathers once: ahead of each layer's use, or all after the update."""

import numpy as np
import pytest

from meshwright.cost import load_framework, standard
from meshwright.cost.framework import overlapped_as_usual
from meshwright.graph import KIND
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import Train

ON, TRAIN = cluster("64xh100"), Train(global_batch=128, seq_len=2048)


def run(words):
    return simulate(parse(words), model("llama3-8b"), ON, TRAIN, standard(load_framework("default")))


def spans(found, kind):
    mine = found.lowered.graph.kind == KIND[kind]
    return found.start_s[mine], found.end_s[mine]


@pytest.mark.parametrize("words", ["dp64 mb1 zero1", "tp2 dp32 mb1 zero2", "pp2 dp32 mb1 zero1", "pp2 dp32 mb1 zero3"])
def test_what_is_gathered_after_the_update_is_added_to_the_step(words):
    ahead, after = run(words), run(f"{words} gather=after")
    starts, ends = spans(after, "all_gather")
    _, updated = spans(after, "optimizer")
    assert starts.min() >= updated.min() and np.isclose(ends.max(), after.step_time_s)
    longest = (ends - starts).max()
    assert 0.2 * longest < after.step_time_s - ahead.step_time_s <= longest


@pytest.mark.parametrize("words", ["dp64 mb1", "dp64 mb1 zero3"])
def test_nothing_is_gathered_once_a_step_where_nothing_or_every_pass_is_sharded(words):
    assert run(f"{words} gather=after").step_time_s == run(words).step_time_s


def test_software_gathers_as_its_profile_says_and_a_plan_says_otherwise():
    def gathers(name, words):
        return overlapped_as_usual(load_framework(name), parse(words), words, model("llama3-8b"), ON).overlap.gather

    assert gathers("nanotron", "dp64 zero1") == gathers("default", "dp64 zero1") == "after"
    assert gathers("megatron-bridge", "dp64 zero1") == gathers("nanotron", "dp64") == "ahead"
    assert gathers("nanotron", "dp64 zero1 gather=ahead") == "ahead"
    assert gathers("nanotron", "dp64 zero1 overlap=dp,pp") == "after"
