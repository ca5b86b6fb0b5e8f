"""Goodput against rate: points of the same requests at other rates."""

import meshwright as mw
from meshwright.answer.rates import COMPILED, rate_curve
from meshwright.answer.serving import predict_serving
from meshwright.spec.serve import parse


def curve_of(words):
    serve = parse(words)
    requests = serve.drawn()
    served = predict_serving(
        mw.load_model("llama3-8b"), mw.load_cluster("1xh100"), serve, mw.parse_plan("tp1"), requests=requests
    )
    return served, rate_curve(served, requests)


def test_goodput_follows_the_rate_until_bounds_are_missed_and_falls_beyond():
    served, curve = curve_of("rate=8,prompt=512,output=64,requests=600,ttft=300ms,tpot=20ms")
    own = next(p for p in curve if p.asked)
    assert own.metrics.goodput_req_per_s == served.metrics.goodput_req_per_s  # the same requests at the same rate
    assert [p.offered for p in curve] == sorted(p.offered for p in curve)
    first, last = curve[0].metrics, curve[-1].metrics
    assert first.attainment == 1.0 and last.attainment < 0.5
    assert last.throughput_req_per_s < 0.75 * curve[-1].offered


def test_a_closed_loop_has_more_requests_open_until_no_more_are_answered():
    _, curve = curve_of("concurrency=8,prompt=256,output=32,requests=300")
    opens = [p.open for p in curve]
    assert opens == sorted(set(opens)) and opens[0] == 2 and 8 in opens
    assert curve[-1].offered < 1.05 * curve[-2].offered


def test_a_static_batch_has_no_rate():
    assert curve_of("batch=8,prompt=64,output=8")[1] == ()


def test_a_point_has_no_more_requests_than_takes_a_moment():
    served, curve = curve_of(f"rate=40,prompt=64,output=4,requests={COMPILED + 1000}")
    assert served.num_requests == COMPILED + 1000
    # 4,000 requests of 40 a second take 100 seconds, 5,000 would 125
    own = next(p for p in curve if p.asked)
    assert 95 < COMPILED / own.metrics.throughput_req_per_s < 105


def test_conversations_come_as_fast_as_their_first_turns_and_the_users_thoughts():
    _, curve = curve_of("rate=4,turns=3,think=2s,prompt=128,output=16,requests=60")
    # 60 requests are 20 conversations of three turns: 4 requests a second are a conversation in 3/4 of a second, and
    # the last of them goes on for two more thoughts
    own = next(p for p in curve if p.asked)
    assert 2.0 < own.offered < 5.0
    assert curve[-1].offered > own.offered
    assert [p.offered for p in curve] == sorted(p.offered for p in curve)
