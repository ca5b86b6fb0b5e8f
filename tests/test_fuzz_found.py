"""Defects that the random search (`make fuzz`) once found stay mended; and the search finds what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import campaign, found, questions, readers
from fuzz.campaign import CAMPAIGNS, rng_of, signature

FOUND = sorted((Path(__file__).parent / "fuzz_found").glob("*.json"))


@pytest.fixture(scope="session", params=sorted(CAMPAIGNS))
def searched(request):
    return CAMPAIGNS[request.param]()


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_what_was_found_is_mended(file):
    kept = json.loads(file.read_text(encoding="utf-8"))
    CAMPAIGNS[kept["campaign"]]().look(kept["example"])


def test_an_example_depends_on_its_seed_and_number_alone(searched):
    first = [searched.example(rng_of(3, number)) for number in range(5)]
    assert [searched.example(rng_of(3, number)) for number in range(5)] == first == json.loads(json.dumps(first))
    assert first != [searched.example(rng_of(4, number)) for number in range(5)]


def test_what_is_found_is_made_small_and_kept_once(monkeypatch, tmp_path):
    texts = CAMPAIGNS["texts"]()

    def plan(self, data):
        if b"vpp" in data:
            raise KeyError("planted")
        return True

    monkeypatch.setattr(readers.Readers, "_plan", plan)
    example = {"kind": "plan", "text": "tp8 pp4 vpp5 dp2 zero1 mb1"}
    with pytest.raises(KeyError) as planted:
        texts.look(example)
    wanted = signature(planted.value)
    small = found.minimised(texts, example, wanted, signature)
    assert small == {"kind": "plan", "text": "vpp"}
    first = found.keep("texts", wanted, "KeyError", small, tmp_path)
    assert json.loads(first.read_text()) == {"campaign": "texts", "was": "KeyError", "example": small}
    assert found.keep("texts", wanted, "another", example, tmp_path) == first  # the first of its signature stays
    assert json.loads(first.read_text())["example"] == small


def test_an_example_that_hangs_is_ended_and_said(monkeypatch, tmp_path):
    shown = tmp_path / "at"
    shown.write_bytes(bytes(8))
    monkeypatch.setattr(campaign, "LIMIT_S", 0.1)
    hanging = [sys.executable, "-S", "-c", "while True: pass"]
    with subprocess.Popen(hanging, stdout=subprocess.PIPE) as worker:
        followed = campaign._followed(worker, str(shown), start=-1)
        with pytest.raises(StopIteration) as ended:
            next(followed)
        worker.kill()
    assert ended.value.value == (0, "more than 0.1 s")


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf")])
def test_a_figure_that_cannot_be_is_a_defect(figure):
    with pytest.raises(readers.Defect):
        questions.figures({"memory": [{"peak_bytes": figure}]}, "")
    questions.figures({"memory": [{"headroom_bytes": -1.0, "peak_bytes": 0.0}]}, "")
