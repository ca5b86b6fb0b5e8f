"""An engine's name in place of a batching policy is answered with the word that takes it."""

import pytest

from meshwright import serving
from meshwright.cli.explain import look_up
from meshwright.errors import MeshwrightError


def test_the_refusal_of_an_engine_as_a_policy_says_engine_and_the_policies():
    with pytest.raises(MeshwrightError) as caught:
        serving.get("batching", "sglang")
    (found,) = caught.value.diagnostics
    assert found.code == "W013" and found.help.startswith("engine=sglang has") and "vllm-v1" in found.help
    with pytest.raises(MeshwrightError) as caught:
        serving.get("batching", "sglong")
    assert "engine=" not in caught.value.diagnostics[0].help


@pytest.mark.parametrize("word", ["vllm", "sglang", "trtllm", "engine"])
def test_engines_that_serve_are_explained(word):
    assert "engine=sglang" in look_up(word)["text"]
