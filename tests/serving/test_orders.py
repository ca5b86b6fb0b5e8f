"""The order in which requests are served, by each policy, worked out by hand."""

import msgspec
import numpy as np
import pytest

from meshwright import serving
from meshwright.errors import MeshwrightError
from meshwright.serving.batching import Admit, Arrived, Batching, Computed, Iterate
from meshwright.serving.cache import CacheRules, EngineLimits, KvCache
from meshwright.serving.engine_request import EngineRequest, NewRequest
from meshwright.simulate.serve_pool import served_alone
from tests.serving.costs import replica, requests

LIMITS = EngineLimits(max_batch=1, budget=1000, block=4, blocks=1000)


def order_of(order, asked, *, prefix=False):
    """The requests in the order in which an engine that serves one at a time begins them."""
    rules = CacheRules(prefix=prefix, unit=4)
    order = serving.get("order", order) if isinstance(order, str) else order
    decider = Batching(policy=serving.get("batching", "vllm-v1"), limits=LIMITS, order=order, rules=rules)
    state, decisions = decider.decide(decider.begin(), Arrived(tuple(asked)))
    limit, made, found = {one.number: one.limit for one in asked}, {}, []
    while any(isinstance(one, Iterate) for one in decisions):
        found += [one.number for one in decisions if isinstance(one, Admit)]
        run = decisions[-1]
        for number in [*run.decoding, *(share.number for share in run.shares if share.samples)]:
            made[number] = made.get(number, 0) + 1
        ends = [number for number in made if made[number] == limit[number]]
        for number in ends:
            del made[number]
        state, decisions = decider.decide(state, Computed(tuple(ends)))
    return found


def queue_of(order, *asked):
    queue = serving.get("order", order).open()
    for place, one in enumerate(asked):
        queue.add(EngineRequest(one, place))
    return queue


def test_shortest_job_first_goes_by_the_length_of_answers_then_by_arrival():
    asked = [NewRequest(0, 10, 5), NewRequest(1, 10, 2), NewRequest(2, 90, 2), NewRequest(3, 10, 3)]
    assert order_of("sjf", asked) == [1, 2, 3, 0]
    assert order_of("fcfs", asked) == [0, 1, 2, 3]


def test_shortest_job_first_has_the_smallest_mean_time():
    # answers of 9, 1 and 2 tokens, a second each, one at a time: in turn they end after 9, 10 and 12 s, 31 in all;
    # the shortest first after 1, 3 and 12, 16 in all
    asked = requests((0.0, 4, 9), (0.0, 4, 1), (0.0, 4, 2))
    one = replica("vllm-v1", max_batch=1)
    ends = served_alone(msgspec.structs.replace(one, order=serving.get("order", "sjf")), asked).end_s
    assert ends.tolist() == [12.0, 1.0, 3.0] and served_alone(one, asked).end_s.sum() == 31.0


def test_the_earliest_wanted_first_token_goes_first_and_nobody_waits_for_who_wants_none():
    asked = [NewRequest(i, 8, 1, deadline_s=wanted) for i, wanted in enumerate((0.0, 9.0, 2.0, 2.0))]
    assert order_of("deadline", asked) == [2, 3, 1, 0]


def test_a_first_token_is_wanted_the_bound_of_its_class_after_its_request_comes():
    # iterations of a second; 0 runs until 3 s. 1 came at 0.1 s and wants its token within 30 s, 2 at 1.0 s within 2 s
    asked = msgspec.structs.replace(requests((0.0, 8, 3), (0.1, 8, 2), (1.0, 8, 2)), slo=np.array([0, 0, 1]))
    one = msgspec.structs.replace(
        replica("vllm-v1", max_batch=1), order=serving.get("order", "deadline"), wanted_s=(30.0, 2.0)
    )
    assert served_alone(one, asked).first_s.tolist() == [1.0, 6.0, 4.0]


def test_the_tenant_served_least_goes_first():
    # 10 tokens of prompt and 2 of 2 make 14: after request 0 tenant 0 has 14 and tenant 1 nothing; then both 14, and
    # the request that came first goes
    asked = [*(NewRequest(i, 10, 2, tenant=0) for i in range(3)), NewRequest(3, 10, 2, tenant=1)]
    assert order_of("vtc", asked) == [0, 3, 1, 2]


def test_a_tenant_that_comes_back_starts_from_the_least_served_of_those_who_wait():
    queue = queue_of("vtc", NewRequest(0, 100, 1, tenant=0), NewRequest(1, 100, 1, tenant=0))
    cache = KvCache(LIMITS, CacheRules())
    queue.take(queue.first(cache))  # tenant 0 was served 100 tokens, and waits with another request
    queue.add(EngineRequest(NewRequest(2, 10, 1, tenant=1), 2))
    assert queue.first(cache).number == 1 and queue.served == {0: 100, 1: 100}
    queue.decoded({0: 1, 1: 0}, 3)
    assert queue.served == {0: 106, 1: 100} and queue.first(cache).number == 2


