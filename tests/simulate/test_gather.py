"""When parameters are gathered that a step gathers once: ahead of each layer's use, or all after the update."""

import numpy as np
import pytest

from meshwright.cost import load_framework, standard
from meshwright.cost.framework import overlapped_as_usual
from meshwright.graph import KIND, QUEUES
from meshwright.plan import parse
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load as cluster
from meshwright.spec.model import load as model
from meshwright.spec.workload import Train

#: What a rank computes and what data parallelism exchanges.
QUEUES_OF = [QUEUES.index(name) for name in ("compute", "dp", "dp_gather")]
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


@pytest.mark.parametrize("words", ["dp8 fsdp mb2", "pp2 dp4 fsdp mb1", "dp8 hsdp2 mb4"])
def test_calls_that_return_when_they_are_done_gather_and_reduce_in_turn(words):
    """Ranks whose exchange is not overlapped have one task at a time, whatever its queue: as a processor runs
    ``fully_shard``. A plan that overlaps has both exchanges at once."""

    def at_once(words):
        found = simulate(parse(words), model("llama3-8b"), ON, TRAIN, standard(load_framework("default")))
        graph, most = found.lowered.graph, 0
        for rank in set(graph.streams.rank):
            mine = [s for s, r in enumerate(graph.streams.rank) if r == rank and graph.streams.queue[s] in QUEUES_OF]
            of = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))
            tasks = np.unique(of[np.isin(graph.member, mine)])
            starts, ends = found.start_s[tasks], found.end_s[tasks]
            among = (starts[:, None] < ends[None, :] - 1e-12) & (ends[:, None] > starts[None, :] + 1e-12)
            most = max(most, int((among & (ends > starts)[None, :]).sum(axis=1).max()))
        return most

    assert at_once(f"{words} overlap=none") == 1
    assert at_once(words) >= 2


def test_software_gathers_as_its_profile_says_and_a_plan_says_otherwise():
    def gathers(name, words):
        return overlapped_as_usual(load_framework(name), parse(words), words, model("llama3-8b"), ON).overlap.gather

    assert gathers("nanotron", "dp64 zero1") == gathers("default", "dp64 zero1") == "after"
    assert gathers("megatron-bridge", "dp64 zero1") == gathers("nanotron", "dp64") == "ahead"
    assert gathers("nanotron", "dp64 zero1 gather=ahead") == "ahead"
    assert gathers("nanotron", "dp64 zero1 overlap=dp,pp") == "after"
