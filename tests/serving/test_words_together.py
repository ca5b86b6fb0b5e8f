"""Words of a serving workload in any two: each pair serves every request, or is refused with a help."""

from itertools import combinations, pairwise

import pytest
from fuzz import served

from meshwright.errors import MeshwrightError

BASE = "rate=40,prompt=128,output=12,requests=16"
#: A word of every feature.
FEATURES = (
    "prefix=64:groups=3,prefix_cache=yes",
    "preempt=swap,host=2GiB,kv_blocks=60",
    "order=dlpm,tenants=3",
    "kv_budget=h2o",
    "draft=llama3.2-1b,accept=0.7",
    "adapters=4,lora=slots",
    "chunks=2:tokens=32:of=9,chunk_cache=0.3,host=2GiB",
    "graphs=no",
    "routing=power-of-two",
    "policy=sarathi,budget=32",
)
#: Pairs that exclude each other, by the message that says so.
EXCLUDED = ("shared prefixes", "prompts share", "and several pools")


def judged(words, plan, model="llama3.2-1b"):
    """Return whether a question is answered, as it has to be; False where it is refused with a help."""
    asked = {"model": model, "on": "4xh100", "plan": plan, "serve": f"{BASE},{words}", "detail": True}
    try:
        served.judge(served.answered(asked))
    except MeshwrightError as error:
        assert all(one.help for one in error.diagnostics)
        assert any(text in error.diagnostics[0].message for text in EXCLUDED), error
        return False
    return True


def test_any_two_words_serve_every_request_or_exclude_each_other():
    pairs = [",".join(pair) for pair in combinations(FEATURES, 2)]
    assert sum(judged(words, "dp2") for words in pairs) == len(pairs) - 2  # two pairs say twice what prompts share


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama3.2-1b", "pp2"),
        ("llama3.2-1b", "tp2 nano2"),
        ("mixtral-8x7b", "tp4 adp2 ep4"),
        ("llama3.2-1b", "prefill=[tp1 on=0:1] + decode=[tp2 on=1:3] prefill->decode:kv"),
    ],
)
def test_layouts_take_the_words_of_engines(model, plan):
    taken = [judged(",".join(pair), plan, model) for pair in pairwise((*FEATURES, FEATURES[0]))]
    assert sum(taken) >= 8
