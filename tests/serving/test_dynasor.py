"""Queries of several requests: who of them runs next, and which become needless, by hand."""

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright import serving
from meshwright.answer.serving import predict_serving
from meshwright.errors import MeshwrightError
from meshwright.serving.certaindex import Certaindex
from meshwright.serving.engine_request import EngineRequest, NewRequest
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import pooled, served_alone
from meshwright.spec.serve import parse
from tests.serving.costs import linear_costs, replica, requests
from tests.serving.test_orders import order_of

COSTS = linear_costs(base=5e-3, token=2e-5, sampled=1e-5, decode=3e-7, prefill=1e-5, tokens=1 << 14)


def test_the_query_with_the_least_work_goes_first_and_stays_together():
    asked = [
        NewRequest(0, 8, 9, program=0),
        NewRequest(1, 8, 9, program=0),
        NewRequest(2, 8, 2, program=1),
        NewRequest(3, 8, 12, program=1),
        NewRequest(4, 8, 15),
    ]
    # work of 18, 14 and 15; with 20 tokens in place of 12 the second query has 22
    assert order_of("dynasor", asked) == [2, 3, 4, 0, 1]
    asked[3] = NewRequest(3, 8, 20, program=1)
    assert order_of("dynasor", asked) == [4, 0, 1, 2, 3]


def test_a_query_that_has_begun_goes_before_a_shorter_one():
    asked = [NewRequest(0, 8, 1, program=0), NewRequest(1, 8, 30, program=0), NewRequest(2, 8, 40, program=1)]
    queue = serving.get("order", "dynasor").open()
    ones = [EngineRequest(one, i) for i, one in enumerate(asked)]
    for one in ones:
        queue.add(one)
    queue.take(queue.first(None))
    queue.add(EngineRequest(NewRequest(3, 8, 2, program=2), 3))
    assert [one.number for one in queue] == [1, 3, 2]


def test_answers_beyond_those_needed_are_withdrawn_once():
    index = Certaindex(np.array([0, 0, 0, 1, -1]), np.array([2, 2, 2, 1, 0]))
    assert index.settles([0]) == [] and index.settles([4]) == []
    assert index.settles([2]) == [1] and index.settles([1]) == []
    assert index.settles([3]) == [] and index.gone == {1}


def test_a_query_ends_with_the_answers_it_needs_and_the_others_leave_room():
    # four samples of 2, 4, 8 and 16 tokens, a second each; two are enough. The query is over at 4 s, and the request
    # that waits for a place (two run at a time) begins then: 8 s of others are not computed
    asked = requests((0.0, 8, 2), (0.0, 8, 4), (0.0, 8, 8), (0.0, 8, 16), (0.0, 8, 3))
    said = {"program": np.array([0, 0, 0, 0, 1]), "needed": np.array([2, 2, 2, 2, 1])}
    (share,), (served,) = pooled(
        replica("vllm-v1", max_batch=2),
        1,
        msgspec.structs.replace(asked, **said),
        serving.get("routing", "round-robin"),
    )
    assert share.output.tolist() == [2, 4, 3] and served.end_s.tolist() == [2.0, 4.0, 7.0]
    (share,), (all_of_them,) = pooled(replica("vllm-v1", max_batch=2), 1, asked, serving.get("routing", "round-robin"))
    assert all_of_them.end_s.tolist() == [2.0, 4.0, 10.0, 20.0, 13.0]


def test_samples_on_other_replicas_are_withdrawn_too():
    asked = requests(*((0.0, 8, n) for n in (2, 50, 60, 70)))
    said = {"program": np.zeros(4, np.int64), "needed": np.ones(4, np.int64)}
    shares, served = pooled(
        replica("vllm-v1"), 2, msgspec.structs.replace(asked, **said), serving.get("routing", "round-robin")
    )
    assert [share.output.tolist() for share in shares] == [[2]] and served[0].end_s.tolist() == [2.0]
    assert served[0].iterations == 2


def test_a_certain_share_saves_compute_and_shortens_queries():
    model, cluster, plan = mw.load_model("llama3-8b"), mw.load_cluster("1xh100"), mw.parse_plan("tp1")
    words = "rate=30,prompt=256,output=lognormal:mean=256;sigma=0.6,requests=320,samples=8,prefix_cache=yes"
    every, some = (predict_serving(model, cluster, parse(words + more), plan) for more in ("", ",certain=0.5"))
    assert every.withdrawn == 0 and some.withdrawn == 160
    assert some.query_s.mean < 0.8 * every.query_s.mean
    busy = [sum(s for cause, s in one.attribution.items() if cause != "idle") for one in (every, some)]
    assert busy[1] < 0.95 * busy[0]
    assert parse(words + ",certain=0.2..0.8").certain.text() == "0.2..0.8"


def test_certainty_is_of_queries_of_several_answers():
    with pytest.raises(MeshwrightError) as caught:
        parse("rate=1,prompt=8,output=8,certain=0.5")
    assert "of queries of several answers" in caught.value.diagnostics[0].message


def test_a_withdrawn_request_is_over_when_its_query_is_settled():
    # as above: the third sample runs from 2 s and the fourth never does; both are over with the second one, at 4 s
    asked = requests((0.0, 8, 2), (0.0, 8, 4), (0.0, 8, 8), (0.0, 8, 16), (0.0, 8, 3))
    said = {"program": np.array([0, 0, 0, 0, 1]), "needed": np.array([2, 2, 2, 2, 1])}
    served = simulate(replica("vllm-v1", max_batch=2), msgspec.structs.replace(asked, **said))
    assert served.end_s.tolist() == [2.0, 4.0, 4.0, 4.0, 7.0] and served.first_s.tolist() == [1.0, 1.0, 3.0, 4.0, 5.0]


def test_queries_of_clients_keep_what_settles_them(tmp_path):
    file = tmp_path / "w.toml"
    client = "rate = 4\nprompt = 8\noutput = 8\nsamples = 4\n"
    file.write_text(f"format_version = 1\nrequests = 40\n[[client]]\n{client}certain = 0.5\n[[client]]\n{client}")
    drawn = parse(str(file)).drawn()
    assert set(drawn.needed[drawn.tenant == 0].tolist()) == {2} and set(drawn.needed[drawn.tenant == 1].tolist()) == {0}


@pytest.mark.parametrize(
    ("policy", "order", "seed"), [("sarathi", "fcfs", 1), ("vllm-v0", "vtc", 0), ("orca", "dynasor", 5)]
)
def test_queries_that_end_early_are_the_same_with_every_iteration_by_itself(policy, order, seed):
    words = "rate=30,requests=160,prompt=lognormal:mean=300;sigma=0.7,output=lognormal:mean=60;sigma=0.7"
    asked = parse(f"{words},samples=4,certain=0.3..1,tenants=3,seed={seed}").drawn()
    one = msgspec.structs.replace(replica(policy, COSTS, blocks=400, budget=300), order=serving.get("order", order))
    skipped, plain = (served_alone(one, asked, skips=skips) for skips in (True, False))
    assert skipped.end_s == pytest.approx(plain.end_s, rel=1e-9) and skipped.runs < plain.runs
