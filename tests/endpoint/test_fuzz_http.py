"""Random requests are answered properly, and nothing is held for those that are over."""

import gc
import json
from collections import Counter

import pytest
from fuzz.campaign import rng_of
from fuzz.http import SEEDS, Http, judge
from fuzz.readers import Defect


@pytest.fixture(scope="module")
def campaign():
    return Http()


def test_three_hundred_random_requests_have_a_proper_status_each_and_leave_nothing_behind(campaign):
    outcomes = Counter(campaign.look(campaign.example(rng_of(0, number))) for number in range(300))
    assert {"status 200", "status 400", "status 401", "status 404", "status 405", "status 413"} <= outcomes.keys()
    assert outcomes["status 200"] > 40


def test_requests_that_are_over_leave_no_objects_behind(campaign):
    def ask(count):
        for number in range(count):
            body = {**SEEDS["/v1/completions"][0], "seed": number, "n": 1}
            example = campaign.example(rng_of(0, 0)) | {"method": "POST", "path": "/v1/completions", "sizes": []}
            example |= {"headers": [["content-type", "application/json"], ["authorization", "Bearer secret"]]}
            example["headers"].append(["host", "localhost"])
            example["body"], example["hangs"] = json.dumps(body), number % 5 - 1
            assert campaign.look(example) in ("status 200", "status 499", "hung up")
        gc.collect()
        return len(gc.get_objects())

    first = ask(100)
    assert ask(400) < first + 200  # an object a request would be 400


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (500, {}, b"{}"),
        (307, {}, b""),
        (400, {"content-length": "2"}, b'{"error": {}}'),
        (400, {}, b'{"error": {"message": "", "type": "", "param": null, "code": null}}'),
        (429, {}, b'{"error": {"message": "a", "type": "", "param": null, "code": null}}'),
        (200, {"content-type": "text/event-stream"}, b'data: {"a": 1}\n\n'),
    ],
)
def test_an_answer_that_is_not_proper_is_a_defect(status, headers, body):
    with pytest.raises((Defect, KeyError)):
        judge(status, headers, body, True, {"method": "POST"})


def test_a_request_that_is_still_held_is_a_defect(campaign):
    example = campaign.example(rng_of(0, 1))
    campaign.engine._free -= 1
    try:
        with pytest.raises(Defect, match="1 blocks are held"):
            campaign.look(example)
    finally:
        campaign.engine._free += 1
