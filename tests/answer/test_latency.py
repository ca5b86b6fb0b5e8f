"""Objectives of priorities and clients: each is judged by the requests that it is of."""

import msgspec
import numpy as np
import pytest

from meshwright.answer.latency import objectives_kept, serving_metrics
from meshwright.simulate.serve import simulate
from meshwright.spec.serve import parse
from tests.serving.costs import linear_costs, replica

WORDS = "batch=4,prompt=100,output=4,policy=vllm-v1,priority=1+0"


def answered(words, slo):
    """Four requests of 100, 200, ... tokens, one batch of a budget of 100: prompts are computed one after the other."""
    serve = parse(f"{WORDS},{words}")
    length = np.array([100, 200, 300, 400])
    requests = msgspec.structs.replace(serve.drawn(), prompt=length, slo=np.array(slo))
    one = replica("vllm-v1", linear_costs(base=0.1), max_batch=4, blocks=400, budget=100)
    served = simulate(one, requests)
    return serve, requests, served, served.first_s - served.arrival_s


def test_an_objective_of_a_priority_is_of_its_requests_and_the_general_one_of_the_others():
    serve, requests, served, ttft = answered("ttft=10s@p50,ttft.1=1ms@p50", [1, 0, 0, 1])
    general, first = objectives_kept(serve, [requests], [served])
    assert (general.of, first.of, first.said) == ("", "priority 1", "TTFT p50 of priority 1")
    assert general.value_s == pytest.approx(np.median(ttft[[1, 2]])) and general.met
    assert first.value_s == pytest.approx(np.median(ttft[[0, 3]])) and not first.met
    assert serving_metrics(serve, [requests], [served]).attainment == 0.5


def test_an_objective_that_no_class_replaces_is_of_everybody():
    serve, requests, served, ttft = answered("e2e=10s,ttft=10s@p50,e2e.1=1ms", [1, 0, 0, 1])
    kept = {(one.metric, one.of): one.value_s for one in objectives_kept(serve, [requests], [served])}
    assert set(kept) == {("ttft_s", ""), ("e2e_s", ""), ("e2e_s", "priority 1")}
    assert kept["ttft_s", ""] == pytest.approx(np.median(ttft))
    assert serve.common().objectives == {"ttft_s": serve.ttft}


def test_requests_without_classes_are_judged_by_the_workload_s_objectives():
    serve, requests, served, ttft = answered("ttft=10s@p50", [])
    (kept,) = objectives_kept(serve, [requests], [served])
    assert kept.of == "" and kept.value_s == pytest.approx(np.median(ttft))