def test_who_is_served_least_stays_so_until_its_counter_has_caught_up():
    queue = queue_of("vtc", NewRequest(0, 10, 1, tenant=0), NewRequest(1, 10, 1, tenant=1))
    queue.served.update({0: 0, 1: 13})
    # two of tenant 0 decode and one of tenant 1: the gap of 13 closes by 2 x (2 - 1) each time, after 6.5 iterations
    assert queue.unchanged({0: 2, 1: 1}) == 7 and queue.unchanged({0: 1, 1: 1}) > 1 << 30


def test_two_tenants_that_always_wait_are_served_alike_however_much_one_asks():
    # tenant 0 asks three times as often; while both wait neither is ahead by more than the paper's bound of
    # 2 x max(prompt, 2 x what a batch of 4 requests of 40 + 40 tokens holds)
    tenants = [0, 0, 0, 1] * 15
    asked = msgspec.structs.replace(
        requests(*((0.01 * i, 40, 40) for i in range(60))),
        tenant=np.array(tenants),
    )
    one = msgspec.structs.replace(replica("vllm-v1", max_batch=4), order=serving.get("order", "vtc"))
    served = served_alone(one, asked)
    both = served.end_s <= sorted(served.end_s[asked.tenant == 1])[-2]
    done = [int(((asked.prompt + 2 * asked.output) * both)[asked.tenant == t].sum()) for t in (0, 1)]
    assert abs(done[0] - done[1]) <= 2 * 2 * 4 * 80
    first = served_alone(replica("vllm-v1", max_batch=4), asked)
    assert first.end_s[asked.tenant == 1].mean() > 1.3 * served.end_s[asked.tenant == 1].mean()


SHARED = [
    NewRequest(0, 8, 1, tenant=0, hashes=(1, 2)),
    NewRequest(1, 8, 1, tenant=1, hashes=(8, 9)),
    NewRequest(2, 8, 1, tenant=0, hashes=(1, 2)),
    NewRequest(3, 8, 1, tenant=0, hashes=(1, 2)),
]


def test_the_longest_prefix_in_the_cache_goes_first():
    assert order_of("lpm", SHARED, prefix=True) == [0, 2, 3, 1]
    assert order_of("lpm", SHARED) == [0, 1, 2, 3]  # without a prefix cache nothing is there


def test_beyond_128_that_wait_the_longest_prefix_is_not_looked_for():
    others = [NewRequest(10 + i, 8, 1, hashes=(100 + i,)) for i in range(130)]
    found = order_of("lpm", [SHARED[0], *others, SHARED[2]], prefix=True)
    assert found[:3] == [0, 10, 11] and found.index(2) == 4  # at 128 that wait it is looked for, and found


def test_a_tenant_without_credit_waits_however_much_of_its_prompt_is_there():
    # tenant 0: 8 tokens of prompt and 2 for one generated leave 6 of 16; then 4 more of a prompt of which 4 are there
    # and 2 leave none, so that tenant 1 goes before request 3
    dlpm = serving.get("order", "dlpm:16")
    assert order_of(dlpm, SHARED, prefix=True) == [0, 2, 1, 3]
    assert order_of("dlpm:1000", SHARED, prefix=True) == [0, 2, 3, 1]  # with credit left as by the prefix alone


def test_tenants_that_wait_without_credit_get_as_many_quanta_as_it_takes():
    queue = serving.get("order", "dlpm:10").open()
    queue.add(EngineRequest(SHARED[0], 0))
    queue.add(EngineRequest(SHARED[1], 1))
    queue.credit.update({0: -25, 1: -40})
    assert queue.first(KvCache(LIMITS, CacheRules())).number == 0  # three quanta leave 5 and -10
    assert queue.credit == {0: 5, 1: -10}


def test_a_number_behind_a_policy_that_has_none_is_refused():
    with pytest.raises(MeshwrightError) as caught:
        serving.get("order", "fcfs:7")
    assert caught.value.diagnostics[0].code == "W013" and "no number" in caught.value.diagnostics[0].message


@pytest.mark.parametrize(("order", "count"), [("vtc", "served"), ("dlpm:50", "credit")])
def test_a_request_that_is_withdrawn_while_it_waits_is_not_charged(order, count):
    queue = serving.get("order", order).open()
    ones = [EngineRequest(NewRequest(i, 10, 1), i) for i in range(2)]
    for one in ones:
        queue.add(one)
    before = dict(getattr(queue, count))
    queue.drop(ones[0])
    assert getattr(queue, count) == before and len(queue) == 1
    queue.take(ones[1])
    assert getattr(queue, count) != before and len(queue) == 0
